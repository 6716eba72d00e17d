"""Paged KV memory: blocks of a few tokens each, found through a table per sequence (Kwon et al. 2023, PagedAttention).

All blocks lie in one tensor, and a block is one contiguous piece of it with the keys and values of every layer, so that
moving a block to another tier is one copy. A step runs a *flat* batch: the new tokens of all sequences in one row, one
sequence behind the other, however many each has.

Slots that were not written are never read into a result: they may hold NaN (`fill`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cs336_kernels.ops import attention

from cs336_infer.devices import advise_huge_pages
from cs336_infer.kv.singles import groups_of
from cs336_infer.models.attend import Attend
from cs336_infer.models.config import ModelConfig
from cs336_infer.types import InvalidRequest

ATTENTION = {"cpu": "native", "triton": "triton", "fused": "triton", "graph": "triton"}
"""Which kernels read the pages, by the rung of the model; all others leave it to torch."""


@dataclass(frozen=True)
class Row:
    """A sequence's part of a step: token i of the sequence is in slot i % block_size of block table[i // block_size].

    `past` tokens are stored already, `new` ones (>= 1) are computed and stored by this step.
    """

    table: Sequence[int]
    past: int
    new: int

    @property
    def total(self) -> int:
        return self.past + self.new


class PagedKV:
    """Memory for `num_blocks` blocks of `block_size` tokens.

    Args:
        fill: what fresh and recycled blocks are filled with, for tests; None leaves what was there.
        attention: which kernels read the pages: "torch", "native" (C++, of rows with one new token) or "triton".

    Attributes:
        data: [num_blocks, layers, 2 (K, V), block_size, kv_heads, head_dim].
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        fill: float | None = None,
        attention: str = "torch",
    ) -> None:
        shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        try:
            self.data = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError):  # torch's CPU allocator has no error class of its own
            size = math.prod(shape) * dtype.itemsize / 2**30
            raise InvalidRequest(
                f"{num_blocks} KV blocks of {block_size} tokens need {size:.3g} GiB, more than {device} has"
            ) from None
        advise_huge_pages(self.data)
        self.block_size, self.fill, self.attention = block_size, fill, attention
        if fill is not None:
            self.data.fill_(fill)

    @property
    def page(self) -> int:
        """Numbers in a page: the keys, or the values, of a block in one layer."""
        return self.data[0, 0, 0].numel()

    def pages(self, blocks: torch.Tensor) -> torch.Tensor:
        """Where the pages of these blocks are in `layer`."""
        return blocks * (self.data.shape[1] * 2)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer: views [pages, page] of the memory that begin with this layer's page of block 0,
        so that the same indices serve every layer. Index rows of one contiguous matrix are moved the fastest way."""
        flat = self.data.view(-1, self.page)
        return flat[2 * layer :], flat[2 * layer + 1 :]

    @property
    def block_bytes(self) -> int:
        return self.data[0].nbytes

    def bytes_of(self, block: int) -> torch.Tensor:
        """The memory of a block, [block_bytes] uint8; writing to it changes the block."""
        return self.data[block].view(-1).view(torch.uint8)

    def copy(self, source: int, target: int) -> None:
        """Copy-on-write: `target` gets all that `source` holds."""
        self.data[target] = self.data[source]

    def recycle(self, blocks: Sequence[int]) -> None:
        """These blocks have a new owner; with `fill`, nothing of the old one's numbers is left."""
        if self.fill is not None:
            for block in blocks:
                self.data[block] = self.fill

    def step(self, rows: Sequence[Row]) -> PagedStep:
        """The cache of one forward pass over the new tokens of `rows`, in their order."""
        if self.attention == "triton":
            from cs336_infer.kv.triton_step import TritonStep  # Triton has wheels for Linux only

            return TritonStep(self, rows)
        return PagedStep(self, rows)


class PagedStep:
    """One forward pass, with attention by torch or, for rows with one new token, in C++:
    `Llama.forward(tokens [1, all new tokens], positions, step, at=step.last)`.

    Attributes:
        positions: [1, all new tokens] int64. last: [rows] int64, the column of each row's newest token.
    """

    length = 0

    def __init__(self, memory: PagedKV, rows: Sequence[Row]) -> None:
        self._memory = memory
        size, device = memory.block_size, memory.data.device
        places = [torch.arange(r.past, r.total) for r in rows]
        tables = self._tables = [torch.tensor(r.table[: math.ceil(r.total / size)]) for r in rows]
        flat = torch.cat(places)
        self.positions = flat.unsqueeze(0).to(device)
        blocks = torch.cat([t[p // size] for t, p in zip(tables, places, strict=True)])
        self._slots = (memory.pages(blocks) * size + flat % size).to(device)
        self._rows, self._ends = rows, torch.tensor([r.new for r in rows]).cumsum(0)
        self.last = (self._ends - 1).to(device)

    def extend(self, new: int) -> Attend:
        if new != self.positions.shape[1]:
            raise ValueError(f"this step stores {self.positions.shape[1]} tokens, not {new}")
        memory, width = self._memory, self._memory.page // self._memory.block_size
        parts = list(zip(self._ends.tolist(), self._rows, self._tables, strict=True))
        singles = groups_of(memory, [(end - 1, row, table) for end, row, table in parts if row.new == 1])
        longer = [
            (end - row.new, end, row, memory.pages(table).to(memory.data.device))
            for end, row, table in parts
            if row.new > 1
        ]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = memory.layer(layer)
            for mine, fresh in ((keys, k), (values, v)):
                mine.view(-1, width).index_copy_(0, self._slots, fresh.reshape(-1, width))
            out = torch.empty_like(q)
            for begin, end, row, pages in longer:
                if row.past == 0:
                    mine = k[:, begin:end], v[:, begin:end]
                else:
                    mine = (t[pages].view(1, -1, *k.shape[2:])[:, : row.total] for t in (keys, values))
                past_and_new = (t.transpose(1, 2) for t in mine)
                out[:, begin:end] = attention(q[:, begin:end].transpose(1, 2), *past_and_new).transpose(1, 2)
            for group in singles:
                group.attend(q, keys, values, out)
            return out

        return attend
