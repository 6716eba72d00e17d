"""A class of hostile submissions, graded as `cs336-infer grade` does: each gets the points of what it solved and no
more, honest ones beside it get all of theirs, and nothing outside the sandbox changes.

Both ways to start a submission are attacked: forked, and as a fresh program.
The light class answers in plain Python, so that each of its many submissions starts in a tenth of a second. The
heavy one has torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from cs336_infer.course.assignment import Exercise
from cs336_infer.course.checks import Ask, Check, expect_equal
from cs336_infer.course.forks import Forks
from cs336_infer.course.grade import Course, Journal, find_submissions, grade_class, open_course
from cs336_infer.course.grade_report import write_csv, write_json, write_pages
from cs336_infer.course.sandbox import Limits

REPO = Path(__file__).resolve().parents[2]
SOLUTION = REPO / "solutions" / "a1_prefill_decode" / "a1_prefill_decode.py"
HIDDEN = REPO / "tests" / "hidden" / "a1_prefill_decode.py"
SECOND = (REPO / "tests" / "mutants" / "a1_prefill_decode_second.py").read_text(encoding="utf-8")
MARKER = f"left-behind-{os.getpid()}"
CANARY = "canary-of-the-honest-student"
LIMITS = Limits(
    wall_s_per_question=2,
    wall_s_load=6,
    memory_bytes=512 * 2**20,
    processes=24,
    file_bytes=8 * 2**20,
    disk_bytes=16 * 2**20,
)

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None and os.environ.get("CI") != "true", reason="no bubblewrap: the grader needs it"
)


def mirror_small(ask: Ask, rng: np.random.Generator) -> None:
    values = [int(x) for x in rng.integers(0, 10**9, 3)]
    expect_equal(ask("mirror", values), values[::-1], what="mirror")


def mirror_large(ask: Ask, rng: np.random.Generator) -> None:
    values = [int(x) for x in rng.integers(0, 10**9, 30)]
    expect_equal(ask("mirror", values), values[::-1], what="mirror")


MIRROR = Exercise("mirror", ("mirror",), 1, 1, 1, 1, False, ("reversed_by_library",))
CHECKS = (Check("mirror", "three numbers", 1, mirror_small), Check("mirror", "thirty numbers", 2, mirror_large))
COST = SECOND.split("# %%\n")[-1]
HONEST = f"# {CANARY}\ndef mirror(values):\n    return values[::-1]\n"


def light_course() -> Course:
    whole = open_course(REPO, "a1")
    public = tuple(c for c in whole.public if c.exercise == "decode_step_cost")
    hidden = tuple(c for c in whole.hidden if c.exercise == "decode_step_cost")
    exercises = (MIRROR, *(e for e in whole.assignment.exercises if e.name == "decode_step_cost"))
    assignment = dataclasses.replace(whole.assignment, exercises=exercises)
    return Course(assignment, (CHECKS[0], *public), (CHECKS[1], *hidden), "light")


ALL, REST, NONE = "all", "all but mirror", "none"

DIGGING = """
import os, struct, sys

def pipe():
    frame = sys._getframe()
    while "nonce" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals

def forged(value):
    body = sys.modules["answering.wire"].encode({"kind": "ok", "value": value})
    return struct.pack("<Q16sQ", 24 + len(body), pipe()["nonce"], pipe()["number"]) + body
