"""Each use has its own count."""

import torch
import triton
import triton.language as tl


@triton.jit
def barrier(count, until):
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release")
    while tl.atomic_add(count, 0, sem="acquire") < until:
        pass


@triton.jit
def two_steps(a, b, c, d, count, BLOCK: tl.constexpr):
    p, programs, i = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    neighbour = (p + 1) % programs
    tl.store(b + p * BLOCK + i, tl.load(a + p * BLOCK + i) * 2)
    barrier(count, programs)
    tl.store(c + p * BLOCK + i, tl.load(b + neighbour * BLOCK + i))
    barrier(count, 2 * programs)
    tl.store(d + p * BLOCK + i, tl.load(c + neighbour * BLOCK + i))


b, c, d = torch.empty(3, 32)
two_steps[(4,)](torch.rand(32), b, c, d, torch.zeros(1, dtype=torch.int32), BLOCK=8)
