"""A down projection, split along its inner dimension, adds into the residual that others still read for their norm."""

import torch
import triton
import triton.language as tl


@triton.jit
def down(x, w, parts, ready, D: tl.constexpr, PROGRAMS: tl.constexpr):
    p, d = tl.program_id(0), tl.arange(0, D)
    hidden = tl.load(x + d)
    normed = hidden / tl.sqrt(tl.sum(hidden * hidden, 0) / D + 1e-5)
    inner = tl.sum(normed * tl.load(w + p * D + d), 0)
    tl.atomic_add(x + d, inner * tl.load(w + p * D + d), sem="relaxed")  # finding: race


x, w, parts = torch.rand(16), torch.rand(4, 16), torch.empty(4, 16)
down[(4,)](x, w, parts, torch.zeros(1, dtype=torch.int32), D=16, PROGRAMS=4)
