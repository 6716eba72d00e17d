"""What grading leaves behind: one JSON, one CSV, and a page for each student."""

from __future__ import annotations

import csv
import hashlib
import html
import io
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cs336_infer.course.grade import Course, GradeError, statistics
from cs336_infer.course.submission import printable
from cs336_infer.files import replace_bytes

COUNTED = "score and max_score: all checks, and the written questions that a person has graded so far"
NOT_GRADED = "not graded yet"


def check_places(file_json: Path | None, file_csv: Path | None, folder: Path | None) -> None:
    """Before an hour of grading: whether its results can be written where they shall be.

    Raises:
        GradeError: not there, or two of them in the same place.
    """
    files = [f for f in (file_json, file_csv) if f is not None]
    if len({os.path.abspath(p) for p in (*files, *([folder] if folder else []))}) < len(files) + (folder is not None):
        raise GradeError("--json, --csv and --html must be different places")
    for place in files:
        if place.is_dir():
            raise GradeError(f"{place}: cannot be written: it is a folder")
        _probe(place.parent, place)
    if folder:
        _make(folder)
        _probe(folder, folder)


def _probe(folder: Path, place: Path) -> None:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as e:
        raise GradeError(f"{place}: cannot be written: {e.strerror}") from None


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise GradeError(f"{folder}: cannot be made: {e.strerror}") from None


def write_json(path: Path, course: Course, results: Sequence[dict[str, Any]]) -> None:
    """{"assignment", "points" (what the scores count), "checks" (statistics over the class), "submissions"}; replaces
    the file in one step."""
    whole = {
        "assignment": course.assignment.name,
        "points": COUNTED,
        "checks": statistics(results),
        "submissions": list(results),
    }
    replace_file(path, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def write_csv(path: Path, course: Course, results: Sequence[dict[str, Any]]) -> None:
    """A row a submission: score, max_score, points of each exercise and each written question, and the problem of an
    unreadable file."""
    exercises = [e.name for e in course.assignment.exercises]
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(
        ["submission", "score", "max_score", *exercises, *(q.name for q in course.assignment.questions), "problem"]
    )
    for r in results:
        points = [sum(c["score"] for c in r["checks"] if c["exercise"] == e) for e in exercises]
        points += [NOT_GRADED if q["points"] is None else q["points"] for q in questions_of(course, r)]
        table.writerow([plain(r["submission"]), r["score"], r["max_score"], *points, plain(r["problem"] or "")])
    replace_file(path, out.getvalue())


def write_pages(folder: Path, course: Course, results: Sequence[dict[str, Any]]) -> list[Path]:
    """One page a submission. A hidden check shows the property that failed, and nothing of its inputs or its code."""
    _make(folder)
    pages = []
    for r in results:
        name = Path(r["submission"])
        tail = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]  # two students may hand in the same file name
        page = folder / f"{printable(name.stem)[:50]}-{tail}.html"
        replace_file(page, page_of(course, r))
        pages.append(page)
    return pages


def page_of(course: Course, result: dict[str, Any]) -> str:
    """The report of one student as HTML."""
    rows = []
    for c in result["checks"]:
        said = c["message"] if not c["hidden"] or c["outcome"] == "not done" else ""
        mark = "passed" if c["outcome"] == "passed" else "not passed"
        kind = "hidden" if c["hidden"] else "public"
        cells = [c["exercise"], c["title"], kind, mark, f"{c['score']:g} / {c['points']:g}", said]
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(x))}</td>" for x in cells) + "</tr>")
    problem = f"<p><b>{html.escape(result['problem'])}</b></p>" if result["problem"] else ""
    title = html.escape(f"{course.assignment.name}: {Path(result['submission']).name}")
    score = f"{result['score']:g} of {result['max_score']:g} points"
    questions = "".join(_question(q) for q in questions_of(course, result))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: 0.3em 0.6em; border-bottom: 1px solid #ddd; vertical-align: top; }}
</style></head><body><h1>{title}</h1><p>{score}</p>{problem}<table>
<tr><th>exercise</th><th>property</th><th>check</th><th>result</th><th>points</th><th></th></tr>
{chr(10).join(rows)}
</table>{questions}</body></html>
"""


def questions_of(course: Course, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The written questions of a result: question, max_points, points (None: not graded yet), comment."""
    blank = [
        {"question": q.name, "max_points": q.points, "points": None, "comment": ""} for q in course.assignment.questions
    ]
    return result.get("questions", blank)


def _question(question: dict[str, Any]) -> str:
    most = f"{question['max_points']:g} points"
    state = f"{NOT_GRADED} by a person ({most}, not in the score above)"
    if question["points"] is not None:
        state = f"{question['points']:g} of {most}"
    comment = f"<br>{html.escape(question['comment'])}" if question["comment"] else ""
    return f"<p>Question {html.escape(question['question'])}: {state}.{comment}</p>"


def plain(text: str) -> str:
    """A spreadsheet must not take a file's name for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path`, all or nothing.

    Raises:
        GradeError: it cannot be written.
    """
    try:
        replace_bytes(path, text.encode(errors="backslashreplace"))  # a name may be no UTF-8
    except OSError as e:
        raise GradeError(f"{path}: cannot be written: {e.strerror}") from None
