"""otter-grader 7.0.0 on assignment 1, by its true commands. Gradescope itself is not tried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from classroom import NAME, REPO, filled, mutants, mutated, without_metadata

from cs336_infer.course import otter_export
from cs336_infer.course.grade import open_course
from cs336_infer.course.release import student_notebook

MUTANT = 9  # one slot too many is read


@pytest.fixture(scope="module")
def course() -> Any:
    return open_course(REPO, "a1")


@pytest.fixture(scope="module")
def made(course: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zip. Otter grades the solution with it, and fails unless it gets all points."""
    folder = tmp_path_factory.mktemp("otter")
    wheel = folder / "cs336_infer-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"stands for the wheel: `otter run` does not install it")
    return otter_export.write(course, REPO, wheel, folder / "made")


def run(zip_file: Path, notebook: Any, folder: Path) -> dict[str, Any]:
    """results.json of `otter run`, as Gradescope would get it. The cells behind the last check are left out: they
    run a model."""
    last = max(
        i for i, cell in enumerate(notebook.cells) if "check_public(" in cell.source and cell.cell_type == "code"
    )
    notebook.cells = notebook.cells[: last + 1]
    file = folder / "a1 (1).ipynb"
    nbformat.write(notebook, file)
    command = [sys.executable, "-m", "otter", "run", "-a", str(zip_file), "-o", str(folder), str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def scores(results: dict[str, Any]) -> dict[str, float]:
    return {test["name"]: test["score"] for test in results["tests"] if "score" in test}


def test_the_zip_carries_what_it_needs(course: Any, made: Path) -> None:
    with zipfile.ZipFile(made) as archive:
        names = set(archive.namelist())
        tests = {e.name: archive.read(f"tests/{e.name}.py").decode() for e in course.assignment.exercises}
        packages = archive.read("environment.yml").decode()
        config = json.loads(archive.read("otter_config.json"))
        assert archive.read(f"files/hidden/{NAME}.py") == (REPO / "tests" / "hidden" / f"{NAME}.py").read_bytes()
    assert {"run_autograder", "run_otter.py", "setup.sh"} <= names
    wheel = next(name for name in names if name.startswith("files/wheels/"))
    assert f"/autograder/source/{wheel}" in packages and "otter-grader[grading,plugins]==7.0.0" in packages
    assert config["show_hidden"] is False and "assignment_name" not in config
    for check in course.checks:
        own = tests[check.exercise].split(repr(check.title))
        assert len(own) == 2, check.title
        decorator = own[0].rsplit("@test_case(", 1)[1]
        assert decorator.startswith(f"points={check.points:g}, hidden={check in course.hidden}")


def test_a_stub_and_a_bug(course: Any, made: Path, tmp_path: Path) -> None:
    """With all metadata gone and under another file name. The solution was graded in full when the zip was made."""
    blank = student_notebook(course.assignment)
    stub = run(made, without_metadata(blank), tmp_path)
    most = {e.name: sum(c.points for c in course.checks if c.exercise == e.name) for e in course.assignment.exercises}
    assert scores(stub) == dict.fromkeys(most, 0)
    assert {test["name"]: test["max_score"] for test in stub["tests"] if "score" in test} == most
    bug = mutants()[MUTANT]
    results = run(made, without_metadata(filled(blank, mutated(MUTANT))), tmp_path)
    lost = sum(c.points for c in course.checks if c.title == bug[4])
    got = scores(results)
    assert got[bug[1]] <= most[bug[1]] - lost
    assert {name: s for name, s in got.items() if name != bug[1]} == {n: m for n, m in most.items() if n != bug[1]}
    public = next(test for test in results["tests"] if test["name"] == "Public Tests")
    assert public["visibility"] == "visible" and bug[4] not in public["output"]
    assert all(test["visibility"] == "hidden" for test in results["tests"] if "score" in test)


def test_what_otter_says_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(otter_export.OtterError) as error:
        otter_export._run([sys.executable, "-m", "pip", "wheel", "--no-index", "./nothing-here"], tmp_path)
    assert "pip wheel failed" in str(error.value) and "\n" not in str(error.value)
