"""Products with a weight: with a residual, and as the first half of a gated MLP."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is for Linux")

from cs336_kernels.ops import gate_up, linear, linear_add
from cs336_kernels.sanitizer import sanitize
from hypothesis import given
from hypothesis import strategies as st
from kernel_bounds import DTYPES, check, same_over_fills
from matvec import EPS, SETTINGS, TOKENS, double, normal, rms, tiles  # noqa: F401

WIDTHS = st.sampled_from((1, 16, 40, 64, 100, 576))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dtypes
@pytest.mark.usefixtures("tiles")
@SETTINGS
@given(tokens=TOKENS, n=st.integers(1, 40), d=WIDTHS, add=st.booleans(), seed=st.integers(0, 999))
def test_products_are_those_of_float64(dtype: torch.dtype, tokens: int, n: int, d: int, add: bool, seed: int):
    def arguments(fill: float) -> list[torch.Tensor]:
        x = normal(tokens, d, dtype=dtype, seed=seed, fill=fill)
        w = normal(n, d, dtype=dtype, seed=seed + 1, scale=d**-0.5, fill=fill)
        residual = normal(tokens, n, dtype=dtype, seed=seed + 2, scale=3, fill=fill)
        return [x, w, residual] if add else [x, w]

    op = linear_add if add else linear
    (got,) = same_over_fills(lambda fill: [op(*arguments(fill), path="triton")])
    given_ = arguments(0)
    x, w, *residual = double(*given_)
    oracle = F.linear(x, w) + (residual[0] if add else 0)
    x, w, *residual = (t.float() for t in given_)
    honest = (F.linear(x, w) + (residual[0] if add else 0)).to(dtype)
    check(got, oracle, honest)
    check(op(*given_, path="reference"), oracle, honest)
    assert got.dtype == dtype and got.is_contiguous()


@pytest.mark.parametrize("tokens", [3, 20])
def test_a_sum_with_a_residual_is_rounded_once(tokens: int):
    """The residual cancels what bfloat16 keeps of the product: the rest would be lost by rounding that first."""
    x, w = normal(tokens, 64, dtype=torch.bfloat16, seed=0), normal(30, 64, dtype=torch.bfloat16, seed=1)
    product = F.linear(*double(x, w))
    residual = -product.to(torch.bfloat16)
    oracle = product + residual.double()
    for path in ("reference", "triton"):
        check(linear_add(x, w, residual, path=path), oracle, oracle.to(torch.bfloat16))


def honest_gate_up(x: torch.Tensor, gain: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """float32 inside, rounded after the norm, the product, silu and the end."""
    h = rms(x.float(), gain.float()).to(x.dtype)
    gate, up = F.linear(h.float(), w.float()).to(x.dtype).float().chunk(2, -1)
    return (F.silu(gate).to(x.dtype).float() * up).to(x.dtype)


@dtypes
@pytest.mark.usefixtures("tiles")
@SETTINGS
@given(tokens=TOKENS, n=st.integers(1, 40), d=WIDTHS, seed=st.integers(0, 999), size=st.sampled_from((0.02, 1, 50)))
def test_gated_products_are_those_of_float64(
    dtype: torch.dtype,
    tokens: int,
    n: int,
    d: int,
    seed: int,
    size: float,
):
    def arguments(fill: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = normal(tokens, d, dtype=dtype, seed=seed, scale=size, fill=fill)
        w = normal(2 * n, d, dtype=dtype, seed=seed + 1, scale=2 * d**-0.5, fill=fill)
        return x, normal(d, dtype=dtype, seed=seed + 2) + 1, w

    (got,) = same_over_fills(lambda fill: [gate_up(*arguments(fill), EPS, path="triton")])
    x, gain, w = double(*arguments(0))
    gate, up = F.linear(rms(x, gain), w).chunk(2, -1)
    honest = honest_gate_up(*arguments(0))
    check(got, F.silu(gate) * up, honest)
    check(gate_up(*arguments(0), EPS), F.silu(gate) * up, honest)
    assert got.dtype == dtype and got.is_contiguous()


@pytest.mark.parametrize("tokens", [3, 20])
def test_float16_norms_numbers_whose_squares_it_cannot_hold(tokens: int):
    x = normal(tokens, 64, dtype=torch.float16, seed=0, scale=9000).clamp(-60000, 60000)
    gain, w = normal(64, dtype=torch.float16, seed=1) * 5, normal(20, 64, dtype=torch.float16, seed=2, scale=0.2)
    gate, up = F.linear(rms(*double(x, gain)), w.double()).chunk(2, -1)
    check(gate_up(x, gain, w, EPS, path="triton"), F.silu(gate) * up, honest_gate_up(x, gain, w))


@pytest.mark.parametrize("tokens", [1, 8, 9, 70])
def test_a_token_gets_the_same_numbers_in_any_place_of_a_tile(tokens: int):
    """Columns of a tile are independent: a token's result does not depend on who sits beside it."""
    x, w = normal(tokens, 96, dtype=torch.bfloat16, seed=0), normal(33, 96, dtype=torch.bfloat16, seed=1)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    assert torch.equal(linear(x, w, path="triton")[order], linear(x[order], w, path="triton"))


