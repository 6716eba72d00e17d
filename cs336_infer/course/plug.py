"""A student's functions inside the real engine.

    plug(rope=rope, causal_attention=causal_attention)          from here on
    with plug(rope=rope): generate(model, "The capital of")     for one block
    plug_notebook("../assignments/a1_slug/a1_slug.ipynb")       all functions of a notebook that have a place

In a full checkout the function takes the place of the package's own; what is not plugged in stays the package's. In
the bundle that students get, the package has no such parts of its own, and a call that needs one says which exercise
it is. `Completion.path` names what was plugged in.
"""

from __future__ import annotations

import ast
import importlib
import json
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cs336_infer.types import InferError

PACKAGES = ("cs336_infer", "cs336_kernels")
PLUGGED: dict[str, Callable[..., Any]] = {}
"""exercise -> the student's function, for the adapters in `sockets`."""


class NotPlugged(InferError):
    """The engine needs a function that an exercise asks for, and none is plugged in."""


def plugged(name: str) -> Callable[..., Any]:
    """The function that is plugged in under the name of its exercise.

    Raises:
        NotPlugged: there is none.
    """
    if name not in PLUGGED:
        raise NotPlugged(f"this needs your `{name}`: write it in the assignment, then call plug({name}={name})")
    return PLUGGED[name]


def places() -> dict[str, dict[str, Callable[..., Any]]]:
    """exercise -> the places of the engine that it takes, of every assignment that is installed here."""
    from cs336_infer.course.sockets import SOCKETS

    for file in sorted(Path(__file__).parent.glob("a*_sockets.py")):
        importlib.import_module(f"{__package__}.{file.stem}")
    return SOCKETS


class plug:
    """Put functions into the engine, each under the name of its exercise, until `remove()` or the end of a `with`.

    Raises:
        InferError: a name is no exercise with a place in the engine, or its value is not a function.
    """

    def __init__(self, **functions: Callable[..., Any]) -> None:
        known = places()
        for name, function in functions.items():
            if name not in known:
                raise InferError(f"no place in the engine is called {name!r}; there are {', '.join(known)}")
            if not callable(function):
                raise InferError(f"plug({name}=...) takes a function, not a {type(function).__name__}")
        self._before = dict(PLUGGED)
        self._undo: list[tuple[Any, str, Any]] = []
        PLUGGED.update(functions)
        for name in functions:
            for place, adapter in known[name].items():
                self._replace(place, adapter)

    def __enter__(self) -> plug:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Take out what this call put in; calls are undone in reverse order."""
        for owner, attribute, old in reversed(self._undo):
            setattr(owner, attribute, old)
        self._undo.clear()
        PLUGGED.clear()
        PLUGGED.update(self._before)

    def _replace(self, place: str, adapter: Callable[..., Any]) -> None:
        """`place` is "module:name" or "module:Class.name"; modules that imported the name get the adapter too."""
        module_name, _, path = place.partition(":")
        owner: Any = importlib.import_module(module_name)
        *classes, attribute = path.split(".")
        for name in classes:
            owner = getattr(owner, name)
        old = getattr(owner, attribute)
        if old is adapter:
            return
        owners = [owner]
        if not classes:
            ours = [
                m for name, m in list(sys.modules.items()) if name.split(".")[0] in ("cs336_infer", "cs336_kernels")
            ]
            owners = [m for m in ours if vars(m).get(attribute) is old]
        for each in owners:
            self._undo.append((each, attribute, old))
            setattr(each, attribute, adapter)


def plug_notebook(path: str | Path) -> plug:
    """`plug` every function of a notebook that has a place in the engine. Of its cells only imports, functions,
    classes and constants are run, in order.

    Raises:
        InferError: the file is no notebook, or defines no such function.
    """
    known = places()
    try:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InferError(f"{path}: not a notebook that can be read ({type(error).__name__})") from None
    namespace: dict[str, Any] = {"__name__": Path(path).stem}
    for number, source in enumerate(sources, 1):
        name = f"{Path(path).name}, code cell {number}"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)  # Triton reads a kernel's lines
        exec(compile(_definitions(source), name, "exec"), namespace)
    found = {name: namespace[name] for name in known if callable(namespace.get(name))}
    if not found:
        raise InferError(f"{path}: none of its functions has a place in the engine ({', '.join(known)})")
    return plug(**found)


def _definitions(source: str) -> ast.Module:
    """The statements of a cell that define something; none of a cell that is not plain Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    tree.body = [
        s
        for s in tree.body
        if isinstance(s, kinds) or (isinstance(s, ast.Assign) and isinstance(s.value, ast.Constant))
    ]
    return tree
