"""Who runs: admission, the tokens each sequence computes in a step, and who gives way when KV memory runs out.

Answers first, then prompts: a step computes one token for every running answer and gives what is left of its budget
to prompts, in chunks (Sarathi-Serve, Agrawal et al. 2024). When KV memory runs out, the last in rank gives up its
blocks and waits again. It starts later from its own tokens (recompute preemption), or, where it was copied to the host
before (swap preemption), from what is found there. The first in rank always advances, so every request ends.
"""

from __future__ import annotations

from cs336_infer.engine.roster import OutOfCapacity, Roster
from cs336_infer.engine.sequence import Sequence
from cs336_infer.kv.pool import OutOfBlocks
from cs336_infer.types import InferError

Plan = list[tuple[Sequence, int]]


class Scheduler(Roster):
    """Decides what the sequences of a roster do in the next step."""

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
                self.begin(sequence)
            except InferError as error:
                failed.append((sequence, error))
                self.drop(sequence)
                continue
            if self.running and not self._fits(sequence):
                self.give_back(sequence)
                return
            self.enter(sequence)

    def _fits(self, sequence: Sequence) -> bool:
        """All that it has to compute has room, not its next chunk alone: it would give way before it has an answer."""
        assert sequence.kv is not None
        return self.kv.missing(sequence.kv, sequence.remaining) <= self.kv.pool.available

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
                        self.preempt(victim)
                except InferError as error:
                    failed.append((sequence, error))
                    self.drop(sequence)
                else:
                    plan[sequence] = new
                    budget -= new
                    break
        return list(plan.items())
