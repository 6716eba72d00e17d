"""The step engine: requests come and go at any time, and every step is one forward pass over whoever runs.

    schedule (who computes how many tokens) -> forward -> store -> choose -> finish

A step's tokens are a flat batch: a chunk of a prompt beside one token of each running answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cs336_infer.engine.roster import OutOfCapacity
from cs336_infer.engine.scheduler import Scheduler
from cs336_infer.engine.sequence import Sequence
from cs336_infer.kv.manager import KVManager
from cs336_infer.models.load import LoadedModel
from cs336_infer.text.safety import SafetyCheck, check_prompt
from cs336_infer.types import (
    NO_TOKEN,
    FinishReason,
    InferError,
    NonFiniteLogits,
    PromptRefused,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
    check_number,
)


def logprobs_of(logits: torch.Tensor, token: int, count: int) -> TokenLogprobs:
    """Of the chosen token and the `count` most probable ones, from float32 logits [vocab]."""
    logs = logits.log_softmax(-1)
    best = logs.topk(min(count, len(logs)))
    return TokenLogprobs(
        token, float(logs[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    )


class Engine:
    """Sequences on their way, over one model and one KV memory. Used from one thread.

    Args:
        path: which rung this is; written into every completion. clock: seconds, for times and deadlines.
        safety: what judges prompts and answers.
        scheduling: options of `Scheduler`.

    Attributes:
        forward: what runs in place of the model's own, or None. scheduler: who waits and who runs. steps: forward
            passes so far. refused: prompts that the safety check did not let in.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: KVManager,
        *,
        path: str = "",
        clock: Callable[[], float] = time.perf_counter,
        safety: SafetyCheck | None = None,
        **scheduling: Any,
    ) -> None:
        self.model, self.kv, self.path, self.clock, self.safety = model, kv, path, clock, safety
        self.forward: Callable[..., torch.Tensor] | None = None
        self.scheduler = Scheduler(kv, **scheduling)
        self.steps = self.refused = 0
        self._numbers = 0

    @property
    def running(self) -> list[Sequence]:
        return self.scheduler.running

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(
        self,
        ids: list[int],
        params: SamplingParams,
        root: bytes,
        *,
        n: int = 1,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Sequence]:
        """A new request for `n` answers to one prompt; answer i draws with seed + i.

        Args:
            timeout_s: seconds from now after which its answers end as they are, with the finish reason "timeout".

        Raises:
            InvalidRequest: max_tokens exceeds the context; timeout_s is not a number above 0.
            OutOfCapacity: the prompt does not fit into KV memory, even alone.
            PromptRefused: a safety check refuses the prompt. SafetyFailed: it raised.
        """
        self._check_prompt(ids)
        if timeout_s is not None:
            check_number("timeout_s", timeout_s, 0.0, math.inf, "a number of seconds above 0", open_low=True)
        seeds = [None if params.seed is None else (params.seed + i) % 2**64 for i in range(n)]
        first, *others = [self._sequence(ids, replace(params, seed=seed), root) for seed in seeds]
        first.forks = others
        for sequence in (first, *others):
            sequence.priority = priority
            sequence.deadline = math.inf if timeout_s is None else sequence.arrived + timeout_s
        self.scheduler.add(first)
        return [first, *others]

    def check(self, ids: list[int], params: SamplingParams) -> None:
        """Raise what `add` would raise. May be called from any thread."""
        self._check_prompt(ids)
        Sequence(-1, self.model, ids, params, b"", "", safety=self.safety)

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
        self._left(sequence)

    def _left(self, sequence: Sequence) -> None:
        """It has ended before its time."""
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
        events = self._out_of_time()
        plan, failed = self.scheduler.next()
        events += [self.fail(sequence, error) for sequence, error in failed]
        if not plan:
            return events
        self.steps += 1
        parts = [s.tokens[s.stored : s.stored + new] for s, new in plan]
        ready = [i for i, (s, new) in enumerate(plan) if self._chooses(s, new)]
        step = self.kv.step([(s.kv, new) for s, new in plan if s.kv is not None])
        flat = torch.tensor([[token for part in parts for token in part]], device=self.model.device)
        forward = self.forward or self.model.net.forward
        logits = forward(flat, step.positions, step, at=step.last[ready])[0]
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

    def _out_of_time(self) -> list[TokenEvent]:
        """Ends the answers whose deadline has passed, whether they run, wait, or wait for their prompt."""
        now, events = self.clock(), []
        for sequence in [*self.scheduler.waiting, *self.running]:
            for late in [s for s in (*sequence.forks, sequence) if s.deadline <= now and not s.ended]:
                events.append(late.answer.close(late.number, FinishReason.TIMEOUT))
                self._left(late)
        return events

    def _check_prompt(self, ids: list[int]) -> None:
        slots = self.kv.memory.block_size * self.kv.pool.total
        if len(ids) > slots:
            raise OutOfCapacity(f"the prompt has {len(ids)} tokens, the engine's KV memory holds {slots}")
        if self.safety is not None:
            try:
                check_prompt(self.safety, self.model.tokenizer.decode(ids))
            except PromptRefused:
                self.refused += 1
                raise

    @staticmethod
    def _chooses(sequence: Sequence, new: int) -> bool:
        """Whether it gets a token after a step that computes `new` of its tokens: nothing is left to compute."""
        return new == sequence.remaining

    def _sequence(self, ids: list[int], params: SamplingParams, root: bytes) -> Sequence:
        self._numbers += 1
        return Sequence(self._numbers - 1, self.model, ids, params, root, self.path, self.clock(), self.safety)

    def _start_fork(self, parent: Sequence, child: Sequence) -> None:
        assert parent.kv is not None
        child.follow(parent)
        child.kv, child.deadline = self.kv.fork(parent.kv), parent.deadline
        self.running.append(child)

    def _choose(self, sequence: Sequence, logits: torch.Tensor) -> TokenEvent:
        try:
            token = sequence.sampler(logits.unsqueeze(0))[0]
        except NonFiniteLogits as error:
            return self.fail(sequence, error)
        event = sequence.answer.accept(sequence.number, token, self.clock() - sequence.arrived)
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
