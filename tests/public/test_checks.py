"""Checks of an assignment: who is at fault, what the messages say, and that a notebook cell is enough to run them."""

from __future__ import annotations

import copy
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from nbclient import NotebookClient

from cs336_infer.course import checks
from cs336_infer.course.checks import (
    ALL_PASSED,
    AskError,
    CheckFailed,
    NotPassed,
    Outcome,
    checks_of,
    expect_close,
    expect_equal,
    expect_shape,
    local_ask,
    make_check,
    notebook_check,
    run,
)

TOY = """
from cs336_infer.course.checks import *

@check("double", points=2, title="doubles numbers")
def doubles(ask, rng):
    x = rng.normal(size=3)
    expect_close(ask("double", x), 2 * x, what="double(x)")

@check("double", points=1, title="leaves its input alone")
def pure(ask, rng):
    x = rng.normal(size=3)
    before = x.copy()
    ask("double", x)
    expect_close(x, before, what="the input")

@check("spell", points=3, title="spells a number")
def spells(ask, rng):
    if ask("spell", 2) != "two":
        fail("2 is spelled 'two'", share=0.5)

check_public = make_check(__name__)
"""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("a1_toy_checks")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(TOY, "a1_toy_checks.py", "exec"), vars(module))
    return module


def student(code: str) -> dict[str, Any]:
    """The namespace that a notebook has after a cell with this code."""
    namespace: dict[str, Any] = {"__name__": "student"}
    exec(compile(code, "<cell>", "exec"), namespace)
    return namespace


def one(function: Callable[..., None], ask: Callable[..., Any] = lambda name: None) -> checks.Result:
    return run([checks.Check("ex", "title", 1, function)], ask, seed=0).results[0]


RIGHT = "def double(x):\n    return 2 * x\ndef spell(n):\n    return {1: 'one', 2: 'two'}[n]\n"
STUB = 'def double(x):\n    raise NotImplementedError("a1 double: Twice x.")\n'


def test_a_full_pass_says_that_hidden_checks_were_not_run(toy: types.ModuleType) -> None:
    report = run(toy, local_ask(student(RIGHT)), seed=1)
    assert (report.score, report.max_score, report.passed) == (6, 6, True)
    assert ALL_PASSED == "public checks passed; hidden checks not run"
    assert report.text.split("\n") == [
        "double: 3 of 3 points",
        "  passed      doubles numbers",
        "  passed      leaves its input alone",
        "spell: 3 of 3 points",
        "  passed      spells a number",
        ALL_PASSED,
    ]


def test_points_are_partial_and_a_failed_check_may_keep_a_share(toy: types.ModuleType) -> None:
    report = run(toy, local_ask(student(STUB + "def spell(n):\n    return 'deux'")), seed=1)
    assert (report.score, report.max_score, report.passed) == (1.5, 6, False)
    assert report.text.split("\n")[-2:] == [
        "  failed      spells a number: 2 is spelled 'two'",
        "0 of 3 public checks passed, 1.5 of 6 points; hidden checks not run",
    ]
    first = json.loads(json.dumps(report.to_dict()))["checks"][0]
    assert first == {
        "exercise": "double",
        "title": "doubles numbers",
        "points": 2,
        "score": 0,
        "outcome": "not done",
        "message": "not done yet",
    }


