"""Processes that are forked into their sandboxes: nothing of the outside comes with them, and nothing leads back.

What a fresh program sees is the oracle: a forked process must give the same description of its world.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cs336_infer.course import forks as forking
from cs336_infer.course.forks import Forks
from cs336_infer.course.questions import StudentError, StudentProcess
from cs336_infer.course.sandbox import Limits

REPO = Path(__file__).resolve().parents[2]
AS_USER = REPO / "tests" / "e2e" / "as_user.sh"
HONEST = "def honest(x):\n    return x + 1\n"
TORCH = "import torch\n"
LIMITS = Limits(processes=24, restarts=20)

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None and os.environ.get("CI") != "true", reason="no bubblewrap: the grader needs it"
)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as made:
        made.prepare(torch=True)
        yield made
        assert made.why_not == ""


def answer(forks: Forks | None, cells: list[str], function: str, *args: Any, **options: Any) -> Any:
    with StudentProcess(cells, limits=LIMITS, forks=forks, **options) as student:
        result = student.ask(function, *args)
        assert dict(student.ways) == {"forked" if forks else "fresh": 1}
    return result


WORLD = (
    TORCH
    + r"""
import ctypes, gc, os, re, resource, signal, socket, stat, sys, threading
def status():
    wanted = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp",
              "Seccomp_filters", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "Umask", "Threads", "PPid", "THP_enabled")
    lines = [line.partition(":") for line in open("/proc/self/status")]
    return {name: " ".join(value.split()) for name, _, value in lines if name in wanted}
def link(path):
    try: return os.readlink(path)
    except OSError as error: return type(error).__name__
def text(path):
    try: return open(path, errors="replace").read()
    except OSError as error: return type(error).__name__
def descriptors():
    found = {}
    for number in range(4096):
        try: mode = os.fstat(number).st_mode
        except OSError: continue
        where = link(f"/proc/self/fd/{number}")
        found[str(len(found))] = "pipe" if stat.S_ISFIFO(mode) else where
    return found
def mounts():
    return [" ".join([*line.split()[3:6], line.split(" - ")[1]]) for line in open("/proc/self/mountinfo")]
