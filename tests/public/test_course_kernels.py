"""What lecture 08 counts and draws: traces of kernels, the launches and bytes of a layer, the tiny model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from cs336_kernels.sanitizer import sanitize
from cs336_kernels.shapes import MODELS, TINY
from matplotlib import pyplot as plt

from cs336_infer import LLM, SamplingParams, generate
from cs336_infer.course import kernel_drawings, layer_ladder
from cs336_infer.course.kernel_trace import Access, trace
from cs336_infer.course.layer_ladder import DTYPE, RUNGS, layer
from cs336_infer.course.tiny_model import TINY as TINY_CONFIG
from cs336_infer.course.tiny_model import tiny_model
from cs336_infer.kv.paged import PagedKV, Row
from cs336_infer.models.llama import inverse_frequencies


@triton.jit
def add_one(out, x, D: tl.constexpr, REACH: tl.constexpr, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    numbers = tl.load(x + row * D + lane, mask=lane < REACH).to(tl.float32)
    tl.store(out + row * D + lane, (numbers + 1).to(out.dtype.element_ty), mask=lane < D)


@triton.jit
def count_up(count):
    tl.atomic_add(count, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trace_computes_and_lists_every_access(dtype):
    x, out = torch.arange(6.0).view(2, 3).to(dtype), torch.full((2, 3), float("nan"), dtype=dtype)
    seen = trace(add_one, (2,), out, x, D=3, REACH=3, BLOCK=4)
    assert torch.equal(out, x + 1)
    assert seen == [
        Access(0, "load", "x", (0, 1, 2, None)),
        Access(0, "store", "out", (0, 1, 2, None)),
        Access(1, "load", "x", (3, 4, 5, None)),
        Access(1, "store", "out", (3, 4, 5, None)),
    ]
    assert seen[2].elements == [3, 4, 5]


def test_a_trace_refuses_what_it_cannot_show():
    x, out = torch.zeros(2, 3), torch.zeros(2, 3)
    with pytest.raises(IndexError, match=r"program 1 loads outside of out, x"):
        trace(add_one, (2,), out, x, D=3, REACH=4, BLOCK=4)
    with pytest.raises(NotImplementedError, match="under the sanitizer"):
        trace(count_up, (1,), torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [1, 64])
def test_each_rung_has_fewer_launches_and_moves_no_more(name, tokens):
    shape, counted = MODELS[name], layer(MODELS[name], tokens)
    matrices = layer_ladder.config_of(shape).layer_params - 2 * shape.hidden - 2 * shape.head_dim * shape.qk_norm
    assert counted.weights == matrices * 2
    assert counted.cached == tokens * shape.context * shape.kv_heads * shape.head_dim * 2 * 2
    assert all(counted.between(rung) > 0 for rung in RUNGS)
    for less, more in (("compile", "eager"), ("triton", "eager"), ("fused", "compile"), ("fused", "triton")):
        assert counted.launches(less) < counted.launches(more)
    for less, more in (("compile", "eager"), ("fused", "triton")):  # only the engine's attention shows its parts
        assert counted.moved(less) < counted.moved(more)
    assert counted.rungs["graph"] == counted.rungs["fused"] and counted.launches("fused") in (5, 6)


def test_eager_bytes_are_those_of_the_tensors():
    """By hand, for one token: each op reads its inputs and writes its result."""
    s = replace(TINY["tiny"], context=8)
    width, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    norm, turned = 3 * s.hidden, width + kv
    qkv = s.hidden + (width + 2 * kv) * (s.hidden + 1)
    rope = 2 * turned + s.head_dim + 2 * turned + 3 * turned + s.head_dim
    attention = 2 * kv + 2 * kv + 2 * width + 2 * s.context * kv
    out = width + s.hidden * (width + 1) + 3 * s.hidden
    mlp = s.hidden + 2 * s.ffn * (s.hidden + 1) + 2 * s.ffn + 3 * s.ffn + s.ffn + s.hidden * (s.ffn + 1) + 3 * s.hidden
    assert layer(s, 1).moved("eager") == 2 * (norm + qkv + rope + attention + out + norm + mlp)


@pytest.mark.parametrize("path", ["triton", "fused"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_the_bytes_of_triton_kernels_are_those_that_the_sanitizer_counts(path, tokens):
    shape = TINY["tiny"]
    config, block = layer_ladder.config_of(shape), layer_ladder.block_of(shape, path, "cpu")
    draw = torch.Generator().manual_seed(0)
    for gain in (block.attn_norm, block.mlp_norm):
        gain.fill_(1.0)
    for linear in (block.qkv, block.o, block.gate_up, block.down):
        linear.weight.normal_(0, 0.1, generator=draw)
    pages = shape.context // shape.page
    kv = PagedKV(config, num_blocks=pages * tokens, block_size=shape.page, dtype=DTYPE, fill=0.5, attention="triton")
    rows = [Row(range(i * pages, (i + 1) * pages), shape.context - 1, 1) for i in range(tokens)]
    step = kv.step(rows)
    rope = layer_ladder.rope_tables(step.positions, inverse_frequencies(config), DTYPE)
    x = torch.randn(1, tokens, shape.hidden, generator=draw).to(DTYPE)
    with torch.inference_mode(), sanitize(schedules=1) as report:
        block(x, rope, 0, step.extend(tokens))
    counted = layer(shape, tokens)
    sums = [kernel.moved for kernel in counted.rungs[path] if kernel.name == "add"]
    assert report.findings == []
    assert len(report.launches) == counted.launches(path) - len(sums)
    assert counted.moved(path) - sum(sums) == pytest.approx(report.unique_bytes, rel=0.01)


def test_the_tiny_model_is_the_same_on_every_rung():
    prompts, params = [[5, 9, 300], [7]], SamplingParams(max_tokens=4, ignore_eos=True)
    alone = [d.token_ids for d in generate(tiny_model(), prompts, params, kv="none")]
    assert all(0 <= token < TINY_CONFIG.vocab_size for ids in alone for token in ids)
    for kernels in ("reference", "fused"):
        llm = LLM(tiny_model(kernels), block_size=4, kv_tokens=64, fill=float("nan"))
        assert [d.token_ids for d in llm.generate(prompts, params)] == alone


def test_drawings_hold_what_they_are_given():
    accesses = [Access(0, "load", "x", (0, 1, None)), Access(1, "load", "x", (2, 3, None))]
    figures = {
        "lanes": (kernel_drawings.lanes(accesses, title="t"), 6),
        "offsets": (kernel_drawings.offsets(2, 3, 4, title="t"), 7 + 8),
        "levels": (kernel_drawings.levels([("a", "1", "x"), ("b", "2", "y")]), 2),
        "chains": (kernel_drawings.chains(["p", "q"], {"r": [(0, 1, "s", 1)], "u": [(0, 0, "v", 2)]}, title="t"), 2),
    }
    for name, (figure, patches) in figures.items():
        assert len(figure.axes[0].patches) == patches, name
    bars = kernel_drawings.rungs(["a", "b"], [3, 2], [("w", 5.0)], [0.2, 0.1], title="t")
    widths = [[bar.get_bbox().width for group in ax.containers for bar in group] for ax in bars.axes]
    assert [pytest.approx(numbers) for numbers in ([3, 2], [5, 5, 0.2, 0.1], [200, 100])] == widths
    times = kernel_drawings.step_times(["a", "b"], 10, [3, 2], [20, 1], title="t")
    assert [text.get_text().strip() for text in times.axes[0].texts] == ["20", "12"]
    plt.close("all")
