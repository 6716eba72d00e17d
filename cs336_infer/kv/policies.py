"""Eviction policies beside LRU: first in first out, least frequently used, ARC, and Belady's, which knows the future.

Every event costs O(log n) for n cached blocks, amortised, and every policy remembers a number of keys that grows with
the cache and not with the traffic. Belady alone is given the whole trace.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from cs336_infer.kv.policy import LRU, EvictionPolicy, Key
from cs336_infer.types import InvalidRequest, check_integer, short

_NUMBER_BITS = 48  # of a rank: the running number of the event that gave it


class _Ranking:
    """Keys in the order of their ranks. A rank is an integer that is given once.

    A rank that was given up stays in the heap until it surfaces or more than half of the heap is such.
    """

    def __init__(self) -> None:
        self.ranks: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._heap: list[int] = []

    def add(self, key: Key, rank: int) -> None:
        """`key` is not there."""
        self.ranks[key] = rank
        self._keys[rank] = key
        heapq.heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._keys) + 64:
            self._heap = list(self._keys)
            heapq.heapify(self._heap)

    def discard(self, key: Key) -> None:
        rank = self.ranks.pop(key, None)
        if rank is not None:
            del self._keys[rank]

    def lowest(self) -> Key:
        heap, keys = self._heap, self._keys
        while heap[0] not in keys:
            heapq.heappop(heap)
        return keys[heap[0]]


class FIFO:
    """First in, first out: hits change nothing. A key comes in when it is released for the first time."""

    def __init__(self) -> None:
        self._number = 0
        self._came: dict[Key, int] = {}
        self._idle = _Ranking()

    def released(self, key: Key) -> None:
        came = self._came.get(key)
        if came is None:
            self._number = came = self._number + 1
            self._came[key] = came
        self._idle.add(key, came)

    def reused(self, key: Key) -> None:
        self._idle.discard(key)

    def evicted(self, key: Key) -> None:
        self._idle.discard(key)
        self._came.pop(key, None)

    def victim(self) -> Key:
        return self._idle.lowest()


class LFU:
    """Least frequently used: fewest uses since the key came into the cache, then the longest unused.

    What leaves is forgotten, its count too.
    """

    def __init__(self) -> None:
        self._number = 0
        self._uses: dict[Key, int] = {}
        self._idle = _Ranking()

    def released(self, key: Key) -> None:
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        self._number += 1
        self._idle.add(key, (uses << _NUMBER_BITS) + self._number)

    def reused(self, key: Key) -> None:
        self._idle.discard(key)

    def evicted(self, key: Key) -> None:
        self._idle.discard(key)
        self._uses.pop(key, None)

    def victim(self) -> Key:
        return self._idle.lowest()


class ARC:
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003, figure 4): recency against frequency, by itself.

    T1 holds keys used once, T2 keys used again, each in order of use. B1 and B2 are ghosts: keys that were evicted from
    T1 and T2. A ghost that comes back says which side was too small, and moves `target`, the size that T1 should have.
    As in the paper |T1| + |B1| <= blocks and all four together <= 2 blocks, so at most 2 * blocks keys are remembered.

    The paper moves `target` before it evicts for the key that came back. A pool needs the room before it knows the
    key's content, so here the key that came back is seen one eviction later. T1 and T2 hold what nobody uses.
    """

    def __init__(self, blocks: int) -> None:
        check_integer("blocks", blocks, 1, 1 << 40)
        self.blocks, self.target = blocks, 0.0
        self._t1: OrderedDict[Key, None] = OrderedDict()
        self._t2: OrderedDict[Key, None] = OrderedDict()
        self._b1: OrderedDict[Key, None] = OrderedDict()
        self._b2: OrderedDict[Key, None] = OrderedDict()
        self._in_use: set[Key] = set()  # they were hit: into T2 when they are released
        self._chosen: Key | None = None

    @property
    def ghosts(self) -> int:
        """Keys remembered that are not in the cache."""
        return len(self._b1) + len(self._b2)

    def released(self, key: Key) -> None:
        recent, often = len(self._b1), len(self._b2)
        if key in self._in_use:
            self._in_use.remove(key)
            self._t2[key] = None
        elif key in self._b1:
            del self._b1[key]
            self.target = min(self.target + max(1.0, often / recent), self.blocks)
            self._t2[key] = None
        elif key in self._b2:
            del self._b2[key]
            self.target = max(self.target - max(1.0, recent / often), 0.0)
            self._t2[key] = None
        else:
            self._t1[key] = None
        self._trim()

    def reused(self, key: Key) -> None:
        if key in self._t1:
            del self._t1[key]
        else:
            del self._t2[key]
        self._in_use.add(key)

    def evicted(self, key: Key) -> None:
        chosen, self._chosen = self._chosen == key, None
        for cached, ghosts in ((self._t1, self._b1), (self._t2, self._b2)):
            if key in cached:
                del cached[key]
                if chosen:  # what became invalid is not a ghost: nothing was too small
                    ghosts[key] = None
        self._in_use.discard(key)
        self._trim()

    def victim(self) -> Key:
        first = self._t1 and (len(self._t1) > self.target or not self._t2)
        self._chosen = next(iter(self._t1 if first else self._t2))
        return self._chosen

    def _trim(self) -> None:
        while self._b1 and len(self._t1) + len(self._b1) > self.blocks:
            self._b1.popitem(last=False)
        while self._b2 and len(self._t1) + len(self._t2) + self.ghosts > 2 * self.blocks:
            self._b2.popitem(last=False)


