"""From one source to two notebooks: what a student gets, what is refused, and what counts as stale."""

from __future__ import annotations

import ast
import json
import textwrap
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_infer.course import build, regions, release
from cs336_infer.course.assignment import AssignmentError, Question, read_assignment
from cs336_infer.course.regions import Problem, stub, without_hidden


def meta(role: str, grade_id: str, points: Any = None, **extra: Any) -> str:
    grade, solution, locked = {"solution": "010", "check": "101", "question": "110", "read-only": "001"}[role]
    fields: dict[str, Any] = {"schema_version": 3, "grade_id": grade_id, "task": False}
    fields |= {"grade": grade == "1", "solution": solution == "1", "locked": locked == "1"}
    if points is not None:
        fields["points"] = points
    return f"nbgrader={json.dumps({**fields, **extra})}"


def exercise(**changes: Any) -> str:
    fields = {"difficulty": 3, "importance": 5, "minutes": 25, "gpu": False, "forbidden": ["torch.softmax"]}
    return f"exercise={json.dumps({**fields, **changes})}"


SOURCE = f'''\
# %% [markdown]
# # A toy

# %% {meta("read-only", "setup")}
import numpy as np

# %% {meta("solution", "weights")} {exercise()}
def weights(scores: np.ndarray, *, causal: bool = True) -> np.ndarray:
    """Attention weights of one query, # not a comment.

    More about it.
    """
    # Step: shift
    # BEGIN SOLUTION
    shifted = scores - scores.max()

    def exponential(x):
        # Step: exponential
        return np.exp(x)

    e = exponential(shifted)
    # Step: normalise
    return e / e.sum()
    # END SOLUTION


# %% {meta("check", "weights_check", 2)}
assert abs(weights(np.arange(3.0)).sum() - 1) < 1e-12
# BEGIN HIDDEN TESTS
assert np.isfinite(weights(np.array([1e4, 0.0]))).all()
# END HIDDEN TESTS

# %% {meta("check", "weights_hidden", 1)}
# BEGIN HIDDEN TESTS
assert weights(np.zeros(4))[0] == 0.25
# END HIDDEN TESTS

# %% {meta("solution", "Cache")} {exercise(gpu=True, forbidden=[], difficulty=1)}
class Cache:
    """Keeps what it is given."""

    def __init__(self) -> None:
        # BEGIN SOLUTION
        self.kept = []
        # END SOLUTION

    def add(self, x: int) -> None:
        """Keep one more."""
        # BEGIN SOLUTION
        self.kept.append(x)
        # END SOLUTION


# %% {meta("check", "Cache_check", 1.5)}
cache = Cache()
cache.add(3)
print("kept", cache.kept)

# %% [markdown] {meta("question", "why", 3)}
# Why is the largest score subtracted?
#
# # BEGIN SOLUTION
# Because exp(1e4) is too large for a float.
# # END SOLUTION
'''


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "solutions" / "a1_toy" / "a1_toy.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return path


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the toy released; tests must not change it."""
    root = tmp_path_factory.mktemp("released")
    path = root / "solutions" / "a1_toy" / "a1_toy.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    assert release.main([str(path.parent)]) == 0
    return root


def sources_of(notebook: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(notebook, as_version=4).cells]


def student_text(source: Path) -> str:
    return build.text_of(release.student_notebook(read_assignment(source)))


def edit(source: Path, old: str, new: str) -> None:
    text = source.read_text()
    assert text.count(old) == 1, f"{text.count(old)} times {old!r}"
    source.write_text(text.replace(old, new))


def test_what_is_read(source: Path) -> None:
    toy = read_assignment(source)
    assert (toy.name, toy.short, toy.questions) == ("a1_toy", "a1", (Question("why", 3),))
    first, second = toy.exercises
    assert (first.name, first.functions, first.points, first.forbidden) == (
        "weights", ("weights",), 3, ("torch.softmax",))  # fmt: skip
    assert (first.difficulty, first.importance, first.minutes, first.gpu) == (3, 5, 25, False)
    assert (second.functions, second.points, second.gpu) == (("Cache",), 1.5, True)


def test_given_helpers_are_not_asked_for_and_an_assignment_may_be_long(source: Path) -> None:
    edit(source, "def weights(scores", "def given(x: int) -> int:\n    return x\n\n\ndef weights(scores")
    source.write_text(source.read_text() + "\n# %%\npass\n" * (build.MAX_CELLS + 1))
    assert [e.functions for e in read_assignment(source).exercises] == [("weights",), ("Cache",)]


def test_what_a_student_gets(released: Path) -> None:
    path = released / "assignments" / "a1_toy" / "a1_toy.ipynb"
    cells = sources_of(path)
    assert cells[2].split("\n") == [
        "### Exercise `weights`",
        "",
        "difficulty 3/5 · importance 5/5 · about 25 minutes · 3 points · needs no GPU",
        "",
        "Refused library calls: `torch.softmax`",
    ]
    assert cells[3] == textwrap.dedent('''\
        def weights(scores: np.ndarray, *, causal: bool = True) -> np.ndarray:
            """Attention weights of one query, # not a comment.

            More about it.
            """
            # Step: shift
            # Step: exponential
            # Step: normalise
            raise NotImplementedError("a1 weights: Attention weights of one query, # not a comment.")''')
    assert cells[4] == "assert abs(weights(np.arange(3.0)).sum() - 1) < 1e-12"
    assert cells[5] == regions.HIDDEN_HERE
    assert cells[6].endswith("difficulty 1/5 · importance 5/5 · about 25 minutes · 1.5 points · needs a GPU")
    assert 'raise NotImplementedError("a1 Cache: Keeps what it is given.")' in cells[7]
    assert 'raise NotImplementedError("a1 Cache: Keep one more.")' in cells[7]
    assert cells[9] == "Why is the largest score subtracted?\n\nYour answer here."
    text = path.read_text()
    for gone in ("SOLUTION", "HIDDEN TESTS", "1e4", "exponential(", "self.kept", str(released), 'execution_count": 1'):
        assert gone not in text, gone
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type != "code" or (cell.outputs == [] and cell.execution_count is None)


def test_the_untouched_stub_raises_and_names_its_exercise(released: Path) -> None:
    space: dict[str, Any] = {}
    for cell in nbformat.read(released / "assignments" / "a1_toy" / "a1_toy.ipynb", as_version=4).cells:
        if cell.cell_type == "code" and not cell.metadata.get("nbgrader", {}).get("grade"):
            exec(cell.source, space)
    with pytest.raises(NotImplementedError, match=r"a1 weights: Attention weights of one query"):
        space["weights"](None)
    with pytest.raises(NotImplementedError, match=r"a1 Cache: Keeps what it is given\."):
        space["Cache"]()


def test_the_solution_notebook_is_executed_and_has_the_headers(released: Path) -> None:
    notebook = nbformat.read(released / "solutions" / "a1_toy" / "a1_toy.ipynb", as_version=4)
    assert "### Exercise `Cache`" in notebook.cells[6].source and "# BEGIN SOLUTION" in notebook.cells[7].source
    assert notebook.cells[8].outputs[0].text == "kept [3]\n"
    assert [c.execution_count for c in notebook.cells if c.cell_type == "code"] == [1, 2, 3, 4, 5, 6]


def test_the_students_file_is_the_same_each_time_and_anywhere(source: Path, released: Path) -> None:
    have = (released / "assignments" / "a1_toy" / "a1_toy.ipynb").read_bytes()
    assert student_text(source).encode() == have == student_text(source).encode()
    ids = [cell["id"] for cell in json.loads(have)["cells"]]
    assert len(set(ids)) == len(ids)


def test_nothing_is_stale_after_a_release(released: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(released)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in released.rglob("*") if p.is_file()}
    assert release.main(["--check"]) == 0
    assert capsys.readouterr().out == "release: a1_toy fresh\n"
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in released.rglob("*") if p.is_file()} == before


@pytest.fixture
def copied(source: Path, released: Path, tmp_path: Path) -> Path:
    """The source of a released toy that a test may change."""
    for old in released.rglob("*.ipynb"):
        new = tmp_path / old.relative_to(released)
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(old.read_bytes())
    assert release.main(["--check"]) == 0
    return source


SOLUTION, STUDENT = "solutions/a1_toy/a1_toy.ipynb", "assignments/a1_toy/a1_toy.ipynb"


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        ("return e / e.sum()", "return e / e.sum(-1)", [SOLUTION]),
        ("== 0.25", "== 0.250", [SOLUTION]),
        ("# Step: normalise", "# Step: divide", [SOLUTION, STUDENT]),
        ("# # A toy", "# # A new toy", [SOLUTION, STUDENT]),
        ('"minutes": 25, "gpu": true', '"minutes": 30, "gpu": true', [SOLUTION, STUDENT]),
        ('"points": 1.5', '"points": 2', [SOLUTION, STUDENT]),
    ],
)
def test_an_edit_makes_stale(copied: Path, old: str, new: str, stale: list[str], capsys: Any) -> None:
    edit(copied, old, new)
    capsys.readouterr()
    assert release.main(["--check"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1].rstrip(":") for line in lines] == stale
    assert all("make release" in line for line in lines)


def change(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def test_files_that_are_gone_changed_or_left_over(copied: Path, tmp_path: Path, capsys: Any) -> None:
    solution, student = tmp_path / SOLUTION, tmp_path / STUDENT
    change(student, "\n", "\n ")
    (tmp_path / "assignments" / "a9_old").mkdir()
    change(solution, '"execution_count": 6', '"execution_count": 7')
    capsys.readouterr()
    assert release.main(["--check"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "release: assignments/a9_old has no source in solutions/: delete it",
        f"release: {SOLUTION}: cell 9 was not executed in order; run `make release`",
        f"release: {STUDENT} is not what solutions/a1_toy gives: run `make release`",
    ]
    student.unlink()
    solution.unlink()
    assert release.main(["--check", "solutions/a1_toy"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"release: {SOLUTION} does not exist: run `make release`",
        f"release: {STUDENT} does not exist: run `make release`",
    ]


def test_without_assignments_there_is_nothing_to_do(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["--check"]):
        assert release.main(arguments) == 0
        assert capsys.readouterr().out == "release: there is no assignment in solutions/, nothing to do\n"
    assert not list(tmp_path.iterdir())
    (tmp_path / "solutions" / "a1_empty").mkdir(parents=True)
    assert release.main(["--check"]) == 1
    assert "a1_empty.py: cannot be read" in capsys.readouterr().err


def test_a_failing_solution_writes_neither_notebook(source: Path, capsys: Any) -> None:
    edit(source, "cache.add(3)", "cache.add(3, 4)")
    assert release.main([]) == 1
    assert "release: a1_toy.py: cell 9 of 10: TypeError" in capsys.readouterr().err
    assert not list(source.parents[2].rglob("*.ipynb"))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("# # A toy", "# # A toy\n#\n# Hint: `shifted = scores - scores.max()`.", "shifted = scores - scores.max()"),
        ("import numpy as np", "import numpy as np\nx = 0  # e = exponential(shifted)", "e = exponential(shifted)"),
        ('"forbidden": []', '"forbidden": [], "gpu": true} tags=["self.kept.append(x)"] y={"z": 1', "self.kept.append(x)"),  # noqa: E501
        ("# # A toy", "# # Because exp(1e4) is too large for a float. And so on", "Because exp(1e4) is too large for a float."),  # noqa: E501
        ("# # A toy", "# assert weights(np.zeros(4))[0] == 0.25 is checked", "assert weights(np.zeros(4))[0] == 0.25"),
    ],
)  # fmt: skip
def test_a_leak_is_refused(source: Path, old: str, new: str, line: str, capsys: Any) -> None:
    edit(source, old, new)
    assert release.main([]) == 1
    said = capsys.readouterr().err.strip()
    assert f"of the student's notebook would hold {line!r}" in said and len(said.splitlines()) == 1
    assert not list(source.parents[2].rglob("*.ipynb"))


def test_a_stub_that_kept_a_line_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "stub", lambda text, label: text.replace("return e / e.sum()", ""))
    with pytest.raises(release.ReleaseError, match=r"a line of a region in cell 3 of a1_toy\.py"):
        student_text(source)


def test_a_line_that_is_also_outside_gives_nothing_away(source: Path) -> None:
    edit(source, "import numpy as np", "import numpy as np\n\nkept = 'self.kept.append(x)'")
    with pytest.raises(release.ReleaseError):
        student_text(source)
    edit(source, "kept = 'self.kept.append(x)'", "def f(self, x):\n    self.kept.append(x)")
    assert "self.kept.append(x)" in student_text(source)


WEIGHTS = meta("solution", "weights")
RULES = {
    "another cell has the grade_id 'weights'": ('"grade_id": "Cache"', '"grade_id": "weights"'),
    "'Cache' has no check cell below it": (meta("check", "Cache_check", 1.5), ""),
    "'weights' has no check cell below it": (meta("solution", "weights"), meta("solution", "weights")),
    "a check cell stands below the solution cell it checks": ("# # A toy", f"# # A\n\n# %% {meta('check', 'c', 1)}\n1"),
    "line 2: # BEGIN HIDDEN TESTS has no END": ("assert np.isfinite(weights(np.array([1e4, 0.0]))).all()\n# END HIDDEN TESTS", ""),  # noqa: E501
    "line 6: END SOLUTION where no region is open": ("        # BEGIN SOLUTION\n        self.kept = []", "        self.kept = []"),  # noqa: E501
    "line 7: BEGIN SOLUTION where # BEGIN SOLUTION of line 6 is open": ("    # Step: shift", "    # BEGIN SOLUTION"),
    "line 4: END SOLUTION where # BEGIN HIDDEN TESTS of line 2": (").all()\n# END HIDDEN TESTS", ").all()\n# END SOLUTION"),  # noqa: E501
    "line 3: a marker must be a comment on a line of its own": ("Keeps what it is given.", "Keeps.\n# BEGIN SOLUTION\n"),  # noqa: E501
    "'Cache_check' needs points >= 0, not True": (meta("check", "Cache_check", 1.5), meta("check", "Cache_check", True)),  # noqa: E501
    "a check cell cannot hold a region SOLUTION": ('print("kept", cache.kept)', "# BEGIN SOLUTION\n1\n# END SOLUTION"),
    "a read-only cell cannot hold a region HIDDEN TESTS": ("import numpy as np", "# BEGIN HIDDEN TESTS\n1\n# END HIDDEN TESTS"),  # noqa: E501
    "has no region between # BEGIN SOLUTION and # END SOLUTION": ("# # BEGIN SOLUTION\n# Because exp(1e4) is too large for a float.\n# # END SOLUTION", "# ?"),  # noqa: E501
    "line 2: a marker must be a comment on a line of its own, not '\"\"\"Keeps # BEGIN SOLUTION.\"\"\"'": ("Keeps what it is given.", "Keeps # BEGIN SOLUTION."),  # noqa: E501
    "not 'x = 1  # BEGIN SOLUTION'": ("    # Step: shift", "    x = 1  # BEGIN SOLUTION"),
    "not '# begin solution'": ("    # Step: shift", "    # begin solution"),
    "not '### BEGIN SOLUTION here'": ("    # Step: shift", "    ### BEGIN SOLUTION here"),
    "not 'BEGIN SOLUTION marks one'": ("# # A toy", "# BEGIN SOLUTION marks one"),
    "line 1: a marker must be a comment": ("# # A toy", "# ### BEGIN MARK SCHEME"),
    "a solution cell needs `exercise` metadata": (f"{WEIGHTS} {exercise()}", WEIGHTS),
    "only a solution cell has `exercise` metadata": (meta("read-only", "setup"), f"{meta('read-only', 'setup')} {exercise()}"),  # noqa: E501
    "`exercise` needs exactly difficulty, forbidden, gpu, importance, minutes; it has gpu": (exercise(), 'exercise={"gpu": true}'),  # noqa: E501
    "it has difficulty, extra, forbidden": (exercise(), exercise(extra=1)),
    "`exercise` needs exactly": (exercise(), "exercise=3"),
    "difficulty must be a whole number from 1 to 5, not 6": (exercise(), exercise(difficulty=6)),
    "importance must be a whole number from 1 to 5, not 0": (exercise(), exercise(importance=0)),
    "minutes must be a whole number from 1 to 600, not 2.5": (exercise(), exercise(minutes=2.5)),
    "difficulty must be a whole number from 1 to 5, not True": (exercise(), exercise(difficulty=True)),
    "gpu must be true or false, not 1": (exercise(), exercise(gpu=1)),
    "forbidden must be a list of names": (exercise(), exercise(forbidden="sdpa")),
    "such as scaled_dot_product_attention, not ['a b']": (exercise(), exercise(forbidden=["a b"])),
    "its metadata is not JSON": (WEIGHTS, 'nbgrader={"schema_version": }'),
    "`nbgrader` metadata must be an object, not 3": (meta("read-only", "setup"), "nbgrader=3"),
    "`nbgrader` metadata lacks grade": (meta("read-only", "setup"), 'nbgrader={"schema_version": 3, "grade_id": "s", "locked": true, "solution": false}'),  # noqa: E501
    "`nbgrader` metadata has the unknown extra": (meta("read-only", "setup"), meta("read-only", "setup", extra=1)),
    "schema_version 3, not 2": (meta("read-only", "setup"), meta("read-only", "setup", schema_version=2)),
    "letters, digits, - and _, not 'a b'": (meta("read-only", "setup"), meta("read-only", "a b")),
    "(False, False, False, False): no kind of cell": (meta("read-only", "setup"), meta("read-only", "setup", locked=False)),  # noqa: E501
    "(0, False, True, False): no kind of cell": (meta("read-only", "setup"), meta("read-only", "setup", grade=0)),
    "a question cell is a markdown cell, not code": (meta("check", "Cache_check", 1.5), meta("question", "Cache_check", 1)),  # noqa: E501
    "a check cell is a code cell, not markdown": (meta("question", "why", 3), meta("check", "why", 3)),
    "'Cache_check' needs points >= 0, not -1": (meta("check", "Cache_check", 1.5), meta("check", "Cache_check", -1)),
    "'Cache_check' needs points >= 0, not None": (meta("check", "Cache_check", 1.5), meta("check", "Cache_check")),
    "'Cache_check' needs points >= 0, not '2'": (meta("check", "Cache_check", 1.5), meta("check", "Cache_check", points="2")),  # noqa: E501
    "is a read-only cell and cannot have points": (meta("read-only", "setup"), meta("read-only", "setup", 1)),
    "cell 7: is not plain Python: line 3: invalid syntax": ('print("kept", cache.kept)', "%time 1"),
    "cell 6: is not plain Python: line 6": ("self.kept = []", "self.kept = = []"),
    "cell 7 is empty": ('cache = Cache()\ncache.add(3)\nprint("kept", cache.kept)', ""),
}  # fmt: skip


@pytest.mark.parametrize("says", RULES)
def test_a_broken_rule_is_named_in_one_line(source: Path, says: str) -> None:
    old, new = RULES[says]
    text = source.read_text()
    if says.startswith("'weights' has no check cell"):
        start, end = (
            text.index(f"# %% {meta('check', 'weights_check', 2)}"),
            text.index("# %% " + meta("solution", "Cache")),
        )
        source.write_text(text[:start] + text[end:])
    else:
        edit(source, old, new)
    with pytest.raises(AssignmentError) as error:
        read_assignment(source)
    said = str(error.value)
    assert says in said and "a1_toy.py: cell " in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("name", ["toy", "a1", "a1_Toy", "a_toy", "b1_toy"])
def test_the_name_of_an_assignment(tmp_path: Path, name: str) -> None:
    with pytest.raises(AssignmentError, match=r"an assignment is aN_slug/aN_slug\.py"):
        read_assignment(tmp_path / name / f"{name}.py")
    with pytest.raises(AssignmentError, match=r"an assignment is aN_slug/aN_slug\.py"):
        read_assignment(tmp_path / "a1_other" / "a1_toy.py")


STUBS = {
    "a nested function with its own docstring": (
        '''\
        def f(x):
            """Outer."""
            def g(y):
                """Inner."""
                # BEGIN SOLUTION
                return y
                # END SOLUTION
            return g(x)''',
        '''\
        def f(x):
            """Outer."""
            def g(y):
                """Inner."""
                raise NotImplementedError("a1 f: Inner.")
            return g(x)''',
    ),
    "several regions, decorators, async": (
        '''\
        @dec(1)
        async def f(x):  # BEGIN with care
            """Say "hi" \\\\ now."""
            a = "# BEGIN"  # Step: outside
            # BEGIN SOLUTION
            await x  # Step: wait
            # END SOLUTION
            if a:
                # BEGIN SOLUTION
                    return a
                # END SOLUTION
            return None''',
        '''\
        @dec(1)
        async def f(x):  # BEGIN with care
            """Say "hi" \\\\ now."""
            a = "# BEGIN"  # Step: outside
            # Step: wait
            raise NotImplementedError("a1 f: Say \\"hi\\" \\\\ now.")
            if a:
                    raise NotImplementedError("a1 f: Say \\"hi\\" \\\\ now.")
            return None''',
    ),
    "a module": ("# BEGIN SOLUTION\nX = 1\n# END SOLUTION", 'raise NotImplementedError("a1 f")'),
    "no docstring, text that looks like steps": (
        '''\
        def f():
        # BEGIN SOLUTION
            text = """
        # Step: not one
            # also not
        """
            return text
        # END SOLUTION
        ''',
        """\
        def f():
            raise NotImplementedError("a1 f")
        """,
    ),
    "a docstring inside the region is not told": (
        '''\
        def f():
            # BEGIN SOLUTION
            """Secret."""
            # END SOLUTION''',
        """\
        def f():
            raise NotImplementedError("a1 f")""",
    ),
}


@pytest.mark.parametrize("name", STUBS)
def test_stubs(name: str) -> None:
    given_text, wanted = map(textwrap.dedent, STUBS[name])
    assert stub(given_text, "a1 f") == wanted


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def f():\n    for i in x:\n        # BEGIN SOLUTION\n        y = i\n    return y\n    # END SOLUTION", "line 3: the region leaves the block"),  # noqa: E501
        ("f(\n# BEGIN SOLUTION\n1,\n# END SOLUTION\n)", "without its regions it is not plain Python: line 2"),
        ("def f():\n    x = 1\n    def g():\n        nonlocal y\n        return y\n    # BEGIN SOLUTION\n    y = 1\n    # END SOLUTION", "no binding for nonlocal 'y'"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_region_that_cannot_be_taken_out(code: str, says: str) -> None:
    with pytest.raises(Problem, match=says):
        stub(code, "a1 f")


def test_hidden_regions_leave_python_behind() -> None:
    with pytest.raises(Problem, match="without its regions it is not plain Python"):
        without_hidden("if True:\n    # BEGIN HIDDEN TESTS\n    x = 1\n    # END HIDDEN TESTS")
    assert without_hidden("# look\n# BEGIN HIDDEN TESTS\nx\n# END HIDDEN TESTS") == f"# look\n{regions.HIDDEN_HERE}"


SIMPLE = st.sampled_from([
    "v{n} = x + {n}",
    "v{n} = '# BEGIN {n}'  # Step: s{n}",
    "# Step: s{n}",
    "v{n} = '''\n# Step: no{n}\n  text'''",
    "v{n} = [\n    {n},  # why {n}\n]",
    "return x * {n}",
])  # fmt: skip
HEADS = st.sampled_from(
    ["for i{n} in range({n}):", "if x > {n}:", "def g{n}(y{n}):", "with open(x) as f{n}:", "while x < {n}:"]
)
BODIES = st.recursive(
    st.lists(SIMPLE, min_size=1, max_size=3).map(lambda lines: [("pass", []), *((line, []) for line in lines)]),
    lambda inner: st.lists(st.tuples(HEADS, inner), min_size=1, max_size=2),
    max_leaves=4,
)


def render(body: list[Any], depth: int, counter: list[int]) -> list[str]:
    lines: list[str] = []
    for line, inner in body:
        counter[0] += 1
        first, *rest = line.format(n=1000 + counter[0]).split("\n")
        lines += ["    " * depth + first, *rest]
        lines += render(inner, depth + 1, counter) if inner else []
    return lines


@settings(max_examples=80, deadline=None, derandomize=True)
@given(BODIES, BODIES, st.booleans(), st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=30))
def test_any_body_is_stubbed(before: list[Any], secret: list[Any], is_async: bool, about: str) -> None:
    counter = [0]
    about = about.replace('"', "'").replace("\\", "/")
    head = [f"{'async ' if is_async else ''}def f(x: int, *a, k: str = '# x', **kw) -> int:", f'    """A {about}."""']
    given_lines, inside = render(before, 1, counter), render(secret, 1, counter)
    marked = ["    # BEGIN SOLUTION", *inside, "    # END SOLUTION"]
    source = "\n".join([*head, *given_lines, *marked, "    return 0"])
    result = stub(source, "a1 f")
    tree = ast.parse(result).body[0]
    original = ast.parse(source).body[0]
    assert isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef) and type(tree) is type(original)
    assert ast.unparse(tree.args) == ast.unparse(original.args) and ast.get_docstring(tree) == f"A {about}."  # type: ignore[attr-defined]
    assert result.split("\n")[: 2 + len(given_lines)] == [*head, *given_lines]
    steps = [line.split("# Step:")[1] for line in inside if "# Step: s" in line]
    tail = [line.strip() for line in result.split("\n")[2 + len(given_lines) :]]
    assert tail == [*(f"# Step:{s}" for s in steps), f'raise NotImplementedError("a1 f: A {about}.")', "return 0"]
    raised = tree.body[-2]
    assert isinstance(raised, ast.Raise), "the error stands in the function itself, not deeper"
