"""For each op of the catalogue: arguments at the shape of a model, bytes that it cannot avoid, and its separate form.

Bytes count each number that is needed once and each number of the result once. What passes between the parts of a fused
op is in neither; in the separate form it is written and read again.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from cs336_kernels.ops.decode_attention import choose_splits
from cs336_kernels.ops.quant_linear import QuantWeight, quantise
from cs336_kernels.shapes import Shape, Values

Arguments = dict[str, Any]
EPS = 1e-5
ID_BYTES = 8  # a token id


class Run(Protocol):
    """Runs an op of the catalogue by its name, and notes ops of torch; see `catalogue.Separate`."""

    def __call__(self, name: str, **arguments: Any) -> Any: ...
    def torch(self, name: str, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor: ...


def nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


# Norms, RoPE, SwiGLU


def rms_norm_call(values: Values, s: Shape, tokens: int) -> Arguments:
    return {"x": values.normal(tokens, s.hidden), "weight": values.gain(s.hidden), "eps": EPS}


def rms_norm_bytes(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> int:
    return 2 * nbytes(x) + nbytes(weight)


def add_rms_norm_call(values: Values, s: Shape, tokens: int) -> Arguments:
    return {"residual": values.normal(tokens, s.hidden), **rms_norm_call(values, s, tokens)}


def add_rms_norm_bytes(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> int:
    return 4 * nbytes(x) + nbytes(weight)


def add_rms_norm_separate(run: Run, x: Any, residual: Any, weight: Any, eps: float) -> Any:
    summed = run.torch("add", x + residual, x, residual)
    return run("rms_norm", x=summed, weight=weight, eps=eps), summed


def apply_rope_call(values: Values, s: Shape, tokens: int) -> Arguments:
    cos, sin = values.angles(1, tokens, 1, s.head_dim)
    return {"x": values.normal(1, tokens, s.heads + s.kv_heads, s.head_dim), "cos": cos, "sin": sin}


def apply_rope_bytes(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> int:
    return 2 * nbytes(x) + nbytes(cos, sin)


def qk_norm_call(values: Values, s: Shape, tokens: int) -> Arguments:
    gains = {"q_weight": values.gain(s.head_dim), "k_weight": values.gain(s.head_dim)}
    return {"qk": values.normal(tokens, s.heads + s.kv_heads, s.head_dim), **gains, "num_heads": s.heads, "eps": EPS}


def qk_norm_bytes(qk: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, **_: Any) -> int:
    return 2 * nbytes(qk) + nbytes(q_weight, k_weight)


def swiglu_call(values: Values, s: Shape, tokens: int) -> Arguments:
    return {"gate_up": values.normal(tokens, 2 * s.ffn)}


def swiglu_bytes(gate_up: torch.Tensor) -> int:
    return nbytes(gate_up) * 3 // 2


# Products with a weight


def linear_call(values: Values, s: Shape, tokens: int) -> Arguments:
    """The head: the largest matrix of a model."""
    return {"x": values.normal(tokens, s.hidden), "weight": values.weight(s.vocab, s.hidden)}


def linear_bytes(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> int:
    return nbytes(x, weight, residual) + len(x) * len(weight) * x.element_size()


def linear_add_call(values: Values, s: Shape, tokens: int) -> Arguments:
    """The second half of the MLP."""
    residual = values.normal(tokens, s.hidden)
    return {"x": values.normal(tokens, s.ffn), "weight": values.weight(s.hidden, s.ffn), "residual": residual}


def linear_add_separate(run: Run, x: Any, weight: Any, residual: Any) -> Any:
    y = run("linear", x=x, weight=weight)
    return run.torch("add", y + residual, y, residual)


def gate_up_call(values: Values, s: Shape, tokens: int) -> Arguments:
    x, gain = values.normal(tokens, s.hidden), values.gain(s.hidden)
    return {"x": x, "norm_weight": gain, "weight": values.weight(2 * s.ffn, s.hidden), "eps": EPS}


def gate_up_bytes(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, **_: Any) -> int:
    return nbytes(x, norm_weight, weight) + len(x) * (len(weight) // 2) * x.element_size()


def gate_up_separate(run: Run, x: Any, norm_weight: Any, weight: Any, eps: float) -> Any:
    normed = run("rms_norm", x=x, weight=norm_weight, eps=eps)
    return run("swiglu", gate_up=run("linear", x=normed, weight=weight))


def qkv_call(values: Values, s: Shape, tokens: int) -> Arguments:
    rows = (s.heads + 2 * s.kv_heads) * s.head_dim
    cos, sin = values.angles(tokens, s.head_dim)
    pages = math.ceil(tokens / s.page) + 2
    room = (pages, s.page, s.kv_heads, s.head_dim)
    gains = {"q_norm": values.gain(s.head_dim), "k_norm": values.gain(s.head_dim)} if s.qk_norm else {}
    return {
        "x": values.normal(tokens, s.hidden),
        "norm_weight": values.gain(s.hidden),
        "weight": values.weight(rows, s.hidden),
        "cos": cos,
        "sin": sin,
        "keys": values.normal(*room),
        "values": values.normal(*room),
        "slots": values.slots(tokens, pages, s.page),
        "num_heads": s.heads,
        "eps": EPS,
        **gains,
    }


def qkv_bytes(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slots: torch.Tensor, q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, **_: Any,
) -> int:  # fmt: skip
    made = len(x) * len(weight) * x.element_size()
    return nbytes(x, norm_weight, weight, cos, sin, slots, q_norm, k_norm) + made


def qkv_separate(
    run: Run, x: Any, norm_weight: Any, weight: Any, cos: Any, sin: Any, keys: Any, values: Any, slots: Any,
    num_heads: int, eps: float, q_norm: Any = None, k_norm: Any = None,
) -> Any:  # fmt: skip
    kv_heads, head_dim = keys.shape[2:]
    normed = run("rms_norm", x=x, weight=norm_weight, eps=eps)
    heads = run("linear", x=normed, weight=weight).view(len(x), -1, head_dim)
    qk, v = heads.split([num_heads + kv_heads, kv_heads], 1)
    if q_norm is not None:
        qk = run("qk_norm", qk=qk, q_weight=q_norm, k_weight=k_norm, num_heads=num_heads, eps=eps)
    cos, sin = (table.view(1, len(x), 1, head_dim) for table in (cos, sin))
    q, k = run("apply_rope", x=qk.unsqueeze(0), cos=cos, sin=sin)[0].split([num_heads, kv_heads], 1)
    run("write_kv", keys=keys, values=values, k=k, v=v, slots=slots)
    return q.contiguous()


def quant_linear_call(values: Values, s: Shape, tokens: int, bits: int) -> Arguments:
    """The second half of the MLP, of 8 or 4 bits."""
    arguments = linear_add_call(values, s, tokens)
    weight, group = arguments["weight"], 64 if s.ffn % 64 == 0 else 32
    if values.seeded:
        packed = quantise(weight, bits, group)
    else:
        row = quantise(torch.zeros(1, s.ffn), bits, group)
        numbers, scales = (t.to(values.device).new_empty(s.hidden, t.shape[1]) for t in (row.packed, row.scales))
        packed = QuantWeight(numbers, scales, bits, group)
    return {**arguments, "weight": packed}


def quant_linear_bytes(x: torch.Tensor, weight: QuantWeight, residual: torch.Tensor | None = None) -> int:
    made = len(x) * weight.shape[0] * x.element_size()
    return nbytes(x, weight.packed, weight.scales, residual) + made


def quant_linear_separate(run: Run, x: Any, weight: QuantWeight, residual: Any) -> Any:
    whole = run.torch("dequantise", weight.dequantise().to(x.dtype), weight.packed, weight.scales)
    return linear_add_separate(run, x, whole, residual)


# KV memory and attention


def write_kv_call(values: Values, s: Shape, tokens: int) -> Arguments:
    pages = math.ceil(tokens / s.page) + 2
    room = (pages, s.page, s.kv_heads, s.head_dim)
    new = {name: values.normal(tokens, s.kv_heads, s.head_dim) for name in ("k", "v")}
    slots = values.slots(tokens, pages, s.page)
    return {"keys": values.normal(*room), "values": values.normal(*room), **new, "slots": slots}


def write_kv_bytes(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, **_: Any) -> int:
    return 2 * nbytes(k, v) + nbytes(slots)


def decode_attention_call(values: Values, s: Shape, tokens: int) -> Arguments:
    """`tokens` sequences of 1 to `context` positions, the first the longest; last pages are not full."""
    lengths = [max(1, s.context - 1 - row * 37 % (s.context // 2)) for row in range(tokens)]
    keys, cached, tables = values.pages(s, lengths)
    return {
        "q": values.normal(tokens, s.heads, s.head_dim),
        "keys": keys,
        "values": cached,
        "tables": tables,
        "lengths": values.integers(*lengths),
        "splits": choose_splits(max(lengths), tokens, s.kv_heads),  # the op would read the lengths from the device
    }


def decode_attention_bytes(
    q: torch.Tensor, keys: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, **_: Any
) -> int:
    return 2 * nbytes(q) + nbytes(lengths) + _cached_bytes(keys, tables, lengths)


def prefill_attention_call(values: Values, s: Shape, tokens: int) -> Arguments:
    """Two sequences, or one if `tokens` is 1: a quarter of the tokens behind a cached prefix, the rest on their own."""
    new = [tokens] if tokens == 1 else [max(1, tokens // 4), tokens - max(1, tokens // 4)]
    totals = [new[0] + s.context // 2 + 1, *new[1:]]
    keys, cached, tables = values.pages(s, totals)
    starts = values.integers(0, *(sum(new[: i + 1]) for i in range(len(new))))
    q = values.normal(tokens, s.heads, s.head_dim)
    totals = values.integers(*totals)
    return {"q": q, "keys": keys, "values": cached, "tables": tables, "starts": starts, "totals": totals}


def prefill_attention_bytes(
    q: torch.Tensor, keys: torch.Tensor, tables: torch.Tensor, starts: torch.Tensor, totals: torch.Tensor, **_: Any
) -> int:
    return 2 * nbytes(q) + nbytes(starts, totals) + _cached_bytes(keys, tables, totals)


def _cached_bytes(keys: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor) -> int:
    """Keys and values of these positions, and the entries of tables that lead to them."""
    _, page, kv_heads, head_dim = keys.shape
    counts = lengths.tolist()
    entries = sum(math.ceil(n / page) for n in counts)
    return 2 * sum(counts) * kv_heads * head_dim * keys.element_size() + entries * tables.element_size()


# From logits to a token


def argmax_call(values: Values, s: Shape, tokens: int) -> Arguments:
    return {"logits": values.normal(tokens, s.vocab, scale=3.0, dtype=torch.float32)}


def sample_call(values: Values, s: Shape, tokens: int) -> Arguments:
    settings = {"temperature": values.full(tokens, 0.8), "top_k": values.full(tokens, 50, torch.int32)}
    settings |= {"top_p": values.full(tokens, 0.9), "uniform": values.uniform(tokens)}
    return {**argmax_call(values, s, tokens), **settings}


def sampling_bytes(logits: torch.Tensor, **settings: torch.Tensor) -> int:
    return nbytes(logits, *settings.values()) + len(logits) * ID_BYTES
