"""Prefill attention over KV pages: the kernel and its reference against float64 attention that never sees a page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cs336_kernels.ops import prefill_attention
from cs336_kernels.sanitizer import sanitize
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bounds import DTYPES, check, same_over_fills
from kernel_pages import Pages, fresh_memory_is_nan, oracle, pages, queries

pytest.importorskip("triton")

PATHS = ("triton", "reference")
Rows = Sequence[tuple[int, int]]
"""(past, new) of each row."""


def arguments(
    rows: Rows, heads: int, memory: Pages, index: torch.dtype, fill: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, starts and totals."""
    starts = torch.tensor([0, *(new for _, new in rows)]).cumsum(0).to(index)
    totals = torch.tensor([past + new for past, new in rows], dtype=index)
    head_dim, dtype = memory.keys.shape[3], memory.keys.dtype
    return queries(int(starts[-1]), heads, head_dim, dtype, fill), starts, totals


def run(
    rows: Rows,
    path: str,
    *,
    block_size: int = 4,
    kv_heads: int = 1,
    group: int = 1,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int32,
    fill: float = math.nan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `path` says, and the oracle."""
    sizes: dict[str, int] = {"block_size": block_size, "kv_heads": kv_heads, "head_dim": head_dim}
    memory = pages([past + new for past, new in rows], **sizes, dtype=dtype, fill=fill, index=index)
    q, starts, totals = arguments(rows, kv_heads * group, memory, index, fill)
    with fresh_memory_is_nan():
        got = prefill_attention(q, memory.keys, memory.values, memory.tables, starts, totals, path)
    parts = [oracle(q[starts[r] : starts[r + 1]], kv) for r, kv in enumerate(memory.rows)]
    return got, torch.cat(parts)


ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=4)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    rows=ROWS,
    block_size=st.sampled_from([1, 4, 16, 6]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 8]),
    head_dim=st.sampled_from([32, 64, 80, 96, 128, 33]),
    dtype=st.sampled_from(DTYPES),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_both_paths_agree_with_attention_without_pages(rows: Rows, **shape) -> None:
    honest, truth = run(rows, "reference", **shape)
    check(honest, truth, honest)
    got, _ = run(rows, "triton", **shape)
    check(got, truth, honest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3])
def test_lengths_around_the_edges_of_tiles(dtype: torch.dtype, group: int) -> None:
    rows = [(0, 64), (1, 63), (0, 65), (62, 1), (63, 1), (64, 1), (0, 0), (63, 2), (127, 3), (100, 29), (5, 0)]
    shape: dict[str, Any] = {"block_size": 16, "group": group, "dtype": dtype}
    honest, truth = run(rows, "reference", **shape)
    check(run(rows, "triton", **shape)[0], truth, honest)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_one_long_row_has_several_tiles_of_queries(head_dim: int) -> None:
    """On the kernel's largest tiles: 1200 queries of a KV head, 13 pages of which the first is only partly its tile."""
    for dtype in (torch.float16, torch.float32):
        shape: dict[str, Any] = {"block_size": 16, "group": 8, "head_dim": head_dim, "dtype": dtype}
        honest, truth = run([(50, 150)], "reference", **shape)
        check(run([(50, 150)], "triton", **shape)[0], truth, honest)


@pytest.mark.parametrize("size", [1, 7, 32])
@pytest.mark.parametrize("path", ["reference", "triton"])
def test_chunks_of_a_prompt_are_the_prompt(size: int, path: str) -> None:
    """Each chunk runs when nothing behind it is stored; the slots there hold NaN."""
    prompt = 45
    whole = pages([prompt], block_size=4, kv_heads=2, head_dim=32)
    q = queries(prompt, 4, 32, torch.float32, math.nan)
    seen = pages([prompt], block_size=4, kv_heads=2, head_dim=32)
    seen.keys.fill_(math.nan)
    seen.values.fill_(math.nan)
    chunks = []
    for begin in range(0, prompt, size):
        end = min(begin + size, prompt)
        for at in range(begin, end):
            where = int(whole.tables[0, at // 4]), at % 4
            seen.keys[where], seen.values[where] = whole.keys[where], whole.values[where]
        span = torch.tensor([0, end - begin])
        total = torch.tensor([end])
        chunks.append(prefill_attention(q[begin:end], seen.keys, seen.values, seen.tables, span, total, path))
    check(torch.cat(chunks), oracle(q, whole.rows[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 32), (4, 80), (16, 96)])
def test_what_nobody_may_read_changes_nothing(dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    """Slots behind a row's end, other pages and layers, padding between queries, table entries behind the last."""
    rows = [(9, 6), (0, 0), (0, 17), (20, 1), (16, 16)]
    shape: dict[str, Any] = {"block_size": block_size, "kv_heads": 2, "group": 3, "head_dim": head_dim, "dtype": dtype}
    for path in ("reference", "triton"):
        same_over_fills(lambda fill, path=path: run(rows, path, **shape, fill=fill)[0])


def test_swapped_pages_are_seen() -> None:
    """The order of full pages matters to a causal mask, so a test of whole pages is not blind here."""
    memory = pages([32], block_size=16, kv_heads=1, head_dim=32)
    q, starts, totals = arguments([(0, 32)], 1, memory, torch.int32, 0.0)
    rest = starts, totals, "triton"
    right = prefill_attention(q, memory.keys, memory.values, memory.tables, *rest)
    swapped = prefill_attention(q, memory.keys, memory.values, memory.tables[:, [1, 0]].contiguous(), *rest)
    assert (right - swapped).abs().max() > 0.1


def test_keys_and_values_may_lie_in_different_memories() -> None:
    memory = pages([21], block_size=4, kv_heads=2, head_dim=32)
    q, starts, totals = arguments([(4, 17)], 2, memory, torch.int64, math.nan)
    apart = torch.stack([memory.values] * 2, 1)[:, 1]
    assert apart.stride() != memory.keys.stride()
    got = prefill_attention(q, memory.keys, apart, memory.tables, starts, totals, "triton")
    check(got, oracle(q, memory.rows[0]))


@pytest.mark.parametrize("shift", [-20, 20])
def test_scores_far_from_zero(shift: int) -> None:
    """About 300 away, where e^score is 0 or inf: only differences to the largest score may be exponentiated."""
    memory = pages([70], block_size=4, kv_heads=1, head_dim=32, dtype=torch.float16)
    memory.keys.add_(shift)
    k, v = memory.rows[0]
    q = queries(9, 2, 32, torch.float16, math.nan).add_(3)
    rest = torch.tensor([0, 9]), torch.tensor([70])
    got, honest = (prefill_attention(q, memory.keys, memory.values, memory.tables, *rest, path=path) for path in PATHS)
    check(got, oracle(q, (k + shift, v)), honest)


def test_pages_beyond_two_gibi_numbers() -> None:
    """Page 2100 at 2^20 numbers a page: its offset does not fit 32 bits. Memory that is not touched is not taken."""
    stride, page = 1 << 20, 2100
    memory = torch.empty(stride * (page + 1), dtype=torch.float16)
    keys, values = (memory[i * 128 :].as_strided((page + 1, 4, 1, 32), (stride, 32, 32, 1)) for i in range(2))
    small = pages([3], block_size=4, kv_heads=1, head_dim=32, dtype=torch.float16, fill=0.0)
    first = int(small.tables[0, 0])
    keys[page], values[page] = small.keys[first], small.values[first]
    q = queries(3, 1, 32, torch.float16, 0.0)
    rest = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32), "triton"
    got = prefill_attention(q, keys, values, torch.tensor([[page]], dtype=torch.int32), *rest)
    assert torch.equal(got, prefill_attention(q, small.keys, small.values, small.tables, *rest))


def test_the_sanitizer_finds_nothing() -> None:
    rows, heads = [(9, 6), (0, 0), (3, 17)], 6
    memory = pages([past + new for past, new in rows], block_size=4, kv_heads=2, head_dim=32, fill=0.0)
    q, starts, totals = arguments(rows, heads, memory, torch.int32, 0.0)
    with sanitize(schedules=3, resident=4) as report:
        got = prefill_attention(q, memory.keys, memory.values, memory.tables, starts, totals, "triton")
    assert report.findings == []
    traffic = report.launches[0].traffic
    stored = sum(past + new for past, new in rows) * 2 * 32 * 4
    assert traffic["keys"].unique_loaded == traffic["values"].unique_loaded == stored
    assert traffic["out"].stored == traffic["out"].unique_stored == got.nbytes
    assert traffic["q"].unique_loaded == got.nbytes


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_a_batch_without_tokens(path: str) -> None:
    assert run([(3, 0), (0, 0)], path)[0].shape == (0, 1, 32)


def test_float64_in_the_reference_is_float64() -> None:
    got, truth = run([(5, 7), (0, 20)], "reference", group=4, dtype=torch.float64)
    assert got.dtype == torch.float64 and (got - truth).abs().max() < 1e-13


GOOD: dict[str, Any] = {
    "q": torch.zeros(3, 4, 32),
    "keys": torch.zeros(5, 4, 2, 32),
    "values": torch.zeros(5, 4, 2, 32),
    "tables": torch.zeros(2, 2, dtype=torch.int32),
    "starts": torch.tensor([0, 1, 3]),
    "totals": torch.tensor([4, 8]),
}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"path": "cuda"}, "unknown path 'cuda' for prefill_attention (reference, triton)"),
    ({"q": torch.zeros(3, 128)}, "q is [3, 128], not [tokens, heads, head_dim]"),
    ({"q": torch.zeros(3, 3, 32)}, "3 query heads are not a multiple of 2 KV heads"),
    ({"q": torch.zeros(3, 4, 16)}, "head_dim is 16 in q and 32 in keys, not one size of 1 to 256"),
    (
        {"q": torch.zeros(3, 32, 4).transpose(1, 2)},
        "q have strides (128, 1, 4); only the first dimension's may",
    ),
    ({"keys": torch.zeros(5, 4, 64)}, "keys are [5, 4, 64], not [pages, block_size, kv_heads, head_dim]"),
    ({"values": torch.zeros(4, 4, 2, 32)}, "values are [4, 4, 2, 32], not [5, 4, 2, 32] like the keys"),
    ({"values": torch.zeros(5, 4, 2, 32).half()}, "values are torch.float16, not torch.float32 like q"),
    ({"keys": torch.zeros(5, 2, 4, 32).transpose(1, 2)}, "keys have strides (256, 32, 128, 1); only the first"),
    ({"tables": torch.zeros(2, dtype=torch.int32)}, "tables are [2], not [rows, max_blocks]"),
    ({"tables": torch.zeros(2, 2)}, "tables are torch.float32, not int32 or int64"),
    ({"starts": torch.tensor([0, 3])}, "starts are [2] with strides (1,), not contiguous [3]"),
    ({"starts": torch.tensor([0, 1, 2])}, "starts are [0, 1, 2], not ascending from 0 to 3, the tokens of q"),
    ({"starts": torch.tensor([0, 4, 3])}, "starts are [0, 4, 3], not ascending from 0 to 3"),
    ({"starts": torch.tensor([1, 1, 3])}, "starts are [1, 1, 3], not ascending from 0 to 3"),
    ({"totals": torch.tensor([4, 8]).int().float()}, "totals are torch.float32, not int32 or int64"),
    ({"totals": torch.tensor([4, 9])}, "totals go from 4 to 9; a row of tables has room for 0 to 8 positions"),
    ({"totals": torch.tensor([4, 1])}, "row 1 has 2 new tokens of 1 positions"),
    ({"totals": torch.zeros(2, device="meta", dtype=torch.int32)}, "totals are on meta, not on cpu like q"),
    ({"keys": torch.zeros(5, 4, 2, 32, device="meta")}, "keys are on meta, not on cpu like q"),
]


@pytest.mark.parametrize(("change", "line"), BAD, ids=[line[:40] for _, line in BAD])
def test_errors_say_what_which_and_what_is_expected(change: dict[str, Any], line: str) -> None:
    prefill_attention(**GOOD)
    with pytest.raises(ValueError, match=re.escape(line)) as raised:
        prefill_attention(**{**GOOD, **change})
    assert "\n" not in str(raised.value)


def test_the_triton_path_refuses_float64() -> None:
    double = {name: t.double() if t.is_floating_point() else t for name, t in GOOD.items()}
    prefill_attention(**double)
    with pytest.raises(ValueError, match=r"the triton path knows float32, float16 and bfloat16, not torch\.float64"):
        prefill_attention(**double, path="triton")
