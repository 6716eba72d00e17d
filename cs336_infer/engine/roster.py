"""Who waits and who runs, and what happens to KV memory when a sequence comes in, gives way or ends. Which of them, and
when, is decided by `scheduler`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cs336_infer.engine.sequence import Sequence
from cs336_infer.kv.manager import KVManager
from cs336_infer.types import InferError, InvalidRequest, check_integer, short

PREEMPTIONS = ("recompute", "swap")
Rank = Callable[[Sequence], Any]
"""Lower ranks are admitted first and give way last. A rank may depend on anything that does not change while a
sequence waits or runs; ties are decided by arrival."""


class OutOfCapacity(InferError):
    """A request needs more KV memory than the engine has, even alone."""


def first_come(sequence: Sequence) -> int:
    """The default rank: nobody overtakes."""
    return 0


def by_priority(sequence: Sequence) -> int:
    """Higher `Sequence.priority` first."""
    return -sequence.priority


class Roster:
    """Sequences that wait and run, over one KV memory. It moves them; when, a scheduler decides.

    Args:
        max_batch: sequences that run at once, at most; forks of a running one come on top.
        step_tokens: tokens computed in one step, at most.
        rank: who goes first; first come, first served by default.
        preemption: "recompute" or "swap"; "swap" needs tiers.

    Attributes:
        waiting, running: in no particular order. preemptions: how many there were. recomputed: tokens that were in
            KV memory, lost by a preemption and not found again.
        looked_up, hits: tokens of admitted sequences, and how many of them were found in KV memory.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        max_batch: int = 64,
        step_tokens: int = 2048,
        rank: Rank = first_come,
        preemption: str = "recompute",
    ) -> None:
        check_integer("max_batch", max_batch, 1, None)
        check_integer("step_tokens", step_tokens, 1, None)
        if preemption not in PREEMPTIONS:
            raise InvalidRequest(f"unknown preemption {short(preemption)} ({' or '.join(PREEMPTIONS)})")
        if preemption == "swap" and (kv.tiers is None or not kv.pool.caching):
            raise InvalidRequest("preemption='swap' copies to a tier: it needs tiers and the prefix cache")
        self.preemption = preemption
        self.kv, self.max_batch, self.step_tokens = kv, max_batch, step_tokens
        self._rank = rank
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = self.recomputed = self.looked_up = self.hits = 0

    def rank(self, sequence: Sequence) -> tuple[Any, int]:
        return self._rank(sequence), sequence.number

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """It has ended: its blocks are given back, wherever it was."""
        for place in (self.waiting, self.running):
            if sequence in place:
                place.remove(sequence)
        self.give_back(sequence)

    def begin(self, sequence: Sequence) -> None:
        """Look for its tokens in KV memory. It holds what was found, and still waits.

        Raises:
            InferError: an eviction policy of somebody's own failed, for one.
        """
        sequence.kv = self.kv.begin(sequence.tokens, sequence.root)

    def enter(self, sequence: Sequence) -> None:
        """One that has begun does not wait any more: it runs."""
        assert sequence.kv is not None
        if sequence.suspended:
            self.kv.resume(sequence.kv, sequence.tokens[: sequence.suspended])
            self.recomputed += max(0, sequence.suspended - sequence.stored)
            sequence.suspended = 0
        elif not sequence.completion.token_ids:
            sequence.completion.cached_tokens = sequence.kv.cached
        self.looked_up += sequence.total
        self.hits += sequence.kv.cached
        self.waiting.remove(sequence)
        self.running.append(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """It waits again, with its tokens and without blocks."""
        sequence.suspended = sequence.stored
        if self.preemption == "swap" and sequence.kv is not None:
            self.kv.suspend(sequence.kv)
        self.give_back(sequence)
        self.running.remove(sequence)
        self.waiting.append(sequence)
        self.preemptions += 1

    def give_back(self, sequence: Sequence) -> None:
        """It holds nothing any more."""
        if sequence.kv is not None:
            self.kv.end(sequence.kv)
            sequence.kv = None
