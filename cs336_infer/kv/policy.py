"""Which block leaves a full cache: the socket for eviction policies, and the ones that come with the course.

A policy knows keys only. The cache tells it what happens to a key and asks it for a victim; pinned blocks, memory and
bytes are the cache's business, and a victim that the cache cannot give up is refused by name (`PolicyError`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Protocol

from cs336_infer.types import InferError

Key = Hashable


class PolicyError(InferError):
    """An eviction policy chose a block that is in use or not in the cache. Nothing was evicted."""


class EvictionPolicy(Protocol):
    """Four events of a key's life. `released` comes first and may come again after each `reused`."""

    def released(self, key: Key) -> None:
        """The block is in the cache and nobody uses it: it may be chosen from now on."""
        ...

    def reused(self, key: Key) -> None:
        """A hit: somebody uses the block, so it must not be chosen until it is released again."""
        ...

    def evicted(self, key: Key) -> None:
        """The block has left the cache, as a victim or because it became invalid, perhaps before any release."""
        ...

    def victim(self) -> Key:
        """The key to evict next, one of those released. Called only when there is one; `evicted` follows."""
        ...


class LRU:
    """Least recently used: the one that was released longest ago.

    A request's blocks are released from its last to its first, so the end of a prompt, which fewer others share,
    goes before its beginning.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def released(self, key: Key) -> None:
        self._order[key] = None

    def reused(self, key: Key) -> None:
        del self._order[key]

    def evicted(self, key: Key) -> None:
        self._order.pop(key, None)

    def victim(self) -> Key:
        return next(iter(self._order))
