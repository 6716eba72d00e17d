"""A transformer layer on Triton kernels: one launch for each op, or each chain of ops fused into one launch."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from cs336_kernels.ops import apply_rope, gate_up, linear, linear_add, qk_norm, qkv, rms_norm, swiglu

from cs336_infer.models.attend import Attend
from cs336_infer.types import InvalidRequest


@runtime_checkable
class PagesAttend(Protocol):
    """An `Attend` over pages, whose two halves can be had one by one: a fused kernel stores keys and values itself."""

    slots: torch.Tensor

    def pages_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...
    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor: ...


def separate(block: Any, x: torch.Tensor, rope: Any, layer: int, attend: Attend) -> torch.Tensor:
    """A layer with one kernel for each op. x: [batch, seq, hidden] -> the same shape.

    Args:
        block: `models.llama.Block`, of which the weights are used.
    """
    c = block.config
    flat = x.reshape(-1, x.shape[2])
    projected = linear(rms_norm(flat, block.attn_norm, c.rms_eps, "triton"), block.qkv.weight, "triton")
    heads = projected.view(*x.shape[:2], -1, c.head_dim)
    qk, v = heads.split([c.num_heads + c.num_kv_heads, c.num_kv_heads], 2)
    if block.q_norm is not None:
        qk = qk_norm(qk.contiguous(), block.q_norm, block.k_norm, c.num_heads, c.rms_eps, "triton")
    q, k = apply_rope(qk.contiguous(), *rope, path="triton").split([c.num_heads, c.num_kv_heads], 2)
    mixed = attend(layer, q.contiguous(), k.contiguous(), v.contiguous()).reshape(len(flat), -1)
    flat = flat + linear(mixed, block.o.weight, "triton")
    hidden = linear(rms_norm(flat, block.mlp_norm, c.rms_eps, "triton"), block.gate_up.weight, "triton")
    return (flat + linear(swiglu(hidden, "triton"), block.down.weight, "triton")).view(x.shape)


def fused(block: Any, x: torch.Tensor, rope: Any, layer: int, attend: Attend) -> torch.Tensor:
    """A layer in five launches, six when attention is split: norm + QKV + RoPE + KV write; attention (and its merge);
    O + residual; norm + gate and up + SwiGLU; down + residual. x: [1, tokens, hidden] -> the same shape.

    Raises:
        InvalidRequest: the KV cache is not made of pages.
    """
    path = block.path
    if not isinstance(attend, PagesAttend):
        raise InvalidRequest(
            f"kernels={path!r} writes keys and values into pages: it needs the engine, LLM or `cs336-infer serve`"
        )
    c = block.config
    flat, (cos, sin) = x[0], (t.reshape(-1, c.head_dim) for t in rope)
    q = qkv(
        flat, block.attn_norm, block.qkv.weight, cos, sin, *attend.pages_of(layer), attend.slots, c.num_heads,
        c.rms_eps, block.q_norm, block.k_norm, "triton",
    )  # fmt: skip
    mixed = attend.attend(layer, q).reshape(len(flat), -1)
    flat = linear_add(mixed, block.o.weight, flat, "triton")
    hidden = gate_up(flat, block.mlp_norm, block.gate_up.weight, c.rms_eps, "triton")
    return linear_add(hidden, block.down.weight, flat, "triton").unsqueeze(0)


def logits(net: Any, x: torch.Tensor) -> torch.Tensor:
    """The end of both: x [batch, n, hidden] -> [batch, n, vocab] in the model's dtype."""
    normed = rms_norm(x.reshape(-1, x.shape[2]), net.norm, net.config.rms_eps, "triton")
    return linear(normed, net.head.weight, "triton").view(*x.shape[:2], -1)
