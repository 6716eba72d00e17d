"""Launches of assignment 4's attention: a batch over pages, its splits, and their merger."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from cs336_infer.course.kernel_cases import Case, next_power, normal, padded


def split_attention(
    rng: np.random.Generator,
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    splits: int,
    block_size: int = 4,
    block_n: int = 8,
    dtype: str = "float32",
    fill: float = math.nan,
    scale_of_q: float = 2.0,
) -> Case:
    """Rows of these lengths. Slots behind a row's end, pages of nobody, and entries of the table behind the last page
    that is needed hold `fill`, or numbers that lead outside."""
    rows, needed = len(lengths), [-(-n // block_size) for n in lengths]
    pages, most = sum(needed) + 2, max(*needed, 1) + 1
    width, step = kv_heads * head_dim, block_size * kv_heads * head_dim + 6
    order = iter(rng.permutation(pages).tolist())
    tables = torch.full((rows, most), 10**9, dtype=torch.int64)
    memory = {}
    q = normal(rng, (rows, heads, head_dim), dtype, scale_of_q)
    kv = {name: [normal(rng, (n, kv_heads, head_dim), dtype) for n in lengths] for name in ("keys", "values")}
    for row, count in enumerate(needed):
        tables[row, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int64)
    for name, rows_of in kv.items():
        memory[name] = torch.full((pages, step), fill, dtype=q.dtype)
        for row, numbers in enumerate(rows_of):
            for place, one in enumerate(numbers):
                begin = place % block_size * width
                memory[name][tables[row, place // block_size], begin : begin + width] = one.flatten()
    scale = head_dim**-0.5
    parts = torch.zeros(rows, heads, splits, head_dim, dtype=torch.float64)
    lse = torch.full((rows, heads, splits), -math.inf, dtype=torch.float64)
    for row, length in enumerate(lengths):
        share = -(-needed[row] // splits) * block_size
        for split in range(splits):
            mine = slice(split * share, min((split + 1) * share, length))
            k, v = (kv[name][row][mine].double() for name in ("keys", "values"))
            if len(k):
                k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
                scores = torch.einsum("hd,nhd->hn", q[row].double(), k) * scale
                lse[row, :, split] = scores.logsumexp(1)
                parts[row, :, split] = torch.einsum("hn,nhd->hd", scores.softmax(1), v)
    empty = lse == -math.inf
    outputs = {
        "partials": {"shape": [rows, heads, splits, head_dim], "dtype": "float32"},
        "lse": {"shape": [rows, heads, splits], "dtype": "float32"},
    }
    shapes = "ragged" if len(set(lengths)) > 1 else "equal"
    read = 2 * sum(lengths) * width + rows * heads * head_dim
    return Case(
        "split_attention_kernel",
        (rows, kv_heads, splits),
        {
            **outputs,
            "q": padded(q.flatten(1), 3, fill),
            **memory,
            "tables": tables,
            "lengths": torch.tensor(lengths, dtype=torch.int64),
        },
        {"step_q": heads * head_dim + 3, "step_keys": step, "step_values": step, "step_table": most, "scale": scale},
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_G": next_power(heads // kv_heads),
            "BLOCK_N": block_n,
            "BLOCK_D": next_power(head_dim),
        },
        {"partials": (parts, parts.float()), "lse": (lse, lse.float())},
        q.element_size() * read + 8 * (sum(needed) + rows) + 4 * (parts.numel() + lse.numel()),
        f"{rows} {shapes} rows {list(lengths)}, {heads}/{kv_heads} heads of {head_dim}, {splits} splits, in {dtype}",
        {"partials": lambda t: torch.where(empty[..., None], torch.zeros_like(t), t)},
    )


def merge(
    rng: np.random.Generator,
    rows: int,
    splits: int,
    head_dim: int,
    dtype: str = "float32",
    fill: float = math.nan,
    empty: float = 0.3,
) -> Case:
    """`rows` rows and heads; a share `empty` of the parts has no positions, and holds `fill`. The first row has only
    such parts when there are any."""
    parts = normal(rng, (rows, splits, head_dim), "float32")
    lse = normal(rng, (rows, splits), "float32", 3.0) + normal(rng, (rows, 1), "float32", 60.0)
    nothing = torch.from_numpy(rng.random((rows, splits)) < empty)
    nothing[0] = empty > 0
    lse[nothing] = -math.inf
    weights = lse.double().softmax(1).masked_fill(nothing, 0)
    oracle = (weights[..., None] * parts.double()).sum(1)
    parts[nothing] = fill
    kind = getattr(torch, dtype)
    return Case(
        "merge_kernel",
        (rows,),
        {"out": {"shape": [rows, head_dim], "dtype": dtype}, "partials": parts, "lse": lse},
        {"splits": splits},
        {"HEAD_DIM": head_dim, "BLOCK_S": next_power(splits), "BLOCK_D": next_power(head_dim)},
        {"out": (oracle, oracle.float().to(kind))},
        4 * (int((~nothing).sum()) * head_dim + lse.numel()) + oracle.numel() * kind.itemsize,
        f"{rows} rows, {splits} parts of {head_dim}, {int(nothing.sum())} of them empty, in {dtype}",
    )
