"""What the engine asks of KV memory. Blocks, keys and hits are yours, once they are plugged in; a fork copies its
unfinished block at once, where exercise 1 waits until somebody writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cs336_infer.kv import pool as pools
from cs336_infer.kv.paged import PagedKV, PagedStep, Row

if TYPE_CHECKING:
    from cs336_infer.kv.tiers import Tiers


@dataclass
class SequenceKV:
    """A sequence's hold on KV memory: its blocks, the keys of what is stored, and tokens that were found."""

    table: list[int]
    chain: Any
    cached: int

    @property
    def length(self) -> int:
        """Tokens stored."""
        return len(self.chain)


class KVManager:
    """KV memory for many sequences."""

    def __init__(self, memory: PagedKV, *, tiers: Tiers | None = None, write: str = "through", **pool: Any) -> None:
        self.memory, self.tiers = memory, tiers
        self.pool: Any = pools.BlockPool(len(memory.data), **pool)

    def begin(self, tokens: Sequence[int], root: bytes) -> SequenceKV:
        """A sequence that starts with `tokens`, with the blocks that your `find_prefix` finds."""
        from cs336_infer.course import a2_sockets

        return a2_sockets.begin(self, tokens, root)

    def missing(self, sequence: SequenceKV, new: int) -> int:
        """How many blocks `reserve` would have to find."""
        return max(0, -(-(sequence.length + new) // self.memory.block_size) - len(sequence.table))

    def reserve(self, sequence: SequenceKV, new: int) -> None:
        """Room for `new` more tokens."""
        more = self.pool.allocate(self.missing(sequence, new))
        self.memory.recycle(more)
        sequence.table.extend(more)

    def step(self, sequences: Sequence[tuple[SequenceKV, int]]) -> PagedStep:
        """The cache of a forward pass over `new` tokens of each sequence."""
        return self.memory.step([Row(of.table, of.length, count) for of, count in sequences])

    def stored(self, sequence: SequenceKV, tokens: Sequence[int]) -> None:
        """The step stored these tokens; full blocks are published."""
        first, chain = len(sequence.chain.keys), sequence.chain
        chain.extend(tokens)
        last = len(chain.keys)
        self.pool.publish_all(sequence.table[first:last], chain.keys[first:], chain.contents[first:])

    def fork(self, sequence: SequenceKV) -> SequenceKV:
        """A second sequence with the same past."""
        full = sequence.length // self.memory.block_size
        rest = sequence.table[full:]
        own = self.pool.allocate(len(rest))
        for theirs, mine in zip(rest, own, strict=True):
            self.memory.copy(theirs, mine)
        self.pool.share(sequence.table[:full])
        return SequenceKV([*sequence.table[:full], *own], sequence.chain.fork(), sequence.cached)

    def end(self, sequence: SequenceKV) -> None:
        """The sequence is over."""
        held, sequence.table = sequence.table, []
        self.pool.release(held)

    def suspend(self, sequence: SequenceKV) -> None:
        """Nowhere to copy it to: without tiers no sequence is swapped."""

    def resume(self, sequence: SequenceKV, tokens: Sequence[int]) -> None:
        """Nothing to fetch beyond what your `find_prefix` found."""

    def flush(self) -> None:
        """Nothing is on its way."""

    def persist(self, tokens: Sequence[int], root: bytes) -> int:
        """Tokens on a disk: none without tiers."""
        return 0
