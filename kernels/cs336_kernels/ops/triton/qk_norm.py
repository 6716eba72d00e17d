"""RMSNorm of heads: a program takes some heads of one token, whichever weight they need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import launch
from cs336_kernels.ops.checks import rows_of, same

MOST_HEAD_DIM = 1024
TILE = 4096  # numbers in a program


@triton.jit
def qk_norm_kernel(
    out, qk, q_weight, k_weight, heads, num_heads, step_token, step_head, eps,
    D: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, i): heads i * HEADS and up to HEADS - 1 more."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)
    inside = at < D
    tile = (head < heads)[:, None] & inside[None, :]
    numbers = tl.load(
        qk + token * step_token + head.to(tl.int64)[:, None] * step_head + at[None, :], mask=tile, other=0.0
    ).to(tl.float32)
    mine = tl.where((head < num_heads)[:, None], q_weight, k_weight)
    weight = tl.load(mine + at[None, :], mask=tile, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 1) / D + eps)
    normed = (numbers * scale[:, None] * weight).to(out.dtype.element_ty)
    tl.store(out + (token * heads + head[:, None]) * D + at[None, :], normed, mask=tile)


def qk_norm(
    qk: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, num_heads: int, eps: float
) -> torch.Tensor:
    """qk: [..., heads + kv_heads, head_dim]; weights: [head_dim]. Returns a contiguous tensor shaped like qk."""
    heads, head_dim = qk.shape[-2:]
    if not 1 <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"head_dim of qk is {head_dim}, not 1 to {MOST_HEAD_DIM}")
    tokens, step_token = rows_of("qk", qk[..., 0, :] if heads else qk)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        same(name, weight, (head_dim,), qk)
        if not weight.is_contiguous():
            raise ValueError(f"{name} has stride {weight.stride(0)}, not 1")
    out = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    if out.numel():
        block = triton.next_power_of_2(head_dim)
        rows = min(triton.next_power_of_2(heads), max(TILE // block, 1))
        sizes = {"D": head_dim, "HEADS": rows, "BLOCK": block, "num_warps": min(max(rows * block // 256, 1), 4)}
        tensors = (out, qk, q_weight, k_weight)
        numbers = (heads, num_heads, step_token, qk.stride(-2), eps)
        launch(qk_norm_kernel, (tokens, triton.cdiv(heads, rows)), *tensors, *numbers, **sizes)
    return out
