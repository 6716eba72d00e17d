"""What a lane holds that the mask turns off is not defined, and the sum takes all lanes."""

import torch
import triton
import triton.language as tl


@triton.jit
def mean(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)  # finding: nondeterminism
    tl.store(y, tl.sum(value, 0) / n)


mean[(1,)](torch.arange(13.0), torch.empty(1), 13, BLOCK=16)
