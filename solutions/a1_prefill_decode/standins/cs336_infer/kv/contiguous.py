"""The simplest KV cache: one tensor per layer, with room for the longest sequence in every row. What is stored and
read in it is up to your `cached_attention`, once it is plugged in."""

from __future__ import annotations

import torch

from cs336_infer.models.attend import Attend
from cs336_infer.models.config import ModelConfig


class ContiguousKV:
    """Keys and values of left-padded rows, all at the same length.

    Args:
        capacity: positions per row. starts: [batch] paddings at the left of each row, or None.

    Attributes:
        k, v: per layer, [batch, kv_heads, capacity, head_dim].
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        starts: torch.Tensor | None = None,
    ) -> None:
        shape, layers = (batch, config.num_kv_heads, capacity, config.head_dim), range(config.num_layers)
        self.k, self.v = ([torch.empty(shape, dtype=dtype, device=device) for _ in layers] for _ in "kv")
        self.capacity, self.starts, self.length = capacity, starts, 0

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return sum(t.nbytes for t in (*self.k, *self.v))

    def extend(self, new: int) -> Attend:
        from cs336_infer.course import sockets

        return sockets.extend(self, new)