def test_no_check_is_no_pass() -> None:
    assert not run([], local_ask({}), seed=0).passed


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f():\n    x = 1\n    return x / 0", "ZeroDivisionError: division by zero (line 3 of the cell, in f)"),
        ("def g():\n    return [][1]\n\ndef f():\n    return g()", "IndexError: list index out of range (line 2 of the cell, in g)"),  # noqa: E501
        ("import json\ndef f():\n    return json.loads('{')", "(line 3 of the cell, in f)"),
        ("def f():\n    raise SystemExit", "SystemExit (line 2 of the cell, in f)"),
        ("def f():\n    raise ValueError('two\\nlines')", "ValueError: two lines (line 2 of the cell, in f)"),
        ("def f():\n    raise NotImplementedError", "not done yet"),
        ("def f():\n    raise NotImplementedError('a1 f: Does.')", "not done yet"),
        ("def f():\n    raise NotImplementedError('no kernel for cpu')", "NotImplementedError: no kernel for cpu (line 2"),  # noqa: E501
        ("def f():\n    return (i for i in range(3))", "`f` gave a generator, which is not a value"),
        ("f = 3", "`f` is a int, not a function: run the cell that defines it"),
        ("", "`f` is not defined: run the cell that defines it"),
        ("class f:\n    def __init__(self):\n        self.x = {}['k']", "KeyError: 'k' (line 3 of the cell, in __init__)"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_the_student_raises_is_one_line(code: str, message: str) -> None:
    result = one(lambda ask, rng: ask("f"), local_ask(student(code)))
    assert message in result.message and len(result.message.splitlines()) == 1
    assert result.outcome is (Outcome.NOT_DONE if message == "not done yet" else Outcome.FAILED)
    assert result.score == 0


def test_a_long_message_is_cut_but_keeps_its_line() -> None:
    result = one(lambda ask, rng: ask("f"), local_ask(student("def f():\n    raise ValueError('x' * 10**6)")))
    assert len(result.message) <= 300 and result.message.endswith("... (line 2 of the cell, in f)")


def test_the_error_of_a_bare_ask_is_the_students_too() -> None:
    def ask(name: str) -> None:
        raise RuntimeError("from afar")

    assert one(lambda ask, rng: ask("f"), ask).message == "RuntimeError: from afar"


def test_an_answer_that_raises_a_failed_check_earns_no_share() -> None:
    def ask(name: str) -> None:
        raise CheckFailed("mine", share=0.9)

    assert one(lambda ask, rng: ask("f"), ask).score == 0


def test_a_keyboard_interrupt_ends_the_run() -> None:
    def ask(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one(lambda ask, rng: ask("f"), ask)


def test_a_buggy_check_is_not_the_students_fault_and_worth_nothing() -> None:
    report = run([checks.Check("ex", "title", 2, lambda ask, rng: {}["k"])], lambda name: None, seed=0)
    result = report.results[0]
    assert result.outcome is Outcome.CHECK_ERROR and (report.score, report.max_score) == (0, 2)
    assert not report.passed and ALL_PASSED not in report.text
    assert result.message == "KeyError: 'k'; the check itself is at fault, not your code: please report it"


def test_a_check_may_ask_for_an_error_by_name() -> None:
    def refuses(ask: checks.Ask, rng: np.random.Generator) -> None:
        with pytest.raises(AskError) as error:
            ask("f")
        assert error.value.kind == "ValueError"

    assert one(refuses, local_ask(student("def f():\n    raise ValueError"))).outcome is Outcome.PASSED


def test_arguments_and_answers_are_copies(toy: types.ModuleType) -> None:
    greedy = student("def double(x):\n    x *= 2\n    return x\nstate = [0]\ndef keep():\n    return state\n")
    assert run(checks_of(toy)[:2], local_ask(greedy), seed=0).passed, "an input changed in place harms no check"
    ask = local_ask(greedy)
    ask("keep")[0] = 5
    assert greedy["state"] == [0]


def test_random_numbers_depend_on_seed_and_title_not_on_order() -> None:
    drawn: dict[str, list[float]] = {}

    def named(title: str) -> checks.Check:
        return checks.Check("ex", title, 1, lambda ask, rng: drawn.setdefault(title, []).append(rng.random()))

    a, b = named("a"), named("b")
    for order, seed in (([a, b], 0), ([b, a], 0), ([b], 0), ([a, b], 1)):
        run(order, lambda name: None, seed=seed)
    assert drawn["a"][0] == drawn["a"][1] and len(set(drawn["b"][:3])) == 1
    assert len({drawn["a"][0], drawn["a"][2], drawn["b"][0], drawn["b"][3]}) == 4


def test_checks_are_kept_in_order_and_loading_again_changes_nothing(toy: types.ModuleType) -> None:
    titles = [c.title for c in checks_of("a1_toy_checks")]
    assert titles == ["doubles numbers", "leaves its input alone", "spells a number"]
    exec(compile(TOY, "a1_toy_checks.py", "exec"), vars(toy))
    assert [c.title for c in checks_of(toy)] == titles


@pytest.mark.parametrize(
    ("exercise", "points", "title"),
    [("e", -1, "t"), ("e", float("nan"), "t"), ("e", 1, " "), ("", 1, "t"), ("e", 1, "two\nlines")],
)
def test_a_wrong_declaration_is_refused(exercise: str, points: float, title: str) -> None:
    with pytest.raises(checks.CheckDeclarationError):
        checks.check(exercise, points=points, title=title)


def test_a_title_is_given_once() -> None:
    twice = 'from cs336_infer.course.checks import check\n@check("e", points=0, title="t")\ndef f(ask, rng): ...\n'
    with pytest.raises(checks.CheckDeclarationError, match="two checks have the title 't'"):
        student(twice + twice)


@pytest.mark.parametrize("share", [-0.1, 1, float("nan")])
def test_a_share_is_part_of_the_points(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        checks.fail("no", share=share)


F32 = np.zeros((2, 3), np.float32)
NAN = np.array([1.0, np.nan, np.inf])


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        (np.zeros((2, 2)), np.zeros((2, 3)), "y: shape [2, 2] instead of [2, 3]"),
        (np.zeros((2, 3)), F32, "y: dtype float64 instead of float32"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3), "y: dtype bfloat16 instead of float32"),
        (None, F32, "y: got None, expected numbers of shape [2, 3]"),
        ("text", 3.0, "y: got 'text', expected numbers of shape []"),
        pytest.param(10**5000, 3.0, "y: got a huge int, expected numbers of shape []", id="huge"),
        ([[1, 2], [3]], [1.0], "y: got [[1, 2], [3]], expected numbers of shape [1]"),
        (np.array([[0.0], [0.25]]), np.zeros((2, 1)), "y: at [1, 0] got 0.25, expected 0 (off by 0.25, allowed 1e-09); 1 of 2 values differ"),  # noqa: E501
        (F32 + np.float32(2e-5), F32, "y: at [0, 0] got 2e-05, expected 0 (off by 2e-05, allowed 1e-05); 6 of 6 values differ"),  # noqa: E501
        ([1.0, np.nan, np.inf], [1.0, 2.0, np.inf], "y: at [1] got nan, expected 2; 1 of 3 values differ"),
        ([1.0, 2.0], [1.0, -np.inf], "y: at [1] got 2, expected -inf; 1 of 2 values differ"),
        (3.5, 4.0, "y: got 3.5, expected 4 (off by 0.5, allowed 5e-09)"),
        (2**60 + 1, 2**60, "y: got 1152921504606846977, expected 1152921504606846976 (off by 1, allowed 0)"),
    ],
)  # fmt: skip
def test_a_difference_is_named(got: Any, want: Any, message: str) -> None:
    with pytest.raises(CheckFailed) as error:
        expect_close(got, want, what="y")
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (F32 + np.float32(9e-6), F32),
        (torch.tensor([1.0, 2.0], requires_grad=True), np.array([1.0, 2.0], np.float32)),
        (torch.full((3,), 1.01, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        ([1.0, 2.0], np.array([1.0, 2.0], np.float32)),
        (np.array([1, 2], np.float32), [1.0, 2.0]),
        (NAN, NAN.copy()),
        (3, 3.0),
    ],
)
def test_close_enough_is_accepted(got: Any, want: Any) -> None:
    expect_close(got, want, what="y")


