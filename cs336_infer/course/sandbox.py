"""Starting a process that may be hostile, with limits, and ending all of it.

With bubblewrap the process sees the system's libraries, the Python installation (both read-only) and the files it
is given; no network, no other process, no home, an empty environment, and one small file system in memory. It runs
as an unprivileged user without capabilities, under a filter of system calls (`seccomp`). When its first process
ends the kernel kills the rest: they share a process namespace. That process ends with the grader, whose pipe it
watches: as root the change of user makes Linux forget that it should die with its parent.

Which limit binds, measured on Linux 6.18 with bubblewrap 0.8:

* processes: RLIMIT_NPROC does not bind the real root, whatever uid a user namespace shows. As root we therefore use
  no user namespace: bubblewrap mounts, then `setpriv` drops to a free high uid, which the limit binds. As a normal
  user bubblewrap makes a user namespace, and since Linux 5.14 the limit counts inside it (before, it counts all
  processes of that user).
* memory: RLIMIT_AS per process; the sum over all processes (proportional shares) is read while an answer is awaited
  and the sandbox is killed above the limit. A sum can be passed for about 0.1 s. `oom_score_adj` names the sandbox
  first.
* disk: the size of the file systems in memory, and RLIMIT_FSIZE per file. They come on top of the memory limit.

Without bubblewrap there is only `unsafe_command`: the same rlimits, none of the walls.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from cs336_infer.course import seccomp

MiB = 2**20
PLACE = "/course"
HOME = "/tmp/home"
FIRST_UID, UIDS = 61184, 4000
"""The range systemd keeps for users that exist for one service: nobody else's."""

HIDDEN_PACKAGES = ("cs336_infer", "cs336_kernels")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": HOME,
    "TMPDIR": "/tmp",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""All a sandboxed process gets. One thread: a class is graded in parallel, and threads count as processes."""


class SandboxUnavailable(RuntimeError):
    """There is no sandbox here. The message is one line that says what to do."""


@dataclass(frozen=True)
class Limits:
    """What one submission may use. Bytes, seconds, numbers."""

    wall_s_per_question: float = 20.0
    wall_s_load: float = 60.0
    """Running the submission's cells, imports included."""
    wall_s: float = 300.0
    """In which a submission is waited for, over all its starts and questions."""
    cpu_s: int = 300
    """Of one process, over all its questions."""
    memory_bytes: int = 4096 * MiB
    processes: int = 64
    """Threads count too."""
    file_bytes: int = 64 * MiB
    disk_bytes: int = 128 * MiB
    open_files: int = 256
    question_bytes: int = 64 * MiB
    """Of one question, or of all cells."""
    output_bytes: int = 4 * MiB
    """Of one answer. The grader computes with what comes back: a row where a column is expected makes a product."""
    restarts: int = 10
    """After a crash or a timeout; then the remaining questions fail without being asked."""


def command(program: list[str], files: Mapping[str, Path], limits: Limits, seccomp_fd: int) -> list[str]:
    """`program` inside bubblewrap. `files` are put under `PLACE`, name -> file or folder, read-only.

    `SandboxUnavailable` without bubblewrap (or, as root, without `setpriv`).
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxUnavailable(
            "grading runs a student's code in bubblewrap, which is not installed (Debian: apt-get install bubblewrap)"
        )
    root = os.geteuid() == 0
    drop: list[str] = []
    line = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    line += ["--as-pid-1", "--new-session", "--die-with-parent", "--hostname", "sandbox", "--seccomp", str(seccomp_fd)]
    if root:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise SandboxUnavailable("as root, grading needs setpriv (Debian: apt-get install util-linux)")
        uid = str(FIRST_UID + secrets.randbelow(UIDS))
        drop = [setpriv, "--reuid", uid, "--regid", uid, "--clear-groups", "--no-new-privs", "--pdeathsig", "KILL"]
        drop += ["--bounding-set=-all", "--inh-caps=-all", "--"]
        line += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    else:
        line += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    line.append("--clearenv")
    for name, value in ENVIRONMENT.items():
        line += ["--setenv", name, value]
    line += _mounts(files, limits)
    return [*line, "--chdir", HOME, "--", *drop, *program]


def unsafe_command(program: list[str]) -> list[str]:
    """`program` as it is: it can read and write whatever the grader can. For trusted code and for tests of the
    protocol."""
    return program


def start(line: list[str], *, pass_fds: Iterable[int], cwd: str | None = None) -> subprocess.Popen[bytes]:
    """Starts `line` in a process group of its own, without input; what it says before the protocol starts is on
    `stderr`."""
    environment = {} if cwd is None else ENVIRONMENT | {"HOME": cwd, "TMPDIR": cwd}
    return subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=tuple(pass_fds),
        cwd=cwd,
        env=environment,
        start_new_session=True,
    )


def filter_pipe() -> int:
    """A file descriptor from which bubblewrap reads the filter of system calls. The caller closes it."""
    try:
        program = seccomp.program()
    except NotImplementedError as error:
        raise SandboxUnavailable(str(error)) from None
    reading, writing = os.pipe()
    os.write(writing, program)  # a filter is far smaller than a pipe
    os.close(writing)
    return reading


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, its group and all its descendants.

    As root `setpriv` changes the user, and Linux then forgets that the process wanted to die with its parent: killing
    bubblewrap alone leaves the first process of the sandbox running. So it is looked up before, and killed by itself;
    the kernel ends the rest of its process namespace with it.
    """
    below = descendants(process.pid)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    for each in below:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.wait()


