"""A product with a weight. Its kernel norms its input on the way, which an exercise asks for: here is PyTorch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def product(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Arguments and result as in `linear_add`, checked there."""
    out = F.linear(x, weight)
    return out if residual is None else out + residual
