"""Decode attention over KV pages, and the merging of its parts, against float64 attention that never sees a page."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from cs336_kernels.ops import choose_splits, decode_attention, merge_attention
from cs336_kernels.ops.kv_pages import softmax_attention
from cs336_kernels.sanitizer import sanitize
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bounds import DTYPES, check, same_over_fills
from kernel_pages import fresh_memory_is_nan, oracle, pages, queries

pytest.importorskip("triton")

PATHS = ("triton", "reference")


def run(
    lengths: list[int],
    path: str,
    splits: int | None = None,
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
    sizes = {"block_size": block_size, "kv_heads": kv_heads, "head_dim": head_dim}
    memory = pages(lengths, **sizes, dtype=dtype, fill=fill, index=index)
    q = queries(len(lengths), kv_heads * group, head_dim, dtype, fill)
    stored = torch.tensor(lengths, dtype=index)
    with fresh_memory_is_nan():
        got = decode_attention(q, memory.keys, memory.values, memory.tables, stored, splits, path)
    return got, torch.cat([oracle(q[r : r + 1], kv) for r, kv in enumerate(memory.rows)])


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    splits=st.one_of(st.none(), st.integers(1, 7)),
    block_size=st.sampled_from([1, 4, 16, 6]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 8]),
    head_dim=st.sampled_from([32, 64, 80, 96, 128, 256, 33]),
    dtype=st.sampled_from(DTYPES),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_both_paths_agree_with_attention_without_pages(lengths: list[int], splits: int | None, **shape) -> None:
    honest, truth = run(lengths, "reference", splits, **shape)
    check(honest, truth, honest)
    got, _ = run(lengths, "triton", splits, **shape)
    check(got, truth, honest)


@pytest.mark.parametrize("splits", range(1, 8))
@pytest.mark.parametrize(("block_size", "group"), [(1, 8), (4, 3), (16, 4), (16, 1)])
def test_every_number_of_splits(splits: int, block_size: int, group: int) -> None:
    """Ragged last pages in pages dealt at random: with a wrong order of pages, a part that is not stored would be read.
    The short rows have fewer pages than splits, one of them none."""
    lengths = [0, 1, 3 * block_size, 3 * block_size - 1, 3 * block_size + 1, block_size, 70, 2 * block_size + 1]
    got, truth = run(lengths, "triton", splits, block_size=block_size, group=group, kv_heads=2)
    check(got, truth)
    assert (got[0] == 0).all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 32), (4, 80), (16, 96)])
def test_what_nobody_may_read_changes_nothing(splits: int, dtype: torch.dtype, block_size: int, head_dim: int) -> None:
    """Slots behind a row's end, other pages and layers, padding between queries, table entries behind the last."""
    shape: dict[str, Any] = {"block_size": block_size, "kv_heads": 2, "group": 3, "head_dim": head_dim, "dtype": dtype}
    for path in ("reference", "triton"):
        same_over_fills(lambda fill, path=path: run([15, 0, 17, 33, 1, 32], path, splits, **shape, fill=fill)[0])


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Bitwise: a row's parts are made of its own pages alone, whatever the others' lengths and strides are."""
    memory = pages([5, 40, 23], block_size=4, kv_heads=2, head_dim=32)
    q = queries(3, 6, 32, torch.float32, math.nan)
    lengths = torch.tensor([5, 40, 23])
    together = decode_attention(q, memory.keys, memory.values, memory.tables, lengths, 3, "triton")
    for row in range(3):
        mine = slice(row, row + 1)
        alone = decode_attention(
            q[mine], memory.keys, memory.values, memory.tables[mine], lengths[mine], 3, "triton"
        )  # fmt: skip
        assert torch.equal(alone, together[mine])


def test_keys_and_values_may_lie_in_different_memories() -> None:
    memory = pages([21], block_size=4, kv_heads=2, head_dim=32)
    q = queries(1, 2, 32, torch.float32, math.nan)
    apart = torch.stack([memory.values] * 2, 1)[:, 1]
    assert apart.stride() != memory.keys.stride()
    got = decode_attention(q, memory.keys, apart, memory.tables, torch.tensor([21]), 2, "triton")
    check(got, oracle(q, memory.rows[0]))


@pytest.mark.parametrize("shift", [-20, 20])
def test_scores_far_from_zero(shift: int) -> None:
    """About 300 away, where e^score is 0 or inf: only differences to the largest score may be exponentiated."""
    memory = pages([70], block_size=4, kv_heads=1, head_dim=32, dtype=torch.float16)
    memory.keys.add_(shift)
    k, v = memory.rows[0]
    q = queries(1, 2, 32, torch.float16, math.nan).add_(3)
    rest = torch.tensor([70]), 2
    got, honest = (decode_attention(q, memory.keys, memory.values, memory.tables, *rest, path=path) for path in PATHS)
    check(got, oracle(q, (k + shift, v)), honest)


def test_pages_beyond_two_gibi_numbers() -> None:
    """Page 2100 at 2^20 numbers a page: its offset does not fit 32 bits. Memory that is not touched is not taken."""
    stride, page = 1 << 20, 2100
    memory = torch.empty(stride * (page + 1), dtype=torch.float16)
    keys, values = (memory[i * 128 :].as_strided((page + 1, 4, 1, 32), (stride, 32, 32, 1)) for i in range(2))
    small = pages([3], block_size=4, kv_heads=1, head_dim=32, dtype=torch.float16, fill=0.0)
    first = int(small.tables[0, 0])
    keys[page], values[page] = small.keys[first], small.values[first]
    q, lengths = queries(1, 1, 32, torch.float16, 0.0), torch.tensor([3])
    got = decode_attention(q, keys, values, torch.tensor([[page]], dtype=torch.int32), lengths, 1, "triton")
    assert torch.equal(got, decode_attention(q, small.keys, small.values, small.tables, lengths, 1, "triton"))


@pytest.mark.parametrize("splits", [1, 3])
def test_each_key_and_value_is_read_once(splits: int) -> None:
    """Once for the four query heads of a KV head, and by one split only; partial results are float32. And the sanitizer
    finds nothing."""
    lengths = [9, 0, 33]
    memory = pages(lengths, block_size=4, kv_heads=2, head_dim=32, dtype=torch.float16, fill=0.0)
    q = queries(3, 8, 32, torch.float16, 0.0)
    with sanitize(schedules=3, resident=4) as report:
        got = decode_attention(q, memory.keys, memory.values, memory.tables, torch.tensor(lengths), splits, "triton")
    assert report.findings == []
    traffic = report.launches[0].traffic
    for name in ("keys", "values"):
        assert traffic[name].loaded == traffic[name].unique_loaded == sum(lengths) * 2 * 32 * 2
    written = splits * got.numel() * (2 if splits == 1 else 4)
    assert traffic["partials"].stored == traffic["partials"].unique_stored == written
    assert len(report.launches) == (1 if splits == 1 else 2)
    if splits > 1:
        assert report.launches[1].traffic["out"].stored == got.nbytes


def test_splits_of_the_reference_in_float64() -> None:
    """So the reference with one split, plain attention, is the oracle of the reference that splits."""
    for splits in (None, 2, 5, 40):
        got, truth = run([0, 1, 30, 64], "reference", splits, group=4, dtype=torch.float64)
        assert got.dtype == torch.float64 and (got - truth).abs().max() < 1e-13


def test_the_rule_for_splits() -> None:
    assert choose_splits(longest=0, rows=1, kv_heads=8) == 1
    assert choose_splits(longest=511, rows=1, kv_heads=8) == 1
    assert choose_splits(longest=512, rows=1, kv_heads=8) == 2
    assert choose_splits(longest=16384, rows=1, kv_heads=8) == 33  # 264 programs
    assert choose_splits(longest=16384, rows=64, kv_heads=8) == 1
    assert choose_splits(longest=10**7, rows=1, kv_heads=1) == 264
    for rows in range(1, 50):
        for longest in range(0, 5000, 100):
            splits = choose_splits(longest, rows, 8)
            assert splits == 1 or (longest / splits >= 256 and rows * 8 * (splits - 1) < 264)


def parts(cuts: list[int], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention over parts of 60 positions cut at `cuts`, [1, 4, parts, 32]; lse; and attention over all of them."""
    rng = torch.Generator().manual_seed(5)
    q = 2 * torch.randn(1, 4, 32, generator=rng, dtype=torch.float64)
    k, v = torch.randn(2, 60, 2, 32, generator=rng, dtype=torch.float64)
    edges = [0, *cuts, 60]
    made = [softmax_attention(q, k[a:b], v[a:b]) for a, b in pairwise(edges)]
    partials = torch.stack([out for out, _ in made], 2).to(dtype)
    return partials, torch.stack([lse for _, lse in made], 2).to(dtype), oracle(q, (k, v))


