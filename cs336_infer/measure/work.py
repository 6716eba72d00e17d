"""What a piece of work costs: operations, and bytes by where they come from."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Work of one or more forward passes. Bytes may be fractions: a 4-bit weight is half a byte.

    Costs add up with `+`; the sum over chunks or steps is the cost of running them one after another.
    """

    flops: int
    weight_bytes: float
    kv_read_bytes: float
    kv_write_bytes: float
    activation_bytes: float

    @property
    def bytes(self) -> float:
        """All memory traffic."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP per byte; infinite when no byte moves."""
        return self.flops / self.bytes if self.bytes else math.inf

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_write_bytes + other.kv_write_bytes,
            self.activation_bytes + other.activation_bytes,
        )
