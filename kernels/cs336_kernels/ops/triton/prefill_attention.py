"""FlashAttention (Dao et al. 2022) of a flat batch over KV pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import capability, interpreted, launch
from cs336_kernels.ops.triton.kv_pages import find_pages, fold, load_tile


@triton.jit
def prefill_kernel(
    out, q, keys, values, tables, starts, totals,
    rows, stride_q, stride_k, stride_v, stride_table, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv_head): BLOCK_M queries of one row, which are the group's heads of consecutive tokens.

    How many tiles a row has is known to the GPU only. So every program counts the tiles of all rows, to find which row
    it belongs to; the grid has room for the worst case, and programs behind the last tile end at once.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    mine, kv_head = tl.program_id(0), tl.program_id(1)

    r = tl.arange(0, BLOCK_R)
    begins = tl.load(starts + r, mask=r < rows, other=0).to(tl.int32)
    ends = tl.load(starts + r + 1, mask=r < rows, other=0).to(tl.int32)
    tiles = (ends - begins) * GROUP
    tiles = (tiles + BLOCK_M - 1) // BLOCK_M
    row = tl.sum((tl.cumsum(tiles, 0) <= mine).to(tl.int32), 0)  # rows that end before this tile
    if row >= rows:
        return
    tile = mine - tl.sum(tl.where(r < row, tiles, 0), 0)
    begin = tl.load(starts + row).to(tl.int32)
    new = tl.load(starts + row + 1).to(tl.int32) - begin
    past = tl.load(totals + row).to(tl.int32) - new

    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = query // GROUP, query % GROUP
    # Queries behind the last token are those of the last one once more: they see the same keys and are not stored.
    seer = tl.minimum(token, new - 1)
    # Where the tile begins is a 64-bit number; within it 32 bits do, and cost half the registers.
    first = tile * BLOCK_M // GROUP
    place = (begin + first).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    in_head = (d < HEAD_DIM)[None, :]
    my_q = q + place * stride_q + kv_head * (GROUP * HEAD_DIM)
    my_q += ((seer - first) * stride_q + head * HEAD_DIM)[:, None] + d[None, :]
    queries = tl.load(my_q, mask=in_head, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)

    table = tables + row.to(tl.int64) * stride_table
    my_keys, my_values = keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = past + tl.max(seer, 0) + 1  # what the newest token here may see
    pages = find_pages(table, tl.arange(0, BLOCK_N), end, BLOCK_SIZE)
    for start in range(0, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        k = load_tile(my_keys, stride_k, pages, at, end, BLOCK_SIZE, KV_HEADS, HEAD_DIM, BLOCK_D, UPCAST)
        v = load_tile(my_values, stride_v, pages, at, end, BLOCK_SIZE, KV_HEADS, HEAD_DIM, BLOCK_D, UPCAST)
        pages = find_pages(table, at + BLOCK_N, end, BLOCK_SIZE)  # of the next tile, before its keys are asked for
        seen = at[None, :] <= (past + seer)[:, None]
        top, total, acc = fold(queries, k, v, seen, scale, top, total, acc, values.dtype.element_ty, UPCAST)

    average = acc / tl.where(total > 0, total, 1.0)[:, None]
    my_out = out + place * (HEADS * HEAD_DIM) + kv_head * (GROUP * HEAD_DIM)
    my_out += ((token - first) * (HEADS * HEAD_DIM) + head * HEAD_DIM)[:, None] + d[None, :]
    tl.store(my_out, average.to(out.dtype.element_ty), mask=(token < new)[:, None] & in_head)


def tile_sizes(queries: float, head_dim: int, dtype: torch.dtype, gpu: int) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps and num_stages for rows of about so many queries of a KV head.

    gpu: its compute capability, 90 for sm_90; 0 in the interpreter.

    The largest tiles whose numbers stay in registers. Tensor cores of sm_90 and sm_100 take keys and values from shared
    memory; those of other GPUs take them from registers, which 64 keys of head_dim 128 would fill. So does float32,
    which has no tensor cores.
    """
    if dtype == torch.float32:
        return (16, 16, 4, 2) if head_dim > 128 else (32, 16, 8, 2)
    block_m = 16 if queries <= 16 else 64 if queries <= 64 or head_dim > 128 else 128
    if head_dim > 128:
        return block_m, 32, 4 if block_m == 16 else 8, 2
    from_shared = gpu // 10 in (9, 10)
    block_n = 64 if head_dim <= 64 or from_shared else 32
    return block_m, block_n, 8 if block_m == 128 else 4, 2 if block_m == 64 else 3


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    totals: torch.Tensor,
) -> torch.Tensor:
    """One launch; arguments and result as in `prefill_attention`, checked there."""
    (tokens, heads, head_dim), rows = q.shape, len(totals)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    block_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    block_m, block_n, num_warps, num_stages = tile_sizes(tokens * group / rows, head_dim, q.dtype, capability(q))
    # A row of n queries has ceil(n / BLOCK_M) tiles, at most n // BLOCK_M + 1.
    grid = (tokens * group // block_m + min(rows, tokens), kv_heads)
    launch(
        prefill_kernel, grid, out, q, keys, values, tables, starts, totals,
        rows, q.stride(0), keys.stride(0), values.stride(0), tables.stride(0), head_dim**-0.5,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_R=triton.next_power_of_2(rows), BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), UPCAST=interpreted(q),
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out
