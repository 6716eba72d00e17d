"""Where a student's functions sit in the engine: adapters between the signature of an exercise and that of the engine.

Exercises use float32 and the layout [batch, heads, seq, head_dim]; the engine may hold other types and [batch, seq,
heads, head_dim]. The adapters convert, call the student's function, and refuse an answer of the wrong shape. Nothing
here does what an exercise asks for: students have this file too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cs336_infer.course.plug import PLUGGED, plugged
from cs336_infer.measure.work import Cost
from cs336_infer.models.attend import Attend
from cs336_infer.models.config import ModelConfig
from cs336_infer.models.load import LoadedModel
from cs336_infer.types import InferError, InvalidRequest, SamplingParams


def ask(name: str, shape: Sequence[int], *args: Any) -> torch.Tensor:
    """The tensor that the student's function returns, of the shape it must have."""
    return expect(name, plugged(name)(*args), shape)


def expect(name: str, answer: Any, shape: Sequence[int]) -> torch.Tensor:
    """`answer` where it is a tensor of this shape; otherwise an error that names the exercise."""
    if not isinstance(answer, torch.Tensor) or tuple(answer.shape) != tuple(shape):
        got = list(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
        raise InferError(f"{name} returned {got} to the engine, which expects a tensor of shape {list(shape)}")
    return answer


# Rotary positions -----------------------------------------------------------------------------------------------------


def rope_tables(positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """What `apply_rope` below needs: the positions, and theta found from the frequencies."""
    steps = (inv_freq[1:] / inv_freq[:-1]).double()
    if len(steps) and not torch.allclose(steps, steps[:1].expand_as(steps), rtol=1e-4):
        raise InferError("this model stretches its RoPE frequencies (Llama 3.1), which the exercise leaves out")
    last, half = float(inv_freq[-1]), len(inv_freq)
    theta = last ** (-half / (half - 1)) if half > 1 else 1e4
    return positions, round(theta) if abs(round(theta) / theta - 1) < 1e-5 else theta


def apply_rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x: [batch, seq, heads, head_dim] -> the same shape and type."""
    given = x.transpose(1, 2)
    return ask("rope", given.shape, given.float(), positions, float(theta)).transpose(1, 2).to(x.dtype)


# Attention ------------------------------------------------------------------------------------------------------------


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """As `cs336_kernels.ops.attention`. A mask of left-padded rows is told to the student as `starts`: its last
    query, the newest, sees everything but the padding."""
    starts = None if mask is None else k.shape[2] - mask[:, 0, -1].sum(-1)
    return ask("causal_attention", q.shape, q.float(), k.float(), v.float(), starts).to(q.dtype)


def extend_without_cache(self: Any, new: int) -> Attend:
    """`NoCache.extend`: every step is given all tokens."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = ask("causal_attention", q.shape, q.float(), k.float(), v.float(), self.starts)
        return out.transpose(1, 2).to(q.dtype)

    return attend


def extend(self: Any, new: int) -> Attend:
    """`ContiguousKV.extend`. Rows that are padded on the left are sequences of their own: each is given to the student
    by itself, without its padding, and so is its part of the cache."""
    begin, self.length = self.length, self.length + new
    if self.length > self.capacity:
        raise InvalidRequest(f"the KV cache holds {self.capacity} positions per row, {self.length} are needed")

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        caches = self.k[layer], self.v[layer]
        if self.starts is None:
            return _attend(q, k, v, caches, begin).transpose(1, 2)
        mixed = torch.zeros_like(q)
        for row, start in enumerate(self.starts.tolist()):
            padding = min(max(start - begin, 0), new)
            if padding < new:
                own_q, own_k, own_v = (t[row : row + 1, :, padding:] for t in (q, k, v))
                parts = [t[row : row + 1, :, start:] for t in caches]
                mixed[row : row + 1, :, padding:] = _attend(own_q, own_k, own_v, parts, max(begin - start, 0))
        return mixed.transpose(1, 2)

    return attend


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, caches: Sequence[torch.Tensor], length: int
) -> torch.Tensor:
    """One call of the student's function; what it returns as caches is put into `caches`."""
    given = [t.float() for t in (q, k, v, *caches)]
    answer = plugged("cached_attention")(*given, length)
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise InferError(f"cached_attention must return (out, k_cache, v_cache), not {type(answer).__name__}")
    for cache, returned in zip(caches, answer[1:], strict=True):
        if returned is not cache:
            cache.copy_(expect("cached_attention", returned, cache.shape))
    return expect("cached_attention", answer[0], q.shape).to(q.dtype)


# Sampling -------------------------------------------------------------------------------------------------------------


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """As the package's; top-k, which the exercise does not have, hides tokens before the student sees them."""
    if params.top_k is not None and params.top_k < len(logits):
        kept = logits.topk(params.top_k).indices
        logits = torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept])
    return ask("next_token_distribution", logits.shape, logits, params.temperature, params.top_p, params.min_p).double()


