"""KV write: a program copies a piece of one token's key and value into its slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import launch

PIECE = 1024  # numbers


@triton.jit
def write_kv_kernel(
    keys, values, k, v, slots, room, step_keys, step_values, step_k, step_v,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, i): numbers i * BLOCK and up to BLOCK - 1 more, of the WIDTH of a token's key and value."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    page, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    key = tl.load(k + token * step_k + at, mask=inside)
    value = tl.load(v + token * step_v + at, mask=inside)
    there = inside & (slot >= 0) & (slot < room)
    tl.store(keys + page * step_keys + offset * WIDTH + at, key, mask=there)
    tl.store(values + page * step_values + offset * WIDTH + at, value, mask=there)


def write_kv(keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Arguments as checked by the op."""
    pages, block_size, kv_heads, head_dim = keys.shape
    tokens, width = len(k), kv_heads * head_dim
    if not tokens or not width:
        return
    block = min(triton.next_power_of_2(width), PIECE)
    strides = (keys.stride(0), values.stride(0), k.stride(0), v.stride(0))
    # A thread moves 8 numbers at once: 16 bytes of half precision, the widest load and store there is.
    sizes = {"BLOCK_SIZE": block_size, "WIDTH": width, "BLOCK": block, "num_warps": max(block // 256, 1)}
    grid = (tokens, triton.cdiv(width, block))
    launch(write_kv_kernel, grid, keys, values, k, v, slots, pages * block_size, *strides, **sizes)
