"""Written answers: out of the submissions into one table for a person, and the person's points back into the results.

    cs336-infer grade submissions/ --assignment a1 --json r.json --questions answers.csv
    cs336-infer grade --assignment a1 --json r.json --merge-questions answers.csv --csv r.csv --html pages/

An answer is found by the grade_id of its cell, or by the text of the question where an editor removed the metadata.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cs336_infer.course.grade import Course
from cs336_infer.course.grade_report import plain, questions_of, replace_file
from cs336_infer.course.regions import ANSWER_HERE
from cs336_infer.course.release import student_notebook
from cs336_infer.course.submission import texts
from cs336_infer.types import InferError

COLUMNS = ("submission", "question", "max_points", "answer", "points", "comment")
LONGEST = 30_000  # characters of an answer; a cell of a spreadsheet holds 32,767
RECOGNISED = 60  # characters at the start of a question by which it is known
NOT_FOUND = "[no cell with this question]"


class WrittenError(InferError):
    """The table of written answers cannot be read or written. One line that names the file, the row and the value."""


@dataclass(frozen=True)
class Mark:
    """What a person put into a row; `points` is None where they put none."""

    points: float | None
    comment: str


def export(course: Course, paths: Iterable[Path], place: Path) -> Path:
    """Write the answers of all submissions to `place`, a .csv file or a folder; a row for each question.

    Raises:
        WrittenError: the assignment has no questions, or the file there has points or comments of a person.
    """
    if not course.assignment.questions:
        raise WrittenError(f"{course.assignment.name} has no written questions")
    file = place if place.suffix.lower() == ".csv" else place / f"{course.assignment.name}_questions.csv"
    if file.is_file() and any(row["points"] or row["comment"] for _, row in _rows(file)):
        raise WrittenError(f"{file} holds points or comments: merge them first, or name another file")
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for path in paths:
        found = answers(course, path)
        for q in course.assignment.questions:
            table.writerow([_name(str(path)), q.name, f"{q.points:g}", plain(found[q.name]), "", ""])
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, out.getvalue())
    return file


def answers(course: Course, path: Path) -> dict[str, str]:
    """Question -> the answer in the submission at `path`; text cells that the student added right below belong to it.

    An empty text is no answer; `NOT_FOUND` says that no cell of the submission shows the question.
    """
    prompts = {
        cell.metadata["nbgrader"]["grade_id"]: cell.source.replace(ANSWER_HERE, "")
        for cell in student_notebook(course.assignment).cells
        if cell.metadata.get("nbgrader", {}).get("grade_id") in {q.name for q in course.assignment.questions}
    }
    released = {_squeezed(c.source) for c in student_notebook(course.assignment).cells}
    cells = texts(path)
    found: dict[str, str] = {}
    for name, prompt in prompts.items():
        start = _squeezed(prompt)[:RECOGNISED]
        places = [i for i, (grade_id, text) in enumerate(cells) if grade_id == name]
        places = places or [i for i, (_, text) in enumerate(cells) if start in _squeezed(text)]
        given = [_answer(cells, place, prompt, released) for place in places]
        found[name] = _clean("\n\n".join(dict.fromkeys(filter(None, given)))) if places else NOT_FOUND
    return found


def _answer(cells: Sequence[tuple[str, str]], place: int, prompt: str, released: set[str]) -> str:
    """What stands in a question's cell besides the question, and in new text cells below."""
    asked = {line.strip() for line in prompt.splitlines()} | {ANSWER_HERE}
    lines = [line for line in cells[place][1].splitlines() if line.strip() not in asked or not line.strip()]
    parts = ["\n".join(lines).replace(ANSWER_HERE, "").strip()]
    for grade_id, text in cells[place + 1 :]:
        if grade_id or _squeezed(text) in released:
            break
        parts.append(text.strip())
    return "\n\n".join(filter(None, parts))


def _squeezed(text: str) -> str:
    return " ".join(text.split()).casefold()


