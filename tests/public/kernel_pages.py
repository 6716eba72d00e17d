"""Rows of KV pages for the tests of the attention kernels, where all that nobody may read holds a fill."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

LAYERS, LAYER, SPARE = 3, 1, 3  # layers of the memory, the one under test, and pages and table entries of nobody
JUNK = (-1, 2**31 - 1, -(2**31))  # table entries behind the last needed one; to follow one ends the process


@dataclass(frozen=True)
class Pages:
    """Pages as the engine has them, and the same keys and values row by row, which is what the oracle sees.

    Attributes:
        keys, values: [pages, block_size, kv_heads, head_dim], views of one memory of all layers.
        tables: [rows, max_blocks + spare], a view of something wider.
        rows: for each row its k and v, [length, kv_heads, head_dim].
    """

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    rows: list[tuple[torch.Tensor, torch.Tensor]]


def pages(
    lengths: Sequence[int],
    *,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    fill: float = math.nan,
    seed: int = 0,
    index: torch.dtype = torch.int32,
) -> Pages:
    """Rows of these lengths, in pages dealt at random. What is stored depends on the seed, not on the fill."""
    rng = torch.Generator().manual_seed(seed)
    needed = [math.ceil(n / block_size) for n in lengths]
    order = torch.randperm(sum(needed) + SPARE, generator=rng).tolist()
    shape = (len(order), LAYERS, 2, block_size, kv_heads, head_dim)
    data = torch.full(shape, fill, dtype=dtype)
    keys, values = data[:, LAYER, 0], data[:, LAYER, 1]
    junk = JUNK[0] if math.isnan(fill) else JUNK[1] if fill > 0 else JUNK[2]
    tables = torch.full((len(lengths), max(needed, default=0) + 2 * SPARE), junk, dtype=index)[:, :-SPARE]
    rows = []
    for row, (length, blocks) in enumerate(zip(lengths, needed, strict=True)):
        mine = [order.pop() for _ in range(blocks)]
        tables[row, :blocks] = torch.tensor(mine, dtype=index)
        k, v = (torch.randn(length, kv_heads, head_dim, generator=rng).to(dtype) for _ in range(2))
        for position in range(length):
            page, slot = mine[position // block_size], position % block_size
            keys[page, slot], values[page, slot] = k[position], v[position]
        rows.append((k, v))
    return Pages(keys, values, tables, rows)


def queries(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, fill: float, seed: int = 1) -> torch.Tensor:
    """[tokens, heads, head_dim], a part of wider rows. Scores have a standard deviation of 2: weights differ widely."""
    wide = torch.full((tokens, (heads + 2) * head_dim), fill, dtype=dtype)
    q = wide[:, : heads * head_dim].view(tokens, heads, head_dim)
    q.copy_(2 * torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(seed)))
    return q


def oracle(q: torch.Tensor, row: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Attention of one row's new tokens in float64 by torch, which never sees a page. [new, heads, head_dim]."""
    new, (k, v) = len(q), row
    if len(k) == 0 or new == 0:
        return torch.zeros(q.shape, dtype=torch.float64)
    mask = torch.ones(new, len(k), dtype=torch.bool).tril(len(k) - new)
    by_head = (t.double().transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return F.scaled_dot_product_attention(*by_head, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Inside, `torch.empty` gives NaN, so that a result or scratch that was not written shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)
