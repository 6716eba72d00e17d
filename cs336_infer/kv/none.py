"""No cache at all: the oracle of every cache, and the mask that left-padded rows need."""

from __future__ import annotations

import torch
from cs336_kernels.ops import attention

from cs336_infer.models.attend import Attend


class NoCache:
    """Stores nothing: every step must be given the whole sequence again. The oracle of every cache.

    Args:
        starts: [batch] number of padding positions at the left of each row, or None when there are none.
    """

    length = 0

    def __init__(self, starts: torch.Tensor | None = None) -> None:
        self.starts = starts

    def extend(self, new: int) -> Attend:
        mask = causal_mask(self.starts, new, new)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask).transpose(1, 2)

        return attend


def causal_mask(starts: torch.Tensor | None, new: int, total: int) -> torch.Tensor | None:
    """Which stored positions the newest `new` queries of left-padded rows may see.

    Args:
        starts: [batch] paddings per row, or None.

    Returns:
        [batch, 1, new, total] bool, or None when plain causal attention is right. A padding position sees itself,
        so that no row of the softmax is empty and no NaN is born.
    """
    if starts is None:
        return None
    keys = torch.arange(total, device=starts.device)
    queries = keys[total - new :, None]
    real = keys >= starts[:, None, None]
    return ((keys <= queries) & real | (keys == queries)).unsqueeze(1)
