"""The first kernel is launched for the last, partial block too."""

import torch
import triton
import triton.language as tl


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def total(y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(y + i, mask=i < n, other=0.0)
    tl.store(out, tl.sum(value, 0))


n = 29
y = torch.empty(n)
double[(triton.cdiv(n, 8),)](torch.arange(29.0), y, n, BLOCK=8)
total[(1,)](y, torch.empty(1), n, BLOCK=32)
