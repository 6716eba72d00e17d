"""Three ways to start the process that answers for a submission; each ends with the grader's two ends of its pipes.

`unsafe` and `fresh` start a program that imports what it needs, without and with a sandbox around it. `forked` makes
the same sandbox around a small program, and has a process forked into it that has torch imported already (`forks`).
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336_infer.course import sandbox
from cs336_infer.course.sandbox import Limits

HERE = Path(__file__).parent
PACKAGE = "answering"
SIDE = {f"{PACKAGE}/{name}": HERE / name for name in ("student.py", "wire.py", "forbidden.py", "holder.py")}
BOOT = f"import sys; sys.path.insert(0, sys.argv[1]); from {PACKAGE}.student import main; main(sys.argv[2])"

Enter = Callable[[subprocess.Popen[bytes], list[int]], None]


@dataclass(frozen=True)
class Started:
    """A process, and the grader's ends: it reads answers from `reading` and writes questions to `writing`.

    `way` is "unsafe", "fresh" or "forked"; `folder` has the copies of an unsafe one, to be removed.
    """

    process: subprocess.Popen[bytes]
    reading: int
    writing: int
    way: str
    folder: str | None = None


def unsafe(limits: Limits, files: Mapping[str, Path]) -> Started:
    """Without walls."""
    folder = _copies({**SIDE, **files})
    try:
        with _pipes() as (theirs, ours):
            line = sandbox.unsafe_command(_program(limits, folder, theirs))
            return Started(sandbox.start(line, pass_fds=theirs, cwd=folder), *ours, "unsafe", folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def fresh(limits: Limits, files: Mapping[str, Path]) -> Started:
    """A program of its own in a sandbox. `SandboxUnavailable`."""
    with _pipes() as (theirs, ours):
        return Started(_boxed(_program(limits, sandbox.PLACE, theirs), limits, files, theirs), *ours, "fresh")


def forked(limits: Limits, files: Mapping[str, Path], enter: Enter) -> Started:
    """A sandbox that holds its namespaces ready for a process that is forked into it.

    Args:
        enter: has a process forked with the descriptors [reading, writing, socket of the holder]; an exception of
            it ends the sandbox and is passed on.

    Raises:
        SandboxUnavailable: there is none here.
    """
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with link, theirs, _pipes() as (pipes, ours):
        holder = [sys.executable, "-I", "-S", f"{sandbox.PLACE}/{PACKAGE}/holder.py", str(theirs.fileno())]
        holder += [str(pipes[0]), *(f"{name}={value}" for name, value in bounds(limits).items())]
        process = _boxed(holder, limits, files, [theirs.fileno(), pipes[0]])
        theirs.close()  # its end is then the end of the holder
        try:
            enter(process, [*pipes, link.fileno()])
        except BaseException:
            sandbox.kill(process)
            assert process.stderr is not None
            process.stderr.close()
            raise
        return Started(process, *ours, "forked")


def last_words(process: subprocess.Popen[bytes]) -> str:
    """The last line on stderr of a process that ends. Before the first message no student code has run: it is about
    the machine."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    lines = (process.stderr.read(1 << 16) or b"").decode(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:300] if said else ""


@contextlib.contextmanager
def _pipes() -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Their ends (reading, writing), closed afterwards, and ours, closed after an exception."""
    their_reading, writing = os.pipe()
    reading, their_writing = os.pipe()
    try:
        yield [their_reading, their_writing], (reading, writing)
    except BaseException:
        os.close(reading)
        os.close(writing)
        raise
    finally:
        os.close(their_reading)
        os.close(their_writing)


def _boxed(
    program: list[str], limits: Limits, files: Mapping[str, Path], fds: Iterable[int]
) -> subprocess.Popen[bytes]:
    filter_fd = sandbox.filter_pipe()
    try:
        line = sandbox.command(program, {**SIDE, **files}, limits, filter_fd)
        return sandbox.start(line, pass_fds=[*fds, filter_fd])
    finally:
        os.close(filter_fd)


def _program(limits: Limits, place: str, fds: Sequence[int]) -> list[str]:
    given = json.dumps({"reading": fds[0], "writing": fds[1], "limits": bounds(limits)})
    return [sys.executable, "-I", "-c", BOOT, place, given]


def bounds(limits: Limits) -> dict[str, int]:
    """What the kernel keeps of `limits`, by its name in `resource`."""
    return {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 0,
    }


def _copies(files: Mapping[str, Path]) -> str:
    """A folder with copies of `files`, for a process without a sandbox."""
    folder = tempfile.mkdtemp(prefix="student-")
    for name, source in files.items():
        target = Path(folder, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return folder
