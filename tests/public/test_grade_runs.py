"""Grading as a run: which files, what is kept of a run that ended early, and what is said before it starts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from cs336_infer.cli import main
from cs336_infer.course import grade as grading
from cs336_infer.course import journal as journals
from cs336_infer.course.checks import Ask, Check, expect_equal
from cs336_infer.course.grade import Course, GradeError, Journal, find_submissions, grade_class, grade_one, open_course
from cs336_infer.course.questions import TIMEOUTS, StudentError, StudentProcess
from cs336_infer.course.sandbox import Limits, SandboxUnavailable

REPO = Path(__file__).resolve().parents[2]
needs_sandbox = pytest.mark.skipif(
    shutil.which("bwrap") is None and os.environ.get("CI") != "true", reason="no bubblewrap: the grader needs it"
)


def plus_one(ask: Ask, rng: np.random.Generator) -> None:
    number = int(rng.integers(0, 10**9))
    expect_equal(ask("f", number), number + 1, what="f")


@pytest.fixture(scope="module")
def course() -> Course:
    whole = open_course(REPO, "a1")
    return Course(whole.assignment, (Check("f", "one more", 1, plus_one),), (Check("f", "again", 2, plus_one),), "key")


def hand_in(folder: Path, count: int, source: str = "def f(x): return x + 1\n") -> list[Path]:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"s{number:03}.py").write_text(f"# {number}\n{source}")
    return find_submissions([folder])


def fake(graded: list[Path], stop_after: int | None = None, error: BaseException | None = None) -> Any:
    def grade(course: Course, path: Path, **given: Any) -> dict[str, Any]:
        if stop_after is not None and len(graded) >= stop_after:
            raise error or KeyboardInterrupt
        graded.append(path)
        return {"submission": str(path), "problem": None, "score": 3, "max_score": 3, "checks": [], "at": len(graded)}

    return grade


def test_which_files_are_submissions(tmp_path: Path) -> None:
    for name in (
        "alice/a1.ipynb", "alice/draft.py", "alice/a1 (1).ipynb", "alice/notes.txt", "bob/deep/er/A1.IPYNB",
        "bob/.ipynb_checkpoints/a1-checkpoint.ipynb", "bob/._a1.ipynb", "bob/__MACOSX/._a1.py",
        "bob/venv/pyvenv.cfg", "bob/venv/lib/x.py", "bob/__pycache__/a.py", "carol/readme.md",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "dan").symlink_to("alice")
    names = ["alice/a1 (1).ipynb", "alice/a1.ipynb", "alice/draft.py", "bob/deep/er/A1.IPYNB"]
    assert find_submissions([tmp_path]) == [tmp_path / name for name in names]
    twice = [tmp_path / "alice", tmp_path / "bob" / ".." / "alice", tmp_path / "alice" / "a1.ipynb", tmp_path]
    assert [p.resolve() for p in find_submissions(twice)] == [tmp_path / name for name in names]
    with pytest.raises(GradeError, match=r"no .ipynb or .py file below"):
        find_submissions([tmp_path / "carol"])
    with pytest.raises(GradeError, match="a link: name the folder that it leads to"):
        find_submissions([tmp_path / "dan"])
    assert find_submissions([tmp_path / "dan", tmp_path / "bob"])[0] == tmp_path / "dan"  # and refused when read


def test_a_thousand_folders_deep(tmp_path: Path) -> None:
    (tmp_path / "a1.py").touch()
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    try:
        assert find_submissions([tmp_path]) == [tmp_path / "a1.py"]
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)  # shutil would recurse


def test_a_stopped_run_goes_on_without_grading_again(course, tmp_path, monkeypatch):
    paths, graded, place = hand_in(tmp_path / "class", 5), [], tmp_path / "r.journal"
    monkeypatch.setattr(grading, "grade_one", fake(graded, stop_after=3))
    with pytest.raises(KeyboardInterrupt), Journal(place, "key") as journal:
        grade_class(course, paths, journal=journal)
    assert len(place.read_text().splitlines()) == 3
    seed = json.loads(place.read_text().splitlines()[0])["result"]["seed"]
    for _ in range(2):
        with place.open("a") as file:
            file.write('{"course": "key", "cut in the mid')  # as a power failure leaves it
        before = list(graded)
        monkeypatch.setattr(grading, "grade_one", fake(graded, stop_after=len(graded) + 1))
        with contextlib.suppress(KeyboardInterrupt), Journal(place, "key", resume=True) as journal:
            grade_class(course, paths, journal=journal)
        assert len(graded) == len(before) + 1 and len(set(graded)) == len(graded)
    monkeypatch.setattr(grading, "grade_one", fake([], stop_after=0))
    with Journal(place, "key", resume=True) as journal:
        results = grade_class(course, paths, journal=journal)
    assert [r["submission"] for r in results] == [str(p) for p in paths]
    assert {r["seed"] for r in results} == {seed}, "one class, one seed"


def test_what_changed_is_graded_again(course, tmp_path, monkeypatch):
    paths, place = hand_in(tmp_path / "class", 4), tmp_path / "r.journal"

    def graded_again(key: str = "key", **options: Any) -> list[Path]:
        graded: list[Path] = []
        monkeypatch.setattr(grading, "grade_one", fake(graded))
        changed = dataclasses.replace(course, key=key)
        with Journal(place, key, resume=True) as journal:
            grade_class(changed, paths, journal=journal, **options)
        return graded

    assert graded_again(seed=1) == paths
    assert graded_again() == [] and graded_again(seed=1) == []
    paths[2].write_text("def f(x): return 2")
    assert graded_again() == [paths[2]]
    assert graded_again(seed=2) == paths
    assert graded_again("other checks") == paths


def test_one_journal_has_one_run(tmp_path: Path) -> None:
    place = tmp_path / "r.journal"
    with Journal(place, "key") as journal:
        with pytest.raises(GradeError, match="another run is grading into it"):
            Journal(place, "key", resume=True)
        journal.add("a", {"seed": 1})
    with pytest.raises(GradeError, match=r"holds 1 graded submissions .* --resume, or remove it"):
        Journal(place, "key")
    with Journal(place, "key", resume=True) as journal:
        assert journal.results == {"a": {"seed": 1}}
        journal.remove()
    assert not place.exists()
    with Journal(place, "key"):
        assert place.exists()
    assert not place.exists(), "a journal without a line is not left"


def test_a_full_disk_stops_the_run_and_keeps_what_was_written(course, tmp_path, monkeypatch):
    paths, graded, place = hand_in(tmp_path / "class", 4), [], tmp_path / "r.journal"
    monkeypatch.setattr(grading, "grade_one", fake(graded))
    write, writes = os.write, []

    def full(descriptor: int, data: bytes) -> int:
        writes.append(data)
        return write(descriptor, data[: len(data) // 2] if len(writes) == 3 else data)

    monkeypatch.setattr(journals.os, "write", full)
    with (
        pytest.raises(GradeError, match=r"no space left on device \(2 submissions are kept"),
        Journal(place, "key") as journal,
    ):
        grade_class(course, paths, journal=journal)
    monkeypatch.setattr(journals.os, "write", write)
    graded.clear()
    with Journal(place, "key", resume=True) as journal:
        assert len(grade_class(course, paths, journal=journal)) == 4
    assert len(graded) == 2


def test_a_fault_of_the_grader_costs_one_submission_and_is_not_kept(course, tmp_path, monkeypatch):
    paths, graded, place = hand_in(tmp_path / "class", 3), [], tmp_path / "r.journal"

    def faulty(course: Course, path: Path, **given: Any) -> dict[str, Any]:
        if path == paths[1]:
            raise RuntimeError("cannot\nfork")
        return fake(graded)(course, path)

    monkeypatch.setattr(grading, "grade_one", faulty)
    with Journal(place, "key") as journal:
        results = grade_class(course, paths, journal=journal)
        assert len(journal.results) == 2
    assert [r["problem"] is None for r in results] == [True, False, True]
    assert "not graded, the grader failed (RuntimeError: cannot fork)" in results[1]["problem"]
    assert results[1]["score"] == 0 and results[1]["max_score"] == 3
    monkeypatch.setattr(grading, "grade_one", fake([], stop_after=0, error=SandboxUnavailable("none here")))
    with pytest.raises(SandboxUnavailable):
        grade_class(course, paths)


def test_the_command_line_starts_without_what_reads_notebooks() -> None:
    code = "import sys, cs336_infer.cli; print({'jupytext', 'nbformat', 'jsonschema'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_class_of_300(course, tmp_path, monkeypatch):
    paths, graded = hand_in(tmp_path / "class", 300), []
    monkeypatch.setattr(grading, "grade_one", fake(graded))
    with Journal(tmp_path / "j", "key") as journal:
        results = grade_class(course, paths, jobs=4, journal=journal)
        assert len(journal.results) == 300
    assert [r["submission"] for r in results] == [str(p) for p in paths] and len(graded) == 300


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--json", "no/r.json"], "no/r.json: cannot be written: No such file"),
        (["--csv", "folder"], "folder: cannot be written: it is a folder"),
        (["--html", "file"], "file: cannot be made: File exists"),
        (["--html", "file/pages"], "file/pages: cannot be made: Not a directory"),
        (["--json", "r", "--csv", "./r"], "must be different places"),
        (["--json", "/proc/r.json"], "/proc/r.json: cannot be written"),
    ],
)
def test_places_are_tried_before_grading(args, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    hand_in(tmp_path / "class", 1)
    monkeypatch.setattr(grading, "grade_one", fake([], stop_after=0))
    assert main(["grade", "class", "--assignment", "a1", "--course", str(REPO), *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(err.splitlines()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["class", "file", "folder"]


def test_ctrl_c_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    hand_in(tmp_path / "class", 3)
    monkeypatch.setattr(grading, "grade_one", fake([], stop_after=1))
    command = ["grade", str(tmp_path / "class"), "--assignment", "a1", "--course", str(REPO), "--jobs", "1"]
    assert main([*command, "--json", str(tmp_path / "r.json")]) == 130
    out, err = capsys.readouterr()
    assert out == "" and "stopped, 1 of 3 submissions are kept: --resume goes on from there" in err.splitlines()[-1]
    assert main([*command, "--json", str(tmp_path / "r.json")]) == 2
    assert "--resume" in capsys.readouterr()[1]


def test_a_line_of_the_result_is_one_line(tmp_path, capsys, monkeypatch):
    hand_in(tmp_path / "class", 1)
    (tmp_path / "class" / "s000.py").rename(tmp_path / "class" / "a\n33-33  bob\x1b[2J.py")
    monkeypatch.setattr(grading, "grade_one", lambda course, path, **given: grading._ungraded(course, path, OSError()))
    assert main(["grade", str(tmp_path / "class"), "--assignment", "a1", "--course", str(REPO)]) == 0
    out = capsys.readouterr()[0]
    assert len(out.splitlines()) == 1 and "a?33-33  bob?[2J.py" in out


LOOPS = (
    "import time\ndef f(x):\n    while True: time.sleep(1)\ndef g(x): return x\ndef h(x):\n    if x: time.sleep(99)\n"
)


@needs_sandbox
def test_a_function_that_runs_out_of_time_twice_is_not_asked_again() -> None:
    with StudentProcess([LOOPS]) as student:

        def said(function: str, value: Any = 0) -> Any:
            try:
                return student.ask(function, value, timeout_s=0.3)
            except StudentError as error:
                assert error.kind == "timeout"
                return error.message

        first, second, third, fourth = (said("f") for _ in range(4))
        assert first == second and third == fourth and "it is not asked again" in third
        assert student.asked == student.starts == TIMEOUTS
        assert student.ask("g", 5) == 5, "another function is asked"
        assert student.asked == TIMEOUTS + 1
        said("h", 1)
        assert student.ask("h", 0) is None, "an answer in between: it is slow for some questions only"
        said("h", 1)
        assert student.ask("h", 0) is None
        assert student.asked == TIMEOUTS + 5


@needs_sandbox
def test_a_submission_has_a_sum_of_seconds() -> None:
    with StudentProcess([LOOPS], limits=Limits(wall_s=1.5, wall_s_per_question=600)) as student:
        for function in ("f", "g", "g", "missing"):
            with pytest.raises(StudentError) as caught:
                student.ask(function, 0)
            assert caught.value.kind == "timeout"
        assert student.asked == student.starts == 1
        assert caught.value.message == "the submission has used up its 1.5 s in all"
    with StudentProcess([LOOPS]) as student:
        assert student.ask("g", 1) == 1
        assert 0 < student.waited_s < student.limits.wall_s
        student.waited_s = student.limits.wall_s
        with pytest.raises(StudentError, match="used up its 300 s"):
            student.ask("g", 1)
        assert student.asked == 1


@needs_sandbox
def test_a_stopped_grader_waits_for_nobody(course, tmp_path) -> None:
    (path,) = hand_in(tmp_path / "class", 1, "def f(x):\n    while True: pass\n")
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    result = grade_one(course, path, seed=0, limits=Limits(wall_s_per_question=600), sandbox=True, stop=stop)
    assert {c["message"].split(": ")[-1] for c in result["checks"]} == {"the grader was stopped"}
    assert not psutil.Process().children(recursive=True)


RUN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_grade_runs import REPO, Check, Course, Journal, find_submissions, grade_class, open_course, plus_one
whole = open_course(REPO, "a1")
course = Course(whole.assignment, (Check("f", "one more", 1, plus_one),), (), "key")
with Journal(Path(sys.argv[3]), "key", resume=True) as journal:
    grade_class(course, find_submissions([Path(sys.argv[2])]), seed=1, journal=journal)
"""


