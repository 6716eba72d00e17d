"""A student's kernels in the real engine: the same tokens as plain PyTorch, and a wrong kernel is seen."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest

from cs336_infer import LLM, SamplingParams, generate
from cs336_infer.course.a4_sockets import plug_kernels
from cs336_infer.course.assignment import Role, read_assignment
from cs336_infer.course.plug import PLUGGED, NotPlugged, plug_notebook
from cs336_infer.course.tiny_model import tiny_model
from cs336_infer.types import InferError

REPO = Path(__file__).resolve().parents[2]
NAMES = ("add_rms_norm_kernel", "rope_write_kernel", "swiglu_kernel", "split_attention_kernel", "merge_kernel")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [30]]
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)
CHANGES = {
    "add_rms_norm_kernel": ("/ D + eps", "/ D + 1.0"),
    "rope_write_kernel": ("a * c - b * s", "a * c + b * s"),
    "swiglu_kernel": ("/ (1.0 + tl.exp(-gate)) * up", "* up"),
    "split_attention_kernel": ("tl.minimum(begin + share, length)", "tl.minimum(begin + share, length - 1)"),
    "merge_kernel": ("average.to(out", "(average * 0.5).to(out"),
}


def code_of(change: tuple[str, str] | None = None) -> str:
    cells = read_assignment(REPO / "solutions" / "a4_fusion" / "a4_fusion.py").cells
    code = "\n\n\n".join(c.source for c in cells if c.role is Role.SOLUTION)
    if change is not None:
        assert code.count(change[0]) == 1
        code = code.replace(*change)
    return "import triton\nimport triton.language as tl\n" + code


def kernels(code: str) -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "student"}
    linecache.cache["kernels"] = (len(code), None, code.splitlines(True), "kernels")
    exec(compile(code, "kernels", "exec"), found)
    return {name: found[name] for name in NAMES}


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [generate(tiny_model(), prompt, PARAMS, kv="none")[0].token_ids for prompt in PROMPTS]


def engine() -> list[Any]:
    options: dict[str, Any] = {"block_size": 4, "kv_tokens": 96, "step_tokens": 5, "prefix_cache": False}
    return LLM(tiny_model("triton"), fill=float("nan"), **options).generate(PROMPTS, PARAMS)


SECOND = (REPO / "tests" / "mutants" / "a4_fusion_second.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", [code_of(), SECOND], ids=["reference", "second"])
def test_all_kernels_at_once_give_the_tokens_of_plain_pytorch(plain: list[list[int]], code: str) -> None:
    with plug_kernels(**kernels(code)):
        done = engine()
    assert [d.token_ids for d in done] == plain
    assert "kernels=triton" in done[0].path and done[0].path.endswith(f"plugged={','.join(NAMES)}")
    assert not PLUGGED and "plugged" not in engine()[0].path


@pytest.mark.parametrize("name", NAMES)
def test_each_kernel_by_itself_runs_where_it_should(plain: list[list[int]], name: str) -> None:
    """Right, the tokens stay; wrong, they change: so it is this kernel that ran."""
    for change in (None, CHANGES[name]):
        needed = {name, "split_attention_kernel"} if name == "merge_kernel" else {name}
        found = kernels(code_of(change))
        with plug_kernels(**{each: found[each] for each in needed}):
            assert ([d.token_ids for d in engine()] == plain) is (change is None)


def test_the_notebook_can_be_plugged_in_whole(plain: list[list[int]]) -> None:
    with plug_notebook(REPO / "solutions" / "a4_fusion" / "a4_fusion.ipynb"):
        assert set(NAMES) <= set(PLUGGED)
        assert [d.token_ids for d in engine()] == plain


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(InferError, match=r"swiglu_kernel=\.\.\.\) takes a @triton\.jit function, not a function"):
        plug_kernels(swiglu_kernel=lambda *a: None)
    alone = {"merge_kernel": kernels(code_of())["merge_kernel"]}
    with plug_kernels(**alone), pytest.raises(NotPlugged, match="this needs your `split_attention_kernel`"):
        engine()
    with plug_kernels(**kernels(code_of())), pytest.raises(InferError, match="need the engine"):
        generate(tiny_model("triton"), [PROMPTS[0]], PARAMS)
