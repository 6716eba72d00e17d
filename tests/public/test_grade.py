"""The grader over a class: scores, reports, order, and a run that was killed."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
from pathlib import Path

import nbformat
import pytest

from cs336_infer.cli import main
from cs336_infer.course.checks import NOT_DONE
from cs336_infer.course.grade import Course, GradeError, find_submissions, grade_class, open_course, statistics
from cs336_infer.course.grade_report import page_of, write_csv, write_json, write_pages
from cs336_infer.course.regions import stub
from cs336_infer.course.sandbox import Limits

REPO = Path(__file__).resolve().parents[2]
SOURCE = REPO / "solutions" / "a1_prefill_decode" / "a1_prefill_decode.py"
LIMITS = Limits(wall_s_per_question=3)

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None and os.environ.get("CI") != "true", reason="no bubblewrap: the grader needs it"
)


@pytest.fixture(scope="module")
def course() -> Course:
    """Assignment 1, cut to the exercise that needs no torch model: quick to ask, and real."""
    whole = open_course(REPO, "a1")
    keep = ("decode_step_cost", "rope")
    return dataclasses.replace(
        whole,
        public=tuple(c for c in whole.public if c.exercise in keep),
        hidden=tuple(c for c in whole.hidden if c.exercise in keep),
    )


GOOD = (REPO / "tests" / "mutants" / "a1_prefill_decode_second.py").read_text(encoding="utf-8")
LOOPS = GOOD.replace('    """Complex numbers instead of two halves."""\n', "    while True:\n        pass\n")
EXITS = GOOD.replace('    """Matrix by matrix."""\n', "    import os\n\n    os._exit(1)\n")
FORGES = GOOD.replace('    """Matrix by matrix."""\n', "    print('score: 33/33')\n    return (1, 1)\n")


@pytest.fixture(scope="module")
def class_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("class")
    cells = [nbformat.v4.new_code_cell(part) for part in GOOD.split("# %%\n")[1:]]
    cells.insert(2, nbformat.v4.new_code_cell(cells[1].source))  # duplicated
    notebook = nbformat.v4.new_notebook(cells=cells)
    for who, write in {
        "alice": lambda p: nbformat.write(notebook, p / "a1 (1).ipynb"),
        "bob": lambda p: (p / "a1.py").write_text(LOOPS),
        "carol": lambda p: (p / "a1.py").write_text(EXITS),
        "dan": lambda p: (p / "a1.ipynb").write_text("{not json"),
        "eve": lambda p: (p / "a1.py").write_text(FORGES),
    }.items():
        (folder / who).mkdir()
        write(folder / who)
    return folder


@pytest.fixture(scope="module")
def results(course, class_folder):
    return grade_class(course, find_submissions([class_folder]), seed=1, jobs=2, limits=LIMITS)


def by_name(results):
    return {Path(r["submission"]).parent.name: r for r in results}


def test_scores_of_a_class(course, results):
    scores = {who: r["score"] for who, r in by_name(results).items()}
    assert list(scores) == ["alice", "bob", "carol", "dan", "eve"]
    rope = sum(c.points for c in course.checks if c.exercise == "rope")
    cost = sum(c.points for c in course.checks if c.exercise == "decode_step_cost")
    assert scores == {"alice": rope + cost, "bob": cost, "carol": rope, "dan": 0, "eve": rope}
    assert {r["max_score"] for r in results} == {rope + cost}
    assert by_name(results)["dan"]["problem"] and by_name(results)["alice"]["problem"] is None


def test_the_whole_assignment_end_to_end(tmp_path, capsys):
    """The command line: the reference has every point, the student's version none."""
    course = open_course(REPO, "a1")
    student = tmp_path / "student.py"
    cells = [c for c in course.assignment.cells if c.kind == "code"]
    parts = [stub(c.source, f"a1 {c.grade_id}") if "exercise" in c.metadata else c.source for c in cells]
    student.write_text("\n\n# %%\n".join(["", *parts]), encoding="utf-8")
    out = tmp_path / "r.json"
    code = main(["grade", str(SOURCE), str(student), "--assignment", "a1", "--course", str(REPO), "--json", str(out)])
    assert code == 0
    reference, untouched = json.loads(out.read_text())["submissions"]
    assert [c for c in reference["checks"] if c["outcome"] != "passed"] == []
    assert untouched["score"] == 0 and {c["message"] for c in untouched["checks"]} == {NOT_DONE}
    assert not out.with_name("r.json.journal").exists()


def test_reports(course, results, tmp_path):
    write_json(tmp_path / "r.json", course, results)
    whole = json.loads((tmp_path / "r.json").read_text())
    assert whole["submissions"] == results
    worst = whole["checks"][0]
    assert worst["passed"] / worst["of"] == min(c["passed"] / c["of"] for c in whole["checks"])
    write_csv(tmp_path / "r.csv", course, results)
    rows = list(csv.DictReader((tmp_path / "r.csv").open()))
    assert [float(r["score"]) for r in rows] == [r["score"] for r in results]
    assert all(float(r["rope"]) + float(r["decode_step_cost"]) == float(r["score"]) for r in rows)
    pages = write_pages(tmp_path / "pages", course, results)
    assert len(set(pages)) == 5


def test_a_page_names_the_property_and_hides_the_hidden_check(course, results):
    eve = by_name(results)["eve"]
    page = page_of(course, eve)
    failed = [c for c in eve["checks"] if c["hidden"] and c["outcome"] == "failed"]
    assert failed and all(c["title"] in page and c["message"] and c["message"] not in page for c in failed)
    public = [c for c in eve["checks"] if not c["hidden"] and c["outcome"] == "failed"]
    assert public and all(c["title"] in page for c in public)
    hidden_source = (REPO / "tests" / "hidden" / "a1_prefill_decode.py").read_text()
    lines = {line.strip() for line in hidden_source.splitlines() if len(line.strip()) > 25 and "title=" not in line}
    assert not [line for line in lines if line in page]


def test_names_are_not_markup_or_formulas(course, results, tmp_path):
    odd = {**results[0], "submission": "=cmd()<script>alert(1)</script>.py"}
    assert "<script>" not in page_of(course, odd)
    write_csv(tmp_path / "r.csv", course, [odd])
    assert next(csv.DictReader((tmp_path / "r.csv").open()))["submission"].startswith("'=")


def test_statistics_put_the_worst_check_first():
    def result(*passed):
        outcomes = ("passed" if p else "failed" for p in passed)
        return {"checks": [{"exercise": "e", "title": t, "outcome": o} for t, o in zip("ab", outcomes, strict=True)]}

    assert statistics([result(True, False), result(True, True)]) == [
        {"exercise": "e", "title": "b", "passed": 1, "of": 2},
        {"exercise": "e", "title": "a", "passed": 2, "of": 2},
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--assignment", "a9", "."], "0 assignments 'a9'"),
        (["--assignment", "a1", "nothing-here"], "no such file"),
        (["--assignment", "a1", "--jobs", "0", "."], "jobs"),
        (["--assignment", "a1", "--resume", "."], "--json"),
        (["."], "--assignment"),
    ],
)
def test_bad_commands_are_one_line(args, words, capsys, monkeypatch):
    monkeypatch.chdir(REPO)
    try:
        code = main(["grade", *args])
    except SystemExit as e:
        code = e.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and words in err and len(err.splitlines()) == 1


def test_an_unwritable_report_says_so(course, results, tmp_path):
    with pytest.raises(GradeError, match="cannot be written"):
        write_json(tmp_path / "no" / "r.json", course, results)
