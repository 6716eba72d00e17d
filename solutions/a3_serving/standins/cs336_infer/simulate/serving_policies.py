"""Scheduling policies are not in this package: the open task asks for one of yours. Only their names are here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cs336_infer.simulate.serving import Capacity, Flight, Policy, Schedule, StepCost
from cs336_infer.types import InvalidRequest

POLICIES: tuple[str, ...] = ()


class FirstCome:
    """Not here."""

    def __new__(cls, *args: Any) -> Any:
        raise InvalidRequest("FirstCome is not in the students' package")

    def __init__(self, capacity: Capacity) -> None: ...
    def schedule(self, now_s: float, flights: Sequence[Flight]) -> Schedule: ...


class OnTime:
    """Not here."""

    def __new__(cls, *args: Any) -> Any:
        raise InvalidRequest("OnTime is not in the students' package")

    def __init__(self, capacity: Capacity, cost: StepCost, *, margin: float = 0.9, least: int = 64) -> None: ...
    def schedule(self, now_s: float, flights: Sequence[Flight]) -> Schedule: ...


def make_policy(name: str, capacity: Capacity, cost: StepCost) -> Policy:
    """Only where all policies are."""
    raise InvalidRequest(f"policy {name} is not in the students' package")
