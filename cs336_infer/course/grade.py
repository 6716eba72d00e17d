"""Grading a class: every submission answers the checks of an assignment from its sandbox, and the comparison is here.

Nothing a student prints counts, and no code of a student runs in this process. Each finished submission is written to
a journal at once, so a killed run goes on with `resume` where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cs336_infer.course.ask import one_line
from cs336_infer.course.assignment import Assignment, read_assignment
from cs336_infer.course.checks import NOT_DONE, AskError, Check, Report, checks_of, run
from cs336_infer.course.collect import GradeError, find_submissions
from cs336_infer.course.forks import Forks
from cs336_infer.course.journal import Journal
from cs336_infer.course.questions import StudentError, StudentProcess
from cs336_infer.course.sandbox import Limits, SandboxUnavailable
from cs336_infer.course.submission import Submission, fingerprint, printable
from cs336_infer.course.submission import read as read_submission

__all__ = [
    "Course", "GradeError", "Journal", "find_submissions", "grade_class", "grade_one", "open_course", "statistics",
]  # fmt: skip

_STUB = re.compile(r"NotImplementedError: a\d+ \w+: ")


@dataclass(frozen=True)
class Course:
    """An assignment with both kinds of checks.

    Attributes:
        key: changes with the source and the hidden checks: a journal of other checks is not continued.
        open_task: None, or a module whose `score(ask, seed)` gives what is reported beside the points, as plain values
            (`CELL` is added to the submission, `FILES` to its import path).
        kernels: questions that are for Triton kernels, of which only the text leaves the submission (`kernel_process`).
    """

    assignment: Assignment
    public: tuple[Check, ...]
    hidden: tuple[Check, ...]
    key: str
    open_task: Any = None
    kernels: tuple[str, ...] = ()

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
    task_name = f"cs336_infer.course.{short}_open_task"
    task = importlib.import_module(task_name) if importlib.util.find_spec(task_name) else None
    used = (found[0], hidden_file, *(Path(str(m.__file__)) for m in (public, task) if m))
    parts = [p.read_bytes() for p in used]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    kernels = tuple(getattr(public, "KERNELS", ()))
    return Course(read_assignment(found[0]), checks_of(public), checks_of(hidden), key, task, kernels)


def grade_one(
    course: Course,
    path: Path,
    *,
    seed: int,
    limits: Limits,
    sandbox: bool,
    stop: threading.Event | None = None,
    forks: Forks | None = None,
) -> dict[str, Any]:
    """The result of one submission as plain values: score, max_score, checks, problem, and how its processes were
    started ("forked", "fresh" or "unsafe"; "none" when nothing was run). Never raises for its content."""
    submission = read_submission(path)
    task = course.open_task
    options: dict[str, Any] = {"limits": limits, "sandbox": sandbox, "stop": stop, "forks": forks}
    with contextlib.ExitStack() as processes:
        student = processes.enter_context(
            StudentProcess(
                [*submission.cells, getattr(task, "CELL", "")],
                calls_forbidden={f: e.forbidden for e in course.assignment.exercises for f in e.functions},
                files=getattr(task, "FILES", {}),
                **options,
            )
        )
        ask, started = _asking(student, submission), [student]
        if course.kernels and not submission.problem:
            from cs336_infer.course.kernel_process import KernelProcess

            ask = processes.enter_context(KernelProcess(course.kernels, submission.cells, ask, **options))
            started.append(ask.process)
        report = run(course.checks, ask, seed=seed)
        beyond = {"open_task": task.score(ask, seed)} if task else {}
    known = {
        "submission": str(path),
        "problem": submission.problem,
        "process": ", ".join(sorted({way for each in started for way in each.ways})) or "none",
    }
    return {**known, **_points(course, report), **beyond}


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
    journal: Journal | None = None,
    limits: Limits | None = None,
    sandbox: bool = True,
    forks: Forks | None = None,
) -> list[dict[str, Any]]:
    """Grade all, `jobs` at a time, with a progress bar. Results come in the order of `paths`.

    Args:
        seed: of the inputs; None draws a fresh one, so that nobody can know them (or takes the one of the run that is
            continued). It is part of each result.
        journal: keeps each finished submission at once. What it holds of the same submission, by content, and of the
            same checks and seed is not graded again.
        forks: what submissions are forked from; None makes one for this call. `Forks("why not")` starts fresh programs.
    """
    limits = limits or Limits()
    kept = journal.results if journal else {}
    drawn = next((r["seed"] for r in kept.values()), int.from_bytes(os.urandom(4))) if seed is None else seed
    keys = [_content_key(course, path) for path in paths]
    done = {key: kept[key] for key in keys if key in kept and kept[key]["seed"] == drawn}
    todo = {key: path for key, path in zip(keys, paths, strict=True) if key not in done}
    stop = threading.Event()
    shared = Forks() if forks is None else forks
    own = shared if forks is None else contextlib.nullcontext()

    def work(path: Path) -> dict[str, Any]:
        one = grade_one(course, path, seed=drawn, limits=limits, sandbox=sandbox, stop=stop, forks=shared)
        return {**one, "seed": drawn}

    bar = tqdm(total=len(paths), initial=len(paths) - len(todo), unit="submission", file=sys.stderr, disable=None)
    with bar, own, ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(work, path): key for key, path in todo.items()}
        try:
            for future in as_completed(futures):
                key = futures[future]
                try:
                    done[key] = future.result()
                    if journal:
                        journal.add(key, done[key])
                except (GradeError, SandboxUnavailable):
                    raise
                except Exception as error:  # not in the journal: a resumed run tries again
                    done[key] = {**_ungraded(course, todo[key], error), "seed": drawn}
                bar.update()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [{**done[key], "submission": str(path)} for key, path in zip(keys, paths, strict=True)]


def _ungraded(course: Course, path: Path, error: Exception) -> dict[str, Any]:
    said = one_line(f"{type(error).__name__}: {error}")
    problem = f"{printable(path.name)}: not graded, the grader failed ({said}): grade it again"

    def ask(name: str, /, *args: Any, **kwargs: Any) -> Any:
        raise AskError(problem, "Submission")

    return {
        "submission": str(path),
        "problem": problem,
        "process": "none",
        **_points(course, run(course.checks, ask, seed=0)),
    }


def _content_key(course: Course, path: Path) -> str:
    """Of the file's name and content."""
    parts = (course.key.encode(), os.fsencode(path), fingerprint(path).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


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
