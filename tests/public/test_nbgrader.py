"""nbgrader 0.9.6 on assignment 1, by its true commands: release, validation, grades, feedback, export."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from classroom import (
    ANSWER,
    NAME,
    REPO,
    SOURCE,
    cell_of,
    filled,
    hand_in,
    mishandled,
    mutants,
    mutated,
    reference,
    without_metadata,
)
from classroom import second as second_solution

from cs336_infer.course import graded_cell, nbgrader_export, nbgrader_fair
from cs336_infer.course.ask import AskError, local_ask
from cs336_infer.course.checks import run
from cs336_infer.course.grade import open_course
from cs336_infer.course.release import refuse_leaks, student_notebook

MUTANT = 4  # query heads are dealt to KV heads like cards
HIDDEN = (REPO / "tests" / "hidden" / f"{NAME}.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def course() -> Any:
    return open_course(REPO, "a1")


def nbgrader(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "nbgrader"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_CURRENT_TEST", None)  # it changes how kernels capture output
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The course folder after `nbgrader generate_assignment`."""
    folder = tmp_path_factory.mktemp("nbgrader")
    nbgrader_export.write(REPO, [SOURCE], folder)
    done = nbgrader(folder, "generate_assignment", NAME)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def graded(released: Path) -> Path:
    """After grading a class and writing its feedback; one student handed in under another file name."""
    blank = nbformat.read(released / "release" / NAME / f"{NAME}.ipynb", as_version=4)
    good = filled(blank, reference())
    noisy = filled(blank, {**reference(), **second_solution(), "causal_attention": reference()["causal_attention"]})
    hand_in(noisy, released, "noisy")
    hand_in(blank, released, "stub")
    hand_in(filled(blank, mutated(MUTANT)), released, "mutant", f"{NAME} (1).ipynb")
    hand_in(without_metadata(good), released, "lost")
    hand_in(mishandled(good), released, "mishandled")
    for command in ("autograde", "generate_feedback"):
        done = nbgrader(released, command, NAME)
        assert done.returncode == 0, done.stderr
    assert "changed" not in done.stderr
    return released


def test_the_release_is_ours_with_all_points(course: Any, released: Path) -> None:
    have = nbformat.read(released / "release" / NAME / f"{NAME}.ipynb", as_version=4)
    wanted = student_notebook(course.assignment)
    heading = re.compile(r"[\d.]+ points?")
    assert [heading.sub("", c.source) for c in have.cells] == [heading.sub("", c.source) for c in wanted.cells]
    totals = nbgrader_export.points_of(course)
    for exercise in course.assignment.exercises:
        assert cell_of(have, f"{exercise.name}_check").metadata.nbgrader.points == totals[exercise.name]
        header = next(c.source for c in have.cells if c.source.startswith(f"### Exercise `{exercise.name}`"))
        assert f"{totals[exercise.name]:g} points" in header
    assert sum(totals.values()) == sum(c.points for c in course.checks)


def test_the_release_gives_nothing_away(course: Any, released: Path) -> None:
    files = [p for p in (released / "release").rglob("*") if p.is_file()]
    assert [p.name for p in files] == [f"{NAME}.ipynb"]
    refuse_leaks(course.assignment, nbformat.read(files[0], as_version=4))
    text = files[0].read_text(encoding="utf-8")
    public = json.dumps(student_notebook(course.assignment))  # a signature may stand in the hidden checks too
    assert not [line for line in hidden_lines() if line in text and line not in public]
    assert "graded_cell" not in text and "BEGIN" not in text


def hidden_lines() -> set[str]:
    """Lines of the hidden checks that say something, but for their titles."""
    lines = {line.strip() for line in HIDDEN.splitlines()}
    return {line for line in lines if len(line) > 25 and "title=" not in line}


def test_the_solution_is_valid(released: Path) -> None:
    """Every check cell of the instructor's notebook gives all its points."""
    done = nbgrader(released, "validate", f"source/{NAME}/{NAME}.ipynb")
    assert done.returncode == 0 and "Success" in done.stdout, done.stdout + done.stderr


def grades(folder: Path) -> dict[str, dict[str, str]]:
    done = nbgrader(folder, "export", "--to", "grades.csv")
    assert done.returncode == 0, done.stderr
    return {row["student_id"]: row for row in csv.DictReader((folder / "grades.csv").open())}


