"""RMSNorm of rows that fit into a program's registers, with or without a sum before it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import launch
from cs336_kernels.ops.checks import rows_of, same

MOST_COLUMNS = 1 << 16  # a program holds a row in registers


@triton.jit
def rms_norm_kernel(out, x, weight, step_x, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    """Program `row`: one row, read once."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < D
    numbers = tl.load(x + row * step_x + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / D + eps)
    tl.store(out + row * D + at, (numbers * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    normed, summed, x, residual, weight, step_x, step_residual, eps, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Program `row`: one row of both, read once; the sum is written and normed as it is written, rounded."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < D
    numbers = tl.load(x + row * step_x + at, mask=inside, other=0.0).to(tl.float32)
    numbers += tl.load(residual + row * step_residual + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    rounded = numbers.to(summed.dtype.element_ty)
    tl.store(summed + row * D + at, rounded, mask=inside)
    numbers = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / D + eps)
    tl.store(normed + row * D + at, (numbers * scale * w).to(normed.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., d] with one stride from row to row; weight: [d]. Returns [..., d]."""
    rows, step = rows_of("x", x)
    _check(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows:
        launch(rms_norm_kernel, (rows,), out, x, weight, step, eps, **_sizes(x.shape[-1]))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual: [..., d], each with one stride from row to row; weight: [d]. Returns normed, summed [..., d]."""
    rows, step_x = rows_of("x", x)
    _, step_residual = rows_of("residual", residual)
    same("residual", residual, x.shape, x)
    _check(x, weight)
    normed, summed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if rows:
        tensors = (normed, summed, x, residual, weight)
        launch(add_rms_norm_kernel, (rows,), *tensors, step_x, step_residual, eps, **_sizes(x.shape[-1]))
    return normed, summed


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.shape[-1] > MOST_COLUMNS:
        raise ValueError(f"x has rows of {x.shape[-1]} numbers, more than {MOST_COLUMNS}")
    same("weight", weight, x.shape[-1:], x)
    if not weight.is_contiguous():
        raise ValueError(f"weight has stride {weight.stride(0)}, not 1")


def _sizes(d: int) -> dict[str, Any]:
    """A thread takes 8 numbers at once, 16 bytes of half precision, which is the widest load; 16 warps at most."""
    block = triton.next_power_of_2(d)
    return {"D": d, "BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}
