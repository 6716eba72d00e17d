"""No cache at all: the oracle of every cache. Attention is your `causal_attention`, once it is plugged in."""

from __future__ import annotations

import torch

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
        from cs336_infer.course import sockets

        return sockets.extend_without_cache(self, new)