@pytest.mark.parametrize(("tokens", "times"), [(1, 1), (8, 1), (16, 1), (64, 1), (70, 2), (130, 3)])
def test_each_weight_is_read_once_for_each_tile_of_tokens(tokens: int, times: int):
    x, w = torch.randn(tokens, 96), torch.randn(128, 96)
    residual, gain = torch.randn(tokens, 128), torch.ones(96)
    for call, n in (
        (lambda: linear_add(x, w, residual, path="triton"), 128),
        (lambda: gate_up(x, gain, w, EPS, path="triton"), 64),
    ):
        with sanitize(schedules=1) as report:
            call()
        assert not report.findings
        traffic = report.launches[0].traffic
        assert traffic["weight"].loaded == times * w.nbytes
        assert traffic["weight"].unique_loaded == w.nbytes
        assert traffic["out"].stored == traffic["out"].unique_stored == tokens * n * 4


def test_no_tokens_give_no_rows():
    x, w = torch.empty(0, 32), torch.randn(10, 32)
    assert linear(x, w, path="triton").shape == (0, 10)
    assert linear_add(x, w, torch.empty(0, 10), path="triton").shape == (0, 10)
    assert gate_up(x, torch.ones(32), w, EPS, path="triton").shape == (0, 5)


X, W = torch.ones(3, 32), torch.ones(10, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: linear(X, W, path="cuda"), "unknown path 'cuda' for linear (reference, triton)"),
        (lambda p: linear(X[0], W, path=p), "x is [32], not [tokens, features]"),
        (lambda p: linear(X[:, :0], W[:, :0], path=p), "x is [3, 0], not [tokens, features]"),
        (lambda p: linear(X, W[:, :16], path=p), "weight is [10, 16], not [10, 32]"),
        (lambda p: linear(X, W.half(), path=p), "weight is torch.float16 on cpu, not torch.float32 on cpu"),
        (lambda p: linear(X, W.t().contiguous().t(), path=p), "weight has strides (1, 10); its last dimension"),
        (lambda p: linear(torch.ones(32, 3).t(), W, path=p), "x has strides (1, 3); its last dimension"),
        (lambda p: linear_add(X, W, torch.ones(3, 9), path=p), "residual is [3, 9], not [3, 10]"),
        (lambda p: gate_up(X, X[0, :16], W, EPS, path=p), "norm_weight is [16], not [32]"),
        (lambda p: gate_up(X, X[0], W[:9], EPS, path=p), "weight has 9 rows, not an even number: gate and up"),
    ],
)
@pytest.mark.parametrize("path", ["reference", "triton"])
def test_what_does_not_fit_is_refused(call, message: str, path: str):
    with pytest.raises(ValueError) as caught:
        call(path)
    assert message in str(caught.value)


def test_the_kernels_do_not_know_float64():
    assert linear(X.double(), W.double()).dtype == torch.float64
    with pytest.raises(ValueError, match=r"x is torch\.float64; the triton path of linear knows"):
        linear(X.double(), W.double(), path="triton")
