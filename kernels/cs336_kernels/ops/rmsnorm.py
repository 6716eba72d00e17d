"""RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        x: [..., d].
        weight: [d], same dtype as x.

    Returns:
        [..., d] in the dtype of x; the mean is taken in float32.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
