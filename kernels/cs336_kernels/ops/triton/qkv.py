"""RMSNorm, the QKV product, QK norm, RoPE and the writing of K and V into pages, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import interpreted, launch
from cs336_kernels.ops.triton.products import MOST_FEW, few, few_tile, many, many_tile, power_of_2


@triton.jit
def qkv_few_kernel(
    q, keys, values, slots, x, gain, weight, cos, sin, q_gain, k_gain,
    stride_x, stride_w, stride_cos, stride_sin, stride_k, stride_v, tokens, depth, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): of head i the pairs j * ROWS / 2 to (j + 1) * ROWS / 2, for all tokens."""
    head, block = tl.program_id(0), tl.program_id(1)
    rows = _partners(head, block, HEAD_DIM, ROWS)
    acc = few(
        x, stride_x, tokens, gain, eps, weight, stride_w, rows, depth, True, TOKENS, ROWS, BLOCK_K, CHUNK, EVEN, WARPS
    )  # fmt: skip
    _finish(
        q, keys, values, slots, acc, cos, sin, q_gain, k_gain, stride_cos, stride_sin, stride_k, stride_v, eps,
        tl.arange(0, TOKENS), tokens, head, block, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, ROWS,
    )  # fmt: skip


@triton.jit
def qkv_many_kernel(
    q, keys, values, slots, x, gain, weight, cos, sin, q_gain, k_gain,
    stride_x, stride_w, stride_cos, stride_sin, stride_k, stride_v, tokens, depth, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (i, j, k): BLOCK_M tokens from i * BLOCK_M on, of head j the pairs k * ROWS / 2 to (k + 1) * ROWS / 2."""
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head, block = tl.program_id(1), tl.program_id(2)
    rows = _partners(head, block, HEAD_DIM, ROWS)
    some = tl.minimum(t, tokens - 1)
    acc = many(x, stride_x, some, gain, eps, weight, stride_w, rows, depth, True, BLOCK_K, EVEN, UPCAST)
    _finish(
        q, keys, values, slots, acc, cos, sin, q_gain, k_gain, stride_cos, stride_sin, stride_k, stride_v, eps,
        t, tokens, head, block, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, ROWS,
    )  # fmt: skip


@triton.jit
def _partners(head, block, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):
    """Rows of the weight: of each pair that RoPE rotates the first, then the second, which lies half a head behind."""
    HALF: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, ROWS)
    return head * HEAD_DIM + tl.minimum(block * (ROWS // 2) + i // 2, HALF - 1) + i % 2 * HALF


@triton.jit
def _finish(
    q, keys, values, slots, acc, cos, sin, q_gain, k_gain, stride_cos, stride_sin, stride_k, stride_v, eps,
    t, tokens, head, block,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """QK norm, RoPE, and each number to its place. A V head is normed and rotated by 1: one path for all heads."""
    HALF: tl.constexpr = HEAD_DIM // 2
    first, second = tl.split(tl.reshape(acc, [acc.shape[0], ROWS // 2, 2]))
    i = block * (ROWS // 2) + tl.arange(0, ROWS // 2)
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    live = (t < tokens)[:, None] & (i < HALF)[None, :]
    at = t.to(tl.int64)[:, None]

    if q_gain is not None:  # ROWS covers the head: its mean needs all of it
        squares = tl.where((i < HALF)[None, :], first * first + second * second, 0.0)
        scale = tl.rsqrt(tl.sum(squares, 1) / HEAD_DIM + eps)
        scale = tl.where(is_v, 1.0, scale)[:, None]
        gain = tl.where(is_q, q_gain, k_gain)
        mine = (i < HALF) & (head < HEADS + KV_HEADS)
        first *= scale * tl.load(gain + i, mask=mine, other=1.0).to(tl.float32)[None, :]
        second *= scale * tl.load(gain + HALF + i, mask=mine, other=1.0).to(tl.float32)[None, :]

    turned = live & (head < HEADS + KV_HEADS)
    cos_at, sin_at = cos + at * stride_cos + i[None, :], sin + at * stride_sin + i[None, :]
    cos_1 = tl.load(cos_at, mask=turned, other=1.0).to(tl.float32)
    cos_2 = tl.load(cos_at + HALF, mask=turned, other=1.0).to(tl.float32)
    sin_1 = tl.load(sin_at, mask=turned, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin_at + HALF, mask=turned, other=0.0).to(tl.float32)
    one = (first * cos_1 + second * sin_1).to(q.dtype.element_ty)
    two = (second * cos_2 + first * sin_2).to(q.dtype.element_ty)

    q_at = q + (at * HEADS + head) * HEAD_DIM + i[None, :]
    tl.store(q_at, one, mask=live & is_q)
    tl.store(q_at + HALF, two, mask=live & is_q)
    slot = tl.load(slots + t, mask=(t < tokens) & (head >= HEADS), other=0)[:, None]
    page, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_head = head - HEADS
    v_head = k_head - KV_HEADS
    k_at = keys + page * stride_k + (offset * KV_HEADS + k_head) * HEAD_DIM + i[None, :]
    v_at = values + page * stride_v + (offset * KV_HEADS + v_head) * HEAD_DIM + i[None, :]
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    tl.store(k_at, one, mask=live & is_k)
    tl.store(k_at + HALF, two, mask=live & is_k)
    tl.store(v_at, one, mask=live & is_v)
    tl.store(v_at + HALF, two, mask=live & is_v)


def fused(
    x: torch.Tensor,
    gain: torch.Tensor,
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
    """One launch; arguments and result as in `qkv`, checked there."""
    tokens, depth = x.shape
    block_size, kv_heads, head_dim = keys.shape[1:]
    q = torch.empty(tokens, num_heads, head_dim, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return q
    heads, span = num_heads + 2 * kv_heads, 2 * power_of_2(head_dim // 2)
    whole = max(16, span) if q_norm is not None else 0
    arguments = (
        q, keys, values, slots, x, gain, weight, cos, sin, q_norm, k_norm, x.stride(0), weight.stride(0),
        cos.stride(0), sin.stride(0), keys.stride(0), values.stride(0), tokens, depth, eps,
        num_heads, kv_heads, head_dim, block_size,
    )  # fmt: skip
    # On CUDA cores neither more numbers of the result nor more rows fit the registers.
    room = 512 // x.element_size()
    if tokens <= MOST_FEW and whole <= room // 2 and whole * power_of_2(tokens) <= room:
        tile = few_tile(x, heads * head_dim, interpreted(x), least=max(2, whole))
        tile["ROWS"] = min(tile["ROWS"], max(span, whole))
        launch(qkv_few_kernel, (heads, triton.cdiv(head_dim, tile["ROWS"])), *arguments, **tile)
    else:
        tile = many_tile(x, heads * head_dim, interpreted(x), whole)
        grid = (triton.cdiv(tokens, tile["BLOCK_M"]), heads, triton.cdiv(head_dim, tile["ROWS"]))
        launch(qkv_many_kernel, grid, *arguments, **tile)
    return q
