"""The open task of assignment 4: plans that are run, and counted; plans that are not."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest

from cs336_infer.course import a4_open_task as task
from cs336_infer.course import kernel_ask, kernel_runner
from cs336_infer.course.ask import local_ask
from cs336_infer.course.assignment import Role, read_assignment
from cs336_infer.course.grade import grade_one, open_course
from cs336_infer.course.sandbox import Limits
from cs336_infer.types import InferError

REPO = Path(__file__).resolve().parents[2]
SOURCE = REPO / "solutions" / "a4_fusion" / "a4_fusion.py"

TWO_LAUNCHES = '''
import triton
import triton.language as tl


@triton.jit
def hidden_kernel(hidden, x, residual, norm, gate_up, PIECE: tl.constexpr):
    """Each program norms all tokens again, and has PIECE of the 192 inner numbers of all of them."""
    n = tl.program_id(0) * PIECE + tl.arange(0, 16)
    k = tl.arange(0, 128)
    t = tl.arange(0, 4)
    mine = (tl.arange(0, 16) < PIECE)[:, None] & (k < 96)[None, :]
    rows = (t >= 0)[:, None] & (k < 96)[None, :]
    at = t[:, None] * 96 + k[None, :]
    total = tl.load(x + at, mask=rows, other=0.0) + tl.load(residual + at, mask=rows, other=0.0)
    scale = tl.rsqrt(tl.sum(total * total, 1) / 96 + 1e-5)
    total *= scale[:, None] * tl.load(norm + k, mask=k < 96, other=0.0)[None, :]
    gate = tl.load(gate_up + n[:, None] * 96 + k[None, :], mask=mine, other=0.0)
    up = tl.load(gate_up + (192 + n)[:, None] * 96 + k[None, :], mask=mine, other=0.0)
    g = tl.sum(total[:, None, :] * gate[None, :, :], 2)
    u = tl.sum(total[:, None, :] * up[None, :, :], 2)
    place = t[:, None] * 192 + n[None, :]
    tl.store(hidden + place, g / (1.0 + tl.exp(-g)) * u, mask=(tl.arange(0, 16) < PIECE)[None, :] & (t >= 0)[:, None])


@triton.jit
def down_kernel(out, hidden, x, residual, down, PIECE: tl.constexpr):
    n = tl.program_id(0) * PIECE + tl.arange(0, 8)
    own = tl.arange(0, 8) < PIECE
    k = tl.arange(0, 256)
    t = tl.arange(0, 4)
    numbers = tl.load(hidden + t[:, None] * 192 + k[None, :], mask=(t >= 0)[:, None] & (k < 192)[None, :], other=0.0)
    weight = tl.load(down + n[:, None] * 192 + k[None, :], mask=own[:, None] & (k < 192)[None, :], other=0.0)
    at = t[:, None] * 96 + n[None, :]
    there = (t >= 0)[:, None] & own[None, :]
    total = tl.load(x + at, mask=there, other=0.0) + tl.load(residual + at, mask=there, other=0.0)
    tl.store(out + at, total + tl.sum(numbers[:, None, :] * weight[None, :, :], 2), mask=there)


def layer_plan():
    first = {name: name for name in ("hidden", "x", "residual", "norm", "gate_up")}
    second = {name: name for name in ("out", "hidden", "x", "residual", "down")}
    return {
        "scratch": {"hidden": ((4, 192), "float32")},
        "launches": (
            ["hidden_kernel", (16,), first, {"PIECE": 12}],
            ["down_kernel", (16,), second, {"PIECE": 6}],
        ),
    }
'''


def namespace(code: str) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "student"}
    linecache.cache["plan"] = (len(code), None, code.splitlines(True), "plan")
    exec(compile(code, "plan", "exec"), found)
    return found


def start() -> str:
    """The plan of the notebook, with the kernels that it launches."""
    cells = read_assignment(SOURCE).cells
    names = ("def axpy_kernel", "def product_kernel", "def add_rms_norm_kernel", "def swiglu_kernel")
    kept = [c.source for c in cells if c.kind == "code" and any(name in c.source for name in names)]
    return "import triton\nimport triton.language as tl\n" + "\n\n\n".join(kept)


def scored(code: str, seed: int = 0) -> dict[str, Any]:
    found = namespace(code)

    def ask(name: str, *args: Any) -> Any:
        if name == "layer_plan":
            return local_ask(found)(name)
        return kernel_runner.answer(kernel_ask.text_of(kernel_ask.launched(args[0]), found), args[0])

    return task.score(ask, seed)


@pytest.mark.parametrize(("code", "cost"), [(start, task.START), (lambda: TWO_LAUNCHES, task.TO_BEAT)])
def test_the_cost_is_the_same_for_all_numbers(code: Any, cost: int) -> None:
    for seed in (0, 7):
        result = scored(code(), seed)
        assert result["ok"] and result["cost"] == cost, result
    assert task.bound() < cost
    assert f"cost {cost:,}: " in task.layer_cost(namespace(code())["layer_plan"])


def test_few_programs_cost_sixteen_times_what_the_busiest_moves() -> None:
    wide = TWO_LAUNCHES.replace("arange(0, 16)", "arange(0, 32)").replace("arange(0, 8)", "arange(0, 16)")
    eight = wide.replace('(16,), first, {"PIECE": 12}', '(8,), first, {"PIECE": 24}')
    eight = eight.replace('(16,), second, {"PIECE": 6}', '(8,), second, {"PIECE": 12}')
    result, sixteen = scored(eight), scored(TWO_LAUNCHES)
    assert result["ok"] and result["total_bytes"] < sixteen["total_bytes"]
    assert result["cost"] == 2 * task.LAUNCH + 2 * result["total_bytes"] > sixteen["cost"]


WRONG: dict[str, tuple[str, str, str]] = {
    "no norm": ("total *= scale[:, None] * ", "total *= ", "the plan: out: at"),
    "a race": ("tl.program_id(0) * PIECE + tl.arange(0, 8)", "tl.arange(0, 8)", "race in `tl.store(out + at"),
    "reads what nobody wrote": ('"hidden_kernel", (16,)', '"hidden_kernel", (15,)', "uninitialised-read"),
    "unknown buffer": ('"norm", "gate_up")', '"norm", "up")', "there is no buffer 'up'"),
    "a kernel that is not there": ('"down_kernel", (16,)', '"other_kernel", (16,)', "`other_kernel` is not defined"),
    "no kernel": ('"down_kernel", (16,)', '"layer_plan", (16,)', "`layer_plan` is not"),
    "no name": ('"down_kernel", (16,)', '"a; b", (16,)', "'a; b' is no name of a kernel"),
    "too many programs": ('"down_kernel", (16,)', '"down_kernel", (16, 17)', "is more than 256 programs"),
    "an empty grid": ('"down_kernel", (16,)', '"down_kernel", ()', "not 1 to 3 sizes"),
    "a huge scratch": ("(4, 192)", "(2**60, 2**60)", "has the shape"),
    "too much scratch": ("(4, 192)", "(2**10, 2**10)", "numbers of scratch"),
    "a scratch with the name of an input": ('{"hidden": (', '{"x": (', "is a new name"),
    "a constant of text": ('{"PIECE": 6}', '{"PIECE": "6"}', "constants are numbers"),
    "no plan": ('"launches": (', '"steps": (', 'a plan is {"scratch"'),
    "an argument is missing": ('"residual", "down")', '"down")', "`residual`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_that_is_wrong_has_no_cost_and_one_line(name: str) -> None:
    before, after, says = WRONG[name]
    assert before in TWO_LAUNCHES
    code = TWO_LAUNCHES.replace(before, after)
    if name == "unknown buffer":
        code = code.replace("residual, norm, gate_up, PIECE", "residual, norm, up, PIECE").replace("gate_up +", "up +")
    try:
        result = scored(code)
    except Exception as error:  # in a notebook what the launch raises is shown as it is
        result = {"ok": False, "cost": None, "message": str(error)}
    assert not result["ok"] and result["cost"] is None
    assert says in result["message"] and "\n" not in result["message"].split("in program")[0]


def test_what_is_no_function_is_named() -> None:
    with pytest.raises(InferError, match="layer_plan"):
        task.layer_cost(lambda: None)


def test_a_whole_submission_scores_full_and_its_plan_is_counted(tmp_path: Path) -> None:
    """The reference with another plan, as the grader sees it: kernels from its text, the plan from its process."""
    cells = [c.source for c in read_assignment(SOURCE).cells if c.role is Role.SOLUTION]
    path = tmp_path / "a4.py"
    path.write_text("\n# %%\n".join(["# %%\nimport triton", *cells, TWO_LAUNCHES]), encoding="utf-8")
    result = grade_one(open_course(REPO, "a4"), path, seed=3, limits=Limits(), sandbox=True)
    assert result["score"] == result["max_score"] > 70, [c for c in result["checks"] if c["outcome"] != "passed"]
    assert result["open_task"] == {**scored(TWO_LAUNCHES), "ok": True}