# Cost -----------------------------------------------------------------------------------------------------------------


def step_cost(config: ModelConfig, batch: int, context: int, *, head: bool = True) -> tuple[int, int]:
    """(FLOPs, numbers moved) of a decode step by the student's count; without the head where `head` is false."""
    if not config.tie_embeddings or config.qk_norm:
        raise InferError("decode_step_cost counts models with a tied head and no norms of queries and keys")
    answer = plugged("decode_step_cost")(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size if head else 0,
        batch=batch,
        context=context,
        bytes_per_number=1,
    )
    if not isinstance(answer, tuple) or len(answer) != 2 or not all(isinstance(n, int) for n in answer):
        raise InferError("decode_step_cost must return (FLOPs, bytes), two whole numbers")
    return answer


def decode(
    config: ModelConfig,
    batch: int = 1,
    context: int | Sequence[int] = 0,
    *,
    dtype_bytes: float = 2,
    kv_bytes: float = 2,
) -> Cost:
    """As `measure.decode`, by the student's count. Activations are 0 bytes. What is weight and what is cache follows
    from asking about one row and about two."""
    contexts = [context] * batch if isinstance(context, int) else list(context)
    if isinstance(context, int):
        flops = step_cost(config, batch, context)[0]
    else:
        flops = sum(step_cost(config, 1, n)[0] for n in contexts)
    weights, per_token = weight_numbers(config), cache_numbers(config)
    read = sum(step_cost(config, 1, n)[1] - weights - per_token for n in contexts)
    return Cost(flops, weights * dtype_bytes, read * kv_bytes, batch * per_token * kv_bytes, 0)


def prefill(
    config: ModelConfig,
    lengths: int | Sequence[int],
    batch: int | None = None,
    *,
    dtype_bytes: float = 2,
    kv_bytes: float = 2,
    past: int | Sequence[int] = 0,
    logit_positions: int | None = None,
) -> Cost:
    """As `measure.prefill`, by the student's count: as many decode steps as there are tokens, whose weights are read
    once and whose head runs only where it is needed."""
    rows = batch or (1 if isinstance(lengths, int) else len(lengths))
    new = [lengths] * rows if isinstance(lengths, int) else list(lengths)
    before = [past] * rows if isinstance(past, int) else list(past)
    heads = rows if logit_positions is None else logit_positions
    first = step_cost(config, 1, 0, head=False)[0]
    flops = heads * (step_cost(config, 1, 0)[0] - first)
    flops += sum(
        n * first + attention_flops(config, n, p) - n * attention_flops(config, 1)
        for n, p in zip(new, before, strict=True)
    )
    weights, per_token = weight_numbers(config, head=heads > 0), cache_numbers(config)
    return Cost(flops, weights * dtype_bytes, sum(before) * per_token * kv_bytes, sum(new) * per_token * kv_bytes, 0)


def attention_flops(config: ModelConfig, new: int, past: int = 0) -> int:
    """As `measure.attention_flops`: what one more cached token adds to a decode step, for all that are seen."""
    one = step_cost(config, 1, 1)[0] - step_cost(config, 1, 0)[0]
    return one * sum(range(past + 1, past + new + 1))


def cache_numbers(config: ModelConfig) -> int:
    """Numbers that one token has in the KV cache: what a second row adds to a decode step without context."""
    return step_cost(config, 2, 0)[1] - step_cost(config, 1, 0)[1]


def weight_numbers(config: ModelConfig, *, head: bool = True) -> int:
    """Weights that a step reads."""
    return step_cost(config, 1, 0, head=head)[1] - cache_numbers(config)


_describe_path = LoadedModel.describe_path


def describe_path(self: LoadedModel, kv: str) -> str:
    """As the package's, and what is plugged in: no other code runs under a name that is not its own."""
    return f"{_describe_path(self, kv)} plugged={','.join(PLUGGED)}" if PLUGGED else _describe_path(self, kv)


_PATH: dict[str, Callable[..., Any]] = {"cs336_infer.models.load:LoadedModel.describe_path": describe_path}
SOCKETS: dict[str, dict[str, Callable[..., Any]]] = {
    "rope": {
        "cs336_kernels.ops.rope:rope_tables": rope_tables,
        "cs336_kernels.ops.rope:apply_rope": apply_rope,
        **_PATH,
    },
    "causal_attention": {
        "cs336_kernels.ops.attention:attention": attention,
        "cs336_infer.kv.none:NoCache.extend": extend_without_cache,
        **_PATH,
    },
    "cached_attention": {"cs336_infer.kv.contiguous:ContiguousKV.extend": extend, **_PATH},
    "next_token_distribution": {"cs336_infer.distribution:probabilities": probabilities, **_PATH},
    "decode_step_cost": {
        "cs336_infer.measure.cost:decode": decode,
        "cs336_infer.measure.cost:prefill": prefill,
        "cs336_infer.measure.cost:attention_flops": attention_flops,
    },
}
"""exercise -> "module:name" of the engine -> the adapter that stands there while a function is plugged in."""
