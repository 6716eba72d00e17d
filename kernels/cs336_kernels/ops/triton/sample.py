"""Sampling: one program a row goes over its logits block by block, and no logit is ever moved or sorted.

Thresholds of top-k and top-p are found on keys: the bits of a float32 as a whole number in the same order. A selection
settles two bits of the threshold in a pass, by asking how much lies at or above each of three candidates; how much is
a count for top-k and a sum of fixed-point weights for top-p. Whole numbers add up to the same in every order.
"""

# tl.range is a class that only the compiler can iterate over.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import launch

BLOCK = 4096
STAGES = tl.constexpr(4)  # blocks on their way from memory while one is worked on


@triton.jit
def argmax_kernel(out, logits, vocab, step, BLOCK: tl.constexpr):
    """Program `row`: every lane keeps the first of its largest; then the lanes agree on the first of the largest."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = lane
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = start + lane
        x = tl.load(logits + row * step + at, mask=at < vocab, other=float("-inf"))
        where = tl.where(x > best, at, where)
        best = tl.maximum(x, best)
    first = tl.min(tl.where(best == tl.max(best, 0), where, vocab), 0)
    tl.store(out + row, first.to(tl.int64))


@triton.jit
def _key(x):
    """Bits of float32 as uint32 in the order of the numbers. -0.0 equals 0.0; nothing has key 0, which padding gets."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _weight(x, top, scale, unit):
    """exp((x - top) / temperature) in units of 1 / unit. scale: log2(e) / temperature."""
    return (tl.exp2((x - top) * scale) * unit).to(tl.int64)


@triton.jit
def _largest(row, vocab, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(row + at, mask=at < vocab, other=float("-inf")))
    return tl.max(best, 0)


@triton.jit
def _threshold(row, vocab, wanted, top, scale, unit, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key at or above which at least `wanted` (> 0) lies: weight, or tokens."""
    found = tl.full((), 0, tl.uint32)
    step = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        first, second, third = found + step, found + 2 * step, found + 3 * step
        nothing = tl.zeros([BLOCK], tl.int64 if WEIGHTS else tl.int32)
        one, two, three = nothing, nothing, nothing
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            key = tl.where(at < vocab, _key(x), 0)
            amount = _weight(x, top, scale, unit) if WEIGHTS else tl.full([BLOCK], 1, tl.int32)
            one += tl.where(key >= first, amount, 0)
            two += tl.where(key >= second, amount, 0)
            three += tl.where(key >= third, amount, 0)
        reached = (tl.sum(one, 0) >= wanted).to(tl.uint32) + (tl.sum(two, 0) >= wanted).to(tl.uint32)
        found += (reached + (tl.sum(three, 0) >= wanted).to(tl.uint32)) * step
        step = step >> 2
    return found


@triton.jit
def _around(row, vocab, border, top, scale, unit, BLOCK: tl.constexpr):
    """Tokens above the key `border` and their weight, and the weight of one token at it."""
    count, equal = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    above, at_it = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        key = tl.where(at < vocab, _key(x), 0)
        weight = _weight(x, top, scale, unit)
        count += (key > border).to(tl.int32)
        above += tl.where(key > border, weight, 0)
        here = (key == border) & (at < vocab)
        equal += here.to(tl.int32)
        at_it += tl.where(here, weight, 0)
    one = tl.sum(at_it, 0) // tl.maximum(tl.sum(equal, 0), 1)
    return tl.sum(count, 0), tl.sum(above, 0), one


@triton.jit
def _passed(row, vocab, border, ties, number, top, scale, unit, BLOCK: tl.constexpr):
    """How many ids, in their order, have a cumulative weight that is not above `number`: the id that passes it.
    Kept are keys above `border`, and of those at it the first `ties`."""
    weight_before, ties_before = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    passed = tl.full((), 0, tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        key = tl.where(at < vocab, _key(x), 0)
        tie = ((key == border) & (at < vocab)).to(tl.int32)
        kept = (key > border) | ((tie == 1) & (ties_before + tl.cumsum(tie, 0) <= ties))
        weight = tl.where(kept, _weight(x, top, scale, unit), 0)
        cumulative = weight_before + tl.cumsum(weight, 0)
        passed += tl.sum(((cumulative <= number) & (at < vocab)).to(tl.int32), 0)
        weight_before += tl.sum(weight, 0)
        ties_before += tl.sum(tie, 0)
    return passed


@triton.jit
def sample_kernel(
    out, logits, temperatures, top_ks, top_ps, uniforms, vocab, step, unit, BLOCK: tl.constexpr
):  # fmt: skip
    """Program `row`: finds the border key of what is kept, how many of the tokens at it stay, and draws."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * step
    temperature = tl.load(temperatures + number).to(tl.float64)
    k = tl.load(top_ks + number).to(tl.int64)
    p = tl.load(top_ps + number).to(tl.float64)
    greedy = temperature == 0.0
    # log2(e) / temperature, and never infinity: the largest logit has x - top = 0, and 0 * infinity is NaN.
    scale = tl.minimum(1.4426950408889634 / tl.where(greedy, 1.0, temperature), 3.0e38).to(tl.float32)
    top = _largest(row, vocab, BLOCK)

    border = tl.full((), 0, tl.uint32)
    ties = tl.full((), 0, tl.int64)
    if greedy:
        border = _key(top)
    elif (k > 0) & (k < vocab):
        border = _threshold(row, vocab, k, top, scale, unit, False, BLOCK)
    count, above, one = _around(row, vocab, border, top, scale, unit, BLOCK)
    if greedy:
        ties += 1
    elif (k > 0) & (k < vocab):
        ties = k - count
    if (p < 1.0) & (temperature != 0.0):
        wanted = tl.maximum(tl.ceil(p * (above + ties * one).to(tl.float64)).to(tl.int64), 1)
        border = _threshold(row, vocab, wanted, top, scale, unit, True, BLOCK)
        count, above, one = _around(row, vocab, border, top, scale, unit, BLOCK)
        ties = (wanted - above + one - 1) // one

    total = above + ties * one
    draw = (tl.load(uniforms + number).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    chosen = _passed(row, vocab, border, ties, tl.minimum(draw, total - 1), top, scale, unit, BLOCK)
    tl.store(out + number, chosen.to(tl.int64))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """logits: [rows, vocab] float32, rows at any stride. Returns [rows] int64."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        launch(argmax_kernel, (rows,), out, logits, vocab, logits.stride(0), **_sizes(vocab))
    return out


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Arguments as checked by the op. Returns [rows] int64."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        # The largest weight is 1. Whole numbers of these units, summed over the vocabulary, stay below 2^62.
        unit = 2.0 ** (62 - vocab.bit_length())
        numbers = (temperature, top_k, top_p, uniform)
        launch(sample_kernel, (rows,), out, logits, *numbers, vocab, logits.stride(0), unit, **_sizes(vocab))
    return out


def _sizes(vocab: int) -> dict[str, Any]:
    block = min(triton.next_power_of_2(vocab), BLOCK)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}