def test_a_wrong_expectation_is_an_error_of_the_check() -> None:
    assert one(lambda ask, rng: expect_close(1.0, "text", what="y")).outcome is Outcome.CHECK_ERROR


@settings(max_examples=50, deadline=None, derandomize=True)
@given(hnp.arrays(np.float32, hnp.array_shapes(), elements=st.floats(-100, 100, width=32)), st.data())
def test_the_first_changed_value_is_found(want: np.ndarray, data: st.DataObject) -> None:
    expect_close(want, want.copy(), what="y")
    flat = sorted(data.draw(st.sets(st.integers(0, want.size - 1), min_size=1, max_size=3)))
    got = want.copy()
    got.reshape(-1)[flat] += 1
    with pytest.raises(CheckFailed) as error:
        expect_close(got, want, what="y")
    index = list(map(int, np.unravel_index(flat[0], want.shape)))
    assert f"at {index} got" in str(error.value)
    assert f"; {len(flat)} of {want.size} values differ" in str(error.value)


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        ([1, 2, 3], [1, 5, 3], "ids: at [1] got 2, expected 5"),
        ([1, 2], [1, 2, 3], "ids: 2 items instead of 3; the first 2 are right"),
        ([1, 9, 3, 4], [1, 2, 3], "ids: 4 items instead of 3; at [1] got 9, expected 2"),
        ([[1], [2, 3]], [[1], [2, 4]], "ids: at [1][1] got 3, expected 4"),
        ({"a": 1}, {"a": 1, "b": 2}, "ids: lacks key 'b'"),
        ({"a": 1, "c": 2}, {"a": 1}, "ids: has the unexpected key 'c'"),
        ({"a": [1]}, {"a": [2]}, "ids: at ['a'][0] got 1, expected 2"),
        (1, True, "ids: got 1, expected True"),
        (None, 7, "ids: got None, expected 7"),
        (torch.tensor([1, 2]), [1, 3], "ids: at [1] got 2, expected 3"),
        (object(), 3, "ids: got a object, expected 3"),
    ],
)
def test_an_inequality_is_named(got: Any, want: Any, message: str) -> None:
    with pytest.raises(CheckFailed) as error:
        expect_equal(got, want, what="ids")
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("got", "want"),
    [((1, 2), [1, 2]), (torch.tensor([1, 2]), [1, 2]), (np.int64(3), 3), (np.array([np.nan]), [float("nan")]), ("a", "a")],  # noqa: E501
)  # fmt: skip
def test_equal_is_accepted(got: Any, want: Any) -> None:
    expect_equal(got, want, what="ids")


