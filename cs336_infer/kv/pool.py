"""The block pool: who owns which block of KV memory, and which blocks are kept because somebody may want them again.

A block is *live* (somebody uses it), *cached* (nobody does, but its content has a key and may be hit) or *free*. Only
numbers live here, no tensors: the same pool runs under the engine and under the replay of a trace.

    free + cached + live == total                      after every operation; `check` verifies it from scratch

A block is shared by counting references; it becomes findable when it is full and published under the key of its
tokens (`prefix`). What is free is taken before anything cached is evicted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat

from cs336_infer.kv.policy import LRU, EvictionPolicy, Key, PolicyError
from cs336_infer.types import InferError, check_integer, short


class OutOfBlocks(InferError):
    """The pool has fewer free and evictable blocks than were asked for. Nothing was taken."""


class BlockPool:
    """`num_blocks` blocks, numbered from 0.

    Args:
        policy: chooses among the cached blocks; `LRU` by default.
        caching: False publishes nothing, so that every block is free as soon as its last user is gone.
        on_evict: called with (block, key) before a cached block is given to somebody else, while its content is intact.
        fold: maps a key to what it is found by; the default is the key itself. A hit is compared by the whole key and
            by content in any case, so a fold of a few bits makes collisions and no wrong answers.
        debug: `check` after every operation.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        policy: EvictionPolicy | None = None,
        caching: bool = True,
        on_evict: Callable[[int, Key], None] | None = None,
        fold: Callable[[Key], Key] | None = None,
        debug: bool = False,
    ) -> None:
        check_integer("num_blocks", num_blocks, 1, 1 << 40)
        self.total, self.caching, self.debug = num_blocks, caching, debug
        self.policy: EvictionPolicy = LRU() if policy is None else policy
        self.on_evict, self._fold = on_evict, fold
        self.evictions = 0
        self._untouched = 0  # blocks from here on were never given out: a huge pool costs nothing until it is used
        self._free: deque[int] = deque()
        self._refs: list[int] = []
        self._keys: list[Key | None] = []
        self._contents: list[bytes | None] = []
        self._index: dict[Key, int] = {}
        self._idle = 0
        self._lock = threading.RLock()

    @property
    def free(self) -> int:
        """Blocks without content that anybody could want."""
        return len(self._free) + self.total - self._untouched

    @property
    def cached(self) -> int:
        """Blocks that nobody uses and that can be hit, or evicted."""
        return self._idle

    @property
    def live(self) -> int:
        return self.total - self.free - self._idle

    @property
    def available(self) -> int:
        """How many `allocate` could give now."""
        return self.free + self._idle

    @property
    def peak(self) -> int:
        """How many were live or cached at once, at most: a block not given out before is taken when none is free."""
        return self._untouched

    def refs(self, block: int) -> int:
        """How many use the block."""
        return self._refs[block]

    def content(self, block: int) -> bytes | None:
        """The tokens that the block was published with, as bytes; None when it is not published."""
        return self._contents[block]

    def match(self, keys: Sequence[Key], contents: Sequence[bytes] | None = None) -> int:
        """How many of `keys`, from the first on and without a gap, are here. Nothing is pinned."""
        with self._lock:
            return len(self._leading(keys, contents))

    def take(self, keys: Sequence[Key], contents: Sequence[bytes] | None = None) -> list[int]:
        """Find and pin in one step: the blocks of the leading run of `keys`, each with one more reference.

        Args:
            keys: of consecutive full blocks from the beginning of a sequence.
            contents: their tokens; a block whose tokens differ ends the run.
        """
        with self._lock:
            found = self._leading(keys, contents)
            refs, names, reused = self._refs, self._keys, self.policy.reused
            for number, block in enumerate(found):
                if refs[block] == 0:
                    try:
                        reused(names[block])
                    except BaseException:  # a fault of somebody's policy: nothing stays pinned
                        self.release(found[:number])
                        raise
                    self._idle -= 1
                refs[block] += 1
            self._verify()
            return found

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of unknown content, one reference each: free ones first, then evicted ones.

        Raises:
            OutOfBlocks: there are not so many; none was taken.
            PolicyError: the policy chose a block that cannot be evicted; none was taken.
        """
        with self._lock:
            if count > self.available:
                raise OutOfBlocks(f"{count} KV blocks are needed, {self.available} of {self.total} can be had")
            got: list[int] = []
            try:
                for _ in range(count):
                    got.append(self._free.popleft() if self._free else self._fresh())
            except BaseException:
                self._free.extendleft(reversed(got))
                raise
            for block in got:
                self._refs[block] = 1
            self._verify()
            return got

    def publish(self, block: int, key: Key, content: bytes | None = None) -> bool:
        """The live `block` is full: from now on it is found by `key`.

        False when it is not published: caching is off, or another block is found by this key already (two requests of
        one step computed the same): the first one stays, and this one is free after its last user.
        """
        with self._lock:
            return self._publish(block, key, content)

    def publish_all(self, blocks: Sequence[int], keys: Sequence[Key], contents: Sequence[bytes] | None = None) -> None:
        """`publish` each of `blocks`."""
        with self._lock:
            for block, key, content in zip(blocks, keys, contents or repeat(None, len(keys)), strict=True):
                self._publish(block, key, content)

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these live blocks, for a fork."""
        with self._lock:
            if any(self._refs[block] < 1 for block in blocks):
                raise ValueError(f"only live blocks can be shared, not all of {short(list(blocks))} are")
            for block in blocks:
                self._refs[block] += 1
            self._verify()

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. The last block goes first, so that it is evicted first."""
        with self._lock:
            refs, names, free, released = self._refs, self._keys, self._free, self.policy.released
            for block in reversed(blocks):
                left = refs[block] - 1
                if left < 0:
                    raise ValueError(f"block {block} was released more often than it was taken")
                refs[block] = left
                if left == 0:
                    if names[block] is None:
                        free.append(block)
                    else:
                        self._idle += 1
                        released(names[block])
            self._verify()

    def forget(self) -> None:
        """Give up all cached content; live blocks stay with their users and are not found any more."""
        with self._lock:
            gone = []
            for block in list(self._index.values()):
                gone.append(self._unpublish(block))
                if self._refs[block] == 0:
                    self._idle -= 1
                    self._free.append(block)
            for key in gone:  # live ones too: a policy that counts uses would count on from a content that is gone
                self.policy.evicted(key)
            self._verify()

    def check(self) -> None:
        """Recount everything.

        Raises:
            AssertionError: names the rule that does not hold.
        """
        refs, free = self._refs, list(self._free)
        assert len(set(free)) == len(free), "a block is free twice"
        assert all(refs[b] == 0 and self._keys[b] is None for b in free), "a free block has a user or a key"
        idle = [b for b, (r, k) in enumerate(zip(refs, self._keys, strict=True)) if r == 0 and k is not None]
        assert len(idle) == self._idle, f"{self._idle} cached blocks are counted, there are {len(idle)}"
        live = sum(r > 0 for r in refs)
        assert len(free) + self.total - self._untouched + len(idle) + live == self.total, "blocks are lost"
        assert self._untouched == len(refs) and all(r >= 0 for r in refs), "reference counts are wrong"
        named = {b: k for b, k in enumerate(self._keys) if k is not None}
        assert {b: self._place(k) for b, k in named.items()} == {b: p for p, b in self._index.items()}, "a stale key"

    def _leading(self, keys: Sequence[Key], contents: Sequence[bytes] | None) -> list[int]:
        found: list[int] = []
        index, names, fold = self._index, self._keys, self._fold
        for number, key in enumerate(keys):
            block = index.get(key if fold is None else fold(key))
            if block is None or (fold is not None and names[block] != key):
                break
            if contents is not None and self._contents[block] != contents[number]:
                break
            found.append(block)
        return found

    def _publish(self, block: int, key: Key, content: bytes | None) -> bool:
        names = self._keys
        if self._refs[block] < 1 or names[block] is not None:
            raise ValueError(f"block {block} cannot be published: it has {self._refs[block]} users and a key or none")
        place = key if self._fold is None else self._fold(key)
        if not self.caching or place in self._index:
            return False
        self._index[place] = block
        names[block], self._contents[block] = key, content
        self._verify()
        return True

    def _fresh(self) -> int:
        if self._untouched < self.total:
            self._refs.append(0)
            self._keys.append(None)
            self._contents.append(None)
            self._untouched += 1
            return self._untouched - 1
        key = self.policy.victim()
        block = self._index.get(self._place(key))
        if block is None or self._keys[block] != key or self._refs[block] > 0:
            state = "in use" if block is not None and self._keys[block] == key else "not in the cache"
            raise PolicyError(f"{type(self.policy).__name__} chose block {short(key)}, which is {state}")
        if self.on_evict is not None:
            self.on_evict(block, key)
        self._unpublish(block)
        self._idle -= 1
        self.evictions += 1
        try:
            self.policy.evicted(key)
        except BaseException:  # a fault of somebody's policy: the block is not lost
            self._free.append(block)
            raise
        return block

    def _unpublish(self, block: int) -> Key:
        key = self._keys[block]
        assert key is not None
        del self._index[self._place(key)]
        self._keys[block] = self._contents[block] = None
        return key

    def _place(self, key: Key) -> Key:
        return key if self._fold is None else self._fold(key)

    def _verify(self) -> None:
        if self.debug:
            self.check()