@pytest.mark.parametrize("cuts", [[], [1], [20, 20], [0, 30, 59], [*range(1, 60)], [60, 60, 60]])
def test_merging_gives_the_whole(cuts: list[int]) -> None:
    """Also with parts of no positions: their lse is -inf and their average, whatever it holds, is not used."""
    double, lse, whole = parts(cuts)
    edges = torch.tensor([0, *cuts, 60])
    assert torch.equal(lse[0, 0] == -torch.inf, edges.diff() == 0)
    assert (merge_attention(double, lse) - whole).abs().max() < 1e-13
    partials, lse, _ = parts(cuts, torch.float32)
    with fresh_memory_is_nan():
        check(merge_attention(partials, lse, "triton"), whole)


def test_merging_ignores_the_averages_of_nothing() -> None:
    partials, lse, whole = parts([10, 10, 30, 60], torch.float32)
    empty = lse == -torch.inf
    assert empty.any()
    for path in ("reference", "triton"):

        def merged(fill: float, path: str = path) -> torch.Tensor:
            return merge_attention(partials.masked_fill(empty.unsqueeze(-1), fill), lse, path)

        check(same_over_fills(merged), whole)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_merging_nothing_gives_zeros(path: str) -> None:
    nothing = torch.full((2, 3, 5, 32), math.nan), torch.full((2, 3, 5), -torch.inf)
    assert torch.equal(merge_attention(*nothing, path), torch.zeros(2, 3, 32))


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_weights_are_powers_of_e(path: str) -> None:
    """A part of three times the sum of another counts three times, far from 0 too; with another base it would not."""
    partials = torch.stack([torch.full((1, 1, 32), 1.0), torch.full((1, 1, 32), 5.0)], 2)
    for shift in (0.0, 300.0, -300.0):
        lse = torch.tensor([[[math.log(3.0) + shift, shift]]])
        check(merge_attention(partials, lse, path), torch.full((1, 1, 32), 2.0, dtype=torch.float64).expand(1, 1, 32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_merging_rounds_once_to_the_dtype_asked_for(dtype: torch.dtype) -> None:
    partials, lse, _ = parts([7, 33], torch.float32)
    for path in ("reference", "triton"):
        exact = merge_attention(partials, lse, path)
        assert torch.equal(merge_attention(partials, lse, path, dtype), exact.to(dtype))


def test_an_empty_batch() -> None:
    memory = pages([4], block_size=4, kv_heads=1, head_dim=32)
    for path in ("reference", "triton"):
        got = decode_attention(
            torch.zeros(0, 2, 32), memory.keys, memory.values, memory.tables[:0], torch.zeros(0).int(), None, path
        )
        assert got.shape == (0, 2, 32)


GOOD: dict[str, Any] = {
    "q": torch.zeros(2, 4, 32),
    "keys": torch.zeros(5, 4, 2, 32),
    "values": torch.zeros(5, 4, 2, 32),
    "tables": torch.zeros(2, 2, dtype=torch.int32),
    "lengths": torch.tensor([4, 8]),
}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"path": "cuda"}, "unknown path 'cuda' for decode_attention (reference, triton)"),
    ({"q": torch.zeros(2, 4, 16)}, "head_dim is 16 in q and 32 in keys, not one size of 1 to 256"),
    ({"q": torch.zeros(3, 4, 32)}, "lengths are [2] with strides (1,), not contiguous [3]"),
    ({"tables": torch.zeros(3, 2, dtype=torch.int32)}, "tables have 3 rows, not 2 like q"),
    ({"lengths": torch.tensor([4, 9])}, "lengths go from 4 to 9; a row of tables has room for 0 to 8 positions"),
    ({"lengths": torch.tensor([-1, 8])}, "lengths go from -1 to 8; a row of tables has room for 0 to 8 positions"),
    ({"lengths": torch.tensor([4, 0, 8])[::2]}, "lengths are [2] with strides (2,), not contiguous [2]"),
    ({"splits": 0}, "splits is 0, not 1 to 1024"),
    ({"splits": 1025}, "splits is 1025, not 1 to 1024"),
]

