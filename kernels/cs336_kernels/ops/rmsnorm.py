"""RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cs336_kernels.ops.checks import need_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, path: str = "reference") -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    All of it is computed in float32, the product with the weight too, and rounded once.

    Args:
        x: [..., d], float32, float16 or bfloat16. For "triton": d <= 65536, and one stride from row to row.
        weight: [d], same dtype as x.
        path: "reference" or "triton".

    Returns:
        [..., d], contiguous, in the dtype of x.

    Raises:
        ValueError: an unknown path; a shape, dtype or stride the kernel does not take.
    """
    if path == "reference":
        return _reference(x, weight, eps)
    need_triton("rms_norm", path)
    from cs336_kernels.ops.triton import rmsnorm

    return rmsnorm.rms_norm(x, weight, eps)


def _reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
