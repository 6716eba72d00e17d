"""The grader's side: a submission's process that is asked one question at a time.

    with StudentProcess(cells) as student:
        answer = student.ask("softmax", logits)

What comes back is a value or a `StudentError` with its kind; nothing that the student prints matters. A crash or a
timeout costs one question: the next one finds a new process. Cells that never end, or kill their process, are run
once and remembered. So is a function that ran out of time twice without an answer in between: the first time may be
a slow import, the second is the function's own, and each more would hold up the class. Whatever the questions, a
submission has a sum of seconds in which it is waited for.

Messages carry a random nonce and the number of the question. The student's code shares an interpreter with the loop
that answers and can dig both out; what it gains is sending *values* of its own making, early or late, and those are
compared with what the fresh inputs of that very question demand.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cs336_infer.course import starting, wire
from cs336_infer.course.conversation import Ended, Pipe
from cs336_infer.course.forks import Forks
from cs336_infer.course.sandbox import Limits
from cs336_infer.course.student import needs_torch

TIMEOUTS = 2
"""In a row, of one function; then it is not asked again."""
KINDS = ("missing", "exception", "timeout", "crash", "memory", "refused", "type", "protocol")


class StudentError(Exception):
    """Why there is no answer: `kind` is one of `KINDS`, `message` one line for the student."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


@dataclass
class StudentProcess:
    """One submission. Use it as a context manager, from one thread that outlives it (the sandbox ends with its thread).

    `modules_blocked` cannot be imported; `calls_forbidden` maps a function to library names it must not use.
    `files` are put on the sandbox's import path read-only, name -> file or folder: everything else of this project
    is invisible there. Once `stop` is set, nothing is waited for any more. `sandbox=False` is unsafe: limits and a
    process group, no walls. It is for code you wrote yourself. With `forks` its processes are forked from one that has
    torch imported, where that is possible; `ways` counts how they were started (`starting.Started`).

    `starts` counts its processes, `asked` the questions that were put to them, `waited_s` the seconds of both.
    """

    cells: Sequence[str]
    modules_blocked: Sequence[str] = field(default=(), kw_only=True)
    calls_forbidden: Mapping[str, Sequence[str]] = field(default_factory=dict, kw_only=True)
    limits: Limits = field(default=Limits(), kw_only=True)
    sandbox: bool = field(default=True, kw_only=True)
    files: Mapping[str, Path] = field(default_factory=dict, kw_only=True)
    stop: threading.Event | None = field(default=None, kw_only=True)
    forks: Forks | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.starts = 0
        self.ways: Counter[str] = Counter()
        self.asked = 0
        self.waited_s = 0.0
        self._timeouts: Counter[str] = Counter()
        self.load_errors: list[str] = []
        self._pipe: Pipe | None = None
        self._refused: dict[str, str] | None = None
        self._verdict: StudentError | None = None
        self._number = 1

    def __enter__(self) -> "StudentProcess":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process and all it started."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def ask(self, function: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """What the student's `function` returns for these arguments, in `timeout_s` (default: the limits').

        `StudentError` says why not; `wire.WireError` when an argument cannot travel; `SandboxUnavailable`.
        """
        question = {"function": function, "args": list(args), "kwargs": kwargs}
        body = wire.encode(question, self.limits.question_bytes)
        if self._timeouts[function] >= TIMEOUTS:
            raise StudentError("timeout", f"{function}: no answer in time, {TIMEOUTS} times: it is not asked again")
        pipe = self._ready()
        if self._refused and function in self._refused:
            raise StudentError("refused", self._refused[function])
        self._number += 1
        self.asked += 1
        try:
            with self._waiting(self.limits.wall_s_per_question if timeout_s is None else timeout_s) as deadline:
                pipe.send(self._number, body, deadline)
                answer = pipe.receive(self._number, deadline)
            self._timeouts[function] = 0
            return _opened(answer)
        except Ended as error:
            self.close()
            self._timeouts[function] += error.kind == "timeout"
            raise StudentError(error.kind, f"{function}: {error.message}") from None

    @contextlib.contextmanager
    def _waiting(self, seconds: float) -> Iterator[float]:
        """The deadline of a question, or of a start; what is waited counts."""
        begin = time.monotonic()
        try:
            yield begin + min(seconds, self.limits.wall_s - self.waited_s)
        finally:
            self.waited_s += time.monotonic() - begin

    def _ready(self) -> Pipe:
        """The process, started and loaded, with nothing unread in its pipe."""
        if self._verdict is not None:
            raise StudentError(self._verdict.kind, self._verdict.message)
        if self.waited_s >= self.limits.wall_s:
            self.close()
            raise StudentError("timeout", f"the submission has used up its {self.limits.wall_s:g} s in all")
        if self._pipe is not None and self._pipe.stirred():
            self.close()
        if self._pipe is None:
            if self.starts > self.limits.restarts:
                raise StudentError("crash", f"its process ended {self.starts} times and is not started again")
            self.starts += 1
            try:
                self._pipe = self._load()
            except Ended as error:
                self._verdict = StudentError(error.kind, f"the cells could not be run: {error.message}")
                raise StudentError(self._verdict.kind, self._verdict.message) from None
        return self._pipe

    def _load(self) -> Pipe:
        setup = {
            "cells": list(self.cells),
            "blocked": list(self.modules_blocked),
            "forbidden": {name: list(calls) for name, calls in self.calls_forbidden.items()},
            "limit": self.limits.output_bytes,
        }
        started = self._started()
        self.ways[started.way] += 1
        pipe = Pipe(started, self.limits, self.stop)
        try:
            with self._waiting(self.limits.wall_s_load) as deadline:
                pipe.send(0, wire.encode(setup, self.limits.question_bytes), deadline)
                scanned = pipe.receive(0, deadline, starting=True)
                # Read before any cell ran: what the student's code says later about itself does not count.
                self._refused = scanned["refused"] if self._refused is None else self._refused
                errors = _opened(pipe.receive(1, deadline))
            self.load_errors = (
                [_printable(each) for each in errors[:50] if type(each) is str] if type(errors) is list else []
            )
        except BaseException:
            pipe.close()
            raise
        return pipe

    def _started(self) -> starting.Started:
        if not self.sandbox:
            return starting.unsafe(self.limits, self.files)
        if self.forks is not None:
            torch, blocked = needs_torch(list(self.cells)), self.modules_blocked
            forked = self.forks.start(self.limits, self.files, torch=torch, blocked=blocked, stop=self.stop)
            if forked is not None:
                return forked
        return starting.fresh(self.limits, self.files)


def _opened(answer: Any) -> Any:
    """The value in an answer, or the error it reports."""
    kind = answer.get("kind") if isinstance(answer, dict) else None
    if type(kind) is str and kind == "ok" and "value" in answer:
        return answer["value"]
    message = answer.get("message") if isinstance(answer, dict) else None
    if type(kind) is not str or kind not in KINDS or type(message) is not str:
        raise Ended("protocol", "its answer is not one")
    raise StudentError(kind, _printable(message))


def _printable(text: str) -> str:
    """A student's text on one line, without control characters."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:1000]
