"""The step engine: requests come and go at any time, and every step is one forward pass over whoever runs.

    schedule (who computes how many tokens) -> forward -> store -> choose -> finish

A step's tokens are a flat batch: a chunk of a prompt beside one token of each running answer.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from cs336_infer.engine.scheduler import OutOfCapacity, Scheduler
from cs336_infer.engine.sequence import Sequence
from cs336_infer.kv.manager import KVManager
from cs336_infer.models.load import LoadedModel
from cs336_infer.types import FinishReason, InferError, NonFiniteLogits, SamplingParams, TokenEvent, TokenLogprobs


def logprobs_of(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Of the chosen token and the `count` most probable ones, from float32 logits [vocab]."""
    logs = logits.log_softmax(-1)
    best = logs.topk(min(count, len(logs)))
    return TokenLogprobs(
        token, float(logs[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    )


NO_TOKEN = -1  # of the event of a sequence that ended without choosing one


class Engine:
    """Sequences on their way, over one model and one KV memory. Used from one thread.

    Args:
        path: which rung this is; written into every completion. scheduling: options of `Scheduler`.

    Attributes:
        scheduler: who waits and who runs. steps: forward passes so far.
    """

    def __init__(self, model: LoadedModel, kv: KVManager, *, path: str = "", **scheduling: Any) -> None:
        self.model, self.kv, self.path = model, kv, path
        self.scheduler = Scheduler(kv, **scheduling)
        self.steps = 0
        self._numbers = 0

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler.running

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(
        self, ids: list[int], params: SamplingParams, root: bytes, *, n: int = 1, priority: int = 0
    ) -> list[Sequence]:
        """A new request for `n` answers to one prompt; answer i draws with seed + i.

        Raises:
            InvalidRequest: max_tokens exceeds the context.
            OutOfCapacity: the prompt does not fit into KV memory, even alone.
        """
        self._check_capacity(ids)
        seeds = [None if params.seed is None else (params.seed + i) % 2**64 for i in range(n)]
        first, *others = [self._sequence(ids, replace(params, seed=seed), root) for seed in seeds]
        first.forks = others
        for sequence in (first, *others):
            sequence.priority = priority
        self.scheduler.add(first)
        return [first, *others]

    def check(self, ids: list[int], params: SamplingParams) -> None:
        """Raise what `add` would raise. May be called from any thread."""
        self._check_capacity(ids)
        Sequence(-1, self.model, ids, params, b"", "")

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
            self.scheduler.drop(child)
        return child

    def cancel(self, sequence: Sequence) -> None:
        """Somebody gave up on it: its blocks are free at once."""
        self.end(sequence, FinishReason.CANCELLED)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End it now for this reason; one that has ended stays as it is."""
        if sequence.ended:
            return
        sequence.completion.finish_reason = reason
        heirs = [c for c in sequence.forks if not c.ended]
        if heirs:  # the other answers to the prompt still want it
            heirs[0].forks, sequence.forks = heirs[1:], []
            self.scheduler.add(heirs[0])
        self.scheduler.drop(sequence)

    def step(self) -> list[TokenEvent]:
        """One forward pass, if there is anybody to run.

        Returns:
            An event for each token chosen and each sequence that failed; `index` is the number of its sequence.
        """
        plan, failed = self.scheduler.next()
        events = [self.fail(sequence, error) for sequence, error in failed]
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

    def _check_capacity(self, ids: list[int]) -> None:
        slots = self.kv.memory.block_size * self.kv.pool.total
        if len(ids) > slots:
            raise OutOfCapacity(f"the prompt has {len(ids)} tokens, the engine's KV memory holds {slots}")

    def _sequence(self, ids: list[int], params: SamplingParams, root: bytes) -> Sequence:
        self._numbers += 1
        return Sequence(self._numbers - 1, self.model, ids, params, root, self.path)

    def _start_fork(self, parent: Sequence, child: Sequence) -> None:
        assert parent.kv is not None
        child.follow(parent)
        child.kv = self.kv.fork(parent.kv)
        self.running.append(child)

    def _choose(self, sequence: Sequence, logits: torch.Tensor) -> TokenEvent:
        try:
            token = sequence.sampler(logits.unsqueeze(0))[0]
        except NonFiniteLogits as error:
            return self.fail(sequence, error)
        event = sequence.answer.accept(sequence.number, token, time.perf_counter() - sequence.arrived)
        if sequence.params.logprobs is not None:
            logprobs = logprobs_of(logits, token, sequence.params.logprobs)
            sequence.completion.logprobs.append(logprobs)
            event = replace(event, logprobs=logprobs)
        if sequence.ended:
            self.scheduler.drop(sequence)
        return event

    def fail(self, sequence: Sequence, error: InferError) -> TokenEvent:
        """End it because of `error`, which its completion will name; the event that says so."""
        sequence.completion.error = str(error)
        self.end(sequence, FinishReason.ERROR)
        return TokenEvent(sequence.number, NO_TOKEN, "", FinishReason.ERROR)
