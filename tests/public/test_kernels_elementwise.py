"""The elementwise kernels: float64 as oracle, the references as honest half precision, unused memory that is filled."""

from __future__ import annotations

import math

import pytest
import torch
from cs336_kernels.ops import add_rms_norm, apply_rope, qk_norm, rms_norm, rope_tables, swiglu, write_kv
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bounds import DTYPES, FILLS, check, same_over_fills

SHAPES = settings(derandomize=True, deadline=None, max_examples=20)
dtypes = st.sampled_from(DTYPES)
EPS = 1e-5


def numbers(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers of quite different sizes: every row has a scale of its own."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.exp(torch.randn(*shape[:-1], 1, generator=g))
    return (torch.randn(shape, generator=g) * rows * scale).to(dtype)


def spread(x: torch.Tensor, fill: float, gap: int) -> torch.Tensor:
    """x [..., d] with `gap` numbers of `fill` before and after each row; a view."""
    d = x.shape[-1]
    wide = torch.full((*x.shape[:-1], gap + d + gap), fill, dtype=x.dtype)
    wide[..., gap : gap + d] = x
    return wide[..., gap : gap + d]


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@SHAPES
@given(st.integers(1, 4), st.sampled_from([1, 3, 80, 128, 576, 1000, 1536]), st.sampled_from([0, 1, 16]), dtypes)
def test_rms_norm(rows, d, gap, dtype):
    x, weight = numbers(rows, d, dtype=dtype, seed=d), numbers(d, dtype=dtype, seed=1)
    got = same_over_fills(lambda fill: rms_norm(spread(x, fill, gap), weight, EPS, path="triton"))
    assert got.dtype == dtype and got.is_contiguous()
    check(got, normed(x, weight), rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_tiny_and_large_rows(dtype):
    """eps counts where the numbers are tiny, and squares of 300 do not fit into float16."""
    x = torch.stack((numbers(96, dtype=dtype, seed=0, scale=1e-3), numbers(96, dtype=dtype, seed=1, scale=3e2)))
    x = torch.cat((x, torch.zeros(1, 96, dtype=dtype)))
    weight = numbers(96, dtype=dtype, seed=2)
    check(rms_norm(x, weight, EPS, path="triton"), normed(x, weight), rms_norm(x, weight, EPS))


@SHAPES
@given(st.integers(1, 4), st.sampled_from([1, 96, 576, 1536]), st.sampled_from([(0, 0), (8, 0), (3, 16)]), dtypes)
def test_add_rms_norm(rows, d, gaps, dtype):
    x, residual = (numbers(rows, d, dtype=dtype, seed=s) for s in (d, d + 1))
    weight = numbers(d, dtype=dtype, seed=1)
    got, summed = same_over_fills(
        lambda fill: add_rms_norm(spread(x, fill, gaps[0]), spread(residual, fill, gaps[1]), weight, EPS, path="triton")
    )
    assert torch.equal(summed, x + residual)
    assert torch.equal(got, rms_norm(summed, weight, EPS, path="triton")), "the norm is not of the rounded sum"
    honest, honest_sum = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(honest_sum, summed)
    check(got, normed(summed, weight), honest)


@SHAPES
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([2, 32, 64, 80, 96, 128, 256]),
    st.booleans(),
    dtypes,
)
def test_apply_rope(batch, seq, heads, head_dim, shared, dtype):
    """x is the front of rows that also hold the values, as in the model."""
    x = numbers(batch, seq, heads, head_dim, dtype=dtype, seed=head_dim)
    positions = torch.randint(0, 4096, (1 if shared else batch, seq), generator=torch.Generator().manual_seed(seq))
    inv_freq = 1.0 / 10000 ** (torch.arange(0, head_dim, 2).float() / head_dim)
    cos, sin = rope_tables(positions, inv_freq, dtype)

    def run(fill: float) -> torch.Tensor:
        qkv = torch.full((batch, seq, heads + 2, head_dim), fill, dtype=dtype)
        qkv[:, :, :heads] = x
        return apply_rope(qkv[:, :, :heads], spread(cos, fill, 8), spread(sin, fill, 8), path="triton")

    got = same_over_fills(run)
    assert got.dtype == dtype and got.is_contiguous()
    honest = apply_rope(x, cos, sin)
    check(got, x.double() * cos.double() + x.double().roll(head_dim // 2, -1) * sin.double(), honest)
    if dtype == torch.float32:
        angles = (positions.unsqueeze(-1) * inv_freq).double().unsqueeze(2)
        pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        check(got, torch.cat((pairs.real, pairs.imag), -1))


def test_apply_rope_takes_any_strides_before_the_last() -> None:
    x = numbers(2, 3, 4, 32, dtype=torch.float32, seed=0)
    cos, sin = rope_tables(torch.tensor([[3, 1, 4], [1, 5, 9]]), torch.rand(16), torch.float32)
    want = apply_rope(x, cos, sin, path="triton")
    for order in ((1, 0, 2, 3), (2, 0, 1, 3), (2, 1, 0, 3)):
        back = sorted(range(4), key=order.__getitem__)
        moved = x.permute(order).contiguous().permute(back)
        assert moved.stride() != x.stride()
        assert torch.equal(apply_rope(moved, cos, sin, path="triton"), want)


@SHAPES
@given(
    st.sampled_from([(1,), (3,), (2, 2)]),
    st.sampled_from([(1, 1), (9, 3), (14, 2), (1, 0), (0, 2)]),
    st.sampled_from([1, 32, 80, 96, 128, 256]),
    dtypes,
)
def test_qk_norm(tokens, split, head_dim, dtype):
    heads, kv_heads = split
    qk = numbers(*tokens, heads + kv_heads, head_dim, dtype=dtype, seed=head_dim)
    q_weight, k_weight = (numbers(head_dim, dtype=dtype, seed=s) for s in (1, 2))

    def run(fill: float) -> torch.Tensor:
        qkv = torch.full((*tokens, heads + 2 * kv_heads, head_dim), fill, dtype=dtype)
        qkv[..., : heads + kv_heads, :] = qk
        return qk_norm(qkv[..., : heads + kv_heads, :], q_weight, k_weight, heads, EPS, path="triton")

    got = same_over_fills(run)
    assert got.dtype == dtype and got.is_contiguous()
    weights = torch.cat((q_weight.expand(heads, -1), k_weight.expand(kv_heads, -1)))
    check(got, normed(qk, weights), qk_norm(qk, q_weight, k_weight, heads, EPS))


@SHAPES
@given(
    st.sampled_from([(1,), (5,), (2, 3)]),
    st.sampled_from([1, 7, 96, 1000, 1536, 2049]),
    st.sampled_from([0, 3, 16]),
    dtypes,
)
def test_swiglu(rows, n, gap, dtype):
    gate_up = numbers(*rows, 2 * n, dtype=dtype, seed=n, scale=3.0)
    got = same_over_fills(lambda fill: swiglu(spread(gate_up, fill, gap), path="triton"))
    assert got.dtype == dtype and got.is_contiguous()
    gate, up = gate_up.double().chunk(2, -1)
    check(got, gate / (1 + (-gate).exp()) * up, swiglu(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_of_large_gates_is_zero_or_the_gate(dtype):
    gate = torch.tensor([-6e4, -200.0, -90.0, 90.0, 200.0, 6e4], dtype=dtype)
    got = swiglu(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0), path="triton")[0]
    assert torch.equal(got, gate.clamp(min=0))


@SHAPES
@given(
    st.integers(1, 7),
    st.sampled_from([(1, 1), (2, 16), (3, 5)]),
    st.sampled_from([(1, 32), (3, 80), (5, 256)]),
    st.integers(0, 1),
    dtypes,
)
def test_write_kv(tokens, memory, width, layer, dtype):
    """Written slots hold the bits of k and v; every other bit of the memory of all layers is what it was."""
    layers, block_size = memory
    kv_heads, head_dim = width
    layer = min(layer, layers - 1)
    blocks = math.ceil(tokens / block_size) + 2
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(tokens))[:tokens]
    rows = numbers(tokens, 3 + 2 * kv_heads, head_dim, dtype=dtype, seed=head_dim)
    rows[0, 3, 0], rows[-1, -1, -1] = math.nan, -math.inf  # a copy does not look at what it copies
    k, v = rows[:, 3 : 3 + kv_heads], rows[:, 3 + kv_heads :]
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for fill in FILLS:
        results = []
        for path in ("reference", "triton"):
            data = torch.full((blocks, layers, 2, block_size, kv_heads, head_dim), fill, dtype=dtype)
            assert write_kv(data[:, layer, 0], data[:, layer, 1], k, v, slots, path=path) is None
            results.append(data.view(bits))
        want = torch.full_like(data, fill)
        for i, slot in enumerate(slots.tolist()):
            page, offset = divmod(slot, block_size)
            want[page, layer, 0, offset], want[page, layer, 1, offset] = k[i], v[i]
        assert torch.equal(results[0], want.view(bits)) and torch.equal(results[1], want.view(bits))


def test_write_kv_kernel_leaves_memory_alone_for_a_slot_that_is_not_there():
    from cs336_kernels.ops.triton import write_kv as kernel

    memory = torch.full((6, 2, 4, 1, 32), -7.5)
    k = numbers(3, 1, 32, dtype=torch.float32, seed=0)
    kernel.write_kv(memory[2:4, 0], memory[2:4, 1], k, k, torch.tensor([-1, 5, 8]))
    written = memory != -7.5
    assert written[3, :, 1].all()
    assert int(written.sum()) == 2 * 32


def test_offsets_pass_two_to_the_31(tmp_path):
    """Rows of a sparse file that are 2^30 numbers apart: with 32-bit offsets the third would lie before the first."""
    step, d = 1 << 30, 16
    far = torch.from_file(str(tmp_path / "far"), shared=True, size=3 * step, dtype=torch.float16).view(3, step)
    near = numbers(3, 2 * d, dtype=torch.float16, seed=0)
    far[:, : 2 * d] = near
    weight = torch.ones(d, dtype=torch.float16)
    x, y = far[:, :d], near[:, :d].contiguous()
    assert torch.equal(rms_norm(x, weight, EPS, path="triton"), rms_norm(y, weight, EPS, path="triton"))
    for got, want in zip(
        add_rms_norm(x, x, weight, EPS, path="triton"), add_rms_norm(y, y, weight, EPS, path="triton"), strict=True
    ):
        assert torch.equal(got, want)
    assert torch.equal(swiglu(far[:, : 2 * d], path="triton"), swiglu(near, path="triton"))
    heads, few = far[:, :d].unsqueeze(1), y.unsqueeze(1)
    norm = (weight, weight, 1, EPS)
    assert torch.equal(qk_norm(heads, *norm, path="triton"), qk_norm(few, *norm, path="triton"))
    cos, sin = rope_tables(torch.tensor([[1, 2, 3]]), torch.rand(d // 2), torch.float16)
    for view in (lambda t: t[None, :, None, :], lambda t: t[None, None, :, :]):  # far tokens, far heads
        angles = [a[:, : view(y).shape[1]] for a in (cos, sin)]
        assert torch.equal(apply_rope(view(x), *angles, path="triton"), apply_rope(view(y), *angles, path="triton"))
    pages = [far[:, n * d : (n + 1) * d].view(3, 1, 1, d) for n in (2, 3)]
    write_kv(*pages, heads, heads, torch.tensor([2, 0, 1]), path="triton")
    assert all(torch.equal(p.view(3, d)[[2, 0, 1]], y) for p in pages)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_nothing_to_do(path):
    x = torch.empty(0, 32)
    weight = torch.ones(32)
    assert rms_norm(x, weight, EPS, path=path).shape == (0, 32)
    assert [t.shape for t in add_rms_norm(x, x, weight, EPS, path=path)] == [(0, 32)] * 2
    assert swiglu(x, path=path).shape == (0, 16)
    assert qk_norm(x.view(0, 2, 32), weight, weight, 1, EPS, path=path).shape == (0, 2, 32)
    tables = torch.empty(1, 0, 1, 32), torch.empty(1, 0, 1, 32)
    assert apply_rope(torch.empty(1, 0, 2, 32), *tables, path=path).shape == (1, 0, 2, 32)
    pages = torch.full((2, 4, 1, 32), 3.0)
    write_kv(pages, pages.clone(), x.view(0, 1, 32), x.view(0, 1, 32), torch.empty(0, dtype=torch.int64), path=path)
    assert (pages == 3).all()


X, W = torch.ones(2, 32), torch.ones(32)
TABLE = torch.ones(1, 2, 1, 32)
HEADS = torch.ones(1, 2, 3, 32)
PAGES = torch.ones(2, 4, 1, 32)
NEW = torch.ones(2, 1, 32)
SLOTS = torch.tensor([0, 5])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: rms_norm(X, W, EPS, path="cuda"), "unknown path 'cuda' for rms_norm .reference, triton."),
        (lambda: add_rms_norm(X, X, W, EPS, path=""), "unknown path '' for add_rms_norm .reference, triton."),
        (lambda: apply_rope(HEADS, TABLE, TABLE, path="x"), "unknown path 'x' for apply_rope .reference, triton."),
        (lambda: qk_norm(HEADS, W, W, 1, EPS, path="x"), "unknown path 'x' for qk_norm .reference, triton."),
        (lambda: swiglu(X, path="x"), "unknown path 'x' for swiglu .reference, triton."),
        (
            lambda: write_kv(PAGES, PAGES, NEW, NEW, SLOTS, path="x"),
            "unknown path 'x' for write_kv .reference, triton.",
        ),
        (lambda: rms_norm(X.double(), W, EPS, path="triton"), "x is torch.float64"),
        (lambda: rms_norm(X, W.half(), EPS, path="triton"), "weight is torch.float16 .*not torch.float32"),
        (lambda: rms_norm(X, W[:31], EPS, path="triton"), r"weight is \[31\], not \[32\]"),
        (lambda: rms_norm(X, torch.ones(64)[::2], EPS, path="triton"), "weight has stride 2"),
        (lambda: rms_norm(torch.ones(32, 2).T, W, EPS, path="triton"), "numbers of a row must be contiguous"),
        (lambda: rms_norm(torch.ones(2, 3, 64)[:, :2, :32], W, EPS, path="triton"), "not one step from row to row"),
        (lambda: rms_norm(torch.ones(1, 65537), torch.ones(65537), EPS, path="triton"), "more than 65536"),
        (lambda: rms_norm(torch.ones(2, 0), torch.ones(0), EPS, path="triton"), "rows of at least one number"),
        (lambda: add_rms_norm(X, X[:1], W, EPS, path="triton"), r"residual is \[1, 32\], not \[2, 32\]"),
        (lambda: add_rms_norm(X, X[:1], W, EPS), r"residual is \[1, 32\], not \[2, 32\]"),
        (lambda: apply_rope(HEADS, TABLE[:, :1], TABLE, path="triton"), r"cos is \[1, 1, 1, 32\], not \[1, 2, 1, 32\]"),
        (lambda: apply_rope(HEADS, TABLE, TABLE.half(), path="triton"), "sin is torch.float16"),
        (lambda: apply_rope(HEADS[..., :31], TABLE, TABLE, path="triton"), "head_dim of x is 31, not an even number"),
        (lambda: apply_rope(HEADS[0], TABLE, TABLE, path="triton"), r"x is \[2, 3, 32\]"),
        (lambda: qk_norm(HEADS, W, W, 4, EPS), "at least 4 query heads"),
        (lambda: qk_norm(HEADS, W, W[:16], 1, EPS, path="triton"), r"k_weight is \[16\]"),
        (lambda: swiglu(X[:, :31], path="triton"), "31 columns, which are not two halves"),
        (lambda: write_kv(PAGES, PAGES[:1], NEW, NEW, SLOTS), r"values is \[1, 4, 1, 32\], not \[2, 4, 1, 32\]"),
        (lambda: write_kv(PAGES, PAGES, NEW.half(), NEW, SLOTS), "k is torch.float16"),
        (lambda: write_kv(PAGES, PAGES, NEW, NEW[:1], SLOTS), r"v is \[1, 1, 32\], not \[2, 1, 32\]"),
        (lambda: write_kv(PAGES[:, ::2], PAGES[:, ::2], NEW, NEW, SLOTS), "only the first may be free"),
        (lambda: write_kv(PAGES, PAGES, NEW, NEW, SLOTS.int()), "slots is .* torch.int32"),
        (lambda: write_kv(PAGES, PAGES, NEW, NEW, SLOTS[:1]), r"slots is \[1\]"),
        (lambda: write_kv(PAGES, PAGES, NEW, NEW, torch.tensor([0, 8])), "slots go from 0 to 8; there are 8"),
        (lambda: write_kv(PAGES, PAGES, NEW, NEW, torch.tensor([-1, 3])), "slots go from -1 to 3"),
        (lambda: write_kv(PAGES[:0], PAGES[:0], NEW, NEW, SLOTS), "there is no slot for 2 tokens"),
    ],
)
def test_what_a_kernel_does_not_take_is_refused_in_one_line(call, says):
    with pytest.raises(ValueError, match=says) as e:
        call()
    assert "\n" not in str(e.value)
