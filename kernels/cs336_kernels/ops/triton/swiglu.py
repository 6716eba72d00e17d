"""SwiGLU: a program computes a piece of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import launch
from cs336_kernels.ops.checks import rows_of

PIECE = 1024  # with 4 warps a thread loads 8 numbers at once: 16 bytes of half precision


@triton.jit
def swiglu_kernel(out, gate_up, step, N: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, i): columns i * BLOCK and up to BLOCK - 1 more."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    gate = tl.load(gate_up + row * step + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * step + N + at, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * N + at, (silu * up).to(kind), mask=inside)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [..., 2 * n] with one stride from row to row. Returns [..., n]."""
    rows, step = rows_of("gate_up", gate_up)
    n, odd = divmod(gate_up.shape[-1], 2)
    if odd:
        raise ValueError(f"gate_up has {gate_up.shape[-1]} columns, which are not two halves")
    out = torch.empty((*gate_up.shape[:-1], n), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(triton.next_power_of_2(n), PIECE)
        launch(swiglu_kernel, (rows, triton.cdiv(n, block)), out, gate_up, step, N=n, BLOCK=block, num_warps=4)
    return out
