"""Products with a weight of int8 or int4: integers become float32, or operands of the tensor cores, in registers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import interpreted, launch
from cs336_kernels.ops.triton.products import block_of_rows, power_of_2, sum_chunks

if TYPE_CHECKING:
    from cs336_kernels.ops.quant_linear import QuantWeight

MOST_FEW = {8: 4, 4: 2}
"""By bits, tokens that CUDA cores take: 2 or 4 times as many weights arrive a clock as in bfloat16, with more to do for
each."""
LEAST_ROWS = {8: 2, 4: 4}
"""By bits, rows that must share what a program loads of x, which is 2 or 4 times as large as what it loads of a row."""


@triton.jit
def quant_few_kernel(
    out, x, words, scales, residual, stride_x, stride_r, tokens, n, runs,
    BITS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Program i: rows i * ROWS to (i + 1) * ROWS of the weight, for all tokens, on CUDA cores.

    A lane loads 4 words of a row at once, a run of 128 / BITS neighbours of one group. It meets x in pieces of 8, the
    16 bytes that a lane loads of half precision; the sum over the run gets the scale.
    runs: of a row.
    """
    RUN: tl.constexpr = 128 // BITS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = tl.minimum(rows, n - 1).to(tl.int64)[None, :, None, None]
    t = tl.arange(0, TOKENS)
    x_at = x + tl.minimum(t, tokens - 1).to(tl.int64)[:, None, None, None] * stride_x
    w = tl.arange(0, BLOCK_W)[None, None, None, :]
    e = tl.arange(0, 2 * BLOCK_W)[None, None, None, :]
    run = tl.arange(0, BLOCK_W // 4)[None, None, None, :]
    width = runs * 4
    groups = runs * RUN // GROUP
    sums = tl.zeros([TOKENS, ROWS, 1, BLOCK_W // 4], tl.float32)
    for begin in range(0, runs, BLOCK_W // 4):
        raw = tl.load(words + mine * width + begin * 4 + w, mask=begin * 4 + w < width, other=0)
        part = tl.zeros([TOKENS, ROWS, 1, BLOCK_W // 4], tl.float32)
        for piece in tl.static_range(RUN // 8):  # pyright: ignore[reportGeneralTypeIssues]
            inside = begin + e // 8 < runs
            v = tl.load(x_at + (begin + e // 8) * RUN + piece * 8 + e % 8, mask=inside, other=0.0).to(tl.float32)
            numbers = tl.join(_number(raw, 2 * piece, BITS), _number(raw, 2 * piece + 1, BITS))
            part += sum_chunks(v * tl.reshape(numbers, [1, ROWS, 1, 2 * BLOCK_W]), 8)
        scale = tl.load(scales + mine * groups + (begin + run) * RUN // GROUP, mask=begin + run < runs, other=0.0)
        sums += part * scale.to(tl.float32)
    acc = tl.reshape(tl.sum(sums, 3), [TOKENS, ROWS])
    at = t.to(tl.int64)[:, None]
    inside = (t < tokens)[:, None] & (rows < n)[None, :]
    if residual is not None:
        acc += tl.load(residual + at * stride_r + rows[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at * n + rows[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def quant_many_kernel(
    out, x, words, scales, residual, stride_x, stride_r, tokens, n, runs,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (i, j): BLOCK_M tokens from i * BLOCK_M on, rows j * ROWS to (j + 1) * ROWS, on tensor cores.

    One group is one product: integers up to 128 are exact in every format, and the sum over a group gets its scale in
    float32. The weight is the left operand, the one that may come from registers. Groups are small, so UNROLL of them,
    a divisor of their number, share an iteration.
    """
    WORDS: tl.constexpr = GROUP * BITS // 32
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mine = tl.minimum(rows, n - 1).to(tl.int64)
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, GROUP)
    x_at = x + tl.minimum(t, tokens - 1).to(tl.int64)[None, :] * stride_x + k[:, None]
    w_at = words + mine[:, None] * (runs * 4) + tl.arange(0, WORDS)[None, :]
    groups = runs * 4 // WORDS
    acc = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for first in range(0, groups, UNROLL):
        for i in tl.static_range(UNROLL):  # pyright: ignore[reportGeneralTypeIssues]
            group = first + i
            raw, v = tl.load(w_at + group * WORDS), tl.load(x_at + group * GROUP)
            if UPCAST:
                part = tl.dot(_numbers(raw, BITS, tl.float32), v.to(tl.float32), input_precision="ieee")
            else:
                part = tl.dot(_numbers(raw, BITS, x.dtype.element_ty), v, input_precision="ieee")
            acc += part * tl.load(scales + mine * groups + group).to(tl.float32)[:, None]
    at = t.to(tl.int64)[None, :]
    inside = (rows < n)[:, None] & (t < tokens)[None, :]
    if residual is not None:
        acc += tl.load(residual + at * stride_r + rows[:, None], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at * n + rows[:, None], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _number(words, FIELD: tl.constexpr, BITS: tl.constexpr):
    """The integer in bits FIELD * BITS and up, as float32: set as the lowest digits of 2^23, from which it is then
    subtracted. Two instructions and exact; a conversion needs more."""
    AT: tl.constexpr = FIELD * BITS % 16
    UNIT: tl.constexpr = 2.0**-AT
    MASK: tl.constexpr = (2**BITS - 1) * 2**AT
    half = words >> 16 if FIELD * BITS >= 16 else words
    return ((half & MASK) | 0x4B000000).to(tl.float32, bitcast=True) * UNIT - (2.0**23 * UNIT + 2 ** (BITS - 1))


@triton.jit
def _numbers(words, BITS: tl.constexpr, kind: tl.constexpr):
    """[rows, w] words -> [rows, w * 32 / BITS] integers in their order, as `kind`."""
    PIECES: tl.constexpr = 16 // BITS
    zero = tl.join(_number(words, 0, BITS).to(kind), _number(words, 1, BITS).to(kind))
    one = tl.join(_number(words, 2, BITS).to(kind), _number(words, 3, BITS).to(kind))
    if BITS == 8:
        all_pieces = tl.join(zero, one)
    else:
        two = tl.join(_number(words, 4, BITS).to(kind), _number(words, 5, BITS).to(kind))
        three = tl.join(_number(words, 6, BITS).to(kind), _number(words, 7, BITS).to(kind))
        all_pieces = tl.join(tl.join(zero, two), tl.join(one, three))
    by_word = tl.reshape(all_pieces, [words.shape[0], words.shape[1] // 4, 4, 2, PIECES])
    return tl.reshape(tl.permute(by_word, (0, 1, 4, 2, 3)), [words.shape[0], words.shape[1] * 2 * PIECES])


def product(x: torch.Tensor, weight: QuantWeight, residual: torch.Tensor | None) -> torch.Tensor:
    """One launch; arguments and result as in `quant_linear`, checked there."""
    tokens = len(x)
    n, width = weight.packed.shape
    out = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    stride_r = 0 if residual is None else residual.stride(0)
    arguments = (out, x, weight.packed, weight.scales, residual, x.stride(0), stride_r, tokens, n, width // 4)
    kind = {"BITS": weight.bits, "GROUP": weight.group}
    if tokens <= MOST_FEW[weight.bits] * 2 // x.element_size():  # x in float32 takes twice the registers
        rows = block_of_rows(tokens, n, interpreted(x), LEAST_ROWS[weight.bits])
        launch(
            quant_few_kernel, (triton.cdiv(n, rows),), *arguments, **kind,
            TOKENS=power_of_2(tokens), ROWS=rows,
            BLOCK_W=min(512 // min(rows, 4), power_of_2(width)), num_warps=1,
        )  # fmt: skip
    else:
        m = min(64, max(16, power_of_2(tokens)))
        most = 4 if m == 16 else 2
        if x.dtype == torch.float32:  # products on CUDA cores: operands and sums share the registers
            m, most = min(m, 32), 1
        rows = 64 if m == 64 else 16 if n < 8192 else 32
        launch(
            quant_many_kernel, (triton.cdiv(tokens, m), triton.cdiv(n, rows)), *arguments, **kind,
            BLOCK_M=m, ROWS=rows, UNROLL=math.gcd(x.shape[1] // weight.group, most), UPCAST=interpreted(x),
            num_warps=rows // 16, num_stages=3 if m == 64 else 4,
        )  # fmt: skip
    return out
