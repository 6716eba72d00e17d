"""What a model needs of a KV cache: one call per step, and one per layer. Package `kv` holds the caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q, k, v) -> out: store k and v of the new tokens, let q attend to everything stored so far.

q, out: [batch, new, heads, head_dim]; k, v: [batch, new, kv_heads, head_dim].
"""


class KVCache(Protocol):
    """Keys and values of the tokens a batch has seen."""

    @property
    def length(self) -> int:
        """Positions stored per row, padding included."""
        ...

    def extend(self, new: int) -> Attend:
        """Make room for `new` positions and return the attention of this step."""
        ...