def world():
    limits = {n: list(resource.getrlimit(getattr(resource, n))) for n in dir(resource) if n.startswith("RLIMIT_")}
    rights = status()
    uid = rights["Uid"].split()[0]
    for name in ("Uid", "Gid"): rights[name] = " ".join("own" if x == uid else x for x in rights[name].split())
    return {
        "status": rights, "limits": limits, "environment": dict(os.environ),
        "cwd": [os.getcwd(), link("/proc/self/cwd")],
        "root": [link("/proc/self/root"), sorted(os.listdir("/")), os.path.samefile("/proc/self/root/.", "/")],
        "descriptors": descriptors(), "mounts": mounts(), "cgroup": text("/proc/self/cgroup"),
        "host": [socket.gethostname(), text("/proc/net/dev").count("\n")],
        "nice": os.nice(0), "oom": text("/proc/self/oom_score_adj"), "timer slack": text("/proc/self/timerslack_ns"),
        "processes": len([n for n in os.listdir("/proc") if n.isdigit()]),
        "places": {n: sorted(os.listdir(n)) for n in ("/course", "/tmp", "/tmp/home", "/dev", "/dev/shm")},
        "session": [os.getsid(0) > 0, os.getpgrp() > 0, os.getppid()],
        "signals": {str(int(n)): str(signal.getsignal(n)) for n in (2, 13, 15, 17)},
        "path": sys.path, "flags": str(sys.flags), "executable": sys.executable,
        "prefix": [sys.prefix, sys.base_prefix],
        "meta": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
        "scheduling": [os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
        "dumpable": ctypes.CDLL(None).prctl(3),
        "names": [n for n in sys.modules if n.split(".")[0] in ("answering", "torch", "numpy") or "336" in n],
        "side": {n: [m.__file__, m.__spec__.origin, m.__name__, m.__package__, m.__loader__.get_filename()]
                 for n, m in sys.modules.items() if n.startswith("answering.")},
        "threads": threading.active_count(), "tty": link("/dev/tty"), "time": link("/proc/self/ns/time"),
        "namespaces": [int(link(f"/proc/self/ns/{n}") == link(f"/proc/1/ns/{n}"))
                       for n in ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup")],
    }
"""
)


def test_its_world_is_that_of_a_fresh_program(forks: Forks) -> None:
    forked, fresh = plain(answer(forks, [WORLD], "world")), plain(answer(None, [WORLD], "world"))
    assert fresh.keys() == forked.keys()
    for name in fresh:
        if isinstance(fresh[name], dict):
            assert dict(sorted(forked[name].items())) == dict(sorted(fresh[name].items())), name
        else:
            assert forked[name] == fresh[name], name
    assert fresh["processes"] == 2 and forked["session"][-1] == 1


def plain(world: dict[str, Any]) -> dict[str, Any]:
    """Without what may differ: the order of modules, and what each start draws anew."""
    world["names"] = sorted(world["names"])
    world["mounts"] = [re.sub(r"size=\d+k", "size", m) for m in world["mounts"]]
    return world


PATHS = (
    TORCH
    + r"""
import linecache, os, sys
def texts():
    found = {name: text for name in ("cmdline", "environ", "maps", "auxv", "stat", "comm")
             for text in [open("/proc/self/" + name, errors="replace").read()]}
    for name, module in list(sys.modules.items()):
        for attribute in ("__file__", "__cached__", "__path__", "__spec__", "__loader__", "__doc__"):
            found[f"{name}.{attribute}"] = repr(vars(module).get(attribute))
    found["argv"] = repr((sys.argv, sys.orig_argv, sys.path, sys.path_importer_cache, sys.executable))
    found["lines"] = repr([name for name in linecache.cache if not name.startswith("<cell")])
    frame, at = sys._getframe(), 0
    while frame:
        found[f"frame {at}"] = repr((frame.f_code.co_filename, sorted(frame.f_locals)))
        found[f"values {at}"] = " ".join(repr(v)[:2000] for k, v in frame.f_locals.items() if k != "found")
        frame, at = frame.f_back, at + 1
    return found
def modules(): return sorted(sys.modules)
"""
)


def test_no_path_of_the_outside_is_to_be_found(forks: Forks) -> None:
    with StudentProcess([PATHS], limits=LIMITS, forks=forks) as student:
        texts, modules = student.ask("texts"), student.ask("modules")
        assert dict(student.ways) == {"forked": 1}
    fresh = answer(None, [PATHS], "texts")
    # An editable installation has a finder that names the checkout: everybody in the sandbox can read its file.
    finders = [name for name in texts if name.startswith("__editable__")]
    here = os.path.realpath(sys.prefix)
    for name, text in texts.items():
        for inside in {sys.prefix, here, sys.base_prefix, os.path.realpath(sys.base_prefix)}:
            text = text.replace(inside, "")
        if name not in finders:
            assert str(REPO) not in text and os.getcwd() not in text, (name, text[:200])
    assert not {m for m in modules if m.split(".")[0] in ("cs336_infer", "cs336_kernels", "zygote", "pytest")}
    assert {n: t for n, t in texts.items() if n.startswith("frame")}.keys() == {
        n for n in fresh if n.startswith("frame")
    }, "not deeper below another program than a fresh one"
    assert not [n for n, t in texts.items() if n.startswith("frame") and ("zygote" in t or "control" in t)]


MEMORY = (
    TORCH
    + r"""
import os, re
def shared():
    return [line for line in open("/proc/self/maps") if "w" in line.split()[1] and line.split()[1].endswith("s")]
MINE = "the-answer-of-@WHO@"
def count(head, tail):
    needle, total = re.compile((head + tail).encode()), 0
    with open("/proc/self/maps") as file: areas = [line.split()[:2] for line in file]
    with open("/proc/self/mem", "rb", 0) as memory:
        for area, rights in areas:
            start, end = (int(x, 16) for x in area.split("-"))
            if "r" not in rights: continue
            for at in range(start, end, 1 << 22):
                try:
                    memory.seek(at); part = memory.read(min(1 << 22, end - at))
                except (OSError, ValueError, OverflowError): break
                total += len(needle.findall(part))
    return total
"""
)


def test_nothing_of_another_submission_or_of_the_grader_is_in_its_memory(forks: Forks) -> None:
    """What is looked for is a pattern that does not match itself."""
    cells = [MEMORY.replace("@WHO@", f"{n}" * 32) for n in range(2)]
    hidden = (REPO / "tests" / "hidden" / "a1_prefill_decode.py").read_text(encoding="utf-8")
    assert hidden and "rope_by_definition(" in hidden
    with StudentProcess([cells[0]], limits=LIMITS, forks=forks) as first:
        assert first.ask("count", "the-answer-of-", "0{32}") > 0, "its own is found"
        with StudentProcess([cells[1]], limits=LIMITS, forks=forks) as student:
            assert student.ask("shared") == []
            assert student.ask("count", "the-answer-of-", "1{32}") > 0
            assert student.ask("count", "the-answer-of-", "0{32}") == 0
            assert student.ask("count", "rope_by_definition", "[(]") == 0
            assert dict(student.ways) == {"forked": 1}


ESCAPES = (
    TORCH
    + r"""
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def name(error): return errno.errorcode.get(error.errno, "?")
def call(function, *args):
    ctypes.set_errno(0)
    result = getattr(libc, function)(*args)
    return result if result >= 0 else errno.errorcode.get(ctypes.get_errno(), "?")
def enter(space, pid):
    try: fd = os.open(f"/proc/{pid}/ns/{space}", os.O_RDONLY)
    except OSError as error: return name(error)
    return call("setns", fd, 0)
def trace(pid): return [call("ptrace", request, pid, 0, 0) for request in (16, 0x4206)]
def signalled():
    for number in (1, 2, 9, 15, 17, 19): os.kill(1, number)
    return sorted(int(n) for n in os.listdir("/proc") if n.isdigit())[0]
def mapped():
    found = set()
    for entry in os.listdir("/proc/self/map_files")[:50]:
        for use in (lambda p: open(p, "rb").close(), lambda p: os.chmod(p, 0), lambda p: os.truncate(p, 0)):
            try: use("/proc/self/map_files/" + entry); found.add("done")
            except OSError as error: found.add(name(error))
    return sorted(found)
def program():
    uses = {"write": lambda p: open(p, "r+b"), "append": lambda p: open(p, "ab"), "cut": lambda p: os.truncate(p, 0),
            "mode": lambda p: os.chmod(p, 0o777), "owner": lambda p: os.chown(p, os.getuid(), -1),
            "time": lambda p: os.utime(p, (1, 1)), "mark": lambda p: os.setxattr(p, "user.x", b"1"),
            "link": lambda p: os.link(p, "/tmp/home/linked", follow_symlinks=True)}
    found = {}
    for what, use in uses.items():
        for path in ("/proc/self/exe", f"/proc/self/fd/{os.open('/proc/self/exe', os.O_PATH)}"):
            try: use(path); found[what] = "done"
            except OSError as error: found[what] = name(error)
    return found
def roots():
    found = []
    for pid in [n for n in os.listdir("/proc") if n.isdigit()] + ["self", "thread-self"]:
        for place in ("root", "cwd"):
            try: found += [os.path.exists(f"/proc/{pid}/{place}/../../..@REPO@/pyproject.toml"),
                           sorted(os.listdir(f"/proc/{pid}/root/")) != sorted(os.listdir("/"))]
            except OSError: pass
    return found
def above():
    os.chdir("/"); os.chdir("..")
    return sorted(os.listdir(".")) == sorted(os.listdir("/")), os.getcwd()
def others(pids):
    found = []
    for pid in pids:
        try: os.kill(pid, 0); found.append(pid)
        except OSError as error: found.append(name(error))
    return found
def holder(): return sorted(link for n in os.listdir("/proc/1/fd") for link in [os.readlink("/proc/1/fd/" + n)])
def spoil():
    with open("/proc/1/maps") as file: areas = [l.split()[0] for l in file if l.split()[1].startswith("rw")]
    with open("/proc/1/mem", "r+b", 0) as memory:
        for area in areas:
            start, end = (int(x, 16) for x in area.split("-"))
            memory.seek(start); memory.write(b"\xff" * (end - start))
    import time
    if os.fork() == 0:
        os.fork(); os._exit(0)
    time.sleep(3)
    return "alive"
"""
)


def test_no_way_leads_out(forks: Forks) -> None:
    with StudentProcess([HONEST, ESCAPES.replace("@REPO@", str(REPO))], limits=LIMITS, forks=forks) as student:
        for space in ("mnt", "pid", "net", "ipc", "uts", "user", "cgroup"):
            for pid in ("1", "self"):
                assert student.ask("enter", space, pid) == "EPERM", space
        assert student.ask("trace", 1) == ["EPERM"] * 2
        assert student.ask("signalled") == 1
        assert student.ask("honest", 1) == 2, "the holder ignores signals from inside"
        assert set(student.ask("mapped")) <= {"EPERM", "EACCES"}
        assert "done" not in student.ask("program").values()
        assert not any(student.ask("roots"))
        assert student.ask("above") == (True, "/")
        pids = [pid for pid in [os.getpid(), os.getppid(), *forks.processes()] if pid > 64]
        assert student.ask("others", pids) == ["ESRCH"] * len(pids)
        assert [link.partition(":")[0] for link in student.ask("holder")] == ["/dev/null", "/dev/null", "pipe", "pipe"]
        assert dict(student.ways) == {"forked": 1}
        with pytest.raises(StudentError) as caught:
            student.ask("spoil", timeout_s=5)
        assert caught.value.kind in ("crash", "timeout")
        assert student.ask("honest", 2) == 3


def test_random_states_are_its_own(forks: Forks) -> None:
    draw = TORCH + (
        "import numpy as np, random, tempfile, uuid\ndef draw():\n"
        "    return [random.getrandbits(62), int(np.random.randint(2**62)), torch.randint(2**62, ()).item(),\n"
        "            torch.initial_seed() % 2**62, uuid.uuid4().hex, next(tempfile._get_candidate_names())]\n"
    )
    draws = [answer(forks, [draw], "draw") for _ in range(3)]
    for kind in zip(*draws, strict=True):
        assert len(set(kind)) == 3


def test_torch_is_not_imported_again(forks: Forks) -> None:
    source = TORCH + "import resource\nused = resource.getrusage(resource.RUSAGE_SELF)\n"
    source += "def modules():\n    import os\n    return [m for m in ('torch', 'numpy') if m in before]\n"
    first = "import sys\nbefore = set(sys.modules)\n"
    assert answer(forks, [first, source], "modules") == ["torch", "numpy"]


def test_a_blocked_module_that_is_loaded_already_gets_a_fresh_program(forks: Forks) -> None:
    cell = "try:\n    import torch\nexcept ImportError as error:\n    why = str(error)\ndef f(): return why\n"
    for name, ways in (("torch", "fresh"), ("torch.nn", "fresh"), ("transformers", "forked")):
        with StudentProcess([cell], limits=LIMITS, forks=forks, modules_blocked=[name]) as student:
            if ways == "fresh":
                assert student.ask("f").startswith(f"{name} is what this exercise asks for")
            else:
                with pytest.raises(StudentError, match="why"):
                    student.ask("f")
            assert dict(student.ways) == {ways: 1}


def test_many_at_once(forks: Forks) -> None:
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        found[number] = answer(forks, [TORCH + f"def f(x): return [x, {number}]"], "f", -number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [-n, n] for n in range(8)}


def test_a_killed_zygote_is_replaced_and_then_done_without(capfd: pytest.CaptureFixture[str]) -> None:
    with Forks() as forks, StudentProcess([HONEST], limits=LIMITS, forks=forks) as running:
        assert running.ask("honest", 1) == 2
        for number in range(forking.REPLACED + 1):
            (pid,) = forks.processes()
            os.kill(pid, signal.SIGKILL)
            way = "forked" if number < forking.REPLACED else "fresh"
            with StudentProcess([HONEST], limits=LIMITS, forks=forks) as student:
                assert student.ask("honest", number) == number + 1
                assert dict(student.ways) == {way: 1}
            said = capfd.readouterr().err
            assert ("a new one is started" if way == "forked" else "each starts a fresh program") in said
            assert said.count("\n") == 1
        assert forks.processes() == []
        assert running.ask("honest", 5) == 6, "what it forked is not its own"


NO_SETNS = """
import ctypes, json, sys
def refuse(given):
    libc = ctypes.CDLL(None)
    code = bytes.fromhex(given["filter"])
    text = ctypes.create_string_buffer(code, len(code))
    program = (ctypes.c_uint64 * 2)(len(code) // 8, ctypes.addressof(text))
    assert libc.prctl(38, 1, 0, 0, 0) == libc.prctl(22, 2, program, 0, 0) == 0
load = json.load
def loaded(file):
    given = load(file)
    refuse(given)
    return given
json.load = loaded
"""


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("import os; os.dup(2)\n", "it has descriptors open"),
        ("import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n", "2 threads"),
        ("import mmap; kept = mmap.mmap(-1, 4096)\n", "it shares memory that can be written"),
        (NO_SETNS, "setns: Operation not permitted"),
    ],
)
def test_where_it_is_refused_a_fresh_program_is_started(
    before: str, reason: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forking, "BOOT", before + forking.BOOT)
    children = len(psutil.Process().children(recursive=True))
    with Forks() as forks:
        for _ in range(2):
            with StudentProcess([HONEST], limits=LIMITS, forks=forks) as student:
                assert student.ask("honest", 1) == 2
                assert dict(student.ways) == {"fresh": 1}
        assert reason in forks.why_not
    assert len(psutil.Process().children(recursive=True)) == children
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and reason in said and "each starts a fresh program" in said


def test_the_file_of_its_program_is_not_its_own(forks: Forks) -> None:
    """/proc/self/exe is on a mount of the outside: a process of the user who owns it could change its mode."""
    direct = os.geteuid() == 0 or os.stat(os.path.realpath(sys.executable)).st_uid != os.geteuid()
    assert (forking._python() == [sys.executable]) == direct
    cell = (
        "import os, sys\ndef f(): return os.readlink('/proc/self/exe'), sys.executable, os.path.exists(sys.executable)"
    )
    program, executable, exists = answer(forks, [TORCH + cell], "f")
    assert executable == sys.executable and exists
    assert os.geteuid() == 0 or os.stat(program).st_uid != os.geteuid()
    assert (program == os.path.realpath(sys.executable)) == direct


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("owned", ["", "owned"])
def test_the_same_as_a_normal_user(owned: str, tmp_path: Path) -> None:
    """`owned`: the interpreter belongs to that user. AS_USER_TESTS="test" runs all of this file."""
    tried = subprocess.run([str(AS_USER), owned, "true"], cwd=REPO, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no other user can run this interpreter: {tried.stderr.strip()}")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    command += ["-k", os.environ.get("AS_USER_TESTS", "world or leads_out or refused or its_program")]
    done = subprocess.run([str(AS_USER), owned, *command], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
