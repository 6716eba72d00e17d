"""`cs336-infer grade`: the command line of the grader."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from cs336_infer.course import written
from cs336_infer.course.forks import Forks
from cs336_infer.course.grade import Course, GradeError, find_submissions, grade_class, open_course, statistics
from cs336_infer.course.grade_report import NOT_GRADED, check_places, write_csv, write_json, write_pages
from cs336_infer.course.journal import Journal
from cs336_infer.course.sandbox import SandboxUnavailable
from cs336_infer.course.submission import printable
from cs336_infer.types import check_integer


def grade(args: argparse.Namespace, forks: Forks) -> int:
    """Grade, print a line for each submission and write what was asked for. Returns 0 whatever the scores are."""
    check_integer("jobs", args.jobs, 1, 64)
    if args.resume and args.json is None:
        raise GradeError("--resume continues the journal beside --json FILE: name the file")
    if not args.paths and not (args.merge_questions and args.json and not args.questions):
        raise GradeError("name what to grade (PATH), or --merge-questions CSV and the --json FILE of an earlier run")
    if {args.questions, args.merge_questions} & {args.json, args.csv} - {None}:
        raise GradeError("the table of written answers must be another file than --json and --csv")
    course = open_course(args.course, args.assignment)
    if not args.paths:
        results = written.read_results(course, args.json)
        check_places(args.json, args.csv, args.html)
        _report(args, course, results, _marks(args, course, [r["submission"] for r in results]))
        return 0
    paths = find_submissions(args.paths)
    check_places(args.json, args.csv, args.html)
    marks = _marks(args, course, [str(path) for path in paths])  # mistakes in them are found before an hour of grading
    if args.questions:
        print(f"written answers: {written.export(course, paths, args.questions)}", file=sys.stderr)
    with contextlib.ExitStack() as held:
        if args.json:
            place = args.json.with_name(args.json.name + ".journal")
            journal = held.enter_context(Journal(place, course.key, resume=args.resume))
        else:
            journal = None
        _report(args, course, _grade(args, course, paths, journal, forks), marks)
        if journal:
            journal.remove()
    return 0


def _marks(args: argparse.Namespace, course: Course, submissions: list[str]) -> dict[tuple[str, str], written.Mark]:
    return written.read_marks(course, args.merge_questions, submissions) if args.merge_questions else {}


def _grade(
    args: argparse.Namespace, course: Course, paths: list[Path], journal: Journal | None, forks: Forks
) -> list[dict[str, Any]]:
    try:
        boxed = not args.unsafe_no_sandbox
        return grade_class(course, paths, seed=args.seed, jobs=args.jobs, journal=journal, sandbox=boxed, forks=forks)
    except SandboxUnavailable as e:
        raise GradeError(f"{e} (or --unsafe-no-sandbox, for code that you wrote yourself)") from None
    except KeyboardInterrupt:
        done = len(journal.results) if journal else 0
        how = "--resume goes on from there" if journal else "with --json FILE, --resume could go on"
        print(f"cs336-infer: stopped, {done} of {len(paths)} submissions are kept: {how}", file=sys.stderr)
        raise


def _report(
    args: argparse.Namespace,
    course: Course,
    results: list[dict[str, Any]],
    marks: dict[tuple[str, str], written.Mark],
) -> None:
    """Print a line for each submission and write what was asked for; written questions count once they have marks."""
    results = written.merged(course, results, marks)
    for result in results:
        print(_line(result))
    worst = statistics(results)[0]
    if worst["passed"] < worst["of"]:
        print(
            f"fails most: {worst['exercise']}, {worst['title']} ({worst['passed']} of {worst['of']} passed)",
            file=sys.stderr,
        )
    if args.json:
        write_json(args.json, course, results)
    if args.csv:
        write_csv(args.csv, course, results)
    if args.html:
        write_pages(args.html, course, results)


def _line(result: dict[str, Any]) -> str:
    waiting = [q["question"] for q in result["questions"] if q["points"] is None]
    notes = [result["problem"] or "", f"{', '.join(waiting)} {NOT_GRADED}" if waiting else ""]
    said = f"  ({'; '.join(filter(None, notes))})" if any(notes) else ""
    return f"{result['score']:g}/{result['max_score']:g}  {printable(result['submission'])}{said}"