@needs_sandbox
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_grader_leaves_no_process_and_goes_on(how, course, tmp_path) -> None:
    """The second submission has started a process of its own and loops when the signal comes."""
    marker, place = f"killed-grader-{os.getpid()}", tmp_path / "r.journal"
    paths = hand_in(tmp_path / "class", 3)
    paths[1].write_text(
        "import os, sys, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', '{marker}'])\n"
        "    while True: time.sleep(1)\n"
    )

    def marked() -> list[psutil.Process]:
        return [p for p in psutil.process_iter(["cmdline"]) if marker in (p.info["cmdline"] or [])]

    command = [sys.executable, "-c", RUN, str(Path(__file__).parent), str(tmp_path / "class"), str(place)]
    grader = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not marked():
        assert grader.poll() is None
        time.sleep(0.05)
    left = [*marked(), *psutil.Process(grader.pid).children(recursive=True)]
    grader.send_signal(how)
    assert grader.wait() == -how, "also after Ctrl-C: Python ends by the signal"
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive and not marked()
    assert len(place.read_text().splitlines()) == 1
    paths[1].write_text("def f(x): return x + 1\n")
    with Journal(place, "key", resume=True) as journal:
        kept = list(journal.results)
        results = grade_class(dataclasses.replace(course, hidden=()), paths, journal=journal)
        assert list(journal.results)[:1] == kept and len(journal.results) == 3
    assert [r["score"] for r in results] == [1, 1, 1]
