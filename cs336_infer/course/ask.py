"""Asking the student's functions: `ask("name", *args)` gives an answer or raises an `AskError` of one line."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from cs336_infer.types import InferError

Ask = Callable[..., Any]  # ask("function_name", *args, **kwargs) -> the student's answer

NOT_DONE = "not done yet"
LONGEST = 300  # characters of a message
ADAPTERS: list[Callable[[Any], Callable[..., Any] | None]] = []
"""For what a student writes that is no plain function, such as a Triton kernel: what is asked in its place, or None."""

_STUB = re.compile(r"(a\d+ \w+(:|$).*)?")


class AskError(InferError):
    """The student's function gave no answer. `kind` names its exception, such as "ValueError" or "Timeout"."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def describe(error: BaseException, namespace: Mapping[str, Any] | None = None) -> str:
    """One line on what a student's function raised: type, message and, where `namespace` is the globals of their
    code, the last of their lines that ran. The error of a stub is `NOT_DONE`."""
    text = one_line(str(error))
    if isinstance(error, NotImplementedError) and _STUB.fullmatch(text):
        return NOT_DONE
    where, trace = "", error.__traceback__
    while trace is not None:
        if namespace is not None and trace.tb_frame.f_globals is namespace:
            where = f" (line {trace.tb_lineno} of the cell, in {trace.tb_frame.f_code.co_name})"
        trace = trace.tb_next
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__, LONGEST - len(where)) + where


def one_line(text: str, longest: int = LONGEST) -> str:
    """`text` without line breaks, cut to `longest` characters."""
    text = " ".join(text[: 4 * longest].split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def local_ask(functions: Mapping[str, Any]) -> Ask:
    """Ask functions of this process by name; they get copies of the arguments, and their answers are copied."""

    def ask(name: str, /, *args: Any, **kwargs: Any) -> Any:
        function = functions.get(name)
        if not callable(function):
            state = "is not defined" if name not in functions else f"is a {type(function).__name__}, not a function"
            raise AskError(f"`{name}` {state}: run the cell that defines it", "NameError")
        args, kwargs = copy.deepcopy((args, kwargs))
        asked = next(filter(None, (adapt(function) for adapt in ADAPTERS)), function)
        try:
            answer = asked(*args, **kwargs)
        except AskError:
            raise
        except (Exception, SystemExit) as error:
            raise AskError(describe(error, globals_of(function)), type(error).__name__) from None
        try:
            return copy.deepcopy(answer)
        except Exception:
            raise AskError(f"`{name}` gave a {type(answer).__name__}, which is not a value", "TypeError") from None

    return ask


def globals_of(function: Any) -> dict[str, Any]:
    """The namespace in which `function` was written, empty where that cannot be known."""
    function = inspect.unwrap(function)
    module = inspect.getmodule(function)
    code = function.__init__ if inspect.isclass(function) else function
    return getattr(code, "__globals__", None) or (vars(module) if module else {})
