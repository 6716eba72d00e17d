"""Asking a student's Triton kernels in the grader: `ask("some_kernel", question)` gives what the sanitizer saw of it.

The text of a kernel is taken out of the submission, unrun; once everything in it is known to be Triton (`kernel_text`),
it runs in a sandbox of its own, which holds the sanitizer and none of the student's other code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cs336_kernels

from cs336_infer.course.ask import Ask, AskError
from cs336_infer.course.kernel_ask import launched
from cs336_infer.course.kernel_text import cells_lookup, kernel_text
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
