"""Write both notebooks of an assignment from its one source, solutions/aN_slug/aN_slug.py.

    python -m cs336_infer.course.release                       every assignment in solutions/
    python -m cs336_infer.course.release solutions/a1_slug     only this one
    python -m cs336_infer.course.release --check               write nothing; name what is stale

solutions/aN_slug/aN_slug.ipynb is the source, executed. assignments/aN_slug/aN_slug.ipynb is what a student gets:
stubs, no hidden checks, no outputs. The same source gives the same bytes of the student's notebook.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from tqdm import tqdm

from cs336_infer.course import build
from cs336_infer.course.assignment import Assignment, AssignmentError, Cell, Exercise, Role, read_assignment
from cs336_infer.course.regions import Problem, region_lines, stub, without_answer, without_hidden
from cs336_infer.types import InferError

HEADER_TAG = "exercise-header"
SHORTEST_SECRET = 13  # characters; shorter lines, such as `return x`, say nothing
COMMAND = "make release"


class ReleaseError(InferError):
    """A notebook of an assignment is stale, or must not be written. One line that names it."""


def solution_notebook(assignment: Assignment) -> NotebookNode:
    """The source with a header above each exercise, not executed."""
    return _notebook(assignment, {cell.number: cell.source for cell in assignment.cells})


def student_notebook(assignment: Assignment) -> NotebookNode:
    """What a student gets.

    Raises:
        AssignmentError: a cell is not Python without its regions.
        ReleaseError: the notebook would hold a line of a solution or of a hidden check.
    """
    sources: dict[int, str] = {}
    for cell in assignment.cells:
        try:
            sources[cell.number] = _for_student(cell, assignment.short)
        except Problem as problem:
            raise AssignmentError(f"{assignment.path.name}: cell {cell.number}: {problem}") from None
    notebook = _notebook(assignment, sources)
    refuse_leaks(assignment, notebook)
    return notebook


def _for_student(cell: Cell, short: str) -> str:
    match cell.role:
        case Role.SOLUTION:
            return stub(cell.source, f"{short} {cell.grade_id}")
        case Role.CHECK:
            return without_hidden(cell.source)
        case Role.QUESTION:
            return without_answer(cell.source)
        case _:
            return cell.source


def _notebook(assignment: Assignment, sources: dict[int, str]) -> NotebookNode:
    exercises = {e.name: e for e in assignment.exercises}
    cells: list[NotebookNode] = []
    for cell in assignment.cells:
        if cell.role is Role.SOLUTION:
            cells.append(
                nbformat.v4.new_markdown_cell(header(exercises[cell.grade_id]), metadata={"tags": [HEADER_TAG]})
            )
        new: Any = getattr(nbformat.v4, f"new_{cell.kind}_cell")
        cells.append(new(sources[cell.number], metadata=dict(cell.metadata)))
    notebook = build.assemble(cells)
    nbformat.validate(notebook)
    return notebook


def header(exercise: Exercise) -> str:
    """The markdown above an exercise: what it asks for in time, in points and in hardware."""
    facts = [
        f"difficulty {exercise.difficulty}/5",
        f"importance {exercise.importance}/5",
        f"about {exercise.minutes} minutes",
        f"{exercise.points:g} point{'' if exercise.points == 1 else 's'}",
        "needs a GPU" if exercise.gpu else "needs no GPU",
    ]
    lines = [f"### Exercise `{exercise.name}`", "", " · ".join(facts)]
    if exercise.forbidden:
        lines += ["", f"Refused library calls: {', '.join(f'`{call}`' for call in exercise.forbidden)}"]
    return "\n".join(lines)


def refuse_leaks(assignment: Assignment, notebook: NotebookNode) -> None:
    """Refuse a student's notebook with a line of a region in it, in a cell or in metadata.

    Lines of up to 12 characters, and lines that the source also has outside of regions, give nothing away.

    Raises:
        ReleaseError: names the cell and the line.
    """
    secrets: dict[str, int] = {}
    known: set[str] = set()
    for cell in assignment.cells:
        inside, outside = region_lines(cell.source, cell.kind)
        secrets.update({line: cell.number for line in inside if len(line) >= SHORTEST_SECRET})
        known.update(outside)
    for number, cell in enumerate(notebook.cells, 1):
        for text in _texts(cell):
            for secret in secrets.keys() - known:
                if secret in text and re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text):
                    raise ReleaseError(
                        f"{assignment.name}: cell {number} of the student's notebook would hold {secret!r}, "
                        f"a line of a region in cell {secrets[secret]} of {assignment.path.name}"
                    )


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def targets(assignment: Assignment) -> tuple[Path, Path]:
    """Where the solution notebook and the student's notebook are."""
    source = assignment.path.resolve()
    student = source.parents[2] / "assignments" / assignment.name / f"{assignment.name}.ipynb"
    return source.with_suffix(".ipynb"), student


