"""The program inside the sandbox: runs a submission's cells, then answers questions about its functions, one at a time.

Cells run statement by statement, as a notebook whose author presses on after an error: a failing statement costs
itself and is remembered for the message of a function that is missing in the end.

The student's code runs in this interpreter. It can find the nonce, replace these functions and write frames of its
own; with that it can forge *values*, nothing else. A forged value is compared like an honest one, with a fresh
input that the student's code sees only in the question; the comparison is in another process. What an answer *is*
cannot be forged either: it is decoded by `wire`, which knows plain values only.

This file travels into the sandbox: standard library, `wire`, `forbidden` and `holder`.
"""

import ast
import builtins
import contextlib
import gc
import json
import linecache
import os
import signal
import sys
import traceback
import types
from typing import Any, BinaryIO

from . import forbidden, holder, wire

FUTURE_FLAGS = 0x1FF0000
MAX_MESSAGE = 600


class Submission:
    """The student's cells as a module named `__main__`."""

    def __init__(self, cells: list[str]) -> None:
        self.cells = cells
        self.trees: list[ast.Module | None] = []
        self.errors: list[str] = []
        self.module = types.ModuleType("__main__")
        for number, cell in enumerate(cells, 1):
            try:
                self.trees.append(ast.parse(cell, name_of(number)))
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                self.trees.append(None)
                self.errors.append(f"cell {number}: {one_line(error)}")

    def run(self) -> None:
        sys.modules["__main__"] = self.module
        self.module.__dict__["__builtins__"] = builtins
        for number, (cell, tree) in enumerate(zip(self.cells, self.trees, strict=True), 1):
            name = name_of(number)
            linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
            flags = 0
            for statement in () if tree is None else tree.body:
                try:
                    code = compile(ast.Module([statement], []), name, "exec", flags, dont_inherit=True)
                    flags |= code.co_flags & FUTURE_FLAGS
                    exec(code, self.module.__dict__)
                except BaseException as error:
                    self.errors.append(f"cell {number} line {statement.lineno}: {one_line(error)}")


class Answers:
    """Turns one question into one answer."""

    def __init__(self, submission: Submission, names: dict[str, list[str]], limit: int) -> None:
        self.submission = submission
        self.names = names
        self.limit = limit

    def answer(self, question: dict[str, Any]) -> bytes:
        """The encoded answer: a dict with `kind` and either `value` or `message`."""
        function = question["function"]
        target = self.submission.module.__dict__.get(function)
        if not callable(target):
            return self.failed("missing", self.missing(function))
        guard = forbidden.Guard(function, self.names.get(function, []))
        try:
            with guard:
                value = target(*question["args"], **question["kwargs"])
        except BaseException as error:
            return self.failed(*(("refused", guard.hit) if guard.hit else described(error)))
        if guard.hit:
            return self.failed("refused", guard.hit)
        try:
            return wire.encode({"kind": "ok", "value": value}, self.limit)
        except wire.WireError as error:
            return self.failed("type", f"{function} returned {error}, which cannot be graded")
        except BaseException as error:
            return self.failed("type", f"{function} returned a value that cannot be read: {one_line(error)}")

    def missing(self, function: str) -> str:
        errors = self.submission.errors
        if function in self.submission.module.__dict__:
            return f"{function} is not a function"
        return f"{function} is not defined" + (f"; {'; '.join(errors[:3])}" if errors else "")

    @staticmethod
    def failed(kind: str, message: str) -> bytes:
        return wire.encode({"kind": kind, "message": clip(message)})


def name_of(number: int) -> str:
    return f"<cell {number}>"


def clip(text: str) -> str:
    return text[:MAX_MESSAGE].encode("utf-8", "replace").decode()


def one_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except BaseException:
        text = "(no message)"
    name = wire.type_name(type(error))
    return clip(f"{name}: {text}" if text else name)


def described(error: BaseException) -> tuple[str, str]:
    """Kind and message of what a student's function raised, with the last line of the submission that it went
    through."""
    text = one_line(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return "memory", text
    for step in reversed(traceback.extract_tb(error.__traceback__)):
        if step.filename.startswith("<cell "):
            return "exception", f"{text} ({step.filename.strip('<>')} line {step.lineno}, in {step.name})"
    return "exception", text


def needs_torch(cells: list[str]) -> bool:
    """Whether a submission mentions it. Importing torch is most of the time of grading one."""
    return any("torch" in cell for cell in cells)


def preload() -> None:
    """Imports torch, and numpy through which its values travel. The garbage collector would be a fifth of the time,
    looking at a million objects that stay."""
    gc.disable()
    with contextlib.suppress(BaseException):
        import torch  # noqa: F401
    with contextlib.suppress(BaseException):
        import numpy  # noqa: F401
    gc.freeze()
    gc.enable()


def serve(reading: BinaryIO, writing: BinaryIO) -> None:
    """Reads what to run, then one question after another, until the grader closes the pipe."""
    nonce, _, setup = read(reading)
    submission = Submission(setup["cells"])
    names: dict[str, list[str]] = setup["forbidden"]
    refused = forbidden.scan([tree for tree in submission.trees if tree is not None], names)
    send(writing, wire.frame(nonce, 0, wire.encode({"refused": refused})))
    if setup["blocked"]:
        sys.meta_path.insert(0, forbidden.ImportGuard(setup["blocked"]))
    if needs_torch(submission.cells) and "torch" not in sys.modules:
        preload()
    forbidden.watch(name for each in names.values() for name in each)
    owner = os.getpid()
    submission.run()
    if os.getpid() != owner:
        os._exit(0)  # a copy made by os.fork in a cell; the original answers
    answers = Answers(submission, names, setup["limit"])
    send(writing, wire.frame(nonce, 1, wire.encode({"kind": "ok", "value": submission.errors})))
    while True:
        _, number, question = read(reading)
        body = answers.answer(question)
        if os.getpid() != owner:
            os._exit(0)
        send(writing, wire.frame(nonce, number, body))


def send(writing: BinaryIO, message: bytes) -> None:
    writing.write(message)
    writing.flush()


def read(reading: BinaryIO) -> tuple[bytes, int, Any]:
    """The next frame; ends the process quietly when the grader is done with it."""
    head = reading.read(wire.FRAME.size)
    if len(head) < wire.FRAME.size:
        os._exit(0)
    length, nonce, number = wire.FRAME.unpack(head)
    body = reading.read(length - wire.FRAME_REST)
    return nonce, number, wire.decode(body, len(body))


def main(arguments: str) -> None:
    """`arguments` is JSON: the two ends of the pipes, and the limits by their names in `resource`."""
    given = json.loads(arguments)
    holder.restrict(given["limits"])
    reading, writing = os.fdopen(given["reading"], "rb"), os.fdopen(given["writing"], "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.closerange(nowhere, nowhere + 1)
    if os.getpid() == 1:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if child := os.fork():
            holder.stay(child, given["reading"])
    sys.path.append(os.getcwd())
    try:
        serve(reading, writing)
    except BaseException:
        os._exit(70)
