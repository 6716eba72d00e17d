"""x W^T, with or without a residual that is added before the only rounding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import interpreted, launch
from cs336_kernels.ops.triton.products import MOST_FEW, few, few_tile, many, many_tile


@triton.jit
def linear_few_kernel(
    out, x, weight, residual, stride_x, stride_w, stride_r, tokens, n, depth,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Program i: rows i * ROWS to (i + 1) * ROWS of the weight, for all tokens."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = tl.minimum(rows, n - 1)
    acc = few(
        x, stride_x, tokens, x, 0.0, weight, stride_w, mine, depth, False, TOKENS, ROWS, BLOCK_K, CHUNK, EVEN, WARPS
    )  # fmt: skip
    _add_and_store(out, acc, residual, stride_r, tl.arange(0, TOKENS), tokens, rows, n)


@triton.jit
def linear_many_kernel(
    out, x, weight, residual, stride_x, stride_w, stride_r, tokens, n, depth,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (i, j): BLOCK_M tokens from i * BLOCK_M on, rows j * ROWS to (j + 1) * ROWS."""
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    some, mine = tl.minimum(t, tokens - 1), tl.minimum(rows, n - 1)
    acc = many(x, stride_x, some, x, 0.0, weight, stride_w, mine, depth, False, BLOCK_K, EVEN, UPCAST)
    _add_and_store(out, acc, residual, stride_r, t, tokens, rows, n)


@triton.jit
def _add_and_store(out, acc, residual, stride_r, t, tokens, rows, n):
    inside = (t < tokens)[:, None] & (rows < n)[None, :]
    at = t.to(tl.int64)[:, None]
    if residual is not None:
        acc += tl.load(residual + at * stride_r + rows[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at * n + rows[None, :], acc.to(out.dtype.element_ty), mask=inside)


def product(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """One launch; arguments and result as in `linear` and `linear_add`, checked there."""
    (tokens, depth), n = x.shape, len(weight)
    out = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    stride_r = 0 if residual is None else residual.stride(0)
    arguments = (out, x, weight, residual, x.stride(0), weight.stride(0), stride_r, tokens, n, depth)
    if tokens <= MOST_FEW:
        tile = few_tile(x, n, interpreted(x))
        launch(linear_few_kernel, (triton.cdiv(n, tile["ROWS"]),), *arguments, **tile)
    else:
        tile = many_tile(x, n, interpreted(x))
        grid = (triton.cdiv(tokens, tile["BLOCK_M"]), triton.cdiv(n, tile["ROWS"]))
        launch(linear_many_kernel, grid, *arguments, **tile)
    return out
