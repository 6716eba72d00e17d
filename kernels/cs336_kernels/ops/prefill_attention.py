"""Attention of a flat batch of new tokens over KV pages: prefill whole, in chunks, or behind a cached prefix."""

from __future__ import annotations

from itertools import pairwise

import torch

from cs336_kernels.ops.kv_pages import check_list, check_pages, check_path, check_room, gather, softmax_attention


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    totals: torch.Tensor,
    path: str = "reference",
) -> torch.Tensor:
    """Causal attention of each row's new tokens over all its positions, with the new ones, which are stored already.

    New token i of a row's n sees positions 0 to total - n + i. The Triton kernel is FlashAttention (Dao et al. 2022):
    tile after tile of keys and values passes by, and softmax is kept up to date instead of being written down.

    Scores, softmax and sums are float32; weights are rounded to the dtype of the values for the second product, and the
    result once.

    Args:
        q: [tokens, heads, head_dim], float32, float16 or bfloat16 (the reference also takes float64), head_dim <= 256;
            row r's new tokens are q[starts[r] : starts[r + 1]].
        keys, values: [pages, block_size, kv_heads, head_dim] like q; heads is a multiple of kv_heads. The stride of the
            first dimension is free.
        tables: [rows, max_blocks] int32 or int64, the pages of each row. Entries behind the last needed one may be
            anything.
        starts: [rows + 1] int32 or int64, ascending from 0 to tokens; a row may have no new token.
        totals: [rows] int32 or int64, positions of each row, at least as many as its new tokens.
        path: "reference" or "triton". The Triton path reads no number of a GPU, so it can be recorded in a CUDA graph.

    Returns:
        [tokens, heads, head_dim], contiguous, dtype of q.

    Raises:
        ValueError: a shape, dtype, stride or path is wrong. On a CPU also for wrong numbers in starts and totals, which
            on a GPU are trusted.
    """
    check_path("prefill_attention", path, q.dtype)
    check_pages(q, keys, values, tables)
    check_list("starts", starts, len(tables) + 1, q)
    check_list("totals", totals, len(tables), q)
    if q.device.type == "cpu":
        _check_rows(starts, totals, len(q))
    check_room("totals", totals, tables, keys.shape[1])
    if path == "reference":
        return _reference(q, keys, values, tables, starts, totals)
    from cs336_kernels.ops.triton.prefill_attention import prefill

    return prefill(q, keys, values, tables, starts, totals)


def _check_rows(starts: torch.Tensor, totals: torch.Tensor, tokens: int) -> None:
    new = starts.diff()
    if int(starts[0]) != 0 or int(starts[-1]) != tokens or bool((new < 0).any()):
        raise ValueError(f"starts are {starts.tolist()}, not ascending from 0 to {tokens}, the tokens of q")
    for row in (new > totals).nonzero().flatten().tolist():
        raise ValueError(f"row {row} has {int(new[row])} new tokens of {int(totals[row])} positions")


def _reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    totals: torch.Tensor,
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for table, (begin, end), total in zip(tables, pairwise(starts.tolist()), totals.tolist(), strict=True):
        positions = torch.arange(total, device=q.device)
        hidden = positions > positions[total - (end - begin) :].unsqueeze(1)
        k, v = gather(keys, table, total), gather(values, table, total)
        out[begin:end] = softmax_attention(q[begin:end], k, v, hidden)[0]
    return out
