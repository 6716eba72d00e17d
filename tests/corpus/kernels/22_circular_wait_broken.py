"""Each of the two waits for the other before it sends."""

import torch
import triton
import triton.language as tl


@triton.jit
def swap(x, mail, y, flags, BLOCK: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(mail + p * BLOCK + i, tl.load(x + p * BLOCK + i))
    tl.debug_barrier()
    if p == 0:
        while tl.atomic_add(flags + 1, 0, sem="acquire") == 0:  # finding: deadlock
            pass
        tl.atomic_xchg(flags, 1, sem="release")
    else:
        while tl.atomic_add(flags, 0, sem="acquire") == 0:
            pass
        tl.atomic_xchg(flags + 1, 1, sem="release")
    tl.store(y + p * BLOCK + i, tl.load(mail + (1 - p) * BLOCK + i))


swap[(2,)](torch.arange(16.0), torch.empty(16), torch.empty(16), torch.zeros(2, dtype=torch.int32), BLOCK=8)
