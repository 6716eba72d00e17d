"""Time the two phases of a loaded model by themselves, without sampling or text."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cs336_infer.kv import ContiguousKV
from cs336_infer.measure.bench import Timing, measure
from cs336_infer.measure.cost import Cost
from cs336_infer.models.load import LoadedModel
from cs336_infer.types import InvalidRequest, check_integer


def prefill_step(model: LoadedModel, tokens: int, batch: int = 1) -> Callable[[], object]:
    """A call that runs `batch` prompts of `tokens` random ids through the model into a fresh cache."""
    _check_size(model, tokens, batch)
    ids = _random_ids(model, batch, tokens)
    places = torch.arange(tokens, device=model.device).expand(batch, tokens)

    def run() -> object:
        kv = ContiguousKV(model.config, batch=batch, capacity=tokens, dtype=model.dtype, device=model.device)
        return model.net.forward(ids, places, kv)

    return run


def decode_step(model: LoadedModel, context: int, batch: int = 1) -> Callable[[], object]:
    """A call that runs one decode step behind `context` cached positions; every call starts from the same cache.

    The cached keys and values are random numbers: their values do not change the work.
    """
    _check_size(model, context + 1, batch)
    kv = ContiguousKV(model.config, batch=batch, capacity=context + 1, dtype=model.dtype, device=model.device)
    for t in (*kv.k, *kv.v):
        t.normal_()
    ids = _random_ids(model, batch, 1)
    places = torch.full((batch, 1), context, device=model.device)

    def run() -> object:
        kv.length = context
        return model.net.forward(ids, places, kv)

    return run


def time_prefill(model: LoadedModel, tokens: int, batch: int = 1, *, repeats: int = 3) -> Timing:
    """Seconds of one prefill of `batch` prompts of `tokens` tokens each."""
    return measure(prefill_step(model, tokens, batch), repeats=repeats, device=model.device)


def time_decode(model: LoadedModel, context: int, batch: int = 1, *, repeats: int = 15) -> Timing:
    """Seconds of one decode step of `batch` sequences behind `context` cached tokens each."""
    return measure(decode_step(model, context, batch), repeats=repeats, warmup=2, device=model.device)


def memory_traffic(cost: Cost) -> float:
    """Bytes of a decode step that must come from memory: weights and KV. Its activations stay in the caches."""
    return cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes


def _random_ids(model: LoadedModel, batch: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.config.vocab_size, (batch, tokens), generator=generator).to(model.device)


def _check_size(model: LoadedModel, tokens: int, batch: int) -> None:
    check_integer("batch", batch, 1, None)
    if not 1 <= tokens <= model.config.context_length:
        raise InvalidRequest(f"{tokens} positions do not fit the model's context of {model.config.context_length}")
