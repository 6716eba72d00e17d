"""Which block leaves a full cache: the socket for eviction policies. LRU is yours, once it is plugged in."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from cs336_infer.types import InferError

Key = Hashable


class PolicyError(InferError):
    """An eviction policy chose a block that is in use or not in the cache. Nothing was evicted."""


class EvictionPolicy(Protocol):
    """Four events of a key's life; the assignment explains them."""

    def released(self, key: Key) -> None: ...
    def reused(self, key: Key) -> None: ...
    def evicted(self, key: Key) -> None: ...
    def victim(self) -> Key: ...


class LRU:
    """A new one of yours."""

    def __new__(cls) -> Any:
        from cs336_infer.course.plug import plugged

        return plugged("LRU")()

    def __init__(self) -> None: ...
    def released(self, key: Key) -> None: ...
    def reused(self, key: Key) -> None: ...
    def evicted(self, key: Key) -> None: ...
    def victim(self) -> Key: ...
