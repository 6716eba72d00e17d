"""The last split has no positions and writes no average; its weight is 0, and 0 times nothing known is unknown."""

import torch
import triton
import triton.language as tl


@triton.jit
def part(values, average, lse, length, SPLIT: tl.constexpr):
    split, i = tl.program_id(0), tl.arange(0, SPLIT)
    mask = split * SPLIT + i < length
    score = tl.load(values + split * SPLIT + i, mask=mask, other=-float("inf"))
    if split * SPLIT < length:
        weight = tl.exp(score - tl.max(score, 0))
        tl.store(average + split, tl.sum(tl.where(mask, score * weight, 0.0), 0) / tl.sum(weight, 0))
        tl.store(lse + split, tl.max(score, 0) + tl.log(tl.sum(weight, 0)))
    else:
        tl.store(lse + split, -float("inf"))


@triton.jit
def merge(average, lse, out, SPLITS: tl.constexpr):
    s = tl.arange(0, SPLITS)
    weight = tl.load(lse + s)
    value = tl.load(average + s)  # finding: uninitialised-read
    weight = tl.exp(weight - tl.max(weight, 0))
    tl.store(out, tl.sum(value * weight, 0) / tl.sum(weight, 0))


average, lse = torch.empty(4), torch.empty(4)
part[(4,)](torch.rand(21), average, lse, 21, SPLIT=8)
merge[(1,)](average, lse, torch.empty(1), SPLITS=4)
