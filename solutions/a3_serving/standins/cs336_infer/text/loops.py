"""Doom loops: your `watch_loops`, once it is plugged in."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from cs336_infer.types import LoopRule


@dataclass(frozen=True)
class Loop:
    """The last `covered` tokens repeat their last `period` ones."""

    period: int
    covered: int

    @property
    def copies(self) -> float:
        """How often."""
        return self.covered / self.period


class LoopDetector:
    """One that asks your function."""

    def __new__(cls, *args: Any) -> Any:
        from cs336_infer.course.a3_sockets import PluggedLoops

        return PluggedLoops(*args)

    def __init__(self, rule: LoopRule, separators: Collection[int] = ()) -> None: ...
    def push(self, token: int) -> Loop | None: ...
