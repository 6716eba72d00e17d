"""Left out of this package: it holds the answers of assignment 4 in other words."""

from __future__ import annotations

import torch

from cs336_infer.types import InvalidRequest


def fused(x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Not here.

    Raises:
        InvalidRequest: always.
    """
    raise InvalidRequest("kernels='fused' is not in this package: plug your kernels into kernels='triton'")
