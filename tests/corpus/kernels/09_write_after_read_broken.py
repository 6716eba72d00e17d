"""Each program writes its part of a buffer that others may still have to read."""

import torch
import triton
import triton.language as tl


@triton.jit
def normalise(x, ready, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    largest = tl.max(tl.load(x + tl.arange(0, WIDTH)), 0)
    own = x + p * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(own) / largest
    tl.store(own, value)  # finding: race


normalise[(4,)](torch.arange(32.0), torch.zeros(1, dtype=torch.int32), WIDTH=32, BLOCK=8)
