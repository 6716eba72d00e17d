"""The first output of a causal convolution looks before the beginning."""

import torch
import triton
import triton.language as tl


@triton.jit
def difference(x, y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(x + i - 1)  # finding: out-of-bounds
    tl.store(y + i, tl.load(x + i) - before)


difference[(4,)](torch.arange(32.0), torch.empty(32), BLOCK=8)