class Belady:
    """Evict what is needed furthest in the future (Belady 1966): the bound that other policies are measured against.

    Args:
        future: the keys of every request, in the order in which they will come.

    `serve` must be called as each request begins, after its hits were taken. Among keys with the same next use the one
    released first goes, the end of a prompt before its beginning.

    No policy that evicts only when room is needed gets more block hits, provided that a prompt's keys are a chain (each
    names everything before it) and that the new blocks of a request are kept. Then a block's next use is never after
    that of the blocks behind it, no cached prefix gets a hole, and the exchange argument for single pages holds for
    requests that need several at once. It is a heuristic beyond that: hits in tokens count a partly filled last block
    less, and keys that are no chain leave holes, behind which nothing is found.

    Memory: 8 bytes for every block looked up, and the keys that have a future.
    """

    _NEVER = (1 << 32) - 1

    def __init__(self, future: Iterable[Sequence[Key]]) -> None:
        self._after = array("L")  # for the n-th lookup of the trace: the request that looks the same key up next
        last: dict[Key, int] = {}
        for request, keys in enumerate(future):
            for key in keys:
                if key in last:
                    self._after[last[key]] = request
                last[key] = len(self._after)
                self._after.append(self._NEVER)
        self._served = self._number = 0
        self._next: dict[Key, int] = {}
        self._idle = _Ranking()

    def serve(self, keys: Sequence[Key]) -> None:
        """The next request of the future begins: `keys` are its, the hits among them are taken."""
        waiting = self._idle.ranks
        for key, after in zip(keys, self._after[self._served : self._served + len(keys)], strict=True):
            if after == self._NEVER:
                self._next.pop(key, None)
            else:
                self._next[key] = after
            if key in waiting:  # behind a hole: cached and no hit, and its next use moves on all the same
                self._idle.discard(key)
                self._rank(key)
        self._served += len(keys)

    def released(self, key: Key) -> None:
        self._rank(key)

    def reused(self, key: Key) -> None:
        self._idle.discard(key)

    def evicted(self, key: Key) -> None:
        self._idle.discard(key)

    def victim(self) -> Key:
        return self._idle.lowest()

    def _rank(self, key: Key) -> None:
        self._number += 1
        nearness = self._NEVER - self._next.get(key, self._NEVER)
        self._idle.add(key, (nearness << _NUMBER_BITS) + self._number)


POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda blocks: LRU(),
    "fifo": lambda blocks: FIFO(),
    "lfu": lambda blocks: LFU(),
    "arc": ARC,
}
"""A name -> a function from the capacity in blocks to a new policy."""

POLICY_NAMES = (*POLICIES, "belady")


def make_policy(name: str, blocks: int, future: Callable[[], Iterator[Sequence[Key]]] | None = None) -> EvictionPolicy:
    """A new policy for a cache of `blocks` blocks.

    Args:
        future: returns the keys of every request to come; only "belady" asks for it.

    Raises:
        InvalidRequest: the name is unknown, or belady has no future.
    """
    if name == "belady":
        if future is None:
            raise InvalidRequest("policy belady needs the future: give it the requests that will come")
        return Belady(future())
    if name not in POLICIES:
        raise InvalidRequest(f"policy must be one of {', '.join(POLICY_NAMES)}, not {short(name)}")
    return POLICIES[name](blocks)
