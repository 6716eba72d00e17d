"""Which line of a kernel is running, and whether it waits in a loop."""

from __future__ import annotations

import ast
import linecache
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType

import numpy as np
import triton

_BETWEEN = tuple(str(Path(module).parent) for module in (__file__, triton.__file__, np.__file__))


@lru_cache(maxsize=4096)
def _is_kernel_code(code: CodeType) -> bool:
    return not code.co_filename.startswith(_BETWEEN)


Site = int
"""A statement of a kernel, by number."""

_sites: dict[tuple[str, int], Site] = {}
_places: list[tuple[str, int]] = []


def here() -> Site:
    """The innermost statement that runs and is neither Triton's nor the sanitizer's."""
    frame = sys._getframe(1)
    while frame is not None and not _is_kernel_code(frame.f_code):
        frame = frame.f_back
    place = ("?", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    if place not in _sites:
        _sites[place] = len(_places)
        _places.append(place)
    return _sites[place]


def place(site: Site) -> tuple[str, int]:
    """File and line."""
    return _places[site]


@lru_cache(maxsize=256)
def _loops(file: str) -> tuple[tuple[int, int], ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a notebook cell with magics
        return ()
    return tuple((n.lineno, n.end_lineno or n.lineno) for n in ast.walk(tree) if isinstance(n, ast.While))


@lru_cache(maxsize=4096)
def in_while(site: Site) -> bool:
    """Whether a statement belongs to a `while` loop: a `for` loop ends by itself, so nothing waits in one."""
    file, line = place(site)
    return any(first <= line <= last for first, last in _loops(file))