def memory(process: subprocess.Popen[bytes], limit: int) -> int:
    """Bytes that the process and all its descendants hold. Shared pages count once, where the cheap sum is over
    `limit`."""
    try:
        family = [psutil.Process(process.pid), *descendants(process.pid)]
    except psutil.Error:
        return 0
    total = sum(_held(each, "rss") for each in family)
    return total if total <= limit else sum(_held(each, "pss") for each in family)


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below `pid`. The kernel's own list of children, where it has one: psutil would read the parents
    of every process of this machine."""
    found: list[psutil.Process] = []
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(pid).children(recursive=True)
        return found
    todo = [pid]
    while todo:
        parent = todo.pop()
        for child in _children(parent):
            with contextlib.suppress(psutil.Error):
                found.append(psutil.Process(child))
                todo.append(child)
    return found


def _children(pid: int) -> list[int]:
    """Each thread has a list of those that it started."""
    lists: list[str] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                lists.append(Path(f"/proc/{pid}/task/{thread}/children").read_text())
    return [int(each) for line in lists for each in line.split()]


def _held(process: psutil.Process, what: str) -> int:
    try:
        return getattr(process.memory_info() if what == "rss" else process.memory_full_info(), what)
    except psutil.Error:
        return 0


def _mounts(files: Mapping[str, Path], limits: Limits) -> list[str]:
    line: list[str] = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            line += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            line += ["--ro-bind", str(path), str(path)]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"):
        line += [*_parents(path), "--ro-bind-try", path, path]
    line += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/dev/shm", "/tmp"):
        line += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", path]
    line += ["--perms", "1777", "--dir", HOME]
    for path in python_folders():
        if not path.is_relative_to("/usr"):
            line += [*_parents(str(path)), "--ro-bind", str(path), str(path)]
    for scheme in ("purelib", "platlib"):
        for package in HIDDEN_PACKAGES:
            installed = Path(sysconfig.get_path(scheme), package)
            if installed.is_dir():
                line += ["--perms", "0555", "--size", "4096", "--tmpfs", str(installed)]
    for name, source in files.items():
        target = f"{PLACE}/{name}"
        line += [*_parents(target), "--ro-bind", str(source.resolve()), target]
    return [*line, "--remount-ro", "/dev", "--remount-ro", "/"]


def python_folders() -> list[Path]:
    """Where this Python lives: the environment, the installation behind it, and what its links lead through."""
    found = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    link = Path(sys.executable)
    while link.is_symlink():
        link = Path(os.path.normpath(link.parent / os.readlink(link)))
        if link.parent.name == "bin":
            found.append(link.parent.parent)
    return [path for path in dict.fromkeys(found) if path != Path("/")]


def _parents(path: str) -> list[str]:
    """The folders above `path`, open to the unprivileged user (bubblewrap makes missing ones for their owner only)."""
    line: list[str] = []
    for folder in reversed(Path(path).parents[:-1]):
        line += ["--perms", "0755", "--dir", str(folder)]
    return line