def _clean(text: str) -> str:
    text = re.sub(r"[^\S\n]", " ", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = "".join(c for c in text if c == "\n" or c.isprintable()).strip()
    return text if len(text) <= LONGEST else text[:LONGEST] + " [cut here]"


def _name(submission: str) -> str:
    """A submission's name as the table shows it."""
    return plain(submission).encode("utf-8", "backslashreplace").decode()


def read_marks(course: Course, file: Path, submissions: Iterable[str]) -> dict[tuple[str, str], Mark]:
    """(submission, question) -> what a person put there.

    Raises:
        WrittenError: names the row, as a spreadsheet counts it, whose submission or question is not known, that is
            there twice, or whose points are not a number from 0 to the most.
    """
    names = {_name(s).strip(): s for s in submissions}
    most = {q.name: q.points for q in course.assignment.questions}
    marks: dict[tuple[str, str], Mark] = {}
    for number, row in _rows(file):
        where = f"{file} row {number}"
        if row["submission"] not in names:
            raise WrittenError(f"{where}: no submission {row['submission']!r} in the results")
        if row["question"] not in most:
            raise WrittenError(f"{where}: no question {row['question']!r} in {course.assignment.name}")
        key = names[row["submission"]], row["question"]
        if key in marks:
            raise WrittenError(f"{where}: {key[1]!r} of {row['submission']!r} is there twice")
        marks[key] = Mark(_points(where, row["points"], most[key[1]]), row["comment"])
    return marks


def _points(where: str, text: str, most: float) -> float | None:
    if not text:
        return None
    try:
        points = float(text)
    except ValueError:
        points = math.nan
    if not math.isfinite(points):
        raise WrittenError(f"{where}: points {text!r} are not a number")
    if not 0 <= points <= most:
        raise WrittenError(f"{where}: points {text} are not from 0 to {most:g}")
    return points


def _rows(file: Path) -> Iterable[tuple[int, dict[str, str]]]:
    """Rows with their numbers, the heading being row 1; empty ones are left out. Also what spreadsheets save: with a
    byte order mark, or with semicolons and then decimal commas."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        heading = text.split("\n", 1)[0]
        comma = "," in heading or ";" not in heading
        table = list(csv.reader(io.StringIO(text, newline=""), delimiter="," if comma else ";"))
    except (OSError, ValueError, csv.Error) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise WrittenError(f"{file}: cannot be read: {said}") from None
    head = [name.strip() for name in table[0]] if table else []
    if missing := [name for name in COLUMNS if name not in head]:
        raise WrittenError(f"{file} row 1: no column {', '.join(missing)}")
    for number, cells in enumerate(table[1:], 2):
        row = dict(zip(head, (cell.strip() for cell in cells), strict=False))
        if any(row.values()):
            row = {name: row.get(name, "") for name in COLUMNS}
            yield number, row if comma else {**row, "points": row["points"].replace(",", ".")}


def merged(
    course: Course, results: Sequence[dict[str, Any]], marks: Mapping[tuple[str, str], Mark]
) -> list[dict[str, Any]]:
    """The results with a list "questions" each, and the scores of the checks kept as "auto_score", "auto_max_score".

    A question that is graded counts in score and max_score; one that is not counts in neither and keeps the points
    and the comment of an earlier merge, if there was one.
    """
    new: list[dict[str, Any]] = []
    for result in results:
        rows: list[dict[str, Any]] = []
        for old in questions_of(course, result):
            mark = marks.get((result["submission"], old["question"]), Mark(None, ""))
            points = old["points"] if mark.points is None else mark.points
            rows.append({**old, "points": points, "comment": mark.comment or old["comment"]})
        graded = [row for row in rows if row["points"] is not None]
        auto, most = result.get("auto_score", result["score"]), result.get("auto_max_score", result["max_score"])
        scores = {
            "score": auto + sum(row["points"] for row in graded),
            "max_score": most + sum(row["max_points"] for row in graded),
            "auto_score": auto,
            "auto_max_score": most,
            "questions": rows,
        }
        new.append({**result, **scores})
    return new


def read_results(course: Course, file: Path) -> list[dict[str, Any]]:
    """The submissions in a JSON of an earlier run.

    Raises:
        WrittenError: it cannot be read, is not a result, or is one of another assignment.
    """
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
        name, results = whole["assignment"], list(whole["submissions"])
        if not all(isinstance(r["submission"], str) and r["checks"] and r["score"] >= 0 for r in results):
            raise ValueError
    except OSError as error:
        raise WrittenError(f"{file}: cannot be read: {error.strerror}; grade first, with --json {file}") from None
    except (ValueError, KeyError, TypeError):
        raise WrittenError(f"{file}: not a result of grading; grade again, with --json {file}") from None
    if name != course.assignment.name:
        raise WrittenError(f"{file}: the result of {name}, not of {course.assignment.name}")
    return results
