"""Stop strings over a stream of text: your `StopFilter`, once it is plugged in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cs336_infer.types import InferError


class StopMatch(NamedTuple):
    """A complete stop string, offsets in characters."""

    start: int
    end: int
    stop: str


def find_stop(text: str, stops: Iterable[str]) -> StopMatch | None:
    """Not here."""
    raise InferError("find_stop is not in the students' package: write your own oracle for the whole text")


class StopStrings:
    """One that asks your filter; without stop strings there is nothing to ask."""

    def __new__(cls, *args: Any) -> Any:
        from cs336_infer.course.a3_sockets import PluggedStops

        return PluggedStops(*args)

    def __init__(self, stops: Sequence[str]) -> None: ...
    def push(self, text: str) -> str: ...
    @property
    def held(self) -> str: ...
    def flush(self) -> str: ...
