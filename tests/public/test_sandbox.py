"""Hostile submissions: each costs its own question and nothing else, and nothing outside the sandbox changes.

All of it twice: with processes that are forked into their sandboxes, and with fresh programs.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from cs336_infer.course import sandbox, seccomp, starting, wire
from cs336_infer.course.forks import Forks
from cs336_infer.course.questions import KINDS, StudentError, StudentProcess
from cs336_infer.course.sandbox import Limits, SandboxUnavailable

REPO = Path(__file__).resolve().parents[2]
SMALL = Limits(
    wall_s_per_question=20,
    wall_s_load=30,
    cpu_s=60,
    memory_bytes=400 * 2**20,
    processes=24,
    file_bytes=4 * 2**20,
    disk_bytes=8 * 2**20,
    open_files=64,
    question_bytes=2**20,
    output_bytes=2**20,
    restarts=20,
)
TORCH = Limits(output_bytes=2**20)
HONEST = "def honest(x):\n    return x + 1\n"
MARKER = f"student-of-{os.getpid()}"


FORKS: list[Forks] = []
"""What the tests' processes are forked from; nothing: fresh programs."""


def student_of(cells: list[str], **options: Any) -> StudentProcess:
    return StudentProcess(cells, forks=FORKS[0] if FORKS else None, **options)


def available() -> str | None:
    try:
        with StudentProcess([HONEST], limits=SMALL) as student:
            student.ask("honest", 1)
    except SandboxUnavailable as error:
        return str(error)
    return None


