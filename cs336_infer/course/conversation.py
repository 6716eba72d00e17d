"""A running student's process and the frames that go to it and come from it, on a pair of pipes of their own.

Everything here has a deadline, and nothing that arrives is believed: a length over the limit, a frame with another
nonce or number, and bytes that are not a value each end the conversation.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cs336_infer.course import sandbox, wire
from cs336_infer.course.sandbox import Limits, SandboxUnavailable

HERE = Path(__file__).parent
SIDE = {f"answering/{name}": HERE / name for name in ("student.py", "wire.py", "forbidden.py")}
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from answering.student import main; main(sys.argv[2])"
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

    def __init__(
        self, limits: Limits, boxed: bool, files: Mapping[str, Path], stop: threading.Event | None = None
    ) -> None:
        files = {**SIDE, **files}
        self.limits = limits
        self.nonce = secrets.token_bytes(wire.NONCE_BYTES)
        self.folder: str | None = None
        self.stop = stop
        with contextlib.ExitStack() as theirs:
            filter_fd = -1
            if boxed:
                filter_fd = sandbox.filter_pipe()
                theirs.callback(os.close, filter_fd)
            else:
                self.folder = _copies(files)
            their_reading, self.writing = os.pipe()
            theirs.callback(os.close, their_reading)
            self.reading, their_writing = os.pipe()
            theirs.callback(os.close, their_writing)
            try:
                program = _program(limits, self.folder or sandbox.PLACE, their_reading, their_writing)
                line = sandbox.command(program, files, limits, filter_fd) if boxed else sandbox.unsafe_command(program)
                fds = [their_reading, their_writing, *([filter_fd] if boxed else [])]
                self.process = sandbox.start(line, pass_fds=fds, cwd=self.folder)
            except BaseException:
                os.close(self.reading)
                os.close(self.writing)
                self._remove()
                raise
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
        self._remove()

    def _remove(self) -> None:
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
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        lines = (self.process.stderr.read(1 << 16) or b"").decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        if said:
            raise SandboxUnavailable(f"the sandbox did not start: {said[-1][:300]}")


def _program(limits: Limits, place: str, reading: int, writing: int) -> list[str]:
    bounds = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 0,
    }
    given = json.dumps({"reading": reading, "writing": writing, "limits": bounds})
    return [sys.executable, "-I", "-c", BOOT, place, given]


def _copies(files: Mapping[str, Path]) -> str:
    """A folder with copies of `files`, for a process without a sandbox."""
    folder = tempfile.mkdtemp(prefix="student-")
    for name, source in files.items():
        target = Path(folder, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return folder
