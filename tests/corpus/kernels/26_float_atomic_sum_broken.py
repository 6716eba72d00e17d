"""The order of the additions is that of the programs' arrival, and float addition is not associative."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_up(x, total, BLOCK: tl.constexpr):
    value = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    tl.atomic_add(total, value, sem="relaxed")  # finding: nondeterminism


x = torch.tensor([1e8, 1.0, -1e8, 3.0]).repeat_interleave(8)
add_up[(4,)](x, torch.zeros(1), BLOCK=8)
