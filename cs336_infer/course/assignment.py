"""Reading the one source of an assignment: solutions/aN_slug/aN_slug.py, jupytext percent with nbgrader v3 metadata.

    solution cell   "solution": true                    code with regions, and `exercise={...}`: difficulty, importance,
                                                        minutes, gpu, forbidden
    check cell      "grade": true, "locked": true       code with points; belongs to the solution cell above it
    question        "grade": true, "solution": true     markdown with points and a region, graded by a person
    read-only cell  "locked": true

Regions and their markers are those of `regions`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from cs336_infer.course.build import BuildError, from_source
from cs336_infer.course.regions import HIDDEN, SOLUTION, Problem, Region, find_regions, parse
from cs336_infer.types import InferError

NAME = re.compile(r"(a\d+)_[a-z0-9]+(_[a-z0-9]+)*")
_GRADE_ID = re.compile(r"[A-Za-z0-9_-]+")
_CALL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class AssignmentError(InferError):
    """The source of an assignment cannot be used. One line that names the file, the cell and the problem."""


class Role(StrEnum):
    PLAIN = "plain"
    SOLUTION = "solution"
    CHECK = "check"
    QUESTION = "question"
    READ_ONLY = "read-only"


@dataclass(frozen=True)
class Cell:
    """A cell of the source; `number` counts from 1, `kind` is "code", "markdown" or "raw"."""

    number: int
    kind: str
    source: str
    metadata: Mapping[str, Any]
    role: Role
    grade_id: str
    points: float
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Exercise:
    """What a student writes in one solution cell. `functions` are matched by name when graded."""

    name: str
    functions: tuple[str, ...]
    points: float
    difficulty: int
    importance: int
    minutes: int
    gpu: bool
    forbidden: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A written answer that a person grades."""

    name: str
    points: float


@dataclass(frozen=True)
class Assignment:
    name: str  # a1_prefill_decode
    path: Path
    exercises: tuple[Exercise, ...]
    questions: tuple[Question, ...]
    cells: tuple[Cell, ...]

    @property
    def short(self) -> str:
        return self.name.split("_")[0]


def read_assignment(path: Path) -> Assignment:
    """The assignment whose source is `path`.

    Raises:
        AssignmentError: the source breaks a rule of this module; one line names the file, the cell and the rule.
    """
    if not NAME.fullmatch(path.stem) or path.resolve().parent.name != path.stem:
        raise AssignmentError(f"{path}: an assignment is aN_slug/aN_slug.py, such as a1_prefill_decode")
    try:
        notebook = from_source(path, max_cells=None)
    except BuildError as error:
        raise AssignmentError(str(error)) from None
    cells: list[Cell] = []
    exercises: list[Exercise] = []
    for number, cell in enumerate(notebook.cells, 1):
        try:
            cells.append(_cell(number, cell.cell_type, cell.source, cell.metadata))
            new = cells[-1]
            if new.grade_id and new.grade_id in (c.grade_id for c in cells[:-1]):
                raise Problem(f"another cell has the grade_id {new.grade_id!r}")
            if new.role is Role.SOLUTION:
                exercises.append(_exercise(new))
            elif new.role is Role.CHECK:
                if not exercises:
                    raise Problem("a check cell stands below the solution cell it checks; there is none above")
                exercises[-1] = replace(exercises[-1], points=exercises[-1].points + new.points)
        except Problem as problem:
            raise AssignmentError(f"{path.name}: cell {number}: {problem}") from None
    _refuse_unchecked(path, cells)
    questions = tuple(Question(c.grade_id, c.points) for c in cells if c.role is Role.QUESTION)
    return Assignment(path.stem, path, tuple(exercises), questions, tuple(cells))


def _refuse_unchecked(path: Path, cells: list[Cell]) -> None:
    graded = [c for c in cells if c.role in (Role.SOLUTION, Role.CHECK)]
    for cell, following in zip(graded, [*graded[1:], None], strict=True):
        if cell.role is Role.SOLUTION and (following is None or following.role is not Role.CHECK):
            raise AssignmentError(f"{path.name}: cell {cell.number}: {cell.grade_id!r} has no check cell below it")


