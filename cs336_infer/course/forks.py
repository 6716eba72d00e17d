"""The grader's side of the zygotes: processes that have torch imported, from which submissions are forked.

    with Forks() as forks:
        started = forks.start(limits, files, torch=True)

A zygote is started when one is needed first: one with torch, one without for submissions that never mention it. One
that dies is replaced, and said so. Where a process cannot be led into a sandbox, `why_not` says it in a line, on
stderr too, and every submission is started as a fresh program: slower, and the same walls.
"""

import contextlib
import json
import os
import platform
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from cs336_infer.course import sandbox, seccomp, starting
from cs336_infer.course.sandbox import Limits, SandboxUnavailable
from cs336_infer.course.starting import Started

BOOT = (
    "import json, sys; given = json.load(sys.stdin); space = {'__name__': 'zygote'}\n"
    "exec(compile(given.pop('program'), '<zygote>', 'exec'), space); arguments = space['main'](given)\n"
    f"del given, space; from {starting.PACKAGE}.student import main; main(arguments)"
)
LOADERS = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}
NOWHERE = "/nonexistent"
"""HOME of a zygote: it runs outside, where the sandbox's home would be anybody's folder."""
START_S = 60.0
LOOK_S = 0.1
REPLACED = 3
"""Zygotes that die in a run and are replaced."""


class NotForked(Exception):
    """No process was forked; one line."""


class Died(NotForked):
    """The zygote ended, or does not answer."""


