"""What attention needs of new tokens: their queries, and their keys and values in the pages of the KV memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cs336_kernels.ops.matrices import check_like, check_path
from cs336_kernels.ops.rmsnorm import rms_norm
from cs336_kernels.ops.rope import apply_rope


def qkv(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    eps: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    path: str = "reference",
) -> torch.Tensor:
    """RMSNorm, the QKV product, RoPE; K and V of token t are written to slot `slots[t]`.

    Rounding. The reference rounds to the dtype of x after the norm, the product, the QK norm, x * cos and at the end.
    The triton path keeps everything in float32 and rounds at the end; only where it uses tensor cores it also rounds
    after the norm.

    The triton path is one launch; K and V never exist outside registers and pages. Up to 8 tokens run on CUDA cores
    (see `linear`), and a program owns one or two pairs that RoPE rotates. With QK norm it owns a whole head, whose
    mean it needs, in more warps; that is for up to 4 tokens at head_dim 64 and 2 at 128, in float32 for 2 and none.

    Args:
        x: [tokens, d], tokens >= 0, float32, float16 or bfloat16 (the reference also takes float64).
        norm_weight: [d] like x. weight: [(num_heads + 2 * kv_heads) * head_dim, d] like x: rows of Q, of K, of V.
        cos, sin: [tokens, head_dim] like x, from `rope_tables` (the first half of sin is negated).
        keys, values: [pages, block_size, kv_heads, head_dim] like x, changed in place; head_dim is even, 2 to 256. Only
            the stride of the first dimension is free.
        slots: [tokens] int64, page * block_size + place in the page, all different. On a GPU they are trusted.
        q_norm, k_norm: [head_dim] like x, or both None: RMSNorm of each head of Q and K before RoPE (Qwen3).
        eps: of all norms. path: "reference" or "triton".

    Returns:
        q: [tokens, num_heads, head_dim], contiguous, dtype of x.

    Raises:
        ValueError: a shape, dtype, stride or path is wrong; on a CPU also a slot outside the pages.
    """
    check_path("qkv", path, x)
    _check(x, norm_weight, weight, cos, sin, keys, values, slots, num_heads, q_norm, k_norm)
    if path == "reference":
        return _reference(x, norm_weight, weight, cos, sin, keys, values, slots, num_heads, eps, q_norm, k_norm)
    from cs336_kernels.ops.triton.qkv import fused

    return fused(x, norm_weight, weight, cos, sin, keys, values, slots, num_heads, eps, q_norm, k_norm)


def _check(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> None:
    if keys.dim() != 4:
        raise ValueError(f"keys is {list(keys.shape)}, not [pages, block_size, kv_heads, head_dim]")
    pages, block_size, kv_heads, head_dim = keys.shape
    if head_dim % 2 or not 2 <= head_dim <= 256:
        raise ValueError(f"head_dim is {head_dim}, not an even number from 2 to 256")
    if num_heads < 1 or kv_heads < 1 or block_size < 1:
        raise ValueError(f"{num_heads} heads, {kv_heads} KV heads and pages of {block_size}: all must be at least 1")
    tokens, features = x.shape
    check_like("norm_weight", norm_weight, (features,), x)
    check_like("weight", weight, ((num_heads + 2 * kv_heads) * head_dim, features), x)
    check_like("cos", cos, (tokens, head_dim), x)
    check_like("sin", sin, (tokens, head_dim), x)
    for name, memory in (("keys", keys), ("values", values)):
        check_like(name, memory, tuple(keys.shape), x)
        if pages and not memory[0].is_contiguous():
            raise ValueError(f"{name} has strides {memory.stride()}; only the first dimension's may be free")
    if slots.shape != (tokens,) or slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots is {list(slots.shape)} {slots.dtype}, not contiguous [{tokens}] torch.int64")
    if slots.device != x.device:
        raise ValueError(f"slots is on {slots.device}, not on {x.device} like x")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("one of q_norm and k_norm is None: give both or neither")
    for name, gain in (("q_norm", q_norm), ("k_norm", k_norm)):
        if gain is not None:
            check_like(name, gain, (head_dim,), x)
    room = pages * block_size
    if slots.device.type == "cpu" and tokens and not 0 <= int(slots.min()) <= int(slots.max()) < room:
        raise ValueError(
            f"slots go from {int(slots.min())} to {int(slots.max())}; the pages have slots 0 to {room - 1}"
        )


def _reference(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    eps: float,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> torch.Tensor:
    _, block_size, kv_heads, head_dim = keys.shape
    heads = F.linear(rms_norm(x, norm_weight, eps), weight).view(len(x), -1, head_dim)
    q, k, v = heads.split([num_heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    at = slots // block_size, slots % block_size
    keys.index_put_(at, apply_rope(k, cos, sin))
    values.index_put_(at, v)
    return apply_rope(q, cos, sin)