"""

# name: (the code, the points, words in each message of the checks of mirror; | where a busy machine says another)
CODE: dict[str, tuple[str, str, str]] = {
    "endless loop": ("def mirror(v):\n    while True: pass", REST, "no answer in time"),
    "endless sleep": ("import time\ndef mirror(v): time.sleep(10**6)", REST, "no answer in time"),
    "stopped by itself": (
        "import os, signal\ndef mirror(v): os.kill(os.getpid(), signal.SIGSTOP)",
        REST,
        "no answer in time",
    ),
    "endless loop at import": ("while True: pass", NONE, "the cells could not be run: no answer in time"),
    "os._exit": ("import os\ndef mirror(v): os._exit(0)", REST, "ended with exit code 0"),
    "os._exit at import": ("import os\nos._exit(0)", NONE, "the cells could not be run"),
    "segfault": ("import ctypes\ndef mirror(v): ctypes.string_at(0)", REST, "SIGSEGV"),
    "sys.exit": ("import sys\ndef mirror(v): sys.exit(0)", REST, "SystemExit"),
    "KeyboardInterrupt": ("def mirror(v): raise KeyboardInterrupt", REST, "KeyboardInterrupt"),
    "KeyboardInterrupt at import": (HONEST + "raise KeyboardInterrupt", ALL, ""),
    "SystemExit in a thread": (
        "import sys, threading\ndef mirror(v):\n    t = threading.Thread(target=sys.exit); t.start(); t.join()\n"
        "    return v[::-1]",
        ALL,
        "",
    ),
    "fork bomb": (
        "import os\ndef mirror(v):\n    while True:\n        try: os.fork()\n        except OSError: pass",
        REST,
        "no answer in time",
    ),
    "thread bomb": (
        "import threading, time\ndef mirror(v):\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        REST,
        "can't start new thread",
    ),
    "50 GiB": ("def mirror(v): return len(bytearray(50 * 2**30))", REST, "MemoryError"),
    "50 GiB in small pieces": ("def mirror(v):\n    while True: v.append(bytearray(2**26))", REST, "Memory|in time"),
    "filling the disk": (
        "import os\ndef mirror(v):\n    for n in range(10**6):\n        with open(f'/tmp/{n}', 'wb') as f:\n"
        "            f.write(bytes(2**20))",
        REST,
        "No space left",
    ),
    "filling every disk and going on": (
        "def fill(folder):\n    try:\n        for n in range(10**6):\n"
        "            with open(f'{folder}/{n}', 'wb') as f: f.write(bytes(2**20))\n    except OSError: pass\n"
        "def mirror(v):\n    for folder in ('/tmp', '/dev/shm', '.'): fill(folder)\n    return v[::-1]",
        ALL,
        "",
    ),
    "reading what it must not": (
        "import os, pathlib, sys\n"
        "WANTED = ['@SOLUTION@', '@HIDDEN@', '@HONEST@', '@FOLDER@', '@REPO@/pyproject.toml', '/etc/shadow',\n"
        "          '/etc/passwd', '/root/.ssh/id_rsa', '@OUTSIDE@/sentinel']\n"
        "MARKS = ['@CANARY@', 'def ' + 'rope_by_definition', 'check(' + '\"rope']\n"
        "def mirror(v):\n    found = []\n    for name in WANTED:\n"
        "        try: found.append(pathlib.Path(name).read_text())\n"
        "        except OSError: pass\n"
        "    for where, folders, files in os.walk('/'):\n"
        "        skip = ('/proc', '/dev', '/usr', '/etc/alternatives', sys.prefix, sys.base_prefix)\n"
        "        folders[:] = [f for f in folders if os.path.join(where, f) not in skip]\n"
        "        for path in [pathlib.Path(where, name) for name in files]:\n"
        "            text = path.read_text(errors='replace') if path.is_file() else ''\n"
        "            if any(mark in text for mark in MARKS): found.append(text)\n"
        "    return found",
        REST,
        "mirror: 0 items instead of",
    ),
    "reading other processes": (
        "import os\ndef mirror(v):\n    found = []\n    for pid in [p for p in os.listdir('/proc') if p.isdigit()]:\n"
        "        for name in ('cmdline', 'environ', 'cwd', 'root'):\n"
        "            try:\n                path = f'/proc/{pid}/{name}'\n"
        "                text = os.readlink(path) if name in ('cwd', 'root') else open(path).read()\n"
        "                if 'pytest' in text or '@REPO@/tests' in text or 'grade' in text: found.append(text)\n"
        "            except OSError: pass\n    return found",
        REST,
        "mirror: 0 items instead of",
    ),
    "network": (
        "import socket\ndef mirror(v):\n    found = []\n"
        "    for family, address in ((socket.AF_INET, ('127.0.0.1', @PORT@)), (socket.AF_INET, ('1.1.1.1', 53)),\n"
        "                            (socket.AF_UNIX, '\\0@MARKER@'), (socket.AF_UNIX, '@OUTSIDE@/socket')):\n"
        "        try:\n            s = socket.socket(family); s.settimeout(0.3); s.connect(address)\n"
        "            s.sendall(b'hello'); found.append(str(address))\n        except OSError: pass\n"
        "    return found",
        REST,
        "mirror: 0 items instead of",
    ),
    "patched builtins": (
        "import builtins, json\nfor name in ('abs', 'all', 'any', 'sum', 'max', 'min', 'sorted', 'round'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\njson.dumps = json.loads = lambda *a, **k: {'score': 8}\n"
        "def mirror(v): return v",
        REST,
        "mirror: at [0] got",
    ),
    "print and __import__ redefined": (
        HONEST + "import builtins\ndef gone(*a, **k): raise SystemExit\nbuiltins.print = builtins.__import__ = gone\n"
        "print = __import__ = gone",
        ALL,
        "",
    ),
    "a forged answer on every stream": (
        'import os, struct, sys\ndef mirror(v):\n    text = \'{"score": 8, "max_score": 8, "passed": true}\\n\'\n'
        "    print('score: 8/8', text); sys.stderr.write(text)\n    body = b'M' + bytes(8)\n"
        "    for fd in range(64):\n        for number in range(20):\n"
        "            try: os.write(fd, struct.pack('<Q16sQ', 24 + len(body), bytes(16), number) + body)\n"
        "            except OSError: pass\n    return v",
        REST,
        "it wrote into the grader's pipe",
    ),
    "true nonce, forged value": (
        DIGGING
        + "def mirror(v):\n    pipe()['writing'].write(forged({'score': 8, 'passed': True}))\n    return v[::-1]",
        REST,
        "mirror: got",
    ),
    "true nonce, many frames": (
        DIGGING + "def mirror(v):\n    for _ in range(50): pipe()['writing'].write(forged(True))\n    return v[::-1]",
        REST,
        "mirror: got True",
    ),
    "true nonce, an endless frame": (
        DIGGING + "def mirror(v):\n    here = pipe()\n"
        "    here['writing'].write(struct.pack('<Q16sQ', 2**62, here['nonce'], here['number']) + bytes(10**6))\n"
        "    here['writing'].flush()\n    while True: pass",
        REST,
        "announced an answer of",
    ),
    "encoder replaced": (
        "import sys\ndef mirror(v):\n    sys.modules['answering.wire'].encode = lambda *a: b'Oimport os'\n    return 1",
        REST,
        "its answer is not a value",
    ),
    "every answer forged from inside": (
        "import gc, sys\ndef take():\n    found = [x for x in gc.get_objects() if type(x).__name__ == 'Answers']\n"
        "    for thing in found:\n"
        "        type(thing).answer = lambda self, q: sys.modules['answering.wire'].encode(\n"
        "                {'kind': 'ok', 'value': True, 'score': 8})\n"
        "def mirror(v):\n    take()\n    return v",
        NONE,
        "mirror: ",
    ),
    "forged counters": (
        "class Report(dict):\n    score = max_score = 8\n"
        "def mirror(v): return {'score': 8, 'max_score': 8, 'bytes_moved': 0, 'calls': 0}\n"
        "mirror.bytes_moved = mirror.calls = 0\nmirror.passed = True\nCHECKS = []\nscore = 8",
        REST,
        "mirror: got {'bytes_moved': 0",
    ),
    "editing the grader": (
        "import os, pathlib, sys\nWANTED = ['@REPO@/cs336_infer/course/grade.py', '@HIDDEN@', '@OUTSIDE@/sentinel',\n"
        "    '@FOLDER@', os.__file__, sys.modules['answering.wire'].__file__]\n"
        "def mirror(v):\n    found = []\n    for name in WANTED:\n        for mode in ('a', 'w'):\n"
        "            try:\n                open(name, mode).write('# changed'); found.append(name)\n"
        "            except OSError: pass\n"
        "        for change in (os.remove, lambda n: os.chmod(n, 0o777), lambda n: os.rename(n, n + '.old')):\n"
        "            try: change(name); found.append(name)\n            except OSError: pass\n"
        "    return found",
        REST,
        "mirror: 0 items instead of",
    ),
    "a process that stays": (
        "import os, sys\ndef mirror(v):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        "        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', '@MARKER@'])\n"
        "    os.wait()\n    return v[::-1]",
        ALL,
        "",
    ),
    "a message for the next student": (
        HONEST + "import os\nfor folder in ('/tmp', '/dev/shm', '/var/tmp', '@OUTSIDE@', '@FOLDER@', '/course', '.'):\n"
        "    try: open(folder + '/left-for-you', 'w').write('@CANARY@')\n    except OSError: pass",
        ALL,
        "",
    ),
    "looking for a message": (
        "import os\ndef mirror(v):\n"
        "    return [f for f in ('/tmp', '/dev/shm', '/var/tmp', '@OUTSIDE@', '@FOLDER@', '/course', '.')\n"
        "            if os.path.exists(f + '/left-for-you')]",
        REST,
        "mirror: 0 items instead of",
    ),
    "side effects at import": (
        HONEST
        + "import gc, os, sys, signal, tempfile\nos.environ.clear(); os.chdir('/'); os.umask(0); sys.path.clear()\n"
        "open('/tmp/a', 'w').write('x'); os.rmdir('/tmp/home'); sys.setrecursionlimit(150); gc.disable()\n"
        "signal.alarm(0); sys.stdout = sys.stderr = None; os.nice(5)",
        ALL,
        "",
    ),
    "NaN": ("def mirror(v): return [float('nan')] * len(v)", REST, "mirror: at [0] got nan"),
    "1 GiB": ("def mirror(v): return b'x' * 2**28", REST, "an answer larger than|in time"),
    "an endless generator": ("import itertools\ndef mirror(v): return itertools.count()", REST, "cannot be graded"),
    "wrong type": ("def mirror(v): return tuple(v) + (None,)", REST, "items instead of"),
    "an object that equals everything": (
        "class Same(list):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def mirror(v): return Same(v)",
        REST,
        "cannot be graded",
    ),
    "numbers that equal everything": (
        "class Same(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def mirror(v): return [Same(x) for x in v]",
        REST,
        "cannot be graded",
    ),
    "a pickle bomb": (
        "import os\nclass Bomb:\n    def __reduce__(self): return os.system, ('touch @OUTSIDE@/pickled',)\n"
        "def mirror(v): return Bomb()",
        REST,
        "a __main__.Bomb, which cannot be graded",
    ),
    "lists 100,000 deep": (
        "def mirror(v):\n    for _ in range(10**5): v = [v]\n    return v",
        REST,
        "nested deeper than 32 levels",
    ),
    "a list of itself": ("def mirror(v):\n    v.append(v)\n    return v", REST, "nested deeper than 32 levels"),
    "an integer of a million digits": ("def mirror(v): return [1 << 10**7] * len(v)", REST, "cannot be graded"),
    "an exception that attacks": (
        "class E(Exception):\n    def __str__(self): raise SystemExit\ndef mirror(v): raise E",
        REST,
        "(no message)",
    ),
    "a message with commands for the terminal": (
        "def mirror(v): raise ValueError('\\x1b[2J\\x07\\nscore: 8/8\\r\\u202e')",
        REST,
        "ValueError: ?[2J? score: 8/8 ?",
    ),
    "the package's own solution": (
        "def mirror(v):\n    from cs336_infer.course.a1_prefill_decode import cost_by_definition\n    return v[::-1]",
        REST,
        "No module named 'cs336_infer'",
    ),
    "a forbidden library, named": (
        "import helpful\ndef mirror(v): return helpful.reversed_by_library(v)",
        REST,
        "uses reversed_by_library",
    ),
    "descriptors that it inherited": (
        "import os\ndef mirror(v):\n    found = []\n    for fd in range(3, 4096):\n"
        "        try: name = os.readlink(f'/proc/self/fd/{fd}')\n        except OSError: continue\n"
        "        if not name.startswith(('pipe:', '/proc/')): found.append(name)\n    return found",
        REST,
        "mirror: 0 items instead of",
    ),
    "into other namespaces": (
        "import ctypes, glob, os\nlibc = ctypes.CDLL(None)\ndef mirror(v):\n    found = []\n"
        "    for name in glob.glob('/proc/*/ns/*') + glob.glob('/proc/*/root') + glob.glob('/proc/*/cwd'):\n"
        "        try: fd = os.open(name, os.O_RDONLY)\n        except OSError: continue\n"
        "        if libc.setns(fd, 0) == 0: found.append(name)\n"
        "        try:\n            os.fchdir(fd); os.chdir('../../../..')\n"
        "            if os.path.exists('.@REPO@/pyproject.toml'): found.append(name)\n        except OSError: pass\n"
        "    if libc.unshare(0x10000000) == 0 or libc.chroot(b'/tmp') == 0: found.append('unshare')\n"
        "    return found",
        REST,
        "mirror: 0 items instead of",
    ),
    "what it was forked from": (
        "import gc, os, socket, sys\ndef mirror(v):\n    found = [x for x in gc.get_objects()\n"
        "             if isinstance(x, socket.socket) and x.fileno() >= 0]\n    frame = sys._getframe()\n"
        "    while frame:\n        found += [n for n in frame.f_locals if n in ('control', 'request', 'link')]\n"
        "        frame = frame.f_back\n"
        "    found += [n for n in sys.modules if n.split('.')[0] in ('zygote', 'cs336_infer', 'cs336_kernels')]\n"
        "    for pid in range(-1, 70000):\n        if pid in (-1, 0, 1, os.getpid()): continue\n"
        "        try: os.kill(pid, 0); found.append(pid)\n        except OSError: pass\n"
        "    return [str(x) for x in found] + [os.getppid()] * (os.getppid() != 1)",
        REST,
        "mirror: 0 items instead of",
    ),
    "a neighbour's answers in memory": (
        "import re\nWORD = re.compile(b'canary-of-the-[h]onest-[s]tudent')\ndef mirror(v):\n    found = []\n"
        "    areas = [line.split()[:2] for line in open('/proc/self/maps')]\n"
        "    with open('/proc/self/mem', 'rb', 0) as memory:\n        for area, rights in areas:\n"
        "            start, end = (int(x, 16) for x in area.split('-'))\n"
        "            try: memory.seek(start); found += WORD.findall(memory.read(end - start))\n"
        "            except (OSError, ValueError, OverflowError): pass\n    return found",
        REST,
        "mirror: 0 items instead of",
    ),
    "killing the first process": (
        "import ctypes, os\ndef mirror(v):\n    for number in (1, 2, 9, 15, 19): os.kill(1, number)\n"
        "    if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0: return 'traced'\n    return v[::-1]",
        ALL,
        "",
    ),
    "changing the file of its program": (
        "import os\ndef mirror(v):\n    found = []\n    for name in ('/proc/self/exe', '/proc/1/exe'):\n"
        "        for use in (lambda n: open(n, 'r+b'), lambda n: os.chmod(n, 0o777), lambda n: os.truncate(n, 0),\n"
        "                    lambda n: os.utime(n, (1, 1)), lambda n: os.link(n, '/tmp/x', follow_symlinks=True)):\n"
        "            try: use(name); found.append(name)\n            except OSError: pass\n    return found",
        REST,
        "mirror: 0 items instead of",
    ),
    "magics and shell lines": (
        "%matplotlib inline\n!touch @OUTSIDE@/shell\n%%bash\nx = !ls\nget_ipython?\n" + HONEST,
        ALL,
        "",
    ),
    "10 MB of brackets in a cell": (HONEST + "# %%\nx = " + "[" * 10**7, ALL, ""),
    "a cell that nests a formula": (HONEST + "# %%\nx = " + "-" * 10**6 + "1", ALL, ""),
}


def code_file(source: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "a1.py").write_text(f"{COST}\n# %%\n{source}\n", encoding="utf-8")

    return write


def notebook(content: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "a1.ipynb").write_text(content if isinstance(content, str) else json.dumps(content))

    return write


def large(folder: Path) -> None:
    with (folder / "a1.ipynb").open("wb") as file:
        file.truncate(100 * 10**6)


def unreadable(folder: Path) -> None:
    code_file(HONEST)(folder)
    (folder / "a1.py").chmod(0)


def odd_names(name: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        code_file(HONEST)(folder)
        os.rename(folder / "a1.py", os.path.join(os.fsencode(folder), name))

    return write


def linked_folder(folder: Path) -> None:
    (folder / "a1").symlink_to(SOLUTION.parent)
    (folder / "a1.py").symlink_to(SOLUTION)


def book(cells: Any) -> dict[str, Any]:
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}


def code_cell(source: Any) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": source}


# name: (writes the submission, the points, words in its problem)
FILES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a notebook of 100 MB": (large, NONE, "100 MB, at most 20 are read"),
    "invalid JSON": (notebook("{not json"), NONE, "not valid JSON"),
    "nested JSON": (notebook("[" * 10**6), NONE, "not valid JSON"),
    "cells that are no list": (notebook(book({"a": 1})), NONE, "not a notebook of format 4"),
    "cells of null": (notebook(book([None, 3, code_cell(None), {"cell_type": "code"}])), NONE, "no code in it"),
    "a source of mixed things": (
        notebook(book([code_cell([None, COST]), code_cell(["def mirror(v):\n", 7, "    return v[::-1]"])])),
        ALL,
        "",
    ),
    "a link to the solution": (lambda f: (f / "a1.py").symlink_to(SOLUTION), NONE, "a1.py: a link"),
    "a link to the hidden checks": (lambda f: (f / "a1.py").symlink_to(HIDDEN), NONE, "a1.py: a link"),
    "a link to a neighbour": (lambda f: (f / "a1.py").symlink_to("../00 honest/a1.py"), NONE, "a1.py: a link"),
    "a link to endless zeros": (lambda f: (f / "a1.py").symlink_to("/dev/zero"), NONE, "a1.py: a link"),
    "a linked folder": (linked_folder, NONE, "a1.py: a link"),
    "a folder named x.ipynb": (lambda f: (f / "x.ipynb").mkdir(), NONE, "x.ipynb: cannot be read: Is a directory"),
    "a pipe named a1.py": (lambda f: os.mkfifo(f / "a1.py"), NONE, "a1.py: not a file"),
    "a file nobody may read": (unreadable, ALL if os.geteuid() == 0 else NONE, "" if os.geteuid() == 0 else "cannot"),
    "no bytes": (lambda f: (f / "a1.py").touch(), NONE, "no code in it"),
    "no text": (lambda f: (f / "a1.py").write_bytes(b"\xff\xfe\0d"), NONE, "not UTF-8 text"),
    "a name with a line of its own": (odd_names(b"x\n8 of 8  bob.py"), ALL, ""),
    "a name that is no text": (odd_names(b"a1\xff\xfe.py"), ALL, ""),
    "a name of 250 letters": (odd_names(b"a" * 247 + b".py"), ALL, ""),
    "a name that is a formula": (odd_names(b"=cmd|'calc'!A1.py"), ALL, ""),
}


@dataclasses.dataclass
class Graded:
    course: Course
    results: dict[str, dict[str, Any]]
    folder: Path
    outside: Path


@pytest.fixture(scope="module", params=["forked", "fresh"])
def way(request: pytest.FixtureRequest) -> str:
    """How the processes of submissions are started: both must give the same points."""
    return request.param


def forks_of(way: str) -> Forks:
    return Forks("" if way == "forked" else "the other way is tested")


@pytest.fixture(scope="module")
def light(way: str, tmp_path_factory: pytest.TempPathFactory) -> Graded:
    course, folder = light_course(), tmp_path_factory.mktemp("class")
    outside = tmp_path_factory.mktemp("outside")
    outside.chmod(0o777)
    (outside / "sentinel").write_text("as it was")
    (outside / "sentinel").chmod(0o666)
    sources = {p: digest(p) for p in (*(REPO / "cs336_infer" / "course").glob("*.py"), SOLUTION, HIDDEN)}
    with contextlib.ExitStack() as opened:
        servers = [opened.enter_context(socket.create_server(("127.0.0.1", 0)))]
        for address in (f"\0{MARKER}", str(outside / "socket")):
            servers.append(opened.enter_context(socket.socket(socket.AF_UNIX)))
            servers[-1].bind(address)
            servers[-1].listen()
        words = {
            "@REPO@": REPO, "@SOLUTION@": SOLUTION, "@HIDDEN@": HIDDEN, "@OUTSIDE@": outside, "@MARKER@": MARKER,
            "@HONEST@": folder / "00 honest" / "a1.py", "@FOLDER@": folder, "@CANARY@": CANARY,
            "@PORT@": servers[0].getsockname()[1],
        }  # fmt: skip
        everybody: dict[str, Callable[[Path], None]] = {"00 honest": code_file(HONEST)}
        for name, (source, _, _) in CODE.items():
            for word, value in words.items():
                source = source.replace(word, str(value))
            everybody[name] = code_file(source)
        everybody["honest in the middle"] = code_file(HONEST)
        everybody |= {name: write for name, (write, _, _) in FILES.items()}
        everybody["zz honest"] = code_file(HONEST)
        for name, write in everybody.items():
            (folder / name).mkdir()
            write(folder / name)
        paths = find_submissions([folder / name for name in everybody])
        with Journal(outside / "journal", course.key) as journal, forks_of(way) as forks:
            results = grade_class(course, paths, seed=3, jobs=2, limits=LIMITS, journal=journal, forks=forks)
            assert len(journal.results) == len(results) == len(everybody)
            journal.remove()
        for server in servers:
            server.setblocking(False)
            with pytest.raises(BlockingIOError):
                server.accept()
    (outside / "socket").unlink()
    assert {p: digest(p) for p in sources} == sources
    assert {r["process"] for r in results} == {way, "none"}
    return Graded(course, dict(zip(everybody, results, strict=True)), folder, outside)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def points(result: dict[str, Any]) -> dict[str, float]:
    exercises = dict.fromkeys(c["exercise"] for c in result["checks"])
    return {e: sum(c["score"] for c in result["checks"] if c["exercise"] == e) for e in exercises}


def messages(result: dict[str, Any], exercise: str) -> list[str]:
    return [c["message"] for c in result["checks"] if c["exercise"] == exercise]


EXPECTED = {
    ALL: {"mirror": 3, "decode_step_cost": 5},
    REST: {"mirror": 0, "decode_step_cost": 5},
    NONE: {"mirror": 0, "decode_step_cost": 0},
}


@pytest.mark.parametrize("name", CODE)
def test_hostile_code(name: str, light: Graded) -> None:
    _, expected, words = CODE[name]
    result = light.results[name]
    assert points(result) == EXPECTED[expected], messages(result, "mirror")
    said = [m for m in messages(result, "mirror") if m]
    assert all(any(w in m for w in words.split("|")) for m in said) and bool(said) == bool(words), said
    assert all(m.isprintable() and CANARY not in m for c in result["checks"] for m in [c["message"]])
    assert result["problem"] is None
    assert all(c["outcome"] != "check error" for c in result["checks"] if c["exercise"] == "mirror")


@pytest.mark.parametrize("name", FILES)
def test_hostile_files(name: str, light: Graded) -> None:
    _, expected, words = FILES[name]
    result = light.results[name]
    assert points(result) == EXPECTED[expected], messages(result, "mirror")
    if words:
        assert words in result["problem"] and result["problem"].isprintable()
        assert {c["message"] for c in result["checks"]} == {result["problem"]}
    else:
        assert result["problem"] is None
    assert CANARY not in json.dumps(result)


@pytest.mark.parametrize("name", ["00 honest", "honest in the middle", "zz honest"])
def test_honest_neighbours(name: str, light: Graded) -> None:
    result = light.results[name]
    assert points(result) == EXPECTED[ALL] and result["score"] == result["max_score"] == 8
    assert {c["message"] for c in result["checks"]} == {""}


def test_nothing_outside_has_changed(light: Graded) -> None:
    assert [p.name for p in light.outside.iterdir()] == ["sentinel"]
    assert (light.outside / "sentinel").read_text() == "as it was"
    assert stat.S_IMODE((light.outside / "sentinel").stat().st_mode) == 0o666
    assert not [p for p in light.folder.rglob("*") if "left-for-you" in p.name or p.name.endswith(".old")]


def test_no_process_is_left(light: Graded) -> None:
    assert not psutil.Process().children(recursive=True)
    assert not [p for p in psutil.process_iter(["cmdline"]) if MARKER in (p.info["cmdline"] or [])]


def test_reports_of_a_hostile_class_can_be_written(light: Graded, tmp_path: Path) -> None:
    results = list(light.results.values())
    write_json(tmp_path / "r.json", light.course, results)
    assert len(json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["submissions"]) == len(results)
    write_csv(tmp_path / "r.csv", light.course, results)
    pages = write_pages(tmp_path / "pages", light.course, results)
    assert len(set(pages)) == len(results) and all(p.is_file() and p.parent == tmp_path / "pages" for p in pages)


def test_sleeping_just_below_each_limit(way: str, tmp_path: Path) -> None:
    """The first question sleeps, the public check of the cost is answered, the second sleep meets the sum."""
    for name, source in (("sleeper", "import time\ndef mirror(v): time.sleep(3)\n"), ("honest", HONEST)):
        (tmp_path / name).mkdir()
        code_file(source)(tmp_path / name)
    limits = dataclasses.replace(LIMITS, wall_s_per_question=4, wall_s=5.5)
    course = light_course()
    paths = [tmp_path / "sleeper" / "a1.py", tmp_path / "honest" / "a1.py"]
    with forks_of(way) as forks:
        sleeper, honest = grade_class(course, paths, seed=1, limits=limits, forks=forks)
    assert points(honest) == EXPECTED[ALL]
    assert points(sleeper) == {"mirror": 0, "decode_step_cost": course.public[1].points}
    said = [c["message"] for c in sleeper["checks"] if c["exercise"] == "decode_step_cost" and c["message"]]
    assert said and set(said) == {"the submission has used up its 5.5 s in all"}


SDPA = "scaled_dot_product_attention"
LIBRARY = "import importlib, torch\nimport torch.nn.functional as F\n"
# name: (rope and causal_attention, words about rope and its points, words about attention)
HEAVY: dict[str, tuple[str, str, str]] = {
    "honest": ("", "", ""),
    "patched torch, and the library's attention": (
        LIBRARY + "import builtins, numpy as np\n"
        "np.allclose = torch.allclose = torch.equal = torch.isclose = lambda *a, **k: True\n"
        "torch.testing.assert_close = np.testing.assert_allclose = lambda *a, **k: None\n"
        "torch.Tensor.__eq__ = torch.Tensor.__ne__ = lambda a, b: True\nnp.isfinite = lambda *a: np.array([True])\n"
        "builtins.abs = builtins.all = lambda *a: 1\n"
        "def rope(x, positions, theta): return torch.rand_like(x)\n"
        "def causal_attention(q, k, v, starts=None): return F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "got",
        f"causal_attention uses {SDPA}",
    ),
    "a tensor without data, and a name built from pieces": (
        LIBRARY + "def rope(x, positions, theta): return torch.empty(x.shape, device='meta')\n"
        "def causal_attention(q, k, v, starts=None):\n"
        "    try: return getattr(F, 'scaled_dot_' + 'product_attention')(q, k, v, is_causal=True)\n"
        "    except BaseException: return q",
        "on device meta",
        f"causal_attention uses {SDPA}",
    ),
    "a tensor that is always right, and importlib": (
        LIBRARY + "class Right(torch.Tensor):\n    def __eq__(self, other): return True\n"
        "    @classmethod\n    def __torch_function__(cls, *a, **k): return True\n"
        "def rope(x, positions, theta): return x.as_subclass(Right)\n"
        "def causal_attention(q, k, v, starts=None):\n"
        "    module = importlib.import_module('torch.nn.' + 'functional')\n"
        "    return vars(module)['scaled_dot_' + 'product_attention'](q, k, v, is_causal=True)",
        "a __main__.Right, which cannot be graded",
        f"causal_attention uses {SDPA}",
    ),
    "1 GiB, and a reference saved before": (
        LIBRARY + "def rope(x, positions, theta): return torch.zeros(1).expand(2**28)\n"
        "def causal_attention(q, k, v, starts=None, saved=[getattr(F, 'scaled_dot_' + 'product_attention')]):\n"
        "    return saved[0](q, k, v, is_causal=True)",
        "an answer larger than",
        f"causal_attention uses {SDPA}",
    ),
    "another dtype, and transformers": (
        LIBRARY + "first = rope\ndef rope(x, positions, theta): return first(x, positions, theta).double()\n"
        "def causal_attention(q, k, v, starts=None):\n"
        "    from transformers.models.llama.modeling_llama import eager_attention_forward\n"
        "    return eager_attention_forward(None, q, k, v, None, 1.0)[0]",
        "dtype float64 instead of float32; 1 point: the angles are right",
        "causal_attention uses transformers",
    ),
    "honest rope, and the call below the library": (
        LIBRARY + "low = {'f': vars(torch._C._nn)['scaled_dot_' + 'product_attention']}\n"
        "def causal_attention(q, k, v, starts=None): return low['f'](q, k, v, is_causal=True)",
        "",
        f"causal_attention uses {SDPA}",
    ),
    "honest at the end": ("", "", ""),
}


@pytest.fixture(scope="module")
def heavy(way: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    whole = open_course(REPO, "a1")
    keep = ("rope", "causal_attention", "decode_step_cost")
    course = dataclasses.replace(
        whole,
        public=tuple(c for c in whole.public if c.exercise in keep),
        hidden=tuple(c for c in whole.hidden if c.exercise in keep),
    )
    folder, before = tmp_path_factory.mktemp("heavy"), (np.allclose, torch.allclose, torch.equal, abs, all)
    for number, (source, _, _) in enumerate(HEAVY.values()):
        (folder / f"{number:02}.py").write_text(f"{SECOND}\n# %%\n{source}\n", encoding="utf-8")
    with forks_of(way) as forks:
        results = grade_class(course, find_submissions([folder]), seed=3, jobs=2, forks=forks)
    assert {r["process"] for r in results} == {way}
    assert before == (np.allclose, torch.allclose, torch.equal, abs, all)
    return dict(zip(HEAVY, results, strict=True))


@pytest.mark.parametrize("name", HEAVY)
def test_hostile_torch(name: str, heavy: dict[str, dict[str, Any]]) -> None:
    result = heavy[name]
    _, rope_words, attention_words = HEAVY[name]
    whole = points(heavy["honest"])
    assert heavy["honest"]["score"] == heavy["honest"]["max_score"] > whole["decode_step_cost"] == 5
    rope_words, _, kept = rope_words.partition("; ")
    rope = float(kept[:1] or 0) if rope_words else whole["rope"]
    attention = 0 if attention_words else whole["causal_attention"]
    assert points(result) == {**whole, "rope": rope, "causal_attention": attention}, messages(result, "rope")
    for exercise, words in (("rope", rope_words), ("causal_attention", attention_words)):
        said = [m for m in messages(result, exercise) if m]
        assert all(words in m for m in said) and bool(said) == bool(words), said
