"""Weights of 8 and 4 bits: how they are rounded, packed and multiplied by."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is for Linux")

from cs336_kernels.ops import QuantWeight, quant_linear, quantise
from cs336_kernels.sanitizer import sanitize
from hypothesis import given
from hypothesis import strategies as st
from kernel_bounds import DTYPES, check, same_over_fills
from matvec import SETTINGS, TOKENS, double, normal, tiles  # noqa: F401

BITS = st.sampled_from((8, 4))
GROUPS = st.sampled_from((32, 64, 128))
LARGEST = {8: 127, 4: 7}
NUMBERS = st.sampled_from((1e-12, 3e-8, 1e-5, 0.02, 1.0, 1e4))


@SETTINGS
@given(n=st.integers(1, 9), groups=st.integers(1, 5), bits=BITS, group=GROUPS, size=NUMBERS, seed=st.integers(0, 999))
def test_no_number_is_off_by_more_than_half_a_step(n: int, groups: int, bits: int, group: int, size: float, seed: int):
    w = normal(n, groups * group, dtype=torch.float32, seed=seed, scale=size)
    w[0, :group] = 0
    q = quantise(w, bits, group)
    step = q.scales.double().repeat_interleave(group, 1)
    assert ((q.dequantise().double() - w.double()).abs() <= step / 2 * (1 + 1e-6)).all()
    assert torch.equal(q.dequantise()[0, :group], torch.zeros(group))
    # The scale is no larger than float16's rounding makes it: peak / largest, or the next number.
    peak = w.double().view(n, groups, group).abs().amax(-1) / LARGEST[bits]
    assert (q.scales.double() <= peak * (1 + 2**-10) + 2**-24).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_layout_in_memory(bits: int):
    """Number by number, what the docs say of words and their bits."""
    w = normal(3, 96, dtype=torch.float32, seed=0)
    q = quantise(w, bits, 32)
    width, run = 96 * bits // 32, 128 // bits
    assert q.packed.shape == (3, width) and q.packed.dtype == torch.int32
    assert q.scales.shape == (3, 3) and q.scales.dtype == torch.float16
    assert q.shape == (3, 96) and q.nbytes == 3 * 96 * bits // 8 + 3 * 3 * 2
    for row in range(3):
        for k in range(96):
            piece, pair, second = k % run // 8, k % 8 // 2, k % 2
            word = int(q.packed[row, k // run * 4 + pair]) % 2**32
            number = (word >> bits * (2 * piece + second)) % 2**bits - 2 ** (bits - 1)
            expected = round(float(w[row, k]) / float(q.scales[row, k // 32]))
            assert number == max(-LARGEST[bits], min(LARGEST[bits], expected))
            assert float(q.dequantise()[row, k]) == number * float(q.scales[row, k // 32])


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_sum_with_a_residual_is_rounded_once(tokens: int):
    """The residual cancels what bfloat16 keeps of the product: the rest would be lost by rounding that first."""
    x, w = normal(tokens, 64, dtype=torch.bfloat16, seed=0), quantise(normal(30, 64, dtype=torch.bfloat16, seed=1))
    product = F.linear(*double(x, w.dequantise()))
    residual = -product.to(torch.bfloat16)
    oracle = product + residual.double()
    for path in ("reference", "triton"):
        check(quant_linear(x, w, residual, path=path), oracle, oracle.to(torch.bfloat16))


def inside(tensor: torch.Tensor, fill: float) -> torch.Tensor:
    """The same numbers with `fill` before and behind them, as far as the dtype can hold it."""
    if not tensor.is_floating_point():
        fill = 0x5A5A5A5A if fill != fill else int(fill)
    room = torch.full((tensor.numel() + 256,), fill, dtype=tensor.dtype)
    view = room[128 : 128 + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("tiles")
@SETTINGS
@given(
    tokens=TOKENS,
    n=st.integers(1, 40),
    groups=st.integers(1, 5),
    bits=BITS,
    group=GROUPS,
    add=st.booleans(),
    seed=st.integers(0, 999),
)
def test_products_are_those_of_float64(
    dtype: torch.dtype,
    tokens: int,
    n: int,
    groups: int,
    bits: int,
    group: int,
    add: bool,
    seed: int,
):
    d = groups * group
    packed = quantise(normal(n, d, dtype=dtype, seed=seed, scale=d**-0.5), bits, group)

    def arguments(fill: float) -> tuple[torch.Tensor, QuantWeight, torch.Tensor | None]:
        x = normal(tokens, d, dtype=dtype, seed=seed + 1, fill=fill)
        residual = normal(tokens, n, dtype=dtype, seed=seed + 2, scale=3, fill=fill) if add else None
        return x, QuantWeight(inside(packed.packed, fill), inside(packed.scales, fill), bits, group), residual

    (got,) = same_over_fills(lambda fill: [quant_linear(*arguments(fill), path="triton")])
    x, weight, residual = arguments(0)
    oracle = F.linear(*double(x, weight.dequantise())) + (0 if residual is None else residual.double())
    honest = (F.linear(x.float(), weight.dequantise()) + (0 if residual is None else residual.float())).to(dtype)
    check(got, oracle, honest)
    check(quant_linear(x, weight, residual), oracle, honest)
    assert got.dtype == dtype and got.is_contiguous()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_a_product_reads_the_packed_bytes_and_the_scales_once(bits: int, tokens: int):
    weight = quantise(torch.randn(64, 256), bits, 64)
    assert weight.packed.nbytes == 64 * 256 * bits // 8
    with sanitize(schedules=1) as report:
        quant_linear(torch.randn(tokens, 256), weight, path="triton")
    assert not report.findings
    traffic = report.launches[0].traffic
    assert traffic["words"].loaded == traffic["words"].unique_loaded == weight.packed.nbytes
    assert traffic["scales"].unique_loaded == weight.scales.nbytes
    assert traffic["out"].stored == traffic["out"].unique_stored == tokens * 64 * 4


def test_no_tokens_give_no_rows():
    assert quant_linear(torch.empty(0, 32), quantise(torch.ones(10, 32), 4, 32), path="triton").shape == (0, 10)


X, W = torch.ones(3, 64), torch.ones(10, 64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantise(W, 2), "bits is 2, not 8 or 4"),
        (lambda: quantise(W, 8, 48), "group is 48, not one of 32, 64, 128"),
        (lambda: quantise(W, 8, 128), "weight is [10, 64]: its rows are not a multiple of group 128"),
        (lambda: quantise(W.int()), "weight is torch.int32 [10, 64], not floats [n, d]"),
        (lambda: quantise(W[0]), "weight is torch.float32 [64], not floats [n, d]"),
        (lambda: quantise(W * 1e9), "weight goes up to 1e+09, too large for a float16 scale"),
        (lambda: quantise(W * torch.nan), "is not finite"),
        (lambda: quantise(W * torch.inf), "is not finite"),
        (lambda: quant_linear(X, quantise(W), path="int8"), "unknown path 'int8' for quant_linear (reference, triton)"),
        (lambda: quant_linear(X[:, :32], quantise(W)), "x is [3, 32], not [tokens, 64] for a weight [10, 64]"),
        (lambda: quant_linear(X, quantise(W), torch.ones(3, 9)), "residual is [3, 9], not [3, 10]"),
        (lambda: quant_linear(X, quantise(W), torch.ones(3, 10).half()), "residual is torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused(call, message: str):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)
