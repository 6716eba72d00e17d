"""The wait is over at any value from there on."""

import torch
import triton
import triton.language as tl


@triton.jit
def exchange(x, scratch, y, ready, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(scratch + p * BLOCK + i, tl.load(x + p * BLOCK + i) * 2)
    tl.debug_barrier()
    tl.atomic_add(ready, 1, sem="release")
    while tl.atomic_add(ready, 0, sem="acquire") < tl.num_programs(0):
        pass
    neighbour = (p + 1) % tl.num_programs(0)
    tl.store(y + p * BLOCK + i, tl.load(scratch + neighbour * BLOCK + i))
    tl.debug_barrier()
    tl.atomic_add(ready, 1, sem="release")


exchange[(4,)](torch.arange(32.0), torch.empty(32), torch.empty(32), torch.zeros(1, dtype=torch.int32), BLOCK=8)