def _cell(number: int, kind: str, source: str, metadata: Mapping[str, Any]) -> Cell:
    if "incorrectly_encoded_metadata" in metadata:
        raise Problem(f"its metadata is not JSON: {metadata['incorrectly_encoded_metadata']}")
    role, grade_id, points = _grading(kind, metadata.get("nbgrader"))
    if ("exercise" in metadata) != (role is Role.SOLUTION):
        which = "a solution cell needs" if role is Role.SOLUTION else "only a solution cell has"
        raise Problem(f"{which} `exercise` metadata")
    if role in (Role.SOLUTION, Role.CHECK):
        parse(source)
    regions = find_regions(source, kind)
    allowed = {Role.SOLUTION: SOLUTION, Role.QUESTION: SOLUTION, Role.CHECK: HIDDEN}.get(role)
    for region in regions:
        if region.kind != allowed:
            raise Problem(f"a {role} cell cannot hold a region {region.kind}")
    if allowed == SOLUTION and not regions:
        raise Problem(f"{grade_id!r} has no region between # BEGIN SOLUTION and # END SOLUTION")
    return Cell(number, kind, source, metadata, role, grade_id, points, regions)


def _grading(kind: str, meta: Any) -> tuple[Role, str, float]:
    if meta is None:
        return Role.PLAIN, "", 0
    if not isinstance(meta, Mapping):
        raise Problem(f"`nbgrader` metadata must be an object, not {meta!r}")
    if missing := {"schema_version", "grade_id", "grade", "solution", "locked"} - set(meta):
        raise Problem(f"`nbgrader` metadata lacks {', '.join(sorted(missing))}")
    if extra := set(meta) - {"schema_version", "grade_id", "grade", "solution", "locked", "task", "points"}:
        raise Problem(f"`nbgrader` metadata has the unknown {', '.join(sorted(extra))}")
    if meta["schema_version"] != 3:
        raise Problem(f"`nbgrader` metadata must have schema_version 3, not {meta['schema_version']!r}")
    grade_id = meta["grade_id"]
    if not isinstance(grade_id, str) or not _GRADE_ID.fullmatch(grade_id):
        raise Problem(f"a grade_id is made of letters, digits, - and _, not {grade_id!r}")
    flags = tuple(meta.get(f, False) for f in ("grade", "solution", "locked", "task"))
    roles = {
        (False, True, False, False): (Role.SOLUTION, ("code",)),
        (True, False, True, False): (Role.CHECK, ("code",)),
        (True, True, False, False): (Role.QUESTION, ("markdown",)),
        (False, False, True, False): (Role.READ_ONLY, ("code", "markdown", "raw")),
    }
    if not all(isinstance(f, bool) for f in flags) or flags not in roles:
        raise Problem(f"grade, solution, locked and task are {flags}: no kind of cell this course has")
    role, kinds = roles[flags]
    if kind not in kinds:
        raise Problem(f"a {role} cell is a {kinds[0]} cell, not {kind}")
    points = meta.get("points")
    graded = role in (Role.CHECK, Role.QUESTION)
    if graded and not (isinstance(points, int | float) and not isinstance(points, bool) and 0 <= points < 1e6):
        raise Problem(f"{grade_id!r} needs points >= 0, not {points!r}")
    if not graded and points:
        raise Problem(f"{grade_id!r} is a {role} cell and cannot have points")
    return role, grade_id, points or 0


def _exercise(cell: Cell) -> Exercise:
    meta: Any = cell.metadata["exercise"]
    wanted = {"difficulty", "importance", "minutes", "gpu", "forbidden"}
    if not isinstance(meta, Mapping) or set(meta) != wanted:
        have = ", ".join(sorted(meta)) if isinstance(meta, Mapping) else repr(meta)
        raise Problem(f"`exercise` needs exactly {', '.join(sorted(wanted))}; it has {have or 'nothing'}")
    for key, most in (("difficulty", 5), ("importance", 5), ("minutes", 600)):
        if type(meta[key]) is not int or not 1 <= meta[key] <= most:
            raise Problem(f"{key} must be a whole number from 1 to {most}, not {meta[key]!r}")
    if not isinstance(meta["gpu"], bool):
        raise Problem(f"gpu must be true or false, not {meta['gpu']!r}")
    calls = meta["forbidden"]
    if not isinstance(calls, list) or not all(isinstance(c, str) and _CALL.fullmatch(c) for c in calls):
        raise Problem(f"forbidden must be a list of names such as scaled_dot_product_attention, not {calls!r}")
    numbers = (meta["difficulty"], meta["importance"], meta["minutes"], meta["gpu"])
    return Exercise(cell.grade_id, _functions(cell), 0, *numbers, tuple(calls))


def _functions(cell: Cell) -> tuple[str, ...]:
    """Functions and classes of the cell that hold a region; where none does, all of its public ones."""
    defs = [n for n in parse(cell.source).body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    firsts = [r.first + 1 for r in cell.regions]
    holding = [d.name for d in defs if any(d.lineno <= f <= (d.end_lineno or 0) for f in firsts)]
    return tuple(holding or [d.name for d in defs if not d.name.startswith("_")])
