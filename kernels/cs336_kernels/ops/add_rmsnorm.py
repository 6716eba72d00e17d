"""The residual sum and the RMSNorm that follows it, in one pass over memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cs336_kernels.ops.checks import need_triton


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, path: str = "reference"
) -> tuple[torch.Tensor, torch.Tensor]:
    """summed = x + residual, and normed = rms_norm(summed).

    The sum is rounded to the dtype first, and it is the rounded sum that is normed: the next layer adds to it, and must
    see what the norm saw. The norm is computed in float32 and rounded once.

    Args:
        x, residual: [..., d], float32, float16 or bfloat16, same shape and dtype. For "triton": d <= 65536, and one
            stride from row to row, each its own.
        weight: [d], same dtype.
        path: "reference" or "triton".

    Returns:
        normed, summed: [..., d], contiguous, new tensors.

    Raises:
        ValueError: an unknown path; a shape, dtype or stride the kernel does not take.
    """
    if path == "reference":
        return _reference(x, residual, weight, eps)
    need_triton("add_rms_norm", path)
    from cs336_kernels.ops.triton import rmsnorm

    return rmsnorm.add_rms_norm(x, residual, weight, eps)


def _reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual.shape != x.shape:
        raise ValueError(f"residual is {list(residual.shape)}, not {list(x.shape)}")
    summed = x + residual
    return F.rms_norm(summed, (summed.shape[-1],), weight, eps), summed
