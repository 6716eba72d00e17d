"""Grading a class: every submission answers the checks of an assignment from its sandbox, and the comparison is here.

Nothing a student prints counts, and no code of a student runs in this process. Each finished submission is written to
a journal at once, so a killed run goes on with `resume` where it stopped.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cs336_infer.course.assignment import Assignment, read_assignment
from cs336_infer.course.checks import NOT_DONE, AskError, Check, Report, checks_of, run
from cs336_infer.course.questions import StudentError, StudentProcess
from cs336_infer.course.sandbox import Limits
from cs336_infer.course.submission import Submission
from cs336_infer.course.submission import read as read_submission
from cs336_infer.types import InferError

SUFFIXES = (".ipynb", ".py")
_STUB = re.compile(r"NotImplementedError: a\d+ \w+: ")


class GradeError(InferError):
    """Grading cannot start: no such assignment, no submissions, or a file that cannot be written."""


@dataclass(frozen=True)
class Course:
    """An assignment with both kinds of checks.

    Attributes:
        key: changes with the source and the hidden checks: a journal of other checks is not continued.
    """

    assignment: Assignment
    public: tuple[Check, ...]
    hidden: tuple[Check, ...]
    key: str

    @property
    def checks(self) -> tuple[Check, ...]:
        return (*self.public, *self.hidden)


def open_course(root: Path, short: str) -> Course:
    """Assignment `short` ("a1") of the checkout at `root`: solutions/, tests/hidden/ and the package's public checks.

    Raises:
        GradeError: there is none or more than one, or its hidden checks are not there.
    """
    found = [p for p in sorted((root / "solutions").glob(f"{short}*/{short}*.py")) if p.stem.split("_")[0] == short]
    if len(found) != 1:
        raise GradeError(f"{len(found)} assignments {short!r} in {root / 'solutions'}: grade from a full checkout")
    hidden_file = root / "tests" / "hidden" / found[0].name
    if not hidden_file.is_file():
        raise GradeError(f"{hidden_file} is missing: grading needs the hidden checks")
    name = found[0].stem
    spec = importlib.util.spec_from_file_location(f"hidden_{name}", hidden_file)
    assert spec and spec.loader
    hidden = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hidden)
    public = importlib.import_module(f"cs336_infer.course.{name}")
    parts = [p.read_bytes() for p in (found[0], hidden_file, Path(str(public.__file__)))]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return Course(read_assignment(found[0]), checks_of(public), checks_of(hidden), key)


def find_submissions(paths: Iterable[Path]) -> list[Path]:
    """Files named, and every notebook or script below folders named, in order, once each.

    Raises:
        GradeError: a path does not exist, or there is nothing to grade.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            below = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and ".ipynb_checkpoints" not in p.parts)
            found.update(dict.fromkeys(below))
        elif path.exists() or path.is_symlink():
            found[path] = None
        else:
            raise GradeError(f"{path}: no such file or folder")
    if not found:
        raise GradeError(f"no {' or '.join(SUFFIXES)} file below {', '.join(map(str, paths))}")
    return list(found)


def grade_one(course: Course, path: Path, *, seed: int, limits: Limits, sandbox: bool) -> dict[str, Any]:
    """The result of one submission as plain values: score, max_score, checks, problem. Never raises for its content."""
    submission = read_submission(path)
    with StudentProcess(
        submission.cells,
        calls_forbidden={f: e.forbidden for e in course.assignment.exercises for f in e.functions},
        limits=limits,
        sandbox=sandbox,
    ) as student:
        report = run(course.checks, _asking(student, submission), seed=seed)
    return {"submission": str(path), "problem": submission.problem, **_points(course, report)}


def _asking(student: StudentProcess, submission: Submission) -> Callable[..., Any]:
    def ask(name: str, /, *args: Any, **kwargs: Any) -> Any:
        if submission.problem:
            raise AskError(submission.problem, "Submission")
        try:
            return student.ask(name, *args, **kwargs)
        except StudentError as error:
            raise AskError(NOT_DONE if _STUB.match(error.message) else error.message, error.kind) from None

    return ask


def _points(course: Course, report: Report) -> dict[str, Any]:
    result = report.to_dict()
    for row, check in zip(result["checks"], course.checks, strict=True):
        row["hidden"] = check in course.hidden
    return result


def grade_class(
    course: Course,
    paths: Sequence[Path],
    *,
    seed: int | None = None,
    jobs: int = 1,
    journal: Path | None = None,
    resume: bool = False,
    limits: Limits | None = None,
    sandbox: bool = True,
) -> list[dict[str, Any]]:
    """Grade all, `jobs` at a time, with a progress bar. Results come in the order of `paths`.

    Args:
        seed: of the inputs; None draws a fresh one, so that nobody can know them. It is part of each result.
        journal: one line of JSON per finished submission, flushed to disk before the next begins.
        resume: keep what the journal holds of the same submission (by content) and the same checks.
    """
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    limits = limits or Limits()
    done = dict(_read_journal(journal, course.key)) if resume and journal else {}
    if journal and not resume:
        journal.unlink(missing_ok=True)
    keys = [_content_key(course, path) for path in paths]
    todo = [(key, path) for key, path in zip(keys, paths, strict=True) if key not in done]

    def work(item: tuple[str, Path]) -> tuple[str, dict[str, Any]]:
        key, path = item
        return key, {**grade_one(course, path, seed=seed, limits=limits, sandbox=sandbox), "seed": seed}

    bar = tqdm(total=len(paths), initial=len(paths) - len(todo), unit="submission", file=sys.stderr, disable=None)
    with ThreadPoolExecutor(jobs) as pool, bar:
        for key, result in pool.map(work, todo):
            done[key] = result
            if journal:
                _append(journal, {"course": course.key, "key": key, "result": result})
            bar.update()
    return [{**done[key], "submission": str(path)} for key, path in zip(keys, paths, strict=True)]


def _content_key(course: Course, path: Path) -> str:
    """Of the file's name and content; a file too large to grade is known by its size."""
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= 20 << 20 else str(size).encode()
    except OSError:
        content = b"unreadable"
    return hashlib.sha256(course.key.encode() + str(path).encode() + b"\0" + content).hexdigest()[:24]


def _append(journal: Path, line: dict[str, Any]) -> None:
    try:
        with journal.open("a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise GradeError(f"{journal}: cannot be written: {e.strerror}") from None


def _read_journal(journal: Path, course_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Finished submissions; the last line may be cut where a run was killed."""
    if not journal.exists():
        return
    for line in journal.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            if entry["course"] == course_key:
                yield entry["key"], entry["result"]
        except (ValueError, KeyError, TypeError):
            continue


def statistics(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many submissions passed each check, the one that fails most first."""
    counts: dict[tuple[str, str], list[int]] = {}
    for result in results:
        for row in result["checks"]:
            count = counts.setdefault((row["exercise"], row["title"]), [0, 0])
            count[0] += row["outcome"] == "passed"
            count[1] += 1
    rows = [{"exercise": e, "title": t, "passed": p, "of": n} for (e, t), (p, n) in counts.items()]
    return sorted(rows, key=lambda r: r["passed"] / r["of"])
