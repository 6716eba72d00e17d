"""Flash-Decoding (Dao, Haziza, Massa and Sizov 2023) over KV pages: attention of parts, then their merger."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import interpreted, launch
from cs336_kernels.ops.triton.kv_pages import find_pages, fold, load_tile


@triton.jit
def decode_kernel(
    partials, lse, q, keys, values, tables, lengths,
    stride_q, stride_k, stride_v, stride_table, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (row, kv_head, split): all query heads of a KV head, over the split's share of the row's pages."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)

    length = tl.load(lengths + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, BLOCK_SIZE), splits) * BLOCK_SIZE
    begin = split * share
    end = tl.minimum(begin + share, length)

    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    inside = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    queries = tl.load(q + row * stride_q + head[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)

    table = tables + row * stride_table
    my_keys, my_values = keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    pages = find_pages(table, begin + tl.arange(0, BLOCK_N), end, BLOCK_SIZE)
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        k = load_tile(my_keys, stride_k, pages, at, end, BLOCK_SIZE, KV_HEADS, HEAD_DIM, BLOCK_D, UPCAST)
        v = load_tile(my_values, stride_v, pages, at, end, BLOCK_SIZE, KV_HEADS, HEAD_DIM, BLOCK_D, UPCAST)
        pages = find_pages(table, at + BLOCK_N, end, BLOCK_SIZE)  # of the next tile, before its keys are asked for
        seen = (at < end)[None, :]
        top, total, acc = fold(queries, k, v, seen, scale, top, total, acc, values.dtype.element_ty, UPCAST)

    some = total > 0
    average = acc / tl.where(some, total, 1.0)[:, None]
    to = (row * HEADS + head) * splits + split
    tl.store(partials + to[:, None] * HEAD_DIM + d[None, :], average.to(partials.dtype.element_ty), mask=inside)
    tl.store(lse + to, tl.where(some, top * scale + tl.log(tl.where(some, total, 1.0)), float("-inf")), mask=g < GROUP)


@triton.jit
def merge_kernel(
    out,
    partials,
    lse,
    splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TILE_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (row and head): the average of its partial results, weighted by exp(lse)."""
    mine = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    all_lse = tl.load(lse + mine * splits + s, mask=s < splits, other=float("-inf"))
    top = tl.max(all_lse, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(all_lse - base), 0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, TILE_S):
        some = first + tl.arange(0, TILE_S)
        part = tl.load(lse + mine * splits + some, mask=some < splits, other=float("-inf"))
        filled = (part != float("-inf"))[:, None] & (d < HEAD_DIM)[None, :]
        tile = tl.load(partials + (mine * splits + some)[:, None] * HEAD_DIM + d[None, :], mask=filled, other=0.0)
        acc += tl.sum(tile * tl.exp(part - base)[:, None], 0)
    average = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + mine * HEAD_DIM + d, average.to(out.dtype.element_ty), mask=d < HEAD_DIM)


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    splits: int,
) -> torch.Tensor:
    """One launch, or with several splits two; arguments and result as in `decode_attention`, checked there."""
    rows, heads, head_dim = q.shape
    alone = splits == 1  # the only part is the result: it is rounded at once, and its lse is not needed
    partials = torch.empty(rows, heads, splits, head_dim, dtype=q.dtype if alone else torch.float32, device=q.device)
    if rows == 0:
        return partials.squeeze(2)
    lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    block_size, kv_heads = keys.shape[1:3]
    # 16 KiB of keys a tile, of which the next two are under way; float32 has no tensor cores and few registers.
    block_n = 16 if q.dtype == torch.float32 else 32 if head_dim > 128 else 64
    launch(
        decode_kernel, (rows, kv_heads, splits), partials, lse, q, keys, values, tables, lengths,
        q.stride(0), keys.stride(0), values.stride(0), tables.stride(0), head_dim**-0.5,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_G=max(16, triton.next_power_of_2(heads // kv_heads)), BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), UPCAST=interpreted(q),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return partials.squeeze(2) if alone else merge(partials, lse, q.dtype)


def merge(partials: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One launch; arguments and result as in `merge_attention`, checked there."""
    rows, heads, splits, head_dim = partials.shape
    out = torch.empty(rows, heads, head_dim, dtype=dtype, device=partials.device)
    if out.numel():
        block_s = triton.next_power_of_2(splits)
        launch(
            merge_kernel, (rows * heads,), out, partials, lse, splits,
            HEAD_DIM=head_dim, BLOCK_S=block_s, TILE_S=min(16, block_s), BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=4,
        )  # fmt: skip
    return out