def test_grades(course: Any, graded: Path) -> None:
    most = sum(c.points for c in course.checks)
    namespace: dict[str, Any] = {}
    exec("import torch\n" + "\n\n".join(mutated(MUTANT).values()), namespace)
    mutant = run(course.checks, local_ask(namespace), seed=0).score
    assert 0 < mutant < most
    table = grades(graded)
    scores = {student: float(row["raw_score"]) for student, row in table.items()}
    assert scores == {"noisy": most, "stub": 0, "mutant": mutant, "lost": most, "mishandled": most}
    whole = most + sum(q.points for q in course.assignment.questions)
    assert {float(row["max_score"]) for row in table.values()} == {whole}


def test_feedback_names_the_property_and_hides_the_check(course: Any, graded: Path) -> None:
    page = (graded / "feedback" / "mutant" / NAME / f"{NAME}.html").read_text(encoding="utf-8")
    assert mutants()[MUTANT][4] in page and ANSWER in page
    public = json.dumps(student_notebook(course.assignment))
    assert not [line for line in hidden_lines() if line in page and line not in public]
    assert "graded_cell" not in page and "HIDDEN TESTS" not in page


def test_a_function_that_prints_its_inputs_tells_nothing(
    course: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(graded_cell.HIDDEN_FOLDER, str(REPO / "tests" / "hidden"))

    def decode_step_cost(**shape: int) -> tuple[int, int]:
        print("inputs", shape)
        raise ValueError(f"inputs {shape}")

    got = graded_cell.points(NAME, "decode_step_cost", {"decode_step_cost": decode_step_cost})
    said = capsys.readouterr().out
    assert got == 0
    hidden = [line for line in said.splitlines() if line.endswith("hidden)")]
    assert len(hidden) == 2 and all(line.startswith("failed") and "inputs" not in line for line in hidden)
    assert sum("inputs" in line for line in said.splitlines()) == 1  # the public check says what was raised


def test_refused_calls_and_loops_cost_their_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graded_cell, "SECONDS", 0.2)
    space: dict[str, Any] = {
        "_ih": ["def f(x):\n    return sorted(x)", "def g(x):\n    return 1"],
        "f": sorted,
        "g": int,
    }
    ask = graded_cell._limited(space, ["sorted"])
    with pytest.raises(AskError, match="sorted"):
        ask("f", [1])
    assert ask("g", "1") == 1

    def loop() -> None:
        while True:
            pass

    with pytest.raises(AskError, match="longer than"):
        graded_cell._limited({"loop": loop}, [])("loop")


def test_graded_cells_say_where_hidden_checks_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(graded_cell.HIDDEN_FOLDER, str(tmp_path))
    monkeypatch.delitem(sys.modules, f"hidden_{NAME}", raising=False)
    with pytest.raises(graded_cell.HiddenChecksMissing, match=str(tmp_path)):
        graded_cell.points(NAME, "rope", {})


def test_what_is_mended_needs_no_nbgrader_run() -> None:
    """Of cells with one id the last counts; a check cell nobody has comes last; a foreign id is removed."""
    source = [
        SimpleNamespace(name="f", source="def f():\n    pass", cell_type="code"),
        SimpleNamespace(name="f_check", source="check(f)", cell_type="code"),
    ]
    wanted = [
        (source[0], {"grade_id": "f", "solution": True, "grade": False, "locked": False}),
        (source[1], {"grade_id": "f_check", "solution": False, "grade": True, "locked": True}),
    ]
    cells = [nbformat.v4.new_code_cell(text) for text in ("def f():\n    return 0", "def f():\n    return 1", "x = 1")]
    for cell, name in zip(cells, ("f", "f", "other"), strict=True):
        cell.metadata["nbgrader"] = {"grade_id": name}
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbgrader_fair.mend(notebook, wanted)
    ids = [cell.metadata.get("nbgrader", {}).get("grade_id") for cell in notebook.cells]
    assert ids == [None, "f", None, "f_check"] and notebook.cells[-1].source == "check(f)"


def test_regions_that_only_nbgrader_would_run_are_refused(course: Any) -> None:
    cells = list(course.assignment.cells)
    place = next(i for i, cell in enumerate(cells) if cell.grade_id == "rope_check")
    cells[place] = dataclasses.replace(cells[place], regions=("one",))
    other = dataclasses.replace(course, assignment=dataclasses.replace(course.assignment, cells=tuple(cells)))
    with pytest.raises(nbgrader_export.ExportError, match="tests/hidden"):
        nbgrader_export.source_notebook(other)


def test_the_command_writes_its_files_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    (tmp_path / "gradebook.db").write_text("grades")
    assert nbgrader_export.main([str(SOURCE.parent.relative_to(REPO)), "--to", str(tmp_path)]) == 0
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert files == ["gradebook.db", f"hidden/{NAME}.py", "nbgrader_config.py", f"source/{NAME}/{NAME}.ipynb"]
    assert (tmp_path / "gradebook.db").read_text() == "grades"
