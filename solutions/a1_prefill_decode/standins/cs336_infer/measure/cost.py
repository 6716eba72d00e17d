"""What a forward pass must do, by your `decode_step_cost`, once it is plugged in. Activations count as 0 bytes."""

from __future__ import annotations

from collections.abc import Sequence

from cs336_infer.measure.work import Cost
from cs336_infer.models.config import ModelConfig


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
    """Cost of one forward pass over new prompt tokens, all rows together."""
    from cs336_infer.course import sockets

    sizes = {"dtype_bytes": dtype_bytes, "kv_bytes": kv_bytes}
    return sockets.prefill(config, lengths, batch, **sizes, past=past, logit_positions=logit_positions)


def decode(
    config: ModelConfig,
    batch: int = 1,
    context: int | Sequence[int] = 0,
    *,
    dtype_bytes: float = 2,
    kv_bytes: float = 2,
) -> Cost:
    """Cost of one decode step: one new token a row, each with logits."""
    from cs336_infer.course import sockets

    return sockets.decode(config, batch, context, dtype_bytes=dtype_bytes, kv_bytes=kv_bytes)


def attention_flops(config: ModelConfig, new: int, past: int = 0) -> int:
    """FLOPs of Q K^T and P V in all layers for `new` tokens of one row behind `past` cached ones, causal."""
    from cs336_infer.course import sockets

    return sockets.attention_flops(config, new, past)


def kv_bytes_per_token(config: ModelConfig, kv_bytes: float = 2) -> float:
    """Bytes that one token occupies in the KV cache: a key and a value in each KV head of each layer."""
    from cs336_infer.course import sockets

    return sockets.cache_numbers(config) * kv_bytes


def weight_bytes(config: ModelConfig, dtype_bytes: float = 2) -> float:
    """Bytes of all parameters in memory, a tied head counted once, all in the same type."""
    return config.num_params * dtype_bytes
