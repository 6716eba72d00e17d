"""The gates every assignment must pass: its reference scores full, the untouched student version nothing, every
realistic bug is caught by the check meant for it, and another correct solution scores full too."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import linecache
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cs336_infer.course.assignment import Assignment, Role, read_assignment
from cs336_infer.course.checks import Outcome, Report, local_ask, run
from cs336_infer.course.regions import stub

REPO = Path(__file__).resolve().parents[2]
SOURCES = sorted((REPO / "solutions").glob("a*/a*.py"))
SEEDS = (0, 1, 2)


@cache
def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def assignment(source: Path) -> Assignment:
    return read_assignment(source)


def student_code(a: Assignment, change: Any = lambda cell: cell.source) -> dict[str, Any]:
    """The namespace after the imports and the solution cells ran, each solution cell passed through `change`."""
    namespace: dict[str, Any] = {"__name__": "student"}
    last = max(c.number for c in a.cells if c.role is Role.SOLUTION)
    for cell in a.cells:
        if cell.kind == "code" and cell.number <= last and cell.role in (Role.PLAIN, Role.SOLUTION):
            source = change(cell) if cell.role is Role.SOLUTION else cell.source
            execute(source, f"cell {cell.number}", namespace)
    return namespace


def execute(source: str, name: str, namespace: dict[str, Any]) -> None:
    """Run code as a notebook does: whoever asks for the lines of a function finds them, as Triton does."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), namespace)


def grade(a: Assignment, namespace: dict[str, Any], seed: int, *, hidden_of: str | None = None) -> Report:
    """All checks, or the hidden ones of one exercise."""
    hidden = load(REPO / "tests" / "hidden" / f"{a.name}.py")
    public = importlib.import_module(f"cs336_infer.course.{a.name}")
    checks = [*public.CHECKS, *hidden.CHECKS]
    if hidden_of is not None:
        checks = [c for c in hidden.CHECKS if c.exercise == hidden_of]
    with contextlib.redirect_stderr(io.StringIO()):
        return run(checks, local_ask(namespace), seed=seed)


def mutants() -> list[Any]:
    found = []
    for source in SOURCES:
        for mutant in load(REPO / "tests" / "mutants" / source.name).MUTANTS:
            found.append(pytest.param(source, mutant, id=f"{source.stem.split('_')[0]}: {mutant[0]}"))
    return found


def ids(path: Path) -> str:
    return path.stem


def test_there_is_an_assignment():
    assert SOURCES


@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_every_exercise_has_public_and_hidden_checks_worth_its_points(source):
    a = assignment(source)
    public = importlib.import_module(f"cs336_infer.course.{a.name}").CHECKS
    hidden = load(REPO / "tests" / "hidden" / f"{a.name}.py").CHECKS
    for exercise in a.exercises:
        assert sum(c.points for c in public if c.exercise == exercise.name) == exercise.points
        assert sum(c.points for c in hidden if c.exercise == exercise.name) >= 2
    names = {e.name for e in a.exercises}
    assert {c.exercise for c in (*public, *hidden)} == names
    titles = [c.title for c in (*public, *hidden)]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_the_reference_scores_full(source, seed):
    a = assignment(source)
    report = grade(a, student_code(a), seed)
    assert [r for r in report.results if r.outcome is not Outcome.PASSED] == []
    assert report.score == report.max_score > 0


@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_the_untouched_student_version_fails_every_check(source):
    a = assignment(source)
    report = grade(a, student_code(a, lambda cell: stub(cell.source, f"{a.short} {cell.grade_id}")), 0)
    assert report.score == 0
    assert {r.outcome for r in report.results} == {Outcome.NOT_DONE}


@pytest.mark.parametrize(("source", "mutant"), mutants())
def test_every_bug_is_caught_by_its_check(source, mutant):
    _, exercise, before, after, title = mutant
    a = assignment(source)

    def change(cell: Any) -> str:
        if cell.grade_id != exercise:
            return cell.source
        assert cell.source.count(before) == 1, f"the reference does not contain {before!r} once"
        return cell.source.replace(before, after)

    for seed in SEEDS:
        report = grade(a, student_code(a, change), seed, hidden_of=exercise)
        failed = {r.title for r in report.results if r.outcome is Outcome.FAILED}
        assert all(r.outcome is not Outcome.CHECK_ERROR for r in report.results)
        assert title in failed, f"seed {seed}: only {sorted(failed) or 'nothing'} failed"


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("source", SOURCES, ids=ids)
def test_another_correct_and_noisy_solution_scores_full(source, seed):
    a = assignment(source)
    code = (REPO / "tests" / "mutants" / f"{a.name}_second.py").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "student"}
    with contextlib.redirect_stderr(io.StringIO()):
        execute(code, "second solution", namespace)
    report = grade(a, namespace, seed)
    assert [r for r in report.results if r.outcome is not Outcome.PASSED] == []