@pytest.fixture(scope="module", params=["forked", "fresh"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with Forks() as forks:
        if request.param == "forked":
            forks.prepare(torch=False)
            forks.prepare(torch=True)
            FORKS.append(forks)
        yield request.param
        FORKS.clear()


@pytest.fixture(scope="module")
def boxed(way: str) -> None:
    missing = available()
    if missing and os.environ.get("CI") == "true":
        pytest.fail(f"the sandbox is tested in CI: {missing}")
    if missing:
        pytest.skip(missing)


@pytest.fixture
def outside(boxed: None, tmp_path: Path) -> Iterator[Path]:
    """A folder that anybody may write to, with another student's submission; afterwards it is as it was and the next
    submission is answered normally."""
    tmp_path.chmod(0o777)
    other = tmp_path / "other_student.py"
    other.write_text("secret = 1\n")
    other.chmod(0o666)
    sources = {path: path.read_bytes() for path in starting.SIDE.values()}
    descriptors = len(os.listdir("/proc/self/fd"))
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["other_student.py"]
    assert other.read_text() == "secret = 1\n"
    assert {path: path.read_bytes() for path in sources} == sources
    assert marked() == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert children() == []
    with student_of([HONEST], limits=SMALL) as student:
        assert student.ask("honest", 41) == 42
        assert dict(student.ways) == {"forked" if FORKS else "fresh": 1}


def children() -> list[psutil.Process]:
    """All below this process, but for what submissions are forked from."""
    kept = [pid for forks in FORKS for pid in forks.processes()]
    return [p for p in psutil.Process().children(recursive=True) if p.pid not in kept]


def marked() -> int:
    found = psutil.process_iter(["cmdline"])
    return sum(MARKER in (process.info["cmdline"] or []) for process in found)


def outcome(student: StudentProcess, function: str, *args: Any, **options: Any) -> Any:
    """The answer, or the error."""
    try:
        return student.ask(function, *args, **options)
    except StudentError as error:
        assert error.kind in KINDS
        assert error.message and "\n" not in error.message
        return error


def kind(student: StudentProcess, function: str, *args: Any, **options: Any) -> str:
    result = outcome(student, function, *args, **options)
    return result.kind if isinstance(result, StudentError) else f"answered {result!r}"


ONE_QUESTION = {
    "endless loop": ("def attack():\n    while True: pass", "timeout"),
    "endless sleep": ("import time\ndef attack(): time.sleep(10**6)", "timeout"),
    "os._exit": ("import os\ndef attack(): os._exit(3)", "crash"),
    "os._exit(0)": ("import os\ndef attack(): os._exit(0)", "crash"),
    "segfault": ("import ctypes\ndef attack(): ctypes.string_at(0)", "crash"),
    "abort": ("import os\ndef attack(): os.abort()", "crash"),
    "kill the group": ("import os, time\ndef attack():\n    os.killpg(0, 9)\n    time.sleep(9)", "crash"),
    "kill itself": ("import os\ndef attack(): os.kill(os.getpid(), 9)", "crash"),
    "sys.exit": ("import sys\ndef attack(): sys.exit(0)", "exception"),
    "SystemExit": ("def attack(): raise SystemExit", "exception"),
    "KeyboardInterrupt": ("def attack(): raise KeyboardInterrupt", "exception"),
    "a hostile exception": (
        "class E(Exception):\n    def __str__(self): raise SystemExit\ndef attack(): raise E",
        "exception",
    ),
    "recursion": ("def attack(): return attack()", "exception"),
    "fork bomb": (
        "import os\ndef attack():\n    while True:\n        try: os.fork()\n        except OSError: pass",
        "timeout",
    ),
    "thread bomb": (
        "import threading, time\ndef attack():\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "exception",
    ),
    "50 GiB at once": ("def attack(): return len(bytearray(50 * 2**30))", "memory"),
    "memory bit by bit": ("def attack():\n    x = []\n    while True: x.append(bytearray(2**20))", "memory"),
    "memory of many processes": (
        "import os, time\ndef attack():\n    for _ in range(10):\n        if os.fork() == 0:\n"
        "            x = bytearray(80 * 2**20)\n            time.sleep(99)\n    time.sleep(99)",
        "memory",
    ),
    "closing everything": ("import os\ndef attack():\n    os.closerange(0, 64)\n    return 1", "crash"),
    "noise in every descriptor": (
        "import os\ndef attack():\n    for fd in range(64):\n        try: os.write(fd, b'x' * 4000)\n"
        "        except OSError: pass\n    return 1",
        "protocol",
    ),
    "frames with a guessed nonce": (
        "import os, struct\ndef attack():\n    body = b'M' + bytes(8)\n"
        "    for fd in range(64):\n        for number in range(9):\n"
        "            try: os.write(fd, struct.pack('<Q16sQ', 24 + len(body), bytes(16), number) + body)\n"
        "            except OSError: pass\n    return 1",
        "protocol",
    ),
    "a frame of 2**60 bytes": (
        "import gc, os, struct, sys\ndef attack():\n    frame = sys._getframe()\n"
        "    while 'nonce' not in frame.f_locals: frame = frame.f_back\n    here = frame.f_locals\n"
        "    os.write(here['writing'].fileno(), struct.pack('<Q16sQ', 2**60, here['nonce'], here['number']))\n"
        "    return 1",
        "protocol",
    ),
    "an object in the answer's place": (
        "import sys\ndef attack():\n    sys.modules['answering.wire'].encode = lambda *a: b'Oimport os'\n    return 1",
        "protocol",
    ),
}


@pytest.mark.parametrize("name", ONE_QUESTION)
def test_an_attack_costs_one_question(name: str, outside: Path) -> None:
    source, expected = ONE_QUESTION[name]
    with student_of([HONEST, source], limits=SMALL) as student:
        assert student.ask("honest", 1) == 2
        timeout_s = 1 if expected == "timeout" else 20
        assert kind(student, "attack", timeout_s=timeout_s) == expected
        # `encode` of the last one stays replaced; a new process would not know it.
        assert student.ask("honest", 2) == 3
        assert student.starts <= 2


def test_every_kind_of_value_arrives(outside: Path) -> None:
    values = [None, True, False, 0, -(2**100), 1.5, float("inf"), "text \u00e9", b"\0\xff", [], [1, [2.0]], (1, "a")]
    values += [{"a": {"b": [None]}}, np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(0.5), np.zeros((0, 3))]
    tensors = [torch.randn(2, 3).bfloat16(), torch.tensor(3), torch.empty(0, 2), torch.tensor([True, False])]
    with student_of(["def same(x, *, times=1):\n    return [x] * times"], limits=TORCH) as student:
        for value in values:
            (answer,) = student.ask("same", value)
            assert type(answer) is type(value)
            assert np.array_equal(answer, value) if isinstance(value, np.ndarray) else answer == value
        assert student.ask("same", 1, times=3) == [1, 1, 1]
        assert np.isnan(student.ask("same", float("nan"))[0])
        for tensor in tensors:
            (answer,) = student.ask("same", tensor)
            assert answer.dtype == tensor.dtype and torch.equal(answer, tensor)
        assert student.starts == 1


def test_noise_does_not_matter(outside: Path) -> None:
    noisy = """
import os, sys, warnings
from tqdm import tqdm
print("x" * 10**6); warnings.warn("at import")
def noisy(x):
    print("printed" * 10**5); print("err" * 10**5, file=sys.stderr); warnings.warn("a warning")
    os.write(1, b"raw" * 10**5); os.system("echo from a shell; echo err >&2")
    for _ in tqdm(range(100)): pass
    sys.stdout = None; sys.stderr.close()
    return x + 1
"""
    with student_of([noisy], limits=SMALL) as student:
        assert [student.ask("noisy", x) for x in range(1)] == [1]
        assert student.load_errors == []


def test_cells_that_never_end_run_once(outside: Path) -> None:
    hungry = (
        "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n"
        "        x = bytearray(80 * 2**20)\n        time.sleep(99)\ntime.sleep(99)"
    )
    for source, expected, wall_s_load in (
        ("while True: pass", "timeout", 2),
        ("import os; os._exit(0)", "crash", 60),
        ("import ctypes; ctypes.string_at(0)", "crash", 60),
        (hungry, "memory", 60),
    ):
        limits = Limits(wall_s_load=wall_s_load, memory_bytes=400 * 2**20)
        with student_of([HONEST, source], limits=limits) as student:
            assert [kind(student, "honest", n) for n in range(5)] == [expected] * 5
            assert student.starts == 1


def test_restarts_are_limited(outside: Path) -> None:
    with student_of(["import os\ndef f(): os._exit(1)"], limits=Limits(restarts=2)) as student:
        assert [kind(student, "f") for _ in range(6)] == ["crash"] * 6
        assert student.starts == 3


def test_an_error_in_a_cell_costs_a_statement(outside: Path) -> None:
    cells = ["import nothing_of_this_name\ndef first(): return 1", "def broken(:", "raise SystemExit(3)", "import sys"]
    cells += ["sys.exit()", "def last(): return first() + 1", "second = 3"]
    with student_of(cells, limits=SMALL) as student:
        assert student.ask("last") == 2
        error = outcome(student, "broken")
        assert error.kind == "missing" and "cell 2" in error.message and "SyntaxError" in error.message
        assert kind(student, "second") == "missing"
        assert len(student.load_errors) == 4
        assert student.starts == 1


def test_the_last_definition_wins_and_a_renamed_one_is_missing(outside: Path) -> None:
    with student_of(["def f(): return 1", "def f(): return 2", "def f_new(): return 3"], limits=SMALL) as student:
        assert student.ask("f") == 2
        assert kind(student, "g") == "missing"


def test_an_exception_names_type_message_and_line(outside: Path) -> None:
    with student_of(["x = 1", "def f(a):\n    b = a\n    return {}[b]"], limits=SMALL) as student:
        error = outcome(student, "f", "key")
    assert error.kind == "exception"
    assert "KeyError: 'key'" in error.message and "cell 2 line 3" in error.message


def test_a_module_is_blocked_by_name(outside: Path) -> None:
    cells = ["try:\n    import json.tool\nexcept ImportError as e:\n    why = str(e)\ndef f(): return why"]
    with student_of(cells, limits=SMALL, modules_blocked=["json.tool", "cs336_infer.generate"]) as student:
        assert student.ask("f").startswith("json.tool is what this exercise asks for")


FORBIDDEN = """
import torch, importlib, transformers_stub as nothing
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention as s
def helper(q): return F.scaled_dot_product_attention(q, q, q)
def direct(q): return F.scaled_dot_product_attention(q, q, q)
def through(q): return helper(q)
def alias(q): return s(q, q, q)
def by_getattr(q): return getattr(F, "scaled_dot_product_attention")(q, q, q)
def built(q):
    try: return getattr(F, "scaled_dot_" + "product_attention")(q, q, q)
    except BaseException: return q
def by_globals(q): return globals()["s"](q, q, q)
def low(q): return torch._C._nn.scaled_dot_product_attention(q, q, q)
def inner_import(q):
    import transformers
def method(q): return q.softmax(-1)
class Own:
    def softmax(self, x): return x.exp() / x.exp().sum(-1, keepdim=True)
def softmax(x): return Own().softmax(x)
def own(q):
    "neither softmax nor scaled_dot_product_attention of the library"
    return softmax(q)
def unlisted(q): return F.softmax(q, -1)
"""


def test_forbidden_calls_are_refused_and_named(outside: Path) -> None:
    names = ["scaled_dot_product_attention", "softmax", "transformers"]
    cheats = ["direct", "through", "alias", "by_getattr", "built", "by_globals", "low", "inner_import", "method"]
    forbidden = {function: names for function in [*cheats, "own"]}
    q = torch.randn(1, 2, 4, 4)
    with student_of([FORBIDDEN], calls_forbidden=forbidden, limits=TORCH) as student:
        for function in cheats:
            error = outcome(student, function, q)
            assert error.kind == "refused", function
            assert function in error.message and any(name in error.message for name in names)
        expected = torch.softmax(q, -1)
        assert torch.allclose(student.ask("own", q), expected, atol=1e-6)
        assert torch.allclose(student.ask("unlisted", q), expected, atol=1e-6)
        assert student.starts == 1


UNGRADABLE = """
import numpy as np, torch
class Float(float):
    def __eq__(self, other): return True
class Array(np.ndarray):
    def __eq__(self, other): return True
class Tensor(torch.Tensor):
    def __eq__(self, other): return True
class Reduced:
    def __reduce__(self): return (eval, ("1/0",))
class Liar:
    __class__ = float
loop = []; loop.append(loop)
answers = {
    "float": lambda: Float(1), "array": lambda: np.ones(2).view(Array), "tensor": lambda: Tensor([1.0]),
    "reduce": Reduced, "liar": Liar, "loop": lambda: loop, "generator": lambda: (i for i in range(3)),
    "set": lambda: {1}, "keys": lambda: {1: 2}, "object array": lambda: np.array([Reduced()], dtype=object),
    "str array": lambda: np.array(["a"]), "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(), "huge": lambda: np.zeros(2**20), "huge list": lambda: [0] * 2**20,
    "huge view": lambda: torch.zeros(1).expand(2**40), "wide": lambda: [[[[0] * 99] * 99] * 99] * 99,
    "int": lambda: 1 << 10**6, "surrogate": lambda: "\\ud800", "function": lambda: print, "module": lambda: np,
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
}
def give(name): return answers[name]()
def names(): return list(answers)
def wrong_dtype(): return torch.ones(3, dtype=torch.float16)
def nan(): return [float("nan"), torch.tensor([float("nan")])]
"""


def test_answers_that_cannot_be_graded_say_so(outside: Path) -> None:
    with student_of([UNGRADABLE], limits=TORCH) as student:
        for name in student.ask("names"):
            error = outcome(student, "give", name)
            assert isinstance(error, StudentError) and error.kind == "type", (name, error)
            assert "which cannot be graded" in error.message
        assert student.ask("wrong_dtype").dtype == torch.float16
        number, tensor = student.ask("nan")
        assert number != number and bool(tensor.isnan().all())
        assert student.starts == 1


PATCHES = """
import builtins, json, gc, sys
import numpy as np, torch
np.allclose = torch.allclose = torch.equal = lambda *a, **k: True
np.isfinite = lambda *a: np.array([True])
json.dumps = json.loads = lambda *a, **k: {}
for name in ("isinstance", "len", "sum", "abs", "all"): setattr(builtins, name, lambda *a, **k: True)
def wrong(x): return torch.zeros(3)
"""


def test_patching_libraries_stays_inside(outside: Path) -> None:
    before = (np.allclose, np.isfinite, torch.allclose, torch.equal, isinstance, len)
    with student_of([PATCHES], limits=TORCH) as student:
        result = outcome(student, "wrong", 1, timeout_s=10)
    if not isinstance(result, StudentError):
        assert not torch.allclose(result, torch.ones(3))
    assert before == (np.allclose, np.isfinite, torch.allclose, torch.equal, isinstance, len)


TAKEOVER = """
import gc, sys
def take():
    for thing in gc.get_objects():
        if type(thing).__name__ == "Answers":
            type(thing).answer = lambda self, question: sys.modules["answering.wire"].encode(
                {"kind": "ok", "value": 42, "score": 100})
    sys.modules["answering.forbidden"].Guard.__enter__ = lambda self: self
    return 1
def honest(x): return x
"""


def test_a_student_who_owns_the_loop_can_only_forge_values(outside: Path) -> None:
    with student_of([TAKEOVER], limits=SMALL) as student:
        assert student.ask("take") == 1
        assert student.ask("honest", 7) == 42
        assert student.starts == 1


def test_what_came_early_is_thrown_away(outside: Path) -> None:
    source = """
import os, threading, time
def copies(): return os.getpid() if os.fork() else 0
def later():
    threading.Timer(0.05, os._exit, [1]).start()
    return 1
"""
    with student_of([HONEST, source], limits=SMALL) as student:
        assert student.ask("copies") > 0
        assert student.ask("honest", 1) == 2
        assert student.ask("later") == 1
        assert student._pipe is not None
        student._pipe.process.wait(10)
        assert student.ask("honest", 2) == 3
        assert student.starts == 2


REACH = """
import errno, os, socket, sys
def read(path):
    try:
        with open(path, "rb") as file: return file.read(100)
    except OSError as error: return errno.errorcode[error.errno]
def write(path):
    try:
        with open(path, "ab") as file: file.write(b"x"); file.flush(); return "written"
    except OSError as error: return errno.errorcode[error.errno]
def listing(path):
    try: return sorted(os.listdir(path))
    except OSError as error: return errno.errorcode[error.errno]
def connect(port):
    try: socket.create_connection(("127.0.0.1", port), 2); return "connected"
    except OSError as error: return errno.errorcode.get(error.errno, "failed")
def environment(): return dict(os.environ)
def pids(): return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
def status(): return dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
def who(): return list(os.getresuid()), os.getcwd()
def descriptors(): return [os.readlink("/proc/self/fd/" + name) for name in ("0", "1", "2")]
def package():
    try: import cs336_infer; return cs336_infer.__file__
    except ImportError: return "absent"
def find(name):
    found = []
    for root, folders, files in os.walk("/"):
        known = ("/proc", "/usr", sys.prefix, sys.base_prefix)
        folders[:] = [folder for folder in folders if os.path.join(root, folder) not in known]
        found += [root] * (name in files)
    return found
def parent():
    for signal in (2, 9, 15): os.kill(os.getppid(), signal)
    return os.getppid()
def init(): return [line for line in open("/proc/1/status") if line.startswith("Seccomp:")]
"""


def test_nothing_outside_is_within_reach(outside: Path) -> None:
    other = str(outside / "other_student.py")
    with socket.create_server(("127.0.0.1", 0)) as server, student_of([REACH], limits=SMALL) as student:
        for path in ("/etc/shadow", "/etc/passwd", other, str(REPO / "pyproject.toml"), __file__, "/proc/1/environ/x"):
            assert student.ask("read", path) in ("ENOENT", "EACCES", "ENOTDIR"), path
        side = f"{sandbox.PLACE}/answering/wire.py"
        read_only = [
            side,
            os.__file__,
            np.__file__,
            f"{sys.prefix}/x",
            "/usr/x",
            "/x",
            "/dev/x",
            "/proc/sys/vm/swappiness",
        ]
        for path in read_only:
            assert student.ask("write", path) in ("EROFS", "EACCES"), path
        assert student.ask("write", other) == "ENOENT"
        assert student.ask("write", str(REPO / "x")) in ("ENOENT", "EROFS", "EACCES")
        assert student.ask("listing", sandbox.PLACE + "/answering") == sorted(Path(p).name for p in starting.SIDE)
        assert student.ask("listing", sandbox.HOME) == []
        assert student.ask("find", "other_student.py") == []
        assert student.ask("listing", str(REPO)) in ("ENOENT", [".venv"])
        assert student.ask("package") == "absent"
        assert student.ask("connect", server.getsockname()[1]) != "connected"
        assert student.ask("environment").items() - sandbox.ENVIRONMENT.items() <= {("PWD", sandbox.HOME)}
        assert len(student.ask("pids")) == 2
        assert student.ask("descriptors") == ["/dev/null"] * 3
        uids, folder = student.ask("who")
        assert 0 not in uids and folder == sandbox.HOME
        status = student.ask("status")
        assert {status[name].strip() for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert status["NoNewPrivs"].strip() == "1" and status["Seccomp"].strip() == "2"
        assert student.ask("parent") == 1
        assert student.ask("init") == ["Seccomp:\t2\n"]
        assert student.starts == 1


def test_files_that_are_given_can_be_imported(outside: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    given = tmp_path_factory.mktemp("given") / "handout.py"
    given.write_text("VALUE = 7\n")
    given.parent.chmod(0o755)
    cells = ["import handout\ndef f(): return handout.VALUE"]
    with student_of(cells, limits=SMALL, files={"handout.py": given}) as student:
        assert student.ask("f") == 7


LIMITED = """
import ctypes, errno, os, resource, socket, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def processes():
    made = 0
    try:
        for _ in range(200):
            if os.fork() == 0:
                time.sleep(60); os._exit(0)
            made += 1
    except OSError as error: return made, errno.errorcode[error.errno]
def fill(folder, each):
    made = 0
    try:
        for number in range(100):
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                for _ in range(each): made += file.write(b"x" * 2**20)
    except OSError as error: return made, errno.errorcode[error.errno]
def raise_limit():
    try: resource.setrlimit(resource.RLIMIT_NPROC, (10**6, 10**6)); return "raised"
    except (ValueError, OSError): return "refused"
def call(name, *args):
    ctypes.set_errno(0)
    return getattr(libc, name)(*args), errno.errorcode.get(ctypes.get_errno(), "")
def family(number):
    try: socket.socket(number, socket.SOCK_STREAM).close(); return "made"
    except OSError as error: return errno.errorcode[error.errno]
def opened():
    files = []
    try:
        while True: files.append(open("/dev/null"))
    except OSError as error: return len(files), errno.errorcode[error.errno]
    finally: files.clear()
"""


def test_limits_bind(outside: Path) -> None:
    with student_of([LIMITED], limits=SMALL) as student:
        count, error = student.ask("opened")
        assert count < SMALL.open_files and error == "EMFILE"
        assert student.ask("raise_limit") == "refused"
        for folder in ("/tmp", "/dev/shm"):
            assert student.ask("fill", folder, 100) == (SMALL.file_bytes, "EFBIG")
        for name, args in (
            ("unshare", [0x10000000]),
            ("memfd_create", [b"x", 0]),
            ("shmget", [0, 4096, 0o1600]),
            ("mount", [None, b"/tmp", b"tmpfs", 0, None]),
            ("ptrace", [16, 1, 0, 0]),
        ):
            assert student.ask("call", name, *args) == (-1, "EPERM"), name
        assert student.ask("family", 40) == "EPERM"
        assert student.ask("family", int(socket.AF_UNIX)) == "made"
        count, error = student.ask("processes")
        assert SMALL.processes // 2 < count < SMALL.processes and error == "EAGAIN"
        assert student.starts == 1
    with student_of([LIMITED], limits=SMALL) as student:
        for folder in ("/tmp", "/dev/shm"):
            written, error = student.ask("fill", folder, 1)
            assert written <= SMALL.disk_bytes and error == "ENOSPC"


def test_processor_time_is_limited(outside: Path) -> None:
    ignoring = "import signal\ndef f():\n    signal.signal(signal.SIGXCPU, signal.SIG_IGN)\n    while True: pass"
    for source in ("def f():\n    while True: pass", ignoring):
        with student_of([source], limits=Limits(cpu_s=2)) as student:
            error = outcome(student, "f", timeout_s=300)
        assert error.kind == "timeout" and "processor time" in error.message, error


def test_background_processes_die_with_the_submission(outside: Path) -> None:
    source = f"""
import os, sys
def leave():
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        os.execv(sys.executable, [sys.executable, "-c", "import time; print(1); time.sleep(600)", "{MARKER}"])
    os.wait()
    return 1
def others():
    lines = [open(f"/proc/{{pid}}/cmdline", "rb").read() for pid in os.listdir("/proc") if pid.isdigit()]
    return sum(b"{MARKER}" in line for line in lines)
"""
    with student_of([source], limits=SMALL) as student:
        assert student.ask("leave") == 1
        while not student.ask("others"):
            time.sleep(0.01)
        assert student.ask("others") == marked() == 1
    assert marked() == 0


def test_a_thread_that_exits_costs_nothing(outside: Path) -> None:
    source = """
import threading, sys
def f():
    thread = threading.Thread(target=sys.exit)
    thread.start(); thread.join()
    return 5
"""
    with student_of([source], limits=SMALL) as student:
        assert student.ask("f") == 5 and student.starts == 1


def test_an_answer_over_the_limit_and_a_question_over_the_limit(outside: Path) -> None:
    with student_of(["def f(x): return b'x' * x"], limits=SMALL) as student:
        assert len(student.ask("f", SMALL.output_bytes - 200)) == SMALL.output_bytes - 200
        assert kind(student, "f", SMALL.output_bytes) == "type"
        with pytest.raises(wire.WireError):
            student.ask("f", bytes(SMALL.output_bytes))
        assert student.ask("f", 1) == b"x"


def test_sources_with_deep_nesting(outside: Path) -> None:
    deep = ["(" * 10**5, "-" * 10**5 + "1", "x = " + "[" * 5000 + "]" * 5000, "\0", "a" + ".b" * 10**5, "x=1\n" * 10**4]
    with student_of([HONEST, *deep], calls_forbidden={"honest": ["softmax"]}, limits=SMALL) as student:
        result = outcome(student, "honest", 1)
    assert result == 2 or result.kind in ("crash", "exception")


def test_without_bubblewrap_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    with student_of([HONEST]) as student, pytest.raises(SandboxUnavailable) as caught:
        student.ask("honest", 1)
    assert "apt-get install bubblewrap" in str(caught.value) and "\n" not in str(caught.value)


def test_a_sandbox_that_does_not_start_is_no_fault_of_the_student(boxed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = sandbox._mounts
    monkeypatch.setattr(sandbox, "_mounts", lambda *args: [*mounts(*args), "--ro-bind", "/not/there", "/x"])
    with student_of([HONEST]) as student, pytest.raises(SandboxUnavailable, match="did not start"):
        student.ask("honest", 1)


def test_unsafe_mode_answers_limits_and_cleans_up() -> None:
    source = """
import os
def loop():
    while True: pass
def big(): return len(bytearray(50 * 2**30))
def f(): return os.getcwd()
"""
    with StudentProcess([HONEST, source], limits=SMALL, sandbox=False) as student:
        assert student.ask("honest", 1) == 2
        assert kind(student, "loop", timeout_s=1) == "timeout"
        assert kind(student, "big") == "memory"
        folder = student.ask("f")
        assert Path(folder).is_dir()
    assert not Path(folder).exists()


def test_root_drops_to_a_real_uid_and_others_take_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: f"/usr/bin/{name}")
    for uid, has, lacks in ((0, "--reuid", "--unshare-user"), (1000, "--unshare-user", "--reuid")):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        line = sandbox.command(["program"], starting.SIDE, SMALL, 9)
        assert has in line and lacks not in line and line[-1] == "program"
        assert {"--unshare-net", "--unshare-pid", "--die-with-parent", "--clearenv"} <= set(line)


def test_the_filter_of_system_calls_is_well_formed() -> None:
    for machine in ("x86_64", "aarch64"):
        code = seccomp.program(machine)
        assert len(code) % 8 == 0
        steps = [(code[i + 2], code[i + 3]) for i in range(0, len(code), 8)]
        assert all(max(jumps) < len(steps) - at - 1 for at, jumps in enumerate(steps) if max(jumps))
    with pytest.raises(NotImplementedError):
        seccomp.program("pdp11")


def test_an_endless_loop_is_gone_when_its_question_is_over(boxed: None) -> None:
    """As root the user changes inside the sandbox, and Linux then forgets to end the child with its parent."""
    cell = "def ready():\n    return 1\n\n\ndef loop():\n    while True:\n        pass\n"
    with student_of([cell], limits=SMALL) as student:
        student.ask("ready")
        assert student._pipe is not None
        family = psutil.Process(student._pipe.process.pid).children(recursive=True)
        assert family
        with pytest.raises(StudentError, match="timeout"):
            student.ask("loop", timeout_s=0.5)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
