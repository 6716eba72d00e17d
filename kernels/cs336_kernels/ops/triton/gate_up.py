"""RMSNorm, the products with gate and up, and silu(gate) * up, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import interpreted, launch
from cs336_kernels.ops.triton.products import MOST_FEW, few, few_tile, many, many_tile


@triton.jit
def gate_up_few_kernel(
    out, x, gain, weight, stride_x, stride_w, tokens, n, depth, eps,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Program i: columns i * ROWS / 2 to (i + 1) * ROWS / 2 of the result, for all tokens."""
    rows = _alternate(tl.program_id(0), n, ROWS)
    acc = few(
        x, stride_x, tokens, gain, eps, weight, stride_w, rows, depth, True, TOKENS, ROWS, BLOCK_K, CHUNK, EVEN, WARPS
    )  # fmt: skip
    _gate_and_store(out, acc, tl.arange(0, TOKENS), tokens, tl.program_id(0), n, ROWS)


@triton.jit
def gate_up_many_kernel(
    out, x, gain, weight, stride_x, stride_w, tokens, n, depth, eps,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (i, j): BLOCK_M tokens from i * BLOCK_M on, columns j * ROWS / 2 to (j + 1) * ROWS / 2."""
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = _alternate(tl.program_id(1), n, ROWS)
    some = tl.minimum(t, tokens - 1)
    acc = many(x, stride_x, some, gain, eps, weight, stride_w, rows, depth, True, BLOCK_K, EVEN, UPCAST)
    _gate_and_store(out, acc, t, tokens, tl.program_id(1), n, ROWS)


@triton.jit
def _alternate(block, n, ROWS: tl.constexpr):
    """Rows of the weight: gate, up, gate, up... of a block of columns."""
    i = tl.arange(0, ROWS)
    return tl.minimum(block * (ROWS // 2) + i // 2, n - 1) + i % 2 * n


@triton.jit
def _gate_and_store(out, acc, t, tokens, block, n, ROWS: tl.constexpr):
    gate, up = tl.split(tl.reshape(acc, [acc.shape[0], ROWS // 2, 2]))
    column = block * (ROWS // 2) + tl.arange(0, ROWS // 2)
    inside = (t < tokens)[:, None] & (column < n)[None, :]
    at = t.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def fused(x: torch.Tensor, gain: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One launch; arguments and result as in `gate_up`, checked there."""
    (tokens, depth), n = x.shape, len(weight) // 2
    out = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    arguments = (out, x, gain, weight, x.stride(0), weight.stride(0), tokens, n, depth, eps)
    if tokens <= MOST_FEW:
        tile = few_tile(x, 2 * n, interpreted(x), least=2)
        launch(gate_up_few_kernel, (triton.cdiv(2 * n, tile["ROWS"]),), *arguments, **tile)
    else:
        tile = many_tile(x, 2 * n, interpreted(x))
        grid = (triton.cdiv(tokens, tile["BLOCK_M"]), triton.cdiv(2 * n, tile["ROWS"]))
        launch(gate_up_many_kernel, grid, *arguments, **tile)
    return out
