"""The simplest KV cache: one tensor per layer, with room for the longest sequence in every row."""

from __future__ import annotations

import math

import torch
from cs336_kernels.ops import attention

from cs336_infer.kv.none import causal_mask
from cs336_infer.models.attend import Attend
from cs336_infer.models.config import ModelConfig
from cs336_infer.types import InvalidRequest


class ContiguousKV:
    """Keys and values of left-padded rows, all at the same length.

    Every slot below `length` has been written before it is read, so the fresh memory is not cleared.

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
        shape = (batch, config.num_kv_heads, capacity, config.head_dim)
        try:
            self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
            self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        except (RuntimeError, MemoryError):  # torch's CPU allocator has no error class of its own
            size = 2 * config.num_layers * math.prod(shape) * dtype.itemsize / 2**30
            raise InvalidRequest(
                f"the KV cache of {batch} rows of {capacity} tokens needs {size:.3g} GiB, more than {device} has"
            ) from None
        self.capacity = capacity
        self.starts = starts
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, used or not."""
        return sum(t.nbytes for t in self.k) + sum(t.nbytes for t in self.v)

    def extend(self, new: int) -> Attend:
        begin, end = self.length, self.length + new
        if end > self.capacity:
            raise InvalidRequest(f"the KV cache holds {self.capacity} positions per row, {end} are needed")
        self.length = end
        mask = causal_mask(self.starts, new, end)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self.k[layer], self.v[layer]
            keys[:, :, begin:end] = k.transpose(1, 2)
            values[:, :, begin:end] = v.transpose(1, 2)
            out = attention(q.transpose(1, 2), keys[:, :, :end], values[:, :, :end], mask)
            return out.transpose(1, 2)

        return attend