PARTS: dict[str, Any] = {"partials": torch.zeros(2, 4, 3, 32), "lse": torch.zeros(2, 4, 3)}

BAD_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"path": "cuda"}, "unknown path 'cuda' for merge_attention (reference, triton)"),
    ({"partials": torch.zeros(2, 4, 3, 32).half()}, "partials are torch.float16 and lse torch.float32, not both"),
    ({"lse": torch.zeros(2, 4)}, "partials are [2, 4, 3, 32] and lse [2, 4], not [rows, heads, splits, head_dim] and"),
    ({"partials": torch.zeros(2, 4, 0, 32), "lse": torch.zeros(2, 4, 0)}, "0 splits of head_dim 32, not 1 to 1024 of"),
    ({"lse": torch.zeros(2, 3, 4).mT}, "partials have strides (384, 96, 32, 1) and lse (12, 1, 4), which are not"),
    ({"lse": torch.zeros(2, 4, 3, device="meta")}, "lse is on meta, not on cpu like partials"),
]


@pytest.mark.parametrize(("change", "line"), BAD, ids=[line[:40] for _, line in BAD])
def test_errors_of_decode(change: dict[str, Any], line: str) -> None:
    decode_attention(**GOOD)
    with pytest.raises(ValueError, match=re.escape(line)) as raised:
        decode_attention(**{**GOOD, **change})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("change", "line"), BAD_PARTS, ids=[line[:40] for _, line in BAD_PARTS])
def test_errors_of_merge(change: dict[str, Any], line: str) -> None:
    merge_attention(**PARTS)
    with pytest.raises(ValueError, match=re.escape(line)) as raised:
        merge_attention(**{**PARTS, **change})
    assert "\n" not in str(raised.value)


def test_the_triton_path_refuses_float64() -> None:
    double = {name: t.double() if t.is_floating_point() else t for name, t in GOOD.items()}
    with pytest.raises(ValueError, match=r"the triton path knows float32, float16 and bfloat16, not torch\.float64"):
        decode_attention(**double, path="triton")
    with pytest.raises(ValueError, match=r"partials are torch\.float64 and lse torch\.float64, not both"):
        merge_attention(**{name: t.double() for name, t in PARTS.items()}, path="triton")
