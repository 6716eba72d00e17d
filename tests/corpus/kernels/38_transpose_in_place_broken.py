"""Each program swaps a row with a column of the matrix that all of them work on."""

import torch
import triton
import triton.language as tl


@triton.jit
def transpose(x, y, N: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, N)
    tl.store(x + row * N + i, tl.load(x + i * N + row))  # finding: race


x, y = torch.rand(8, 8), torch.empty(8, 8)
transpose[(8,)](x, y, N=8)
