"""Stage 1: prefill and decode on one page, no engine. Everything later is measured against this.

A batch of prompts is padded on the left, so that all rows end at the same column. Prefill runs the prompts through
the model once and yields the first token; each decode step then feeds one token per row. Without a cache
(`kv="none"`) every step runs the whole sequence again: slow, and the oracle of the cached runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from cs336_infer.answer import Answer
from cs336_infer.kv import ContiguousKV, KVCache, NoCache
from cs336_infer.models.load import LoadedModel
from cs336_infer.prompts import as_batch, as_params, encode
from cs336_infer.sampling import Sampler
from cs336_infer.types import Completion, InvalidRequest, Prompt, SamplingParams, TokenEvent, short

KV_KINDS = ("contiguous", "none")
CacheFactory = Callable[..., KVCache]
"""A cache of your own: called with (config, batch=, capacity=, dtype=, device=, starts=), as `ContiguousKV` is."""
Chooser = Callable[[torch.Tensor], list[int]]
"""A sampler of your own: float32 logits [batch, vocab] -> one token id per row."""
PAD = 0  # any valid id: padding is masked out of every attention


def generate(
    model: LoadedModel,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    kv: str | CacheFactory = "contiguous",
    sampler: Chooser | None = None,
) -> list[Completion]:
    """Complete every prompt (a string, or a list of token ids) and return the completions in order.

    Args:
        kv: "contiguous", "none", or a cache of your own.
        sampler: a sampler of your own, instead of the package's, which obeys `params`.
    """
    run = Run(model, prompts, params, kv, sampler)
    for _ in run:
        pass
    return run.completions


def stream(
    model: LoadedModel,
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    kv: str | CacheFactory = "contiguous",
    sampler: Chooser | None = None,
) -> Iterator[TokenEvent]:
    """Like `generate`, but yields each token as it is chosen. Bad input raises here, before the first token."""
    return iter(Run(model, prompts, params, kv, sampler))


class Run:
    """One batch on its way through prefill and decode; iterate once for events, then read `completions`.

    Raises:
        InvalidRequest: a prompt is empty, holds an unknown id or fills the context; max_tokens exceeds the context.
    """

    def __init__(
        self,
        model: LoadedModel,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        kv: str | CacheFactory = "contiguous",
        sampler: Chooser | None = None,
    ) -> None:
        if not callable(kv) and kv not in KV_KINDS:
            raise InvalidRequest(f"unknown kv {short(kv)} ({', '.join(KV_KINDS)}, or a cache of your own)")
        self.model, self.kv, self.sampler = model, kv, sampler
        ids = [encode(model, p) for p in as_batch(prompts)]
        if not ids:
            raise InvalidRequest("no prompt was given")
        params = as_params(params, len(ids))
        if any(p.logprobs is not None for p in params):
            raise InvalidRequest("logprobs are reported by LLM, not by generate and stream")
        path = model.describe_path(kv if isinstance(kv, str) else getattr(kv, "__name__", "own"))
        path += f" sampler={getattr(sampler, '__name__', 'own')}" if sampler else ""
        self._started = False
        self.rows = [Answer(model, i, p, Completion(i, path=path)) for i, p in zip(ids, params, strict=True)]

    @property
    def completions(self) -> list[Completion]:
        return [row.completion for row in self.rows]

    def __iter__(self) -> Iterator[TokenEvent]:
        if self._started:
            raise InvalidRequest("this run was iterated before: make a new one for another answer")
        self._started = True
        elapsed, started = 0.0, time.perf_counter()
        tokens, starts = left_pad([row.completion.prompt_token_ids for row in self.rows], self.model.device)
        cache = self._make_cache(starts, tokens.shape[1])
        sampler = self.sampler or Sampler(
            [row.params for row in self.rows],
            [row.completion.prompt_token_ids for row in self.rows],
            self.model.config.vocab_size,
            self.model.tokenizer.eos_ids,
        )
        feed = tokens
        while True:
            logits = self.model.net.forward(feed, positions(feed, cache, starts), cache)[:, -1]
            chosen = sampler(logits)
            elapsed += time.perf_counter() - started
            for index, (row, token) in enumerate(zip(self.rows, chosen, strict=True)):
                if row.completion.finish_reason is None:
                    yield row.accept(index, token, elapsed)
            if all(row.completion.finish_reason for row in self.rows):
                return
            started = time.perf_counter()
            column = torch.tensor(chosen, device=self.model.device).unsqueeze(1)
            if self.kv == "none":
                feed = tokens = torch.cat((tokens, column), 1)
            else:
                feed = column

    def _make_cache(self, starts: torch.Tensor | None, width: int) -> KVCache:
        if self.kv == "none":
            return NoCache(starts)
        factory = self.kv if callable(self.kv) else ContiguousKV
        return factory(
            self.model.config,
            batch=len(self.rows),
            capacity=width + max(row.room for row in self.rows) - 1,
            dtype=self.model.dtype,
            device=self.model.device,
            starts=starts,
        )


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stack ragged prompts so that all end in the last column.

    Returns:
        tokens [batch, longest]; starts [batch], the paddings of each row, or None when all are equally long.
    """
    longest = max(len(p) for p in prompts)
    tokens = torch.tensor([[PAD] * (longest - len(p)) + list(p) for p in prompts], device=device)
    if all(len(p) == longest for p in prompts):
        return tokens, None
    return tokens, torch.tensor([longest - len(p) for p in prompts], device=device)


def positions(feed: torch.Tensor, cache: KVCache, starts: torch.Tensor | None) -> torch.Tensor:
    """The place of each fed token in its own sequence, [batch, seq]; padding gets 0."""
    columns = torch.arange(cache.length, cache.length + feed.shape[1], device=feed.device).expand_as(feed)
    return columns if starts is None else (columns - starts.unsqueeze(1)).clamp(min=0)
