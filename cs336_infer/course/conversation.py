"""A running student's process and the frames that go to it and come from it, on a pair of pipes of their own.

Everything here has a deadline, and nothing that arrives is believed: a length over the limit, a frame with another
nonce or number, and bytes that are not a value each end the conversation.
"""

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import threading
import time
from typing import Any

from cs336_infer.course import sandbox, wire
from cs336_infer.course.sandbox import Limits, SandboxUnavailable
from cs336_infer.course.starting import Started, last_words

LOOK_EVERY_S = 0.1
ENDING_S = 5.0
ENVELOPE = 4096


class Ended(Exception):
    """The conversation is over: the process is gone, or must go."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Pipe:
    """A running process and the two ends of its pipes."""

    def __init__(self, started: Started, limits: Limits, stop: threading.Event | None = None) -> None:
        self.limits = limits
        self.nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self.process, self.reading, self.writing = started.process, started.reading, started.writing
        self.folder = started.folder
        self.stop = stop
        os.set_blocking(self.reading, False)
        os.set_blocking(self.writing, False)
        self.looked = time.monotonic()

    def send(self, number: int, body: bytes, deadline: float) -> None:
        message = memoryview(wire.frame(self.nonce, number, body))
        while message:
            if self._wait(self.writing, select.POLLOUT, deadline):
                try:
                    message = message[os.write(self.writing, message[: 1 << 16]) :]
                except BrokenPipeError:
                    raise self._ended() from None
                except BlockingIOError:
                    continue

    def receive(self, number: int, deadline: float, starting: bool = False) -> Any:
        """The value of the frame `number`. Anything else that arrives ends the conversation."""
        try:
            length, nonce, got = wire.FRAME.unpack(self._read(wire.FRAME.size, deadline))
            size = length - wire.FRAME_REST
            if nonce != self.nonce or got != number:
                raise Ended("protocol", "it wrote into the grader's pipe")
            if not 0 < size <= self.limits.output_bytes + ENVELOPE:
                raise Ended("protocol", f"it announced an answer of {size} bytes")
            return wire.decode(self._read(size, deadline), size)
        except wire.WireError as error:
            raise Ended("protocol", f"its answer is not a value: {error}") from None
        except Ended:
            if starting:
                self._explain()
            raise

    def stirred(self) -> bool:
        """Whether something came, or the process ended, since the last answer."""
        return bool(select.select([self.reading], [], [], 0)[0]) or self.process.poll() is not None

    def close(self) -> None:
        sandbox.kill(self.process)
        # Every process of a sandbox holds the pipe, or has let go of it: its end means that they are gone.
        with contextlib.suppress(Ended):
            while self.folder is None:
                self._chunk(1 << 16, time.monotonic() + ENDING_S)
        os.close(self.reading)
        os.close(self.writing)
        if self.process.stderr is not None:
            self.process.stderr.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, size: int, deadline: float) -> bytes:
        parts, missing = [], size
        while missing:
            parts.append(self._chunk(min(missing, 1 << 20), deadline))
            missing -= len(parts[-1])
        return b"".join(parts)

    def _chunk(self, size: int, deadline: float) -> bytes:
        while True:
            if self._wait(self.reading, select.POLLIN, deadline):
                data = os.read(self.reading, size)
                if not data:
                    raise self._ended()
                return data
            if self.process.poll() is not None and not select.select([self.reading], [], [], 0)[0]:
                raise self._ended()

    def _wait(self, descriptor: int, event: int, deadline: float) -> bool:
        """Whether the descriptor is ready, after a moment at most; looks at the clock and at the memory."""
        now = time.monotonic()
        if self.stop is not None and self.stop.is_set():
            raise Ended("timeout", "the grader was stopped")
        if now > deadline:
            raise Ended("timeout", "no answer in time")
        if now - self.looked >= LOOK_EVERY_S:
            self.looked = now
            held = sandbox.memory(self.process, self.limits.memory_bytes)
            if held > self.limits.memory_bytes:
                raise Ended("memory", f"more than {self.limits.memory_bytes // sandbox.MiB} MiB in use")
        poll = select.poll()
        poll.register(descriptor, event)
        return bool(poll.poll(1000 * min(LOOK_EVERY_S, max(deadline - now, 0.001))))

    def _ended(self) -> Ended:
        try:
            code = self.process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            return Ended("protocol", "it closed the grader's pipe")
        number = -code if code < 0 else code - 128
        if number == signal.SIGXCPU:
            return Ended("timeout", f"more than {self.limits.cpu_s} s of processor time")
        if 0 < number < signal.NSIG:
            return Ended("crash", f"its process died of {signal.Signals(number).name}")
        return Ended("crash", f"its process ended with exit code {code}")

    def _explain(self) -> None:
        """Before the first message no student code has run: what is on stderr is about the machine."""
        if said := last_words(self.process):
            raise SandboxUnavailable(f"the sandbox did not start: {said}")
