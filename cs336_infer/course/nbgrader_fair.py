"""Parts for nbgrader 0.9.6 that make it fair; `nbgrader_config.py` of the generated course folder uses them.

nbgrader by itself stops at a duplicated cell, loses the points of a check cell whose metadata an editor removed, does
not find a renamed notebook, and puts one stub for every exercise.
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell
from nbgrader import preprocessors as nbgrader
from nbgrader.api import Gradebook
from nbgrader.utils import is_grade, is_solution

from cs336_infer.course.regions import ANSWER_HERE, Problem, stub, without_answer, without_hidden


class Stubs(nbgrader.NbGraderPreprocessor):
    """The stubs of `make release`: steps stay, and the error names the exercise."""

    def preprocess_cell(self, cell: NotebookNode, resources: Any, index: int) -> tuple[NotebookNode, Any]:
        if is_solution(cell):
            short = resources["nbgrader"]["assignment"].split("_")[0]
            label = f"{short} {cell.metadata.nbgrader.grade_id}"
            cell.source = stub(cell.source, label) if cell.cell_type == "code" else without_answer(cell.source)
        return cell, resources


class HideTests(nbgrader.ClearHiddenTests):
    """Removes hidden regions from check cells; what a student writes elsewhere cannot stop the feedback."""

    def preprocess_cell(self, cell: NotebookNode, resources: Any, cell_index: int) -> tuple[NotebookNode, Any]:
        if is_grade(cell) and not is_solution(cell):
            return super().preprocess_cell(cell, resources, cell_index)
        return cell, resources


class Mend(nbgrader.OverwriteCells):
    """Gives every cell of the release back its metadata, and adds the check cells that are gone at the end.

    A cell is known by its grade_id; without one by the functions it defines (solution), its text (check) or its first
    line (question). Of cells with the same grade_id the last counts.
    """

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        about = resources["nbgrader"]
        with Gradebook(about["db_url"]) as gradebook:
            notebook: Any = gradebook.find_notebook(about["notebook"], about["assignment"])
            points = {cell.name: cell.max_score for cell in notebook.grade_cells}
            solutions = {cell.name for cell in notebook.solution_cells}
            wanted = [(cell, metadata_of(cell, points, solutions)) for cell in notebook.source_cells]
            mend(nb, wanted)
        return super().preprocess(nb, resources)


def metadata_of(cell: Any, points: dict[str, float], solutions: set[str]) -> dict[str, Any]:
    """nbgrader's metadata of a cell in its gradebook."""
    found = {
        "schema_version": 3,
        "grade_id": cell.name,
        "grade": cell.name in points,
        "solution": cell.name in solutions,
        "locked": cell.locked,
        "task": False,
        "cell_type": cell.cell_type,
        "checksum": cell.checksum,
    }
    return {**found, "points": points[cell.name]} if cell.name in points else found


def mend(notebook: NotebookNode, wanted: Iterable[tuple[Any, dict[str, Any]]]) -> None:
    """Put the metadata on the cells of `notebook` it belongs to, remove all other metadata of nbgrader.

    Args:
        wanted: cells with `name`, `source` and `cell_type`, in order, and the metadata of each.
    """
    known: dict[str, NotebookNode] = {}
    for cell in notebook.cells:
        grade_id = cell.metadata.pop("nbgrader", {}).get("grade_id")
        if grade_id:
            known[grade_id] = cell
    taken = {id(cell) for cell in known.values()}
    for source, metadata in wanted:
        cell = known.get(source.name)
        if cell is None:
            cell = next((c for c in notebook.cells if id(c) not in taken and _same(c, source, metadata)), None)
        if cell is None:
            if metadata["solution"] and not metadata["grade"]:
                continue  # nothing was written, nothing is graded
            new = new_code_cell if source.cell_type == "code" else new_markdown_cell
            cell = new(source.source)
            notebook.cells.append(cell)
        taken.add(id(cell))
        cell.metadata["nbgrader"] = metadata
        if metadata["locked"]:
            cell.source = source.source  # with the hidden regions


def _same(cell: NotebookNode, source: Any, metadata: dict[str, Any]) -> bool:
    if metadata["solution"] and metadata["grade"]:
        prompt = source.source.replace(ANSWER_HERE, "").strip().split("\n")[0]
        return cell.cell_type == "markdown" and prompt in cell.source
    if metadata["solution"]:
        return bool(_defined(source.source)) and _defined(source.source) <= _defined(cell.source)
    try:
        visible = without_hidden(source.source)
    except Problem:
        visible = source.source
    return cell.source.strip() in (visible.strip(), source.source.strip())


def _defined(source: str) -> set[str]:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return set()
    return {n.name for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}


def expected_name(assignment: str, student: str, notebooks: list[str]) -> None:
    """Before autograding: a single notebook with another name, such as `a1 (1).ipynb`, is copied to the right one."""
    wanted = f"{assignment}.ipynb"
    if len(notebooks) == 1 and Path(notebooks[0]).name != wanted:
        right = Path(notebooks[0]).with_name(wanted)
        shutil.copy(notebooks[0], right)
        notebooks[:] = [str(right)]


GENERATE = [
    nbgrader.LockCells,
    Stubs,
    nbgrader.ClearOutput,
    nbgrader.CheckCellMetadata,
    nbgrader.ComputeChecksums,
    nbgrader.SaveCells,
    HideTests,
    nbgrader.ComputeChecksums,
    nbgrader.CheckCellMetadata,
]
"""Instead of nbgrader's own list; its stub differs, and headers, marking schemes and hashed tests are not used."""

SANITIZE = [nbgrader.ClearOutput, nbgrader.OverwriteKernelspec, Mend, nbgrader.CheckCellMetadata]