def test_shapes() -> None:
    expect_shape(torch.zeros(2, 3, dtype=torch.bfloat16), [2, 3], what="k")
    with pytest.raises(CheckFailed, match=r"k: shape \[2\] instead of \[3\]"):
        expect_shape([1, 2], [3], what="k")
    with pytest.raises(CheckFailed, match=r"k: got None, expected numbers of shape \[3\]"):
        expect_shape(None, (3,), what="k")


def test_a_notebook_cell_checks_only_the_exercises_of_its_functions(
    toy: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    space = student(STUB + "def spell(n):\n    return word[n]\nword = {2: 'two'}")
    toy.check_public(space["spell"])
    assert capsys.readouterr().out.splitlines()[-1] == ALL_PASSED
    with pytest.raises(NotPassed, match="2 of 2 public checks did not pass"):
        toy.check_public(space["double"])
    assert "double: 0 of 3 points" in capsys.readouterr().out
    with pytest.raises(NotPassed, match="2 of 3 public checks did not pass"):
        notebook_check(toy, space)
    with pytest.raises(NotPassed):
        notebook_check(toy, space, exercise="double")
    with pytest.raises(checks.CheckDeclarationError, match="no check for len; there are some for: double, spell"):
        make_check("a1_toy_checks")(len)


def test_a_check_finds_other_functions_of_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("a1_pair")
    monkeypatch.setitem(sys.modules, "a1_pair", module)
    code = 'from cs336_infer.course.checks import *\n@check("pair", points=1, title="t")\n'
    code += 'def both(ask, rng):\n    expect_equal(ask("there", ask("back", 1)), 1, what="there(back(1))")\n'
    exec(code, vars(module))
    space = student("def back(x):\n    return -x\ndef there(x):\n    return -x\n")
    make_check("a1_pair")(space["there"], exercise="pair")


def test_in_a_real_kernel_without_cell_metadata(tmp_path: Path) -> None:
    (tmp_path / "a1_toy_checks.py").write_text(TOY)
    cells = ["from a1_toy_checks import check_public", RIGHT, "check_public(double, spell)"]
    cells += [STUB, "check_public(double)", "def double(x):\n    y = x\n    return y + z", "check_public(double)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode()
    done = copy.deepcopy(notebook)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(done, timeout=60, kernel_name="python3", allow_errors=True, resources=resources).execute()
    outputs = [cell.get("outputs", []) for cell in done.cells]
    assert [o.text.splitlines()[-1] for o in outputs[2]] == [ALL_PASSED]
    said, error = outputs[4]
    assert "not done    doubles numbers: not done yet" in said.text
    assert error.traceback == ["NotPassed: 2 of 2 public checks did not pass"]
    assert "NameError: name 'z' is not defined (line 3 of the cell, in double)" in outputs[6][0].text
    assert outputs[6][1].traceback == ["NotPassed: 2 of 2 public checks did not pass"]
