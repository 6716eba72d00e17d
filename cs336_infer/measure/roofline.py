"""The roofline: how fast a machine can run work of a given arithmetic intensity, and how near a measurement came.

Williams, Waterman and Patterson 2009, Roofline: An Insightful Visual Performance Model for Multicore Architectures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cs336_infer.measure.cost import Cost
from cs336_infer.types import InvalidRequest, check_number


class Bound(StrEnum):
    """Which resource a piece of work runs out of first."""

    MEMORY = "memory"
    COMPUTE = "compute"


@dataclass(frozen=True)
class Placed:
    """One measurement on the roofline plot: x = intensity, y = flops_per_s, the roof above it = attainable."""

    name: str
    intensity: float  # FLOP per byte
    flops_per_s: float  # achieved
    bytes_per_s: float  # achieved
    attainable: float  # FLOP/s
    bound: Bound
    fraction: float  # of the speed of light


@dataclass(frozen=True)
class Roofline:
    """Two ceilings of one machine. `measure.bandwidth` measures both.

    Args:
        bandwidth: bytes per second from memory, > 0.
        flops: floating-point operations per second in the dtype of the work, > 0.

    Raises:
        InvalidRequest: a ceiling is zero, negative, infinite or NaN.
    """

    bandwidth: float
    flops: float

    def __post_init__(self) -> None:
        check_number("bandwidth", self.bandwidth, 0, math.inf, "a finite number of bytes per second > 0", open_low=True)
        check_number("flops", self.flops, 0, math.inf, "a finite number of FLOP per second > 0", open_low=True)

    @property
    def ridge(self) -> float:
        """Intensity in FLOP/byte at which both ceilings meet; work below it is bound by memory."""
        return self.flops / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """FLOP/s that work of this intensity (FLOP/byte, >= 0, may be infinite) can reach at most."""
        if math.isnan(intensity) or intensity < 0:
            raise InvalidRequest(f"intensity must be a number of FLOP per byte >= 0, not {intensity!r}")
        return min(self.flops, intensity * self.bandwidth)

    def time_bound(self, cost: Cost) -> float:
        """Seconds that the work takes at least, computing and reading at the same time."""
        return max(cost.flops / self.flops, cost.bytes / self.bandwidth)

    def bound(self, cost: Cost) -> Bound:
        """Which of the two the work waits for; at the ridge itself, compute."""
        return Bound.MEMORY if cost.intensity < self.ridge else Bound.COMPUTE

    def fraction(self, cost: Cost, measured_s: float) -> float:
        """Speed of light: the time bound over the measured time, 1 being perfect.

        A value above 1 says that a ceiling was measured too low or that the bytes came from a cache.

        Raises:
            InvalidRequest: measured_s is zero, negative, infinite or NaN.
        """
        check_number("measured_s", measured_s, 0, math.inf, "a finite number of seconds > 0", open_low=True)
        return self.time_bound(cost) / measured_s

    def place(self, points: Mapping[str, tuple[Cost, float]]) -> list[Placed]:
        """Rows for a plot or a table: each point is its cost and its measured seconds, in the order given."""
        return [
            Placed(
                name=name,
                intensity=cost.intensity,
                fraction=self.fraction(cost, seconds),
                flops_per_s=cost.flops / seconds,
                bytes_per_s=cost.bytes / seconds,
                attainable=self.attainable(cost.intensity),
                bound=self.bound(cost),
            )
            for name, (cost, seconds) in points.items()
        ]
