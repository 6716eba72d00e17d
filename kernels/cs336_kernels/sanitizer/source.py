"""Which line of a kernel is running, and whether it waits in a loop."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType

import numpy as np
import triton

_BETWEEN = tuple(str(Path(module).parent) for module in (__file__, triton.__file__, np.__file__))

Site = int
"""A statement of a kernel with the calls that led to it, by number."""

Lines = tuple[tuple[int, int], ...]
Calls = tuple[tuple[str, int], ...]

_sites: dict[Calls, Site] = {}
_places: list[Calls] = []


@lru_cache(maxsize=4096)
def _is_kernel_code(code: CodeType) -> bool:
    return not code.co_filename.startswith(_BETWEEN)


def here() -> Site:
    """The innermost statement that runs and is neither Triton's nor the sanitizer's."""
    frame, calls = sys._getframe(1), []
    while frame is not None:
        if _is_kernel_code(frame.f_code):
            calls.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    key = tuple(calls) or (("?", 0),)
    if key not in _sites:
        _sites[key] = len(_places)
        _places.append(key)
    return _sites[key]


def place(site: Site) -> tuple[str, int]:
    """File and line."""
    return _places[site][0]


@lru_cache(maxsize=4096)
def in_while(site: Site) -> bool:
    """Whether a statement belongs to a `while` loop: a `for` loop ends by itself, so nothing waits in one."""
    return any(first <= line <= last for file, line in _places[site] for first, last in _shape(file)[0])


@lru_cache(maxsize=4096)
def polls(site: Site) -> bool:
    """Whether a statement decides if a `while` loop goes on, and looks at the same place each time."""
    return any(first <= line <= last for file, line in _places[site] for first, last in _shape(file)[1])


@lru_cache(maxsize=4096)
def discards(site: Site) -> bool:
    """Whether a statement is a call whose result nobody looks at."""
    file, line = place(site)
    return any(first <= line <= last for first, last in _shape(file)[2])


@lru_cache(maxsize=256)
def _shape(file: str) -> tuple[Lines, Lines, Lines]:
    """Lines of all `while` loops, of what polls in them, and of calls whose result is not used."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a notebook cell with magics
        return (), (), ()
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.While)]
    unused = [n for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    polling = [part for loop in loops for part in _polling(loop)]
    return tuple(map(_lines, loops)), tuple(map(_lines, polling)), tuple(map(_lines, unused))


def _lines(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def _polling(loop: ast.While) -> Iterator[ast.stmt | ast.expr]:
    """The condition of a loop and the assignments it depends on, those with a call whose arguments stay the same."""
    assignments = [n for part in loop.body for n in ast.walk(part) if isinstance(n, ast.Assign | ast.AugAssign)]
    changing = {name for a in assignments for name in _targets(a)}
    condition = _names(loop.test)
    for _ in assignments:  # a condition depends on an assignment that depends on another one
        condition |= {name for a in assignments if _targets(a) & condition for name in _names(a.value)}
    deciding = [a for a in assignments if _targets(a) & condition]
    for part in (loop.test, *deciding):
        calls = [n for n in ast.walk(part) if isinstance(n, ast.Call)]
        if any(not changing & {name for argument in call.args for name in _names(argument)} for call in calls):
            yield part


def _targets(assignment: ast.Assign | ast.AugAssign) -> set[str]:
    targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
    return {name for target in targets for name in _names(target)}


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
