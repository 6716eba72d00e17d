"""The parts are added in a fixed order."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_up(x, total, BLOCK: tl.constexpr):
    value = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    tl.store(total + tl.program_id(0), value)


x = torch.tensor([1e8, 1.0, -1e8, 3.0]).repeat_interleave(8)
parts = torch.empty(4)
add_up[(4,)](x, parts, BLOCK=8)
add_up[(1,)](parts, torch.empty(1), BLOCK=4)
