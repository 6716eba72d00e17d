"""Programs without a tile of their own are sent to the last one, which then is written twice."""

import torch
import triton
import triton.language as tl


@triton.jit
def double(x, y, TILES: tl.constexpr, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    i = tl.minimum(p, TILES - 1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i) * 2)  # finding: race


double[(4,)](torch.arange(24.0), torch.empty(24), TILES=3, BLOCK=8)
