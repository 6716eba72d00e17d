"""One program appends the new key while the others already read up to it."""

import torch
import triton
import triton.language as tl


@triton.jit
def attend(q, keys, new, scores, appended, length, D: tl.constexpr):
    d, p = tl.arange(0, D), tl.program_id(0)
    if p == 0:
        tl.store(keys + (length - 1) * D + d, tl.load(new + d))  # finding: race
    else:
        position = length - p
        tl.store(scores + position, tl.sum(tl.load(q + d) * tl.load(keys + position * D + d), 0))


keys, q, new = torch.rand(4, 8), torch.rand(8), torch.rand(8)
attend[(5,)](q, keys, new, torch.empty(4), torch.zeros(1, dtype=torch.int32), 4, D=8)
