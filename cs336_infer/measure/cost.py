"""What a forward pass must do: floating-point operations and bytes, counted from the shape of the model.

Counted: every matrix product, at 2 FLOPs a multiply-add, and attention's two products (Q K^T and P V) over exactly
the positions that the causal mask leaves. Not counted: norms, RoPE, softmax, SiLU, residual adds and the embedding
lookup. Those are about 1 % of the work for the models here, and `torch.utils.flop_counter` leaves them out too. A
kernel that computes the masked half of a prompt's scores and throws it away does more than is counted here.

Bytes are a lower bound for a machine whose caches hold no tensor from one operation to the next: each weight is read
once a step however large the batch, cached keys and values are read once a row, new ones are written once, and each
product reads its input and writes its output once, with the elementwise operations fused into it. On a CPU the
activations of a decode step stay in the cache, so there its real traffic is `weight_bytes + kv_read_bytes +
kv_write_bytes`.

This way of counting is that of Kaplan et al. 2020 (Scaling Laws, section 2.1) and, with bytes, of Pope et al. 2022
(Efficiently Scaling Transformer Inference, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cs336_infer.measure.work import Cost
from cs336_infer.models.config import ModelConfig
from cs336_infer.types import InvalidRequest, check_integer, check_number

MIN_ACTIVATION_BYTES = 2  # quantised weights are multiplied with activations of at least this size


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
    """Cost of one forward pass over new prompt tokens, all rows together.

    Args:
        config: shape of the model.
        lengths: new tokens, one number for all rows or one per row.
        batch: number of rows; by default as many as `lengths` lists, or 1.
        dtype_bytes: bytes of one weight. Activations have the same size, but at least 2 bytes.
        kv_bytes: bytes of one element of the KV cache.
        past: tokens that are in the cache already, from earlier chunks or a shared prefix; one number for all rows
            or one per row.
        logit_positions: positions of the whole batch that go through the LM head; by default the last of each
            row. 0 is a chunk that does not end its prompt.

    Raises:
        InvalidRequest: a size is negative, zero where there must be work, or not a number; more logit positions
            than tokens; or a list whose length is not the number of rows.
    """
    rows = batch if batch is not None else len(lengths) if isinstance(lengths, Sequence) else 1
    new, cached = _per_row("lengths", lengths, rows), _per_row("past", past, rows)
    return _forward(config, new, cached, dtype_bytes, kv_bytes, logit_positions)


def decode(
    config: ModelConfig,
    batch: int = 1,
    context: int | Sequence[int] = 0,
    *,
    dtype_bytes: float = 2,
    kv_bytes: float = 2,
) -> Cost:
    """Cost of one decode step: one new token a row, each with logits.

    Args:
        config: shape of the model.
        batch: number of rows.
        context: tokens in each row's cache before the step, one number for all rows or one per row. The new token
            attends to them and to itself.
        dtype_bytes: bytes of one weight. Activations have the same size, but at least 2 bytes.
        kv_bytes: bytes of one element of the KV cache.

    Raises:
        InvalidRequest: a size is negative, zero where there must be work, or not a number; or a list of contexts
            whose length is not `batch`.
    """
    return _forward(
        config, _per_row("token", 1, batch), _per_row("context", context, batch), dtype_bytes, kv_bytes, None
    )


def attention_flops(config: ModelConfig, new: int, past: int = 0) -> int:
    """FLOPs of Q K^T and P V in all layers for `new` tokens of one row behind `past` cached ones, causal.

    Token i of the new ones sees past + i + 1 positions, and each costs one multiply-add per element of every query
    head, twice. Sharing KV heads saves bytes, not FLOPs.
    """
    seen = new * past + new * (new + 1) // 2
    return 2 * 2 * config.num_heads * config.head_dim * seen * config.num_layers


def kv_bytes_per_token(config: ModelConfig, kv_bytes: float = 2) -> float:
    """Bytes that one token occupies in the KV cache: a key and a value in each KV head of each layer."""
    check_number("kv_bytes", kv_bytes, 0, math.inf, "a finite number > 0", open_low=True)
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_bytes


def weight_bytes(config: ModelConfig, dtype_bytes: float = 2) -> float:
    """Bytes of all parameters in memory, a tied head counted once, all in the same type."""
    check_number("dtype_bytes", dtype_bytes, 0, math.inf, "a finite number > 0", open_low=True)
    return config.num_params * dtype_bytes


def _per_row(name: str, value: int | Sequence[int], rows: int) -> list[int]:
    check_integer("batch", rows, 1, None)
    if not isinstance(value, Sequence):
        return [value] * rows
    if len(value) != rows:
        raise InvalidRequest(f"{name} must list one number for each row of a batch of {rows}, not {len(value)}")
    return list(value)


def _forward(
    config: ModelConfig,
    new: list[int],
    past: list[int],
    dtype_bytes: float,
    kv_bytes: float,
    logit_positions: int | None,
) -> Cost:
    for n, p in zip(new, past, strict=True):
        check_integer("tokens of a row", n, 1, None)
        check_integer("cached tokens of a row", p, 0, None)
    tokens = sum(new)
    logits = len(new) if logit_positions is None else logit_positions
    check_integer("logit_positions", logits, 0, tokens)
    per_kv_token = kv_bytes_per_token(config, kv_bytes)
    check_number("dtype_bytes", dtype_bytes, 0, math.inf, "a finite number > 0", open_low=True)

    multiplies = config.num_layers * _linear_params(config) * tokens + config.embedding_params * logits
    return Cost(
        flops=2 * multiplies + sum(attention_flops(config, n, p) for n, p in zip(new, past, strict=True)),
        weight_bytes=_params_read(config, tokens, logits) * dtype_bytes,
        kv_read_bytes=sum(past) * per_kv_token,
        kv_write_bytes=tokens * per_kv_token,
        activation_bytes=_activations(config, tokens, logits) * max(dtype_bytes, MIN_ACTIVATION_BYTES),
    )


def _linear_params(config: ModelConfig) -> int:
    """Parameters of one block that are matrices: q, k, v, o and the gated MLP's three."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)


def _params_read(config: ModelConfig, tokens: int, logits: int) -> int:
    """Parameters that one step reads: all blocks, the table's rows looked up, final norm and head if it runs."""
    looked_up = min(tokens, config.vocab_size) * config.hidden_size
    head = config.embedding_params if logits else 0
    embedding = max(looked_up, head) if config.tie_embeddings else looked_up + head
    final_norm = config.hidden_size if logits else 0
    return config.layer_params * config.num_layers + embedding + final_norm


def _activations(config: ModelConfig, tokens: int, logits: int) -> int:
    """Elements that the products read and write, apart from keys and values.

    In a block: hidden -> q; q -> attention -> q; q -> hidden; hidden -> gate and up; gated -> hidden.
    """
    d, q, f = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    block = (d + q) + (q + q) + (q + d) + (d + 2 * f) + (f + d)
    return tokens * (d + config.num_layers * block) + logits * (d + config.vocab_size)
