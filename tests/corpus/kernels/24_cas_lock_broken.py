"""The lock is opened by a relaxed operation: the next one may see it open and the sum still old."""

import torch
import triton
import triton.language as tl


@triton.jit
def add_up(x, total, lock, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    own = tl.load(x + tl.program_id(0) * BLOCK + i)
    while tl.atomic_cas(lock, 0, 1, sem="acquire") == 1:
        pass
    tl.store(total + i, tl.load(total + i) + own)  # finding: race
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="relaxed")


x, total = torch.arange(32, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
add_up[(4,)](x, total, torch.zeros(1, dtype=torch.int32), BLOCK=8)
