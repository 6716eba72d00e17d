"""Submissions of assignment 1 for tests of the graders: the student's notebook, filled in, and then mishandled."""

from __future__ import annotations

import ast
import copy
import importlib.util
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from cs336_infer.course.assignment import Role, read_assignment

REPO = Path(__file__).resolve().parents[2]
NAME = "a1_prefill_decode"
SOURCE = REPO / "solutions" / NAME / f"{NAME}.py"
ANSWER = "=The time of decode at batch 1 does not change."


def reference() -> dict[str, str]:
    """Exercise -> the code of its solution cell."""
    return {cell.grade_id: cell.source for cell in read_assignment(SOURCE).cells if cell.role is Role.SOLUTION}


def second() -> dict[str, str]:
    """Exercise -> the second solution's function, which warns and writes to stderr; what stands above them is "top"."""
    text = (REPO / "tests" / "mutants" / f"{NAME}_second.py").read_text(encoding="utf-8")
    parts = [part.strip() for part in text.split("# %%\n")[1:]]
    return {"top": parts[0]} | {ast.parse(part).body[0].name: part for part in parts[1:]}  # type: ignore[attr-defined]


def mutants() -> list[tuple[str, str, str, str, str]]:
    spec = importlib.util.spec_from_file_location("mutants_a1", REPO / "tests" / "mutants" / f"{NAME}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MUTANTS


def mutated(number: int) -> dict[str, str]:
    """The reference with one of its bugs."""
    _, exercise, before, after, _ = mutants()[number]
    code = reference()
    return {**code, exercise: code[exercise].replace(before, after)}


def filled(release: NotebookNode, code: dict[str, str], answer: str = ANSWER) -> NotebookNode:
    """A student's copy of `release` with these solution cells and this answer to the question."""
    notebook = copy.deepcopy(release)
    for cell in notebook.cells:
        meta = cell.metadata.get("nbgrader", {})
        if meta.get("solution") and cell.cell_type == "code" and meta["grade_id"] in code:
            cell.source = code[meta["grade_id"]]
        elif meta.get("solution") and meta.get("grade") and answer:
            cell.source = cell.source.replace("Your answer here.", answer)
    if "top" in code:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(code["top"]))
    return notebook


def cell_of(notebook: NotebookNode, grade_id: str) -> Any:
    return next(c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)


def without_metadata(notebook: NotebookNode) -> NotebookNode:
    """As some editors save it."""
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        cell.metadata = NotebookNode()
    return notebook


def mishandled(notebook: NotebookNode) -> NotebookNode:
    """A solution and a check cell twice, one check cell deleted, one solution cell turned into text."""
    notebook = copy.deepcopy(notebook)
    for grade_id in ("rope", "rope_check"):
        cell = cell_of(notebook, grade_id)
        again = copy.deepcopy(cell)
        again.id = f"again-{grade_id.replace('_', '-')}"
        notebook.cells.insert(notebook.cells.index(cell) + 1, again)
    notebook.cells.remove(cell_of(notebook, "decode_step_cost_check"))
    cell = cell_of(notebook, "next_token_distribution")
    cell.cell_type = "markdown"
    cell.pop("outputs", None)
    cell.pop("execution_count", None)
    return notebook


def hand_in(notebook: NotebookNode, folder: Path, student: str, name: str = f"{NAME}.ipynb") -> Path:
    """Save it where nbgrader looks for submissions."""
    path = folder / "submitted" / student / NAME / name
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path
