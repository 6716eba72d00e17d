"""What the engine asks of KV memory: begin a sequence, make room, store, fork, end. Pool, memory and tiers behind it.

A `SequenceKV` is all that a sequence holds: which blocks, and how many tokens are stored in them. Everything else about
it follows from these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_infer.kv.paged import PagedKV, PagedStep, Row
from cs336_infer.kv.pool import BlockPool
from cs336_infer.kv.prefix import KeyChain

if TYPE_CHECKING:
    from cs336_infer.kv.tiers import Tiers


@dataclass
class SequenceKV:
    """A sequence's hold on KV memory.

    Attributes:
        table: its blocks, in order.
        chain: the keys of the tokens stored.
        cached: tokens that were found when it began, and not computed.
    """

    table: list[int]
    chain: KeyChain
    cached: int

    @property
    def length(self) -> int:
        """Tokens stored."""
        return len(self.chain)


class KVManager:
    """KV memory for many sequences.

    Args:
        memory: the blocks themselves.
        tiers: where blocks go that leave the device, or None.
        write: "through" sends a block to the tiers when it is full, "back" when it is evicted.
        pool: options of `BlockPool`: policy, caching, fold, debug.
    """

    def __init__(self, memory: PagedKV, *, tiers: Tiers | None = None, write: str = "through", **pool: Any) -> None:
        self.memory, self.tiers, self.write = memory, tiers, write
        self.pool = BlockPool(len(memory.data), on_evict=self._write_back if write == "back" else None, **pool)
        self.promote_s = 0.0  # time spent on bringing blocks up from the tiers
        self._leaving: list[tuple[int, Any]] = []  # blocks pinned until their copy to a tier is complete

    def begin(self, tokens: Sequence[int], root: bytes) -> SequenceKV:
        """A sequence that starts with `tokens`, with the blocks of its longest known prefix.

        At least one token is left to compute: its logits choose the next one.

        Args:
            root: the root of its keys (`root_key`).
        """
        size = self.memory.block_size
        chain = KeyChain(root, size, tokens[: (len(tokens) - 1) // size * size])
        table = self.pool.take(chain.keys, chain.contents) if self.pool.caching else []
        try:
            if self.tiers is not None and self.pool.caching and len(table) < len(chain.keys):
                self._promote(table, chain)
        except BaseException:
            self.pool.release(table)
            raise
        return SequenceKV(table, KeyChain(root, size, tokens[: len(table) * size]), len(table) * size)

    def missing(self, sequence: SequenceKV, new: int) -> int:
        """How many blocks `reserve` would have to find."""
        wanted = math.ceil((sequence.length + new) / self.memory.block_size)
        return wanted - len(sequence.table) + (new > 0 and self._shared_tail(sequence))

    def reserve(self, sequence: SequenceKV, new: int) -> None:
        """Room for `new` more tokens, in blocks that nobody else reads (copy-on-write).

        Raises:
            OutOfBlocks: there is not enough; nothing has changed.
        """
        blocks = self._allocate(self.missing(sequence, new))
        if blocks and self._shared_tail(sequence):
            mine, theirs = blocks.pop(0), sequence.table[-1]
            self.memory.copy(theirs, mine)
            sequence.table[-1] = mine
            self.pool.release([theirs])
        sequence.table += blocks

    def step(self, sequences: Sequence[tuple[SequenceKV, int]]) -> PagedStep:
        """The cache of a forward pass over `new` tokens of each sequence, for which there is room."""
        return self.memory.step([Row(s.table, s.length, new) for s, new in sequences])

    def stored(self, sequence: SequenceKV, tokens: Sequence[int]) -> None:
        """The step stored these tokens. Blocks that became full can be found by others from now on."""
        before = len(sequence.chain.keys)
        sequence.chain.extend(tokens)
        keys, contents = sequence.chain.keys, sequence.chain.contents
        for i in range(before, len(keys)):
            block = sequence.table[i]
            new = self.pool.caching and self.pool.publish(block, keys[i], contents[i])
            if new and self.tiers is not None and self.write == "through":
                self.pool.share([block])
                self._leaving.append((block, self.tiers.store(keys[i], contents[i], self.memory.bytes_of(block))))
        self._let_go()

    def fork(self, sequence: SequenceKV) -> SequenceKV:
        """A second sequence with the same past; it copies the unfinished last block when it writes to it."""
        self.pool.share(sequence.table)
        return SequenceKV(list(sequence.table), sequence.chain.fork(), sequence.cached)

    def end(self, sequence: SequenceKV) -> None:
        """The sequence is over; what others may want stays cached."""
        table, sequence.table = sequence.table, []
        self.pool.release(table)
        if self.tiers is not None:  # blocks went down as they were filled, the first one first
            self.tiers.touch(sequence.chain.keys)
        self._let_go()

    def suspend(self, sequence: SequenceKV) -> None:
        """Copy all that is stored to the tiers, down to the unfinished last block, and wait for it.

        After `end`, `begin` finds the full blocks again and `resume` the last one. What a tier has given up by then is
        computed again.
        """
        assert self.tiers is not None
        chain = sequence.chain
        names = list(zip(chain.keys, chain.contents, strict=True)) + ([chain.tail] if chain.tail else [])
        for (key, content), block in zip(names, sequence.table, strict=False):
            self.tiers.store(key, content, self.memory.bytes_of(block)).wait()

    def resume(self, sequence: SequenceKV, tokens: Sequence[int]) -> None:
        """`sequence` was suspended with `tokens` stored and has begun again: fetch its unfinished last block, if all
        before it was found and there is room."""
        chain = sequence.chain.fork()
        chain.extend(tokens[sequence.length :])
        if self.tiers is None or chain.tail is None or len(chain.keys) != len(sequence.chain.keys):
            return
        key, content = chain.tail
        with self.tiers.find([key], [content]) as lease:
            if not len(lease) or not self.pool.available:
                return
            (block,) = self._allocate(1)
            if not lease.read(0, self.memory.bytes_of(block)):
                self.pool.release([block])
                return
        sequence.table.append(block)
        sequence.chain, sequence.cached = chain, len(chain)

    def flush(self) -> None:
        """Wait until every block on its way to a tier has arrived, or was dropped."""
        self._let_go(wait=True)
        if self.tiers is not None:
            self.tiers.flush()

    def persist(self, tokens: Sequence[int], root: bytes) -> int:
        """Copy what is stored of these tokens down to the disk tier, and wait for it.

        Returns:
            Tokens, from the first on, that are safely on disk; 0 without a disk tier.
        """
        if self.tiers is None:
            return 0
        chain = KeyChain(root, self.memory.block_size, tokens)
        blocks = self.pool.take(chain.keys, chain.contents)
        try:
            for i, block in enumerate(blocks):
                self.tiers.store(chain.keys[i], chain.contents[i], self.memory.bytes_of(block)).wait()
            self.tiers.flush()
            return self.tiers.durable(chain.keys) * self.memory.block_size
        finally:
            self.pool.release(blocks)

    def _shared_tail(self, sequence: SequenceKV) -> bool:
        """Whether the next token goes into a block that somebody else reads too."""
        unfinished = sequence.length % self.memory.block_size != 0
        return unfinished and self.pool.refs(sequence.table[-1]) > 1

    def _allocate(self, count: int) -> list[int]:
        if count <= 0:
            return []
        if count > self.pool.available:
            self._let_go(wait=True)
        blocks = self.pool.allocate(count)
        self.memory.recycle(blocks)
        return blocks

    def _promote(self, table: list[int], chain: KeyChain) -> None:
        """Bring the blocks that follow `table` up from the tiers, as far as they arrive undamaged."""
        assert self.tiers is not None
        first, begun = len(table), time.perf_counter()
        with self.tiers.find(chain.keys[first:], chain.contents[first:]) as lease:
            if len(lease) > self.pool.available:
                self._let_go(wait=True)
            blocks = self._allocate(min(len(lease), self.pool.available))
            try:
                arrived = lease.read_all([self.memory.bytes_of(block) for block in blocks])
            except BaseException:
                self.pool.release(blocks)
                raise
        for i, block in enumerate(blocks[:arrived], first):
            self.pool.publish(block, chain.keys[i], chain.contents[i])
        table += blocks[:arrived]
        self.pool.release(blocks[arrived:])
        self.promote_s += time.perf_counter() - begun

    def _write_back(self, block: int, key: Any) -> None:
        """The pool evicts a block: its content goes to a tier before anybody else gets the block."""
        content = self.pool.content(block)
        if self.tiers is not None and content is not None:
            self.tiers.store(key, content, self.memory.bytes_of(block)).wait()

    def _let_go(self, *, wait: bool = False) -> None:
        """Give back blocks whose copy is complete."""
        staying = []
        for block, transfer in self._leaving:
            if wait:
                transfer.wait()
            if transfer.done():
                self.pool.release([block])
            else:
                staying.append((block, transfer))
        self._leaving = staying
