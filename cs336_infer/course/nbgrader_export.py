"""A course folder for nbgrader 0.9.6 from the sources of the assignments.

    python -m cs336_infer.course.nbgrader_export               every assignment in solutions/ -> dist/nbgrader/
    cd dist/nbgrader && nbgrader generate_assignment a1_prefill_decode

    nbgrader_config.py            settings that make nbgrader fair; your own go into nbgrader_local.py beside it
    source/aN_slug/aN_slug.ipynb  the instructor's notebook; the points of a check cell are public and hidden ones
    hidden/aN_slug.py             hidden checks, outside of what is released; found through nbgrader_config.py

Written again, the folder keeps everything else: gradebook.db, submitted/, autograded/, feedback/.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from nbformat import NotebookNode

from cs336_infer.course import build, release
from cs336_infer.course.assignment import Assignment, Cell, Exercise, Role
from cs336_infer.course.grade import Course, open_course
from cs336_infer.types import InferError

SKIP = "skip-execution"  # a tag that nbclient obeys
CONFIG = '''\
"""Settings of nbgrader 0.9.6 for this course. Written by `make release NBGRADER=1`: yours go into nbgrader_local.py."""

import os
import sys
from pathlib import Path

from cs336_infer.course import nbgrader_fair

# nbgrader starts `alembic`, which lies beside it, by its bare name.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

here = Path(__file__).resolve().parent
# Read by the check cells, in the kernels started here: where the hidden checks are, and one seed for all students.
os.environ["CS336_INFER_HIDDEN_CHECKS"] = str(here / "hidden")
os.environ.setdefault("CS336_INFER_SEED", str(int.from_bytes(os.urandom(4))))

c = get_config()
c.CourseDirectory.course_id = "cs336_infer"
c.CourseDirectory.root = str(here)

# The release: our stubs, so that an unfinished exercise names itself.
c.GenerateAssignment.preprocessors = nbgrader_fair.GENERATE

# Grading: duplicated, deleted, retyped cells and lost metadata are mended; a renamed notebook is found.
c.Autograde.sanitize_preprocessors = nbgrader_fair.SANITIZE
c.Autograde.pre_convert_hook = nbgrader_fair.expected_name
# Seconds for a cell. An endless loop costs one question of 20 s where Python can interrupt it, else the cell.
c.Execute.timeout = 180
# Warnings and progress bars cost no points: values decide, streams never.
c.IgnorePattern.enabled = True
c.IgnorePattern.pattern = r"[\\s\\S]*"

# Feedback without the lines of hidden checks.
c.GenerateFeedback.preprocessors = [
    nbgrader_fair.HideTests,
    "nbgrader.preprocessors.GetGrades",
    "nbconvert.preprocessors.CSSHTMLHeaderPreprocessor",
]

if (here / "nbgrader_local.py").is_file():
    load_subconfig("nbgrader_local.py", path=str(here))
'''


class ExportError(InferError):
    """An assignment cannot be exported for another grader. One line that names it and says why."""


def source_notebook(course: Course) -> NotebookNode:
    """The instructor's notebook, not executed.

    The last check cell of an exercise has all its points, public and hidden; cells behind the last check cell are
    tagged so that nothing executes them when graded.

    Raises:
        ExportError: a check cell has a hidden region of its own, which only nbgrader would run.
    """
    assignment, totals = course.assignment, points_of(course)
    exercises = {e.name: replace(e, points=totals[e.name]) for e in assignment.exercises}
    last = last_checks(assignment)
    cells: list[Cell] = []
    for cell in assignment.cells:
        if cell.role is Role.CHECK:
            if cell.regions:
                where = f"{assignment.name}: cell {cell.number}"
                raise ExportError(f"{where}: a region of hidden tests is not exported; put it into tests/hidden/")
            exercise = last.get(cell.number)
            points = totals[exercise] if exercise else 0
            metadata = {**cell.metadata, "nbgrader": {**cell.metadata["nbgrader"], "points": points}}
            source = check_source(assignment.name, exercises[exercise], cell.source) if exercise else cell.source
            cell = replace(cell, source=source, points=points, metadata=metadata)
        elif cell.role is Role.PLAIN and cell.kind == "code" and cell.number > max(last, default=0):
            cell = replace(cell, metadata={**cell.metadata, "tags": [*cell.metadata.get("tags", []), SKIP]})
        cells.append(cell)
    whole = replace(assignment, cells=tuple(cells), exercises=tuple(exercises.values()))
    return release.solution_notebook(whole)


def points_of(course: Course) -> dict[str, float]:
    """Points of each exercise, public and hidden checks together, as `cs336-infer grade` gives them."""
    return {e.name: sum(c.points for c in course.checks if c.exercise == e.name) for e in course.assignment.exercises}


def last_checks(assignment: Assignment) -> dict[int, str]:
    """Number of the last check cell of each exercise -> the exercise."""
    last: dict[str, int] = {}
    exercise = ""
    for cell in assignment.cells:
        if cell.role is Role.SOLUTION:
            exercise = cell.grade_id
        elif cell.role is Role.CHECK:
            last[exercise] = cell.number
    return {number: name for name, number in last.items()}


def check_source(assignment: str, exercise: Exercise, visible: str) -> str:
    """A check cell: what the student sees, and around it what counts the points; see `graded_cell`."""
    refused = json.dumps(list(exercise.forbidden))
    return "\n".join(
        [
            "# BEGIN HIDDEN TESTS",
            "from cs336_infer.course import graded_cell",
            *(["check_public = graded_cell.later"] if "check_public" in visible else []),
            "# END HIDDEN TESTS",
            visible,
            "# BEGIN HIDDEN TESTS",
            f"graded_cell.points({json.dumps(assignment)}, {json.dumps(exercise.name)}, globals(), {refused})",
            "# END HIDDEN TESTS",
        ]
    )


def write(root: Path, sources: Iterable[Path], folder: Path) -> list[str]:
    """Write the course folder for these sources of the checkout at `root`; the names of the assignments.

    Raises:
        InferError: a source or its hidden checks cannot be used; nothing is written then.
    """
    courses = [open_course(root, source.stem.split("_")[0]) for source in sources]
    texts = {"nbgrader_config.py": CONFIG}
    for course in courses:
        name = course.assignment.name
        texts[f"source/{name}/{name}.ipynb"] = build.text_of(source_notebook(course))
        texts[f"hidden/{name}.py"] = (root / "tests" / "hidden" / f"{name}.py").read_text(encoding="utf-8")
    for place, text in texts.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        build.replace_text(folder / place, text)
    return [course.assignment.name for course in courses]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cs336_infer.course.nbgrader_export", description="For nbgrader.")
    parser.add_argument("folders", nargs="*", type=Path, help="solutions/aN_slug; all of solutions/ when none is named")
    parser.add_argument("--to", type=Path, default=Path("dist/nbgrader"), metavar="DIR", help="default dist/nbgrader")
    args = parser.parse_args(argv)
    try:
        sources = [f / f"{f.resolve().name}.py" for f in args.folders] or release.sources_in(Path("solutions"))
        names = write(Path("."), sources, args.to)
    except InferError as error:
        print(f"nbgrader export: {error}", file=sys.stderr)
        return 1
    print(f"nbgrader export: {', '.join(names)} in {args.to}; there, run: nbgrader generate_assignment {names[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
