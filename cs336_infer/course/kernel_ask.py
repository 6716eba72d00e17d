"""Asking a student's Triton kernels in a notebook: `ask("some_kernel", question)` gives what the sanitizer saw of it.

Here a kernel runs in this process; `kernel_process` is the grader's way.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cs336_infer.course.ask import ADAPTERS
from cs336_infer.course.kernel_text import Definition, kernel_text


def local_kernel(function: Any) -> Callable[..., Any] | None:
    """In a notebook: a kernel as something that can be asked; None for what is no kernel."""
    if not is_kernel(function):
        return None

    def ask(question: dict[str, Any]) -> Any:
        from cs336_infer.course import kernel_runner

        return kernel_runner.answer(text_of(launched(question), function.fn.__globals__), question)

    return ask


def launched(question: dict[str, Any]) -> list[str]:
    """The kernels of a question (`kernel_runner.answer`), each once."""
    return list(dict.fromkeys(kernel for kernel, *_ in question["launches"]))


def text_of(names: Sequence[str], namespace: Mapping[str, Any]) -> str:
    """The text of `@triton.jit` functions of this process, with what they use (`kernel_text`)."""

    def lookup(name: str) -> Definition | None:
        value = namespace.get(name)
        if value is not None and is_kernel(value):
            lines = getattr(value, "raw_src", None) or inspect.getsourcelines(value.fn)[0]
            return Definition(textwrap.dedent("".join(lines)).rstrip(), True)
        number = getattr(value, "value", value)
        if type(number) not in (int, float, bool):
            return None
        return Definition(f"{name} = {number!r}" if number is value else f"{name} = tl.constexpr({number!r})", False)

    return kernel_text(names, lookup)


def is_kernel(value: Any) -> bool:
    """Whether this is a `@triton.jit` function; Triton is not imported."""
    return hasattr(value, "fn") and type(value).__module__.startswith("triton.")


ADAPTERS.append(local_kernel)
