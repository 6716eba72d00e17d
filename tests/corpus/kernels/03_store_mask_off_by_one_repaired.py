"""The mask lets the elements below n through."""

import torch
import triton
import triton.language as tl


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(y + i, value * 2, mask=i < n)


x = torch.arange(29.0)
double[(4,)](x, torch.empty(29), 29, BLOCK=8)
