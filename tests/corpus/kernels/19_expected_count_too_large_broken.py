"""Two programs feed each tile, and the reader waits for three."""

import torch
import triton
import triton.language as tl


@triton.jit
def feed(x, scratch, y, ready, BLOCK: tl.constexpr):
    p, i = tl.program_id(0), tl.arange(0, BLOCK)
    if p < 2:
        tl.store(scratch + p * BLOCK + i, tl.load(x + p * BLOCK + i) * 2)
        tl.debug_barrier()
        tl.atomic_add(ready, 1, sem="release")
    else:
        while tl.atomic_add(ready, 0, sem="acquire") < 3:  # finding: deadlock
            pass
        tl.store(y + i, tl.load(scratch + i) + tl.load(scratch + BLOCK + i))


feed[(3,)](torch.arange(16.0), torch.zeros(16), torch.empty(8), torch.zeros(1, dtype=torch.int32), BLOCK=8)
