"""Written answers: found in whatever came back, into one table, and a person's points into the results."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from classroom import cell_of, filled, mishandled, without_metadata

from cs336_infer.cli import main
from cs336_infer.course import grade_cli, written
from cs336_infer.course.grade import Course, open_course
from cs336_infer.course.grade_report import page_of, write_csv, write_json
from cs336_infer.course.release import student_notebook
from cs336_infer.course.written import NOT_FOUND, WrittenError, answers, export, merged, read_marks, read_results

REPO = Path(__file__).resolve().parents[2]
QUESTION = "why_bandwidth"
ANSWER = "- decode: bytes over bandwidth\n- prefill: half the time"


@pytest.fixture(scope="module")
def course() -> Course:
    return open_course(REPO, "a1")


@pytest.fixture(scope="module")
def blank(course: Course) -> Any:
    return student_notebook(course.assignment)


def save(notebook: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path


def result(submission: str) -> dict[str, Any]:
    check = {"exercise": "rope", "title": "t", "points": 2, "score": 2, "outcome": "passed", "message": ""}
    return {
        "submission": submission,
        "problem": None,
        "score": 2,
        "max_score": 2,
        "checks": [{**check, "hidden": False}],
    }


def table(file: Path, *rows: tuple[str, ...]) -> Path:
    with file.open("w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([written.COLUMNS, *rows])
    return file


def row(submission: str = "alice.ipynb", points: str = "2.5", comment: str = "", question: str = QUESTION) -> tuple:
    return submission, question, "3", "an answer", points, comment


def handed_in(blank: Any) -> dict[str, tuple[Any, str]]:
    """What came back -> the answer that must be found in it."""
    good = filled(blank, {}, ANSWER)
    doubled = mishandled(good)
    doubled.cells.append(nbformat.v4.new_markdown_cell(cell_of(good, QUESTION).source))
    below = filled(blank, {}, "")
    below.cells.insert(below.cells.index(cell_of(below, QUESTION)) + 1, nbformat.v4.new_markdown_cell(ANSWER))
    retyped = without_metadata(good)
    number = good.cells.index(cell_of(good, QUESTION))
    retyped.cells[number] = nbformat.v4.new_code_cell(retyped.cells[number].source)
    gone = filled(blank, {}, ANSWER)
    gone.cells.remove(cell_of(gone, QUESTION))
    overwritten = filled(blank, {}, ANSWER)
    cell_of(overwritten, QUESTION).source = ANSWER
    return {
        "as it should be": (good, ANSWER),
        "metadata lost": (without_metadata(good), ANSWER),
        "cells doubled and deleted": (doubled, ANSWER),
        "written in a cell below": (below, ANSWER),
        "below, and metadata lost": (without_metadata(below), ANSWER),
        "text became code": (retyped, ANSWER),
        "the question overwritten": (overwritten, ANSWER),
        "not answered": (blank, ""),
        "the cell deleted": (gone, NOT_FOUND),
    }


@pytest.mark.parametrize(
    "case",
    [
        "as it should be",
        "metadata lost",
        "cells doubled and deleted",
        "written in a cell below",
        "below, and metadata lost",
        "text became code",
        "the question overwritten",
        "not answered",
        "the cell deleted",
    ],
)
def test_an_answer_is_found(course: Course, blank: Any, case: str, tmp_path: Path) -> None:
    notebook, wanted = handed_in(blank)[case]
    assert answers(course, save(notebook, tmp_path / "a1 (1).ipynb")) == {QUESTION: wanted}


def test_an_answer_in_a_script_and_none_in_a_broken_file(course: Course, tmp_path: Path) -> None:
    script = tmp_path / "a1.py"
    text = course.assignment.path.read_text(encoding="utf-8")
    script.write_text(text)
    assert answers(course, script)[QUESTION].startswith("# BEGIN SOLUTION\nDecode at batch 1")
    script.write_text(text.replace(f'"grade_id": "{QUESTION}"', '"grade_id": ""'))
    assert "Decode at batch 1" in answers(course, script)[QUESTION]
    broken = tmp_path / "b.ipynb"
    broken.write_text("{not json")
    assert answers(course, broken) == {QUESTION: NOT_FOUND}


def test_the_table_is_for_a_spreadsheet(course: Course, blank: Any, tmp_path: Path) -> None:
    texts = {"=x": '=HYPERLINK("http://x")', "+y": "+1", "z": "@SUM(A1)\r\nnext\x00 line\x1b[2J", "w": "y" * 200_000}
    paths = [save(filled(blank, {}, text), tmp_path / f"{name}.ipynb") for name, text in texts.items()]
    file = export(course, paths, tmp_path)
    assert file == tmp_path / "a1_prefill_decode_questions.csv"
    rows = list(csv.DictReader(file.open(encoding="utf-8", newline="")))
    assert list(rows[0]) == list(written.COLUMNS)
    assert [r["submission"] for r in rows] == [str(p) for p in paths]
    assert [r["answer"][:2] for r in rows[:3]] == ["'=", "'+", "'@"]
    assert rows[2]["answer"] == "'@SUM(A1)\nnext line[2J"
    assert len(rows[3]["answer"]) < 32_767
    assert {(r["question"], r["max_points"], r["points"], r["comment"]) for r in rows} == {(QUESTION, "3", "", "")}
    assert read_marks(course, file, map(str, paths)) != {}


def test_an_export_does_not_destroy_points(course: Course, tmp_path: Path) -> None:
    file = table(tmp_path / "q.csv", row())
    with pytest.raises(WrittenError, match="merge them first"):
        export(course, [], file)
    assert file.read_text().count("2.5") == 1


def test_points_and_comments_are_merged(course: Course, tmp_path: Path) -> None:
    results = [result("alice.ipynb"), result("=bob.ipynb"), result("carol.ipynb")]
    file = table(tmp_path / "q.csv", row(comment="<b>good</b>"), row("'=bob.ipynb", "0", ""), row("carol.ipynb", ""))
    both = merged(course, results, read_marks(course, file, [r["submission"] for r in results]))
    assert [(r["score"], r["max_score"], r["auto_score"], r["auto_max_score"]) for r in both] == [
        (4.5, 5, 2, 2),
        (2, 5, 2, 2),
        (2, 2, 2, 2),  # not graded yet: the score of the checks stays
    ]
    assert both[0]["questions"] == [{"question": QUESTION, "max_points": 3, "points": 2.5, "comment": "<b>good</b>"}]
    assert both[2]["questions"][0]["points"] is None
    page, waiting = page_of(course, both[0]), page_of(course, both[2])
    assert "4.5 of 5 points" in page and "2.5 of 3 points" in page and "&lt;b&gt;good" in page and "<b>good" not in page
    assert "2 of 2 points" in waiting and "not graded yet" in waiting and "not in the score" in waiting
    write_csv(tmp_path / "r.csv", course, both)
    assert [r[QUESTION] for r in csv.DictReader((tmp_path / "r.csv").open())] == ["2.5", "0.0", "not graded yet"]
    write_json(tmp_path / "r.json", course, both)
    again = read_results(course, tmp_path / "r.json")
    assert again == both
    assert "written questions" in json.loads((tmp_path / "r.json").read_text())["points"]


def test_a_second_merge_replaces_and_keeps(course: Course, tmp_path: Path) -> None:
    first = merged(course, [result("alice.ipynb")], {("alice.ipynb", QUESTION): written.Mark(1, "hm")})
    file = table(tmp_path / "q.csv", row(points="3"))
    second = merged(course, first, read_marks(course, file, ["alice.ipynb"]))
    assert (second[0]["score"], second[0]["auto_score"], second[0]["questions"][0]["comment"]) == (5, 2, "hm")
    assert merged(course, second, {}) == second


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(points="3.5")], "row 2: points 3.5 are not from 0 to 3"),
        ([row(), row("bob.ipynb", "-1")], "row 3: points -1"),
        ([row(points="two")], "row 2: points 'two' are not a number"),
        ([row(points="nan")], "not a number"),
        ([row(points="1e999")], "not a number"),
        ([row("eve.ipynb")], "row 2: no submission 'eve.ipynb'"),
        ([row(question="why")], "row 2: no question 'why'"),
        ([row(), row("bob.ipynb"), row()], "row 4: 'why_bandwidth' of 'alice.ipynb' is there twice"),
    ],
)
def test_a_wrong_row_is_named(course: Course, rows: list[tuple], words: str, tmp_path: Path) -> None:
    with pytest.raises(WrittenError) as error:
        read_marks(course, table(tmp_path / "q.csv", *rows), ["alice.ipynb", "bob.ipynb"])
    assert words in str(error.value) and "q.csv" in str(error.value) and "\n" not in str(error.value)


def test_what_spreadsheets_save(course: Course, tmp_path: Path) -> None:
    file = tmp_path / "q.csv"
    saved = ";".join(written.COLUMNS) + f'\r\na;{QUESTION};3;"x\r\ny";2,5;\r\n;;;;;\r\n'
    file.write_bytes(b"\xef\xbb\xbf" + saved.encode())
    assert read_marks(course, file, ["a"]) == {("a", QUESTION): written.Mark(2.5, "")}
    for bad, words in ((b"", "no column"), (b"a,b\n", "no column submission"), (b"\xff\xfe", "cannot be read")):
        file.write_bytes(bad)
        with pytest.raises(WrittenError, match=words):
            read_marks(course, file, ["a"])
    with pytest.raises(WrittenError, match="No such file"):
        read_marks(course, tmp_path / "none.csv", ["a"])


def test_results_that_are_none(course: Course, tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    for text in ("", "[]", '{"assignment": "a1_prefill_decode", "submissions": [{"submission": 3}]}'):
        file.write_text(text)
        with pytest.raises(WrittenError, match="not a result"):
            read_results(course, file)
    file.write_text('{"assignment": "a2_x", "submissions": []}')
    with pytest.raises(WrittenError, match="a2_x"):
        read_results(course, file)
    with pytest.raises(WrittenError, match="grade first"):
        read_results(course, tmp_path / "none.json")


def test_the_command_line(course: Course, blank: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(REPO)
    path = save(filled(blank, {}, ANSWER), tmp_path / "in" / "alice.ipynb")
    monkeypatch.setattr(grade_cli, "grade_class", lambda course, paths, **options: [result(str(p)) for p in paths])
    out, table_file = tmp_path / "r.json", tmp_path / "q.csv"
    base = ["grade", "--assignment", "a1", "--json", str(out)]
    assert main([*base, str(path.parent), "--questions", str(table_file)]) == 0
    assert capsys.readouterr().out == f"2/2  {path}  (why_bandwidth not graded yet)\n"
    assert json.loads(out.read_text())["submissions"][0]["questions"][0]["points"] is None
    rows = list(csv.reader(table_file.open(encoding="utf-8")))
    assert rows[1][3] == f"'{ANSWER}"
    rows[1][4:] = ["3", "fine"]
    table(table_file, *map(tuple, rows[1:]))
    shutil.rmtree(path.parent)  # the submissions are not needed any more
    assert main([*base, "--merge-questions", str(table_file), "--html", str(tmp_path / "pages")]) == 0
    assert capsys.readouterr().out == f"5/5  {path}\n"
    assert "fine" in next((tmp_path / "pages").glob("*.html")).read_text()
    assert main([*base, "--merge-questions", str(table_file)]) == 0
    assert capsys.readouterr().out == f"5/5  {path}\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "name what to grade"),
        (["--merge-questions", "q.csv"], "name what to grade"),
        (["--json", "r.json", "--questions", "q.csv"], "name what to grade"),
        (["--json", "q.csv", "--merge-questions", "q.csv"], "another file"),
        (["--json", "none.json", "--merge-questions", "q.csv"], "grade first"),
    ],
)
def test_bad_commands_are_one_line(options: list[str], words: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(REPO)
    assert main(["grade", "--assignment", "a1", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and len(err.splitlines()) == 1
