"""Hostile kernels: each costs exactly the points of its exercise, and the kernel beside it gets all of its own.

A kernel's body is interpreted as Python beside the sanitizer's books, so what it may hold is a list; what is on the
list and still does harm (loops, memory) ends in the sandbox.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cs336_infer.course.ask import NOT_DONE, AskError
from cs336_infer.course.assignment import Role, read_assignment
from cs336_infer.course.forks import Forks
from cs336_infer.course.grade import Course, grade_class, open_course
from cs336_infer.course.kernel_text import HEADER, NotTriton, cells_lookup, kernel_text
from cs336_infer.course.sandbox import Limits

REPO = Path(__file__).resolve().parents[2]
SOURCE = read_assignment(REPO / "solutions" / "a4_fusion" / "a4_fusion.py")
CELLS = {cell.grade_id: cell.source for cell in SOURCE.cells if cell.role is Role.SOLUTION}
ATTACKED, HONEST = "swiglu_kernel", "add_rms_norm_kernel"
BODY = CELLS[ATTACKED].split("    # BEGIN SOLUTION\n")[1].split("    # END SOLUTION")[0]
HEAD = "@triton.jit\ndef swiglu_kernel(out, gate_up, step, N: tl.constexpr, BLOCK: tl.constexpr):\n"
LIMITS = Limits(wall_s_per_question=6, wall_s_load=60)

needs_sandbox = pytest.mark.skipif(
    shutil.which("bwrap") is None and os.environ.get("CI") != "true", reason="no bubblewrap: the grader needs it"
)

REFUSED: dict[str, tuple[str, str]] = {
    "imports": ("    import os\n", "`Import`"),
    "imports from": ("    from sys import modules\n", "`ImportFrom`"),
    "evaluates": ("    eval(0)\n", "uses `eval`"),
    "opens a file": ("    f = open(0)\n", "uses `open`"),
    "prints": ("    print(N)\n", "uses `print`"),
    "reads globals": ("    g = globals()\n", "uses `globals`"),
    "asks for a name": ("    g = getattr(out, BLOCK)\n", "uses `getattr`"),
    "walks to the class": ("    c = out.__class__\n", "`out.__class__`"),
    "walks to the frame": ("    c = step.gi_frame.f_back\n", "`step.gi_frame"),
    "takes the handle of a tensor": ("    data = tl.arange(0, BLOCK).handle\n", "`.handle`"),
    "writes an attribute": ("    out.dtype = N\n", "`out.dtype`"),
    "the language's insides": ("    s = tl.core.tensor\n", "`tl.core"),
    "the language as a value": ("    t = tl\n", "`tl`"),
    "another function of triton": ("    r = triton.runtime\n", "`triton.runtime`"),
    "inline assembly": ("    r = tl.inline_asm_elementwise(N)\n", "`tl.inline_asm_elementwise`"),
    "a method of a builtin": ("    r = float.fromhex\n", "`float.fromhex`"),
    "a string": ("    r = '{0.a}'\n", "the value '{0.a}'"),
    "a lambda": ("    r = lambda: 0\n", "`Lambda`"),
    "a comprehension": ("    r = [i for i in range(2)]\n", "`ListComp`"),
    "a function inside": ("    def f():\n        pass\n", "`FunctionDef`"),
    "an exception": ("    raise ValueError\n", "`Raise`"),
    "a try": ("    try:\n        pass\n    finally:\n        pass\n", "`Try`"),
    "a with": ("    with out:\n        pass\n", "`With`"),
    "a global": ("    global sanitizer\n", "`Global`"),
    "another meaning for range": ("    range = tl.arange\n", "gives `range` another meaning"),
    "two underscores": ("    __debug = N\n", "`__debug`"),
    "a name from nowhere": ("    r = sanitize\n", "uses `sanitize`"),
    "a call of a value": ("    r = [N][0](1)\n", "a call of a value"),
    "an f-string": ("    r = f'{N}'\n", "`JoinedStr`"),
    "an integer of a thousand digits": (f"    r = {10**999}\n", "the value"),
}


def text(*cells: str, name: str = ATTACKED) -> str:
    return kernel_text([name], cells_lookup(cells))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_on_the_list_is_named(name: str) -> None:
    line, says = REFUSED[name]
    with pytest.raises(NotTriton) as error:
        text(HEAD + line + BODY)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_what_is_around_a_kernel_is_looked_at_or_left_behind() -> None:
    whole = HEAD + BODY
    assert text(f"import os\nos.abort()\n{whole}\nos.abort()") == f"{HEADER}\n\n{whole.rstrip()}\n"
    for changed in ("@os.abort\n" + whole, whole.replace("@triton.jit", "@triton.jit()"), f"class {ATTACKED}: pass"):
        with pytest.raises(AskError, match=r"is not a @triton\.jit function"):
            text(changed)
    for old, new in (
        ("BLOCK: tl.constexpr", "BLOCK: tl.constexpr = print(0)"),
        ("BLOCK: tl.constexpr", "BLOCK: tl.constexpr = N"),
        ("step,", "step: eval(chr(N)),"),
        ("step,", "step: tl.exp(0),"),
        ("):", ") -> eval(chr(N)):"),
    ):
        for more in ("", "    eval = chr = print = 0\n"):  # inside they would be names of its own
            with pytest.raises(NotTriton, match=r"the (annotation|default) `"):
                text(HEAD.replace(old, new, 1) + more + BODY)
    for name in ("eval", "chr", "getattr"):
        for own in (
            f"    {name} = 0\n",
            f"    for {name} in range(2):\n        pass\n",
            f"    {name}: tl.constexpr = 0\n",
        ):
            with pytest.raises(NotTriton, match=f"gives `{name}` another meaning"):
                text(HEAD + own + BODY)
        with pytest.raises(NotTriton, match=f"gives `{name}` another meaning"):
            text(HEAD.replace("step,", f"{name}, step,") + BODY)
    with pytest.raises(NotTriton, match="the annotation `print"):
        text(HEAD + "    half: print(0) = 1\n" + BODY)
    with pytest.raises(AskError, match="is not defined"):
        text("(" * 10**5, "def", "x\0", f"if True:\n    {ATTACKED} = 1")
    with pytest.raises(AskError, match=NOT_DONE):
        text(HEAD + '    raise NotImplementedError("a4 swiglu_kernel: out")')


def test_numbers_come_without_what_stands_beside_them() -> None:
    use = HEAD + "    half = LIMIT * SMALL\n" + BODY
    numbers = "LIMIT: print('!') = 7\nSMALL = tl.constexpr(-0.5)\nOTHER = print('!')\n"
    assert text(numbers, use).startswith(HEADER + "SMALL = tl.constexpr(-0.5)\nLIMIT = 7\n")
    for odd in ("LIMIT = print(7)", "LIMIT = 'print'", "LIMIT, b = 1, 2", "LIMIT = [7]", "import x as LIMIT"):
        with pytest.raises(NotTriton, match="uses `LIMIT`"):
            text(odd, use, "SMALL = 1")


def test_helpers_are_looked_at_too_and_long_texts_refused() -> None:
    use = HEAD + "    half = helper(N)\n" + BODY
    helper = "@triton.jit\ndef helper(x):\n    return {}\n"
    assert "def helper" in text(helper.format("x + 1"), use)
    with pytest.raises(NotTriton, match="uses `open`"):
        text(helper.format("open(x)"), use)
    with pytest.raises(NotTriton, match="characters"):
        text(helper.format("x") + "    # long\n" * 2_000 + "    pass", use)
    with pytest.raises(NotTriton, match="nodes"):
        text(helper.format("x") + "    x = x\n" * 1_200, use)
    with pytest.raises((NotTriton, AskError)):
        text(helper.format("x" + ".T" * 5_000), use)


# In the sandbox: (the body, words of the message) --------------------------------------------------------------------

ATTACKS: dict[str, tuple[str, str]] = {
    "imports": ("    import os\n" + BODY, "`Import`"),
    "endless loop": ("    while step > 0:\n        step += 0\n" + BODY, "no answer in time|asked again"),
    "a loop of 10^15 steps": (
        "    for i in range(1000000000000000):\n        step += 0\n" + BODY,
        "in time|asked again",
    ),
    "waits for nobody": (
        "    while tl.load(out) != 12345.0:\n        pass\n" + BODY,
        "deadlock|uninitialised-read|plain-load-poll",
    ),
    "2^36 numbers": ("    big = tl.zeros([65536, 1048576], tl.float32)\n" + BODY, "DoesNotCompile: swiglu_kernel"),
    "a number of 2^40 bits": ("    big: tl.constexpr = 1 << 1099511627776\n" + BODY, "DoesNotCompile|emory|in time"),
    "what only Python runs": ("    pair = [N, BLOCK]\n    pair[0] = 1\n" + BODY, "DoesNotCompile"),
    "writes far away": (BODY + "    tl.store(out + 1000000000, 1.0)\n", "out-of-bounds"),
    "reads far away": (BODY + "    tl.store(out, tl.load(out - 123456789))\n", "out-of-bounds"),
    "a wrong answer": (BODY.replace("* up", "* up * 2.0"), "expected"),
}


def course() -> Course:
    """Two kernels, each with two checks: one of them is attacked. No plain function is asked."""
    whole = open_course(REPO, "a4")
    wanted = {
        "sum and norm: four passes over memory, not five",
        "rows of any size, sums far from 1",
        "silu(gate) times up, of rows of odd sizes",
        "gates of -100 and +100",
    }
    public, hidden = (tuple(c for c in checks if c.title in wanted) for checks in (whole.public, whole.hidden))
    return dataclasses.replace(whole, public=public, hidden=hidden, open_task=None)


@needs_sandbox
def test_each_attack_costs_its_exercise_and_nothing_else(tmp_path: Path) -> None:
    paths = []
    for name, (body, _) in [("honest", (BODY, "")), *ATTACKS.items()]:
        path = tmp_path / f"{name.replace(' ', '-')}.py"
        path.write_text(f"# %%\nimport triton\n# %%\n{CELLS[HONEST]}\n# %%\n{HEAD}{body}\n", encoding="utf-8")
        paths.append(path)
    results = grade_class(course(), paths, seed=5, jobs=2, limits=LIMITS)
    honest = results.pop(0)
    points = {e: sum(c["points"] for c in honest["checks"] if c["exercise"] == e) for e in (ATTACKED, HONEST)}
    assert honest["score"] == honest["max_score"] == sum(points.values()), honest
    for (name, (_, says)), result in zip(ATTACKS.items(), results, strict=True):
        assert result["score"] == points[HONEST], (name, result)
        for check in result["checks"]:
            if check["exercise"] == HONEST:
                assert check["outcome"] == "passed", (name, check)
            else:
                assert any(word in check["message"] for word in says.split("|")), (name, check["message"])


@needs_sandbox
def test_the_students_own_process_has_no_say_in_a_kernel(tmp_path: Path) -> None:
    """Whatever the other cells do to the names, to Triton, or to their process: the text is taken unrun."""
    code: dict[str, Any] = {
        "name taken away": f"{HEAD}{BODY}\ndel swiglu_kernel\nimport sys\nsys.modules['triton'] = None\n",
        "process ended": f"import os\nos._exit(0)\n# %%\n{HEAD}{BODY}\n",
        "replaced by a function": f"{HEAD}{BODY}\nglobals()['swiglu_kernel'] = lambda *a: 1\n",
    }
    paths = []
    for name, cells in code.items():
        path = tmp_path / f"{name.replace(' ', '-')}.py"
        path.write_text(f"# %%\n{CELLS[HONEST]}\n# %%\n{cells}", encoding="utf-8")
        paths.append(path)
    for result in grade_class(course(), paths, seed=6, jobs=2, limits=LIMITS):
        assert result["score"] == result["max_score"], result


@needs_sandbox
def test_a_fresh_program_answers_as_a_forked_one(tmp_path: Path) -> None:
    path = tmp_path / "honest.py"
    path.write_text(f"# %%\n{CELLS[HONEST]}\n# %%\n{HEAD}{BODY}\n", encoding="utf-8")
    (fresh,) = grade_class(course(), [path], seed=7, limits=LIMITS, forks=Forks("a test of the other way"))
    (forked,) = grade_class(course(), [path], seed=7, limits=LIMITS)
    assert fresh["process"] == "fresh" and fresh["score"] == fresh["max_score"]
    assert {**forked, "process": "fresh"} == fresh
