"""The step engine: requests come and go at any time, and every step is one forward pass over whoever runs.

    admit -> plan (who computes how many tokens) -> forward -> store -> choose -> finish

A step's tokens are a flat batch: a prompt's whole chunk beside one token of each running answer. When KV memory runs
out, the youngest sequence gives up its blocks and starts again later from its own tokens (recompute preemption). The
oldest always advances, so every request ends.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import torch

from cs336_infer.engine.sequence import Sequence
from cs336_infer.kv.manager import KVManager
from cs336_infer.kv.pool import OutOfBlocks
from cs336_infer.models.load import LoadedModel
from cs336_infer.types import FinishReason, InferError, NonFiniteLogits, SamplingParams, TokenEvent, check_integer

NO_TOKEN = -1  # of the event of a sequence that ended without choosing one


class OutOfCapacity(InferError):
    """A request needs more KV memory than the engine has, even alone."""


class Engine:
    """Sequences waiting and running, over one model and one KV memory. Used from one thread.

    Args:
        max_batch: sequences that run at once, at most. step_tokens: tokens computed in one step, at most.
        path: which rung this is; written into every completion.

    Attributes:
        waiting: in the order they will be admitted. running: oldest first.
        steps, preemptions: how many there were.
        looked_up, hits: tokens of admitted sequences, and how many of them were found in KV memory.
    """

    def __init__(
        self, model: LoadedModel, kv: KVManager, *, max_batch: int = 64, step_tokens: int = 2048, path: str = ""
    ) -> None:
        check_integer("max_batch", max_batch, 1, None)
        check_integer("step_tokens", step_tokens, 1, None)
        self.model, self.kv, self.max_batch, self.step_tokens, self.path = model, kv, max_batch, step_tokens, path
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.steps = self.preemptions = self.looked_up = self.hits = 0
        self._numbers = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, ids: list[int], params: SamplingParams, root: bytes, *, n: int = 1) -> list[Sequence]:
        """A new request for `n` answers to one prompt; answer i draws with seed + i.

        Raises:
            InvalidRequest: max_tokens exceeds the context.
            OutOfCapacity: the prompt does not fit into KV memory, even alone.
        """
        slots = self.kv.memory.block_size * self.kv.pool.total
        if len(ids) > slots:
            raise OutOfCapacity(f"the prompt has {len(ids)} tokens, the engine's KV memory holds {slots}")
        seeds = [None if params.seed is None else (params.seed + i) % 2**64 for i in range(n)]
        first, *others = [self._sequence(ids, replace(params, seed=seed), root) for seed in seeds]
        first.forks = others
        self.waiting.append(first)
        return [first, *others]

    def fork(self, sequence: Sequence, params: SamplingParams) -> Sequence:
        """A second answer that goes on from where `sequence` is, with its own parameters and random numbers.

        Raises:
            ValueError: `sequence` does not run.
        """
        if sequence not in self.running:
            raise ValueError(f"sequence {sequence.number} does not run; only a running one can be forked")
        child = self._sequence(sequence.completion.prompt_token_ids, params, sequence.root)
        self._start_fork(sequence, child)
        if child.ended:  # its own max_tokens or stop strings end it here
            self._leave(child)
        return child

    def cancel(self, sequence: Sequence) -> None:
        """End it now, whatever it does; its blocks are free at once. One that has ended stays as it is."""
        self._end(sequence, FinishReason.CANCELLED)

    def step(self) -> list[TokenEvent]:
        """One forward pass, if there is anybody to run.

        Returns:
            An event for each token chosen and each sequence that failed; `index` is the number of its sequence.
        """
        events = self._admit()
        plan = self._plan(events)
        if not plan:
            return events
        self.steps += 1
        parts = [s.tokens[s.stored : s.stored + new] for s, new in plan]
        ready = [i for i, (s, new) in enumerate(plan) if new == s.remaining]
        step = self.kv.step([(s.kv, new) for s, new in plan if s.kv is not None])
        flat = torch.tensor([[token for part in parts for token in part]], device=self.model.device)
        logits = self.model.net.forward(flat, step.positions, step, at=step.last[ready])[0]
        for (sequence, _), part in zip(plan, parts, strict=True):
            assert sequence.kv is not None
            self.kv.stored(sequence.kv, part)
        for row, i in zip(logits, ready, strict=True):
            sequence = plan[i][0]
            children, sequence.forks = [c for c in sequence.forks if not c.ended], []
            for child in children:
                self._start_fork(sequence, child)
            events += [self._choose(s, row) for s in (sequence, *children)]
        return events

    def _sequence(self, ids: list[int], params: SamplingParams, root: bytes) -> Sequence:
        self._numbers += 1
        return Sequence(self._numbers - 1, self.model, ids, params, root, self.path)

    def _admit(self) -> list[TokenEvent]:
        """Waiting sequences begin, first come, first served, while what they compute next has room."""
        events: list[TokenEvent] = []
        while self.waiting and len(self.running) < self.max_batch:
            sequence = self.waiting[0]
            try:
                sequence.kv = self.kv.begin(sequence.tokens, sequence.root)
            except InferError as error:  # an eviction policy of somebody's own, for one
                events.append(self._fail(sequence, error))
                continue
            if self.running and self.kv.missing(sequence.kv, sequence.remaining) > self.kv.pool.available:
                self.kv.end(sequence.kv)
                sequence.kv = None
                break
            self.looked_up += sequence.total
            self.hits += sequence.kv.cached
            if not sequence.completion.token_ids:
                sequence.completion.cached_tokens = sequence.kv.cached
            self.running.append(self.waiting.popleft())
        return events

    def _plan(self, events: list[TokenEvent]) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens in this step, oldest first, with room for them reserved."""
        plan: list[tuple[Sequence, int]] = []
        budget = self.step_tokens
        for sequence in list(self.running):
            new = min(sequence.remaining, budget)
            while sequence in self.running and new > 0:
                assert sequence.kv is not None
                try:
                    self.kv.reserve(sequence.kv, new)
                except OutOfBlocks as error:
                    if len(self.running) == 1:
                        events.append(
                            self._fail(sequence, OutOfCapacity(f"out of KV memory, with nobody else: {error}"))
                        )
                    else:
                        self._preempt(self.running[-1])
                except InferError as error:
                    events.append(self._fail(sequence, error))
                else:
                    plan.append((sequence, new))
                    budget -= new
                    break
        return plan

    def _preempt(self, sequence: Sequence) -> None:
        """It waits again, first in line, with its tokens and without blocks."""
        assert sequence.kv is not None
        self.running.remove(sequence)
        self.kv.end(sequence.kv)
        sequence.kv = None
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _start_fork(self, parent: Sequence, child: Sequence) -> None:
        assert parent.kv is not None
        child.follow(parent)
        child.kv = self.kv.fork(parent.kv)
        self.running.append(child)

    def _choose(self, sequence: Sequence, logits: torch.Tensor) -> TokenEvent:
        try:
            token = sequence.sampler(logits.unsqueeze(0))[0]
        except NonFiniteLogits as error:
            return self._fail(sequence, error)
        event = sequence.answer.accept(sequence.number, token, time.perf_counter() - sequence.arrived)
        if sequence.ended:
            self._leave(sequence)
        return event

    def _fail(self, sequence: Sequence, error: InferError) -> TokenEvent:
        sequence.completion.error = str(error)
        self._end(sequence, FinishReason.ERROR)
        return TokenEvent(sequence.number, NO_TOKEN, "", FinishReason.ERROR)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.ended:
            return
        sequence.completion.finish_reason = reason
        heirs = [c for c in sequence.forks if not c.ended]
        if heirs:  # the other answers to the prompt still want it
            heirs[0].forks, sequence.forks = heirs[1:], []
            self.waiting.appendleft(heirs[0])
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence.kv is not None:
            self.kv.end(sequence.kv)
            sequence.kv = None