class Zygote:
    """One process. `loaded` are the modules it has imported, known once it is `ready`."""

    def __init__(self, torch: bool) -> None:
        self.loaded: frozenset[str] = frozenset()
        self.lock = threading.Lock()
        self._ready = False
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sources = {Path(name).stem: path.read_text(encoding="utf-8") for name, path in starting.SIDE.items()}
        order = ("wire", "forbidden", "holder", "student")
        given = {
            "program": (starting.HERE / "zygote.py").read_text(encoding="utf-8"),
            "package": {
                "name": starting.PACKAGE,
                "folder": sandbox.PLACE,
                "sources": {name: sources[name] for name in order},
            },
            "control": theirs.fileno(),
            "torch": torch,
            "home": sandbox.HOME,
            "filter": seccomp.program().hex(),
        }
        with theirs:
            self.process = subprocess.Popen(
                [*_python(), "-I", "-c", BOOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env=sandbox.ENVIRONMENT | {"HOME": NOWHERE},
                start_new_session=True,
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(json.dumps(given).encode())

    def ready(self, stop: threading.Event | None) -> None:
        """Waits until it has imported everything."""
        if not self._ready:
            said = json.loads(self._receive(stop))
            if said["problem"]:
                raise NotForked(said["problem"])
            self.loaded = frozenset(said["loaded"])
            self._ready = True

    def fork(self, limits: Limits, descriptors: list[int], stop: threading.Event | None) -> None:
        """Has a process forked into the sandbox whose holder is at the last of `descriptors`."""
        try:
            socket.send_fds(self.control, [json.dumps({"limits": starting.bounds(limits)}).encode()], descriptors)
        except OSError as error:
            raise Died(f"it is gone: {error}") from None
        said = self._receive(stop).decode(errors="replace")
        if said != "born":
            raise NotForked(said)

    def _receive(self, stop: threading.Event | None) -> bytes:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not (stop and stop.is_set()):
            if select.select([self.control], [], [], LOOK_S)[0]:
                with contextlib.suppress(ConnectionError):
                    if said := self.control.recv(1 << 18):
                        return said
                raise Died(starting.last_words(self.process) or "it ended")
        raise Died("the grader was stopped" if stop and stop.is_set() else f"no answer in {START_S:g} s")

    def close(self) -> None:
        """Ends it. What it forked belongs to the sandboxes, and stays."""
        self.control.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


class Forks:
    """The zygotes of a run. Threads may share it; close it when they have ended."""

    def __init__(self, why_not: str = "") -> None:
        self.why_not = why_not
        self._lock = threading.Lock()
        self._zygotes: dict[bool, Zygote] = {}
        self._died = 0

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            while self._zygotes:
                self._zygotes.popitem()[1].close()
            self.why_not = self.why_not or "closed"

    def prepare(self, torch: bool) -> None:
        """Starts a zygote, so that it imports while the caller does something else."""
        with contextlib.suppress(NotForked):
            self._zygote(torch)

    def processes(self) -> list[int]:
        """Ids of the zygotes."""
        return [zygote.process.pid for zygote in self._zygotes.values()]

    def start(
        self,
        limits: Limits,
        files: Mapping[str, Path],
        *,
        torch: bool,
        blocked: Iterable[str] = (),
        stop: threading.Event | None = None,
    ) -> Started | None:
        """A process forked into a sandbox of its own. None: start a fresh one; `blocked` names what is imported here
        already, or `why_not` says more.

        Raises:
            SandboxUnavailable: there is no sandbox here.
        """
        while not self.why_not and not (stop and stop.is_set()):
            zygote: Zygote | None = None
            try:
                zygote = self._zygote(torch)
                with zygote.lock:
                    zygote.ready(stop)
                if any(is_or_contains(name, zygote.loaded) for name in blocked):
                    return None
                return self._forked(zygote, limits, files, stop)
            except Died as error:
                if not (stop and stop.is_set()):
                    self._replace(torch, zygote, str(error))
            except (NotForked, NotImplementedError, OSError) as error:
                self._give_up(str(error))
        return None

    def _forked(
        self, zygote: Zygote, limits: Limits, files: Mapping[str, Path], stop: threading.Event | None
    ) -> Started:
        def enter(process: subprocess.Popen[bytes], descriptors: list[int]) -> None:
            deadline = time.monotonic() + START_S
            while not select.select([descriptors[-1]], [], [], LOOK_S)[0]:
                if time.monotonic() > deadline:
                    raise SandboxUnavailable(f"the sandbox did not start in {START_S:g} s")
            with zygote.lock:
                try:
                    zygote.fork(limits, descriptors, stop)
                except NotForked:
                    if process.poll() is not None and (said := starting.last_words(process)):
                        raise SandboxUnavailable(f"the sandbox did not start: {said}") from None
                    raise

        return starting.forked(limits, files, enter)

    def _zygote(self, torch: bool) -> Zygote:
        with self._lock:
            if self.why_not:
                raise NotForked(self.why_not)
            if torch not in self._zygotes:
                self._zygotes[torch] = Zygote(torch)
            return self._zygotes[torch]

    def _replace(self, torch: bool, zygote: Zygote | None, said: str) -> None:
        """The next start makes a new one; other threads may have seen it die too."""
        with self._lock:
            if zygote is None or self._zygotes.get(torch) is not zygote:
                return
            del self._zygotes[torch]
            zygote.close()
            self._died += 1
            died = self._died
        if died > REPLACED:
            self._give_up(f"{died} of them died, the last: {said}")
        else:
            _say(f"the process that submissions are forked from died ({said}): a new one is started")

    def _give_up(self, said: str) -> None:
        with self._lock:
            if self.why_not:
                return
            self.why_not = " ".join(said.split())[:300]
        _say(f"submissions cannot be forked here ({self.why_not}): each starts a fresh program, which takes longer")


def is_or_contains(name: str, loaded: Iterable[str]) -> bool:
    """Whether `name` or a module in it is among `loaded`."""
    return any(each == name or each.startswith(name + ".") for each in loaded)


def _say(text: str) -> None:
    print(f"cs336-infer: {text}", file=sys.stderr, flush=True)


def _python() -> list[str]:
    """The interpreter. One that belongs to this user could be changed from a sandbox through /proc/self/exe: then the
    system's loader is the program, and the interpreter what it loads."""
    real = os.path.realpath(sys.executable)
    loader = LOADERS.get(platform.machine(), "")
    if os.geteuid() == 0 or os.stat(real).st_uid != os.geteuid() or not os.path.exists(loader):
        return [sys.executable]
    return [loader, "--argv0", sys.executable, real]
