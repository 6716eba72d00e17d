"""Who runs: admission, the tokens each sequence computes in a step, and who gives way when KV memory runs out.

Answers first, then prompts: a step computes one token for every running answer and gives what is left of its budget
to prompts, in chunks (Sarathi-Serve, Agrawal et al. 2024). When KV memory runs out, the last in rank gives up its
blocks and waits again. It starts later from its own tokens (recompute preemption), or, where it was copied to the host
before (swap preemption), from what is found there. The first in rank always advances, so every request ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cs336_infer.engine.sequence import Sequence
from cs336_infer.kv.manager import KVManager
from cs336_infer.kv.pool import OutOfBlocks
from cs336_infer.types import InferError, InvalidRequest, check_integer, short

PREEMPTIONS = ("recompute", "swap")
Plan = list[tuple[Sequence, int]]
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


class Scheduler:
    """Sequences that wait and run, over one KV memory.

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
        self._give_back(sequence)

    def next(self) -> tuple[Plan, list[tuple[Sequence, InferError]]]:
        """The next step: how many tokens each sequence computes, with room for them reserved; and who cannot go on."""
        failed: list[tuple[Sequence, InferError]] = []
        self._admit(failed)
        return self._plan(failed), failed

    def _admit(self, failed: list[tuple[Sequence, InferError]]) -> None:
        """Waiting sequences begin while all that they have to compute has room beside those that run."""
        for sequence in sorted(self.waiting, key=self.rank):
            if len(self.running) >= self.max_batch:
                return
            try:
                sequence.kv = self.kv.begin(sequence.tokens, sequence.root)
            except InferError as error:  # an eviction policy of somebody's own, for one
                failed.append((sequence, error))
                self.drop(sequence)
                continue
            if self.running and self.kv.missing(sequence.kv, sequence.remaining) > self.kv.pool.available:
                self._give_back(sequence)
                return
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

    def _plan(self, failed: list[tuple[Sequence, InferError]]) -> Plan:
        plan: dict[Sequence, int] = {}
        budget = self.step_tokens
        for sequence in sorted(self.running, key=lambda s: (s.remaining > 1, self.rank(s))):
            new = min(sequence.remaining, budget)
            while new > 0 and sequence in self.running:
                assert sequence.kv is not None
                try:
                    self.kv.reserve(sequence.kv, new)
                except OutOfBlocks as error:
                    if len(self.running) == 1:
                        failed.append((sequence, OutOfCapacity(f"KV memory is too small for it, even alone: {error}")))
                        self.drop(sequence)
                    else:
                        victim = max(self.running, key=self.rank)
                        budget += plan.pop(victim, 0)
                        self._preempt(victim)
                except InferError as error:
                    failed.append((sequence, error))
                    self.drop(sequence)
                else:
                    plan[sequence] = new
                    budget -= new
                    break
        return list(plan.items())

    def _preempt(self, sequence: Sequence) -> None:
        """It waits again, with its tokens and without blocks."""
        sequence.suspended = sequence.stored
        if self.preemption == "swap" and sequence.kv is not None:
            self.kv.suspend(sequence.kv)
        self._give_back(sequence)
        self.running.remove(sequence)
        self.waiting.append(sequence)
        self.preemptions += 1

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.kv is not None:
            self.kv.end(sequence.kv)
            sequence.kv = None