def write(assignment: Assignment) -> None:
    """Execute the solution and write both notebooks, each all or nothing; neither when one cannot be made.

    Raises:
        InferError: a cell fails, or the student's notebook is refused.
    """
    solution, student = targets(assignment)
    text = build.text_of(student_notebook(assignment))
    build.write_executed(solution_notebook(assignment), solution, assignment.path.name)
    student.parent.mkdir(parents=True, exist_ok=True)
    build.replace_text(student, text)


def stale(assignment: Assignment) -> list[str]:
    """What is not as its source gives it, a line each; nothing is executed."""
    solution, student = targets(assignment)
    found: list[str] = []
    try:
        build.compare(solution_notebook(assignment), solution, COMMAND)
    except InferError as error:
        found.append(f"solutions/{assignment.name}/{error}")
    try:
        wanted = build.text_of(student_notebook(assignment)).encode()
        place = f"assignments/{assignment.name}/{student.name}"
        if not student.is_file():
            found.append(f"{place} does not exist: run `{COMMAND}`")
        elif student.read_bytes() != wanted:
            found.append(f"{place} is not what solutions/{assignment.name} gives: run `{COMMAND}`")
    except InferError as error:
        found.append(str(error))
    return found


def sources_in(folder: Path) -> list[Path]:
    """The sources of all assignments in `folder`."""
    inner = sorted(p for p in folder.glob("*") if p.is_dir() and p.name[0] not in "._")
    return [p / f"{p.name}.py" for p in inner]


def orphans(sources: Iterable[Path], folder: Path) -> list[str]:
    """Folders in `folder` (assignments/) that no source stands behind, a line each."""
    names = {s.stem for s in sources}
    left = sorted(p.name for p in folder.glob("*") if p.is_dir() and p.name[0] not in "._" and p.name not in names)
    return [f"assignments/{name} has no source in solutions/: delete it" for name in left]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cs336_infer.course.release", description="Write assignments.")
    parser.add_argument("folders", nargs="*", type=Path, help="solutions/aN_slug; all of solutions/ when none is named")
    parser.add_argument("--check", action="store_true", help="write nothing; name what is stale")
    args = parser.parse_args(argv)
    sources = [f if f.suffix == ".py" else f / f"{f.resolve().name}.py" for f in args.folders]
    found: list[str] = []
    if not args.folders:
        sources = sources_in(Path("solutions"))
        found = orphans(sources, Path("assignments"))
    if not sources and not found:
        print("release: there is no assignment in solutions/, nothing to do")
        return 0
    bar = tqdm(sources, disable=args.check or None, unit="assignment")
    for source in bar:
        bar.set_postfix_str(source.stem)
        try:
            assignment = read_assignment(source)
            if args.check:
                found += stale(assignment)
            else:
                write(assignment)
        except InferError as error:
            found.append(str(error))
    for line in found:
        print(f"release: {line}", file=sys.stderr)
    if found:
        return 1
    names = ", ".join(s.stem for s in sources)
    print(f"release: {names} {'fresh' if args.check else 'written, solution and student notebook'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
