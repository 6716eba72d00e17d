"""Stage 1: prefill and decode on one page, no engine. Everything later is measured against this.

A batch of prompts is padded on the left, so that all rows end at the same column. Prefill runs the prompts through
the model once and yields the first token; each decode step then feeds one token per row. Without a cache
(`kv="none"`) every step runs the whole sequence again: slow, and the oracle of the cached runs.
"""

from __future__ import annotations

import numbers
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cs336_infer.kv import ContiguousKV, KVCache, NoCache
from cs336_infer.models.load import LoadedModel
from cs336_infer.sampling import Sampler
from cs336_infer.text import StopStrings, StreamDetokenizer
from cs336_infer.types import Completion, FinishReason, InvalidRequest, Prompt, SamplingParams, TokenEvent, short

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
        ids = [_encode(model, p) for p in _as_batch(prompts)]
        if not ids:
            raise InvalidRequest("no prompt was given")
        params = _as_params(params, len(ids))
        path = model.describe_path(kv if isinstance(kv, str) else getattr(kv, "__name__", "own"))
        path += f" sampler={getattr(sampler, '__name__', 'own')}" if sampler else ""
        self._started = False
        self.rows = [_Row(model, i, p, Completion(i, path=path)) for i, p in zip(ids, params, strict=True)]

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


class _Row:
    """One sequence of the batch: its parameters, its text on the way out, and what became of it."""

    def __init__(self, model: LoadedModel, ids: list[int], params: SamplingParams, completion: Completion) -> None:
        context = model.config.context_length
        if params.max_tokens > context:
            raise InvalidRequest(f"max_tokens={params.max_tokens} is more than the model's context of {context} tokens")
        self.room = min(params.max_tokens, context - len(ids))
        self.params, self.completion = params, completion
        self._eos = frozenset() if params.ignore_eos else model.tokenizer.eos_ids
        self._detokenizer = StreamDetokenizer(model.tokenizer)
        self._stops = StopStrings(params.stop)

    def accept(self, index: int, token: int, elapsed: float) -> TokenEvent:
        """Take the next token, `elapsed` seconds after the start, and say what may be shown of it."""
        done = self.completion
        done.token_ids.append(token)
        if len(done.token_ids) == 1:
            done.ttft_s = elapsed
        else:
            done.tpot_s = (elapsed - done.ttft_s) / (len(done.token_ids) - 1)
        text = "" if token in self._eos else self._stops.push(self._detokenizer.push(token))
        done.finish_reason = self._finish_reason(token)
        if done.finish_reason is not None and self._stops.matched is None:
            text += self._stops.push(self._detokenizer.flush())
            if self._stops.matched is None:
                text += self._stops.flush()
            else:
                done.finish_reason = FinishReason.STOP
        done.stop_reason = self._stops.matched
        done.text += text
        return TokenEvent(index, token, text, done.finish_reason, done.stop_reason)

    def _finish_reason(self, token: int) -> FinishReason | None:
        if self._stops.matched is not None:
            return FinishReason.STOP
        if token in self._eos:
            return FinishReason.EOS
        if len(self.completion.token_ids) < self.room:
            return None
        return FinishReason.LENGTH if self.room == self.params.max_tokens else FinishReason.CONTEXT


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


def _as_batch(prompts: Any) -> list[Any]:
    """One prompt or several. Only strings and lists, tuples or one-dimensional arrays are prompts: a dict or bytes
    would iterate too, and mean something else."""
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple | range):
        raise InvalidRequest(f"a prompt is a string or a list of token ids, not {short(prompts)}")
    if len(prompts) > 0 and not isinstance(_plain(prompts[0]), str | list | tuple | range):
        return [prompts]
    return list(prompts)


def _plain(value: Any) -> Any:
    """numpy arrays and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _as_params(params: Any, rows: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * rows
    if not isinstance(params, list | tuple) or not all(isinstance(p, SamplingParams) for p in params):
        raise InvalidRequest(f"params must be SamplingParams, or one for each prompt, not {short(params)}")
    if len(params) != rows:
        raise InvalidRequest(f"{rows} prompts and {len(params)} sampling parameters: give one, or one for each")
    return list(params)


def _encode(model: LoadedModel, prompt: Any) -> list[int]:
    vocab, context = model.config.vocab_size, model.config.context_length
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        if len(prompt) > context * model.tokenizer.longest_token:  # refused before it is tokenised
            raise InvalidRequest(f"the prompt of {len(prompt):,} characters is over the model's context of {context}")
        ids = model.tokenizer.encode(prompt)
    elif isinstance(prompt, list | tuple | range):
        ids = [_token_id(i, vocab) for i in prompt]
    else:
        raise InvalidRequest(f"a prompt is a string or a list of token ids, not {short(prompt)}")
    if not ids:
        raise InvalidRequest("the prompt is empty: there is no token to continue")
    if len(ids) >= context:
        raise InvalidRequest(f"the prompt has {len(ids)} tokens; the model's context of {context} leaves no room")
    return ids


def _token_id(value: Any, vocab: int) -> int:
    token = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else -1
    if not 0 <= token < vocab:
        raise InvalidRequest(f"token id {short(value)} is not in the vocabulary of {vocab}")
    return token
