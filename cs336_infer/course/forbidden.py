"""Library calls that would be the answer: found in the source before it runs, and caught while it runs.

`scan` reads the function and whatever of the submission it can reach; `watch` wraps the functions of loaded libraries
before the cells run, so that a reference saved by them is the wrapper; `Guard` makes both those and what came later
refuse for the time of one question; `ImportGuard` makes modules unimportable. All run in the student's process. The
scan is sent to the grader before any of the student's code has run, so it cannot be changed afterwards; the guards
can be undone by a student who sets out to (through `gc` or `ctypes`). They name an honest mistake and make cheating
an act that a reader of the notebook recognises. What stays out of reach is the exercise's own module: it is not in
the sandbox.

This file also travels into the sandbox: standard library only.
"""

import ast
import contextlib
import functools
import importlib.abc
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any


class ForbiddenCall(BaseException):
    """A refused library call. Not an `Exception`, so that a student's `except Exception` does not hide it."""


def scan(trees: Iterable[ast.Module], forbidden: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """function -> message, for each function whose reachable code names something it must not.

    Reachable: the function, the definitions, assignments and imports at top level of every name it uses, and
    theirs. A name that is defined twice counts with all its definitions. A string in `getattr` or `import_module`
    counts as the name; a helper of the student's own that bears a forbidden name does not.
    """
    table: dict[str, list[ast.stmt]] = {}
    for tree in trees:
        for statement in ast.walk(tree):
            if isinstance(statement, ast.stmt):
                for name in _bound(statement):
                    table.setdefault(name, []).append(statement)
    messages: dict[str, str] = {}
    for function, names in forbidden.items():
        found = _reach(function, table, names)
        if found:
            messages[function] = found
    return messages


def _reach(function: str, table: Mapping[str, list[ast.stmt]], names: Sequence[str]) -> str | None:
    aliases = _aliases(table)
    todo, seen = [function], {function}
    while todo:
        current = todo.pop()
        for node in (node for statement in table.get(current, []) for node in ast.walk(statement)):
            for used in _used(node):
                first, *_, last = used.split(".") if "." in used else (used, "")
                if first in aliases:
                    full = aliases[first] + used[len(first) :]
                else:  # what the student's own code defines is followed, not matched
                    full = ".".join(part for part in used.split(".") if part not in table or part in aliases)
                hit = next((name for name in names if matches(full, name)), None)
                if hit is not None:
                    through = "" if current == function else f" through {current}"
                    line = getattr(node, "lineno", 0)
                    return (
                        f"{function} uses {hit}{through} (line {line}), which this exercise asks you to write yourself"
                    )
                for name in {first, last} - seen - {""}:
                    seen.add(name)
                    todo.append(name)
    return None


def _message(function: str, what: str) -> str:
    return f"{function} uses {what}, which this exercise asks you to write yourself"


def matches(full: str, name: str) -> bool:
    """Whether the dotted name `full` is `name` or lies in it; a bare `name` may be any part of it."""
    if "." in name:
        return full == name or full.startswith(name + ".")
    return name in full.split(".")


def _aliases(table: Mapping[str, list[ast.stmt]]) -> dict[str, str]:
    """What imported names stand for: F -> torch.nn.functional."""
    aliases: dict[str, str] = {}
    for statement in (statement for found in table.values() for statement in found):
        if isinstance(statement, ast.Import):
            aliases |= {each.asname: each.name for each in statement.names if each.asname}
            aliases |= {each.name.split(".")[0]: each.name.split(".")[0] for each in statement.names if not each.asname}
        elif isinstance(statement, ast.ImportFrom):
            aliases |= {each.asname or each.name: f"{statement.module or ''}.{each.name}" for each in statement.names}
    return aliases


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).split(".")[0] for alias in statement.names]
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        nodes = [node for target in targets for node in ast.walk(target)]
        names = [node.id for node in nodes if isinstance(node, ast.Name)]
        return names + [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    return []


def _used(node: ast.AST) -> list[str]:
    """The dotted names that one node of the source uses."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        parts = [node.attr]
        inner = node.value
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        return [".".join(reversed([*parts, inner.id if isinstance(inner, ast.Name) else "?"]))]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module or ''}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("getattr", "attrgetter", "methodcaller", "import_module", "__import__"):
            values = [each.value for each in node.args if isinstance(each, ast.Constant)]
            return [f"?.{value}" for value in values if isinstance(value, str)]
    return []


class ImportGuard(importlib.abc.MetaPathFinder):
    """Refuses `import name` and its submodules, for names in `blocked`."""

    def __init__(self, blocked: Iterable[str]) -> None:
        self.blocked = tuple(blocked)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        for name in self.blocked:
            if fullname == name or fullname.startswith(name + "."):
                raise ImportError(f"{name} is what this exercise asks for, it cannot be imported while it is graded")


_asked: list["Guard"] = []


def watch(names: Iterable[str]) -> None:
    """Wraps every loaded function with such a name, for good. It works as before, except while a `Guard` of that name
    is active. Classes and overloaded operators stay as they are: libraries use them as more than functions."""
    for name in set(names):
        wrappers: dict[int, Any] = {}
        for owner, attribute in list(_owners(name)):
            old = getattr(owner, attribute)
            if isinstance(old, types.BuiltinFunctionType | types.FunctionType | types.MethodDescriptorType):
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(owner, attribute, wrappers.setdefault(id(old), _watched(name, old)))


def _watched(name: str, old: Any) -> Any:
    @functools.wraps(old)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        for guard in _asked:
            if name in guard.names:
                raise guard.refuse(name)
        return old(*args, **kwargs)

    del wrapper.__wrapped__
    return wrapper


class Guard:
    """For the time of one question: every loaded module's attribute `name` raises, a module `name` cannot be imported.

    A dotted name replaces that attribute only (torch has some functions in several places: prefer bare names).
    `hit` holds the message of the first refused call, even when the student's code caught the exception.
    """

    def __init__(self, function: str, names: Sequence[str]) -> None:
        self.function = function
        self.names = names
        self.hit: str | None = None
        self._undo: list[tuple[Any, str, Any]] = []
        self._modules: dict[str, ModuleType] = {}
        self._finder = _Refuser(self)

    def __enter__(self) -> "Guard":
        for name in self.names:
            for owner, attribute in list(_owners(name)):
                self._replace(owner, attribute, name)
        originals = {id(old) for _, _, old in self._undo}
        main = sys.modules.get("__main__")
        for attribute, value in list(vars(main).items()) if main is not None else []:
            if id(value) in originals:
                self._replace(main, attribute, getattr(value, "__name__", attribute))
        if self.names:
            for module in list(sys.modules):
                if any(module == name or module.startswith(name + ".") for name in self.names):
                    self._modules[module] = sys.modules.pop(module)
            sys.meta_path.insert(0, self._finder)
        _asked.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _asked.clear()
        for owner, attribute, old in reversed(self._undo):  # one module may have two names
            setattr(owner, attribute, old)
        sys.modules.update(self._modules)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)

    def refuse(self, name: str) -> ForbiddenCall:
        message = _message(self.function, name)
        self.hit = self.hit or message
        return ForbiddenCall(message)

    def _replace(self, owner: Any, attribute: str, name: str) -> None:
        old = getattr(owner, attribute)

        def refused(*args: object, **kwargs: object) -> None:
            raise self.refuse(name)

        try:
            setattr(owner, attribute, refused)
        except (AttributeError, TypeError):
            return
        self._undo.append((owner, attribute, old))


class _Refuser(importlib.abc.MetaPathFinder):
    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        for name in self.guard.names:
            if fullname == name or fullname.startswith(name + "."):
                raise self.guard.refuse(name)


def _owners(name: str) -> Iterable[tuple[Any, str]]:
    head, _, attribute = name.rpartition(".")
    if head:
        owner: Any = sys.modules.get(head)
        if owner is None:
            parts = head.split(".")
            owner = sys.modules.get(parts[0])
            for part in parts[1:]:
                owner = getattr(owner, part, None)
        if owner is not None and hasattr(owner, attribute):
            yield owner, attribute
        return
    main = sys.modules.get("__main__")  # also in the list as __mp_main__
    for module_name, module in list(sys.modules.items()):
        ours = module is main or module_name.startswith(str(__package__))
        if not ours and isinstance(module, ModuleType) and callable(vars(module).get(name)):
            yield module, name
    torch = sys.modules.get("torch")
    for owner in () if torch is None else (torch.Tensor, torch.ops.aten):
        if hasattr(owner, name):
            yield owner, name
