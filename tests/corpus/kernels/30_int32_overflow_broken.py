"""A position in 16.16 fixed point leaves int32 at element 21846."""

import torch
import triton
import triton.language as tl


@triton.jit
def resample(x, y, step, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = i * step >> 16
    tl.store(y + i, tl.load(x + source))  # finding: out-of-bounds


resample[(3,)](torch.rand(36864), torch.empty(24576), 3 << 15, BLOCK=8192)
