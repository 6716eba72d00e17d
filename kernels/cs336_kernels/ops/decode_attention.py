"""Attention of one new token a row over KV pages, with each row's pages split among several programs."""

from __future__ import annotations

import math

import torch

from cs336_kernels.ops.kv_pages import (
    MOST_HEAD_DIM,
    check_list,
    check_pages,
    check_path,
    check_room,
    gather,
    softmax_attention,
)

PROGRAMS = 264  # two for each of the 132 multiprocessors of an H100 or H200
SHORTEST_SPLIT = 256
"""Positions. Writing and reading the partial results of g query heads in float32 then adds g / 128 to the bytes of
bfloat16 keys and values: 3 % for a group of 4."""
MOST_SPLITS = 1024


def choose_splits(longest: int, rows: int, kv_heads: int) -> int:
    """How many programs share the pages of a row: as many as fill the GPU, none with less than 256 positions of the
    longest row.

    Args:
        longest: positions of the longest row. rows: in the batch, >= 1.
    """
    return max(1, min(math.ceil(PROGRAMS / (rows * kv_heads)), longest // SHORTEST_SPLIT))


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    splits: int | None = None,
    path: str = "reference",
) -> torch.Tensor:
    """Attention of one query a row over the row's positions 0 to length - 1, split along the positions.

    Flash-Decoding (Dao, Haziza, Massa and Sizov 2023): the pages of a row are dealt to `splits` programs, each of which
    writes its own softmax average and the logarithm of its sum of exponentials; a second launch merges them
    (`merge_attention`). A program serves all query heads of a KV head, so each key and value is read once.

    Scores, softmax and sums are float32; weights are rounded to the dtype of the values for the second product, and the
    result once. With one split there is nothing to merge.

    Args:
        q: [rows, heads, head_dim], float32, float16 or bfloat16 (the reference also takes float64), head_dim <= 256.
        keys, values: [pages, block_size, kv_heads, head_dim] like q; heads is a multiple of kv_heads. The stride of the
            first dimension is free.
        tables: [rows, max_blocks] int32 or int64, the pages of each row. Entries behind the last needed one may be
            anything.
        lengths: [rows] int32 or int64, positions of each row; a row with 0 gives zeros.
        splits: 1 to 1024. A split gets whole pages, ceil(pages / splits) of them; the last ones may get none. None
            means `choose_splits` of the longest row, whose length is read from the device: say a number in CUDA graphs.
        path: "reference" or "triton".

    Returns:
        [rows, heads, head_dim], contiguous, dtype of q.

    Raises:
        ValueError: a shape, dtype, stride, path or number of splits is wrong. On a CPU also for a row that is longer
            than its table; the lengths of a GPU are trusted.
    """
    check_path("decode_attention", path, q.dtype)
    check_pages(q, keys, values, tables)
    check_list("lengths", lengths, len(q), q)
    if len(tables) != len(q):
        raise ValueError(f"tables have {len(tables)} rows, not {len(q)} like q")
    check_room("lengths", lengths, tables, keys.shape[1])
    if splits is None:
        splits = choose_splits(int(lengths.max()), len(q), keys.shape[2]) if len(q) else 1
    if not 1 <= splits <= MOST_SPLITS:
        raise ValueError(f"splits is {splits}, not 1 to {MOST_SPLITS}")
    if path == "reference":
        return _reference(q, keys, values, tables, lengths, splits)
    from cs336_kernels.ops.triton.decode_attention import decode

    return decode(q, keys, values, tables, lengths, splits)


def merge_attention(
    partials: torch.Tensor, lse: torch.Tensor, path: str = "reference", dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Attention over all positions, from attention over parts of them: sum of exp(lse - LSE) partials, where LSE is the
    logarithm of the sum of all exp(lse).

    Args:
        partials: [rows, heads, splits, head_dim] contiguous, float32 (the reference also takes float64), head_dim <=
            256. What is in a part of no positions is not used.
        lse: [rows, heads, splits] like partials, natural logarithms; -inf for a part of no positions. If all are, the
            result is zeros.
        path: "reference" or "triton". dtype: of the result; None means that of partials.

    Returns:
        [rows, heads, head_dim], contiguous.

    Raises:
        ValueError: a shape, dtype, stride or path is wrong.
    """
    check_path("merge_attention", path, torch.float32)
    known = (torch.float32,) if path == "triton" else (torch.float32, torch.float64)
    if partials.dtype not in known or lse.dtype != partials.dtype:
        raise ValueError(f"partials are {partials.dtype} and lse {lse.dtype}, not both {' or '.join(map(str, known))}")
    if partials.dim() != 4 or lse.shape != partials.shape[:3]:
        raise ValueError(
            f"partials are {list(partials.shape)} and lse {list(lse.shape)}, "
            "not [rows, heads, splits, head_dim] and [rows, heads, splits]"
        )
    splits, head_dim = partials.shape[2:]
    if not 1 <= splits <= MOST_SPLITS or not 1 <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"{splits} splits of head_dim {head_dim}, not 1 to {MOST_SPLITS} of 1 to {MOST_HEAD_DIM}")
    if not (partials.is_contiguous() and lse.is_contiguous()):
        raise ValueError(f"partials have strides {partials.stride()} and lse {lse.stride()}, which are not contiguous")
    if partials.device != lse.device:
        raise ValueError(f"lse is on {lse.device}, not on {partials.device} like partials")
    if path == "reference":
        return _merge(partials, lse).to(dtype or partials.dtype)
    from cs336_kernels.ops.triton.decode_attention import merge

    return merge(partials, lse, dtype or partials.dtype)


def _reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    splits: int,
) -> torch.Tensor:
    rows, heads, head_dim = q.shape
    work = torch.promote_types(q.dtype, torch.float32)
    partials = torch.zeros(rows, heads, splits, head_dim, dtype=work, device=q.device)
    lse = torch.full((rows, heads, splits), -torch.inf, dtype=work, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        k, v = gather(keys, tables[row], length), gather(values, tables[row], length)
        share = math.ceil(math.ceil(length / keys.shape[1]) / splits) * keys.shape[1]
        for split in range(splits):
            mine = slice(split * share, (split + 1) * share)
            if len(k[mine]):
                out, weight = softmax_attention(q[row : row + 1], k[mine], v[mine])
                partials[row, :, split], lse[row, :, split] = out[0], weight[0]
    return _merge(partials, lse).to(q.dtype)


def _merge(partials: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    nothing = lse == -torch.inf
    weights = lse.softmax(-1).masked_fill(nothing, 0)  # the softmax of nothing but -inf is NaN
    return (partials.masked_fill(nothing.unsqueeze(-1), 0) * weights.unsqueeze(-1)).sum(2)
