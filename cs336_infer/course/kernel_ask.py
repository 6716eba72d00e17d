"""Asking a student's Triton kernels: `ask("some_kernel", question)` gives what the sanitizer saw of it.

In a notebook the kernel runs in this process. In the grader its text is taken out of the submission, unrun; once
everything in it is known to be Triton (`kernel_text`), it runs in a sandbox of its own, which holds the sanitizer and
none of the student's other code.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cs336_kernels

from cs336_infer.course.ask import ADAPTERS, Ask, AskError
from cs336_infer.course.kernel_text import Definition, cells_lookup, kernel_text
from cs336_infer.course.questions import StudentError, StudentProcess

KERNELS = Path(str(cs336_kernels.__file__)).parent
FILES = {
    "kernel_runner.py": Path(__file__).with_name("kernel_runner.py"),
    "cs336_kernels/__init__.py": KERNELS / "__init__.py",
    "cs336_kernels/sanitizer": KERNELS / "sanitizer",
}
"""What is in the sandbox of the kernels."""


class KernelProcess:
    """For the grader: an `Ask` that answers for the kernels called `names`, and hands the rest to `others`.

    Args:
        cells: of the submission. options: of `StudentProcess`, the process in which its kernels run.
    """

    def __init__(self, names: Sequence[str], cells: Sequence[str], others: Ask, **options: Any) -> None:
        code = "import functools, torch, kernel_runner\n"
        code += "".join(f"{name} = functools.partial(kernel_runner.answer)\n" for name in names)
        self.names, self._others, self._lookup = names, others, cells_lookup(cells)
        self.process = StudentProcess([code], files=FILES, **options)

    def __enter__(self) -> KernelProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.close()

    def __call__(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if name not in self.names:
            return self._others(name, *args, **kwargs)
        (question,) = args
        text = kernel_text(launched(question), self._lookup)
        try:
            return self.process.ask(name, text, question)
        except StudentError as error:
            raise AskError(error.message.removeprefix("kernel_runner."), error.kind) from None


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
