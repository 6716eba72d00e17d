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
from cs336_kernels.native import paged_attention
from cs336_kernels.ops import attention

from cs336_infer.models.attend import Attend
from cs336_infer.models.config import ModelConfig
from cs336_infer.types import InvalidRequest

GROUP_BYTES = 1 << 20  # of the keys of a group of rows in one layer
GROUP_FILL = 0.8  # the shortest row of a group has at least this share of the blocks of its longest


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


_Single = tuple[int, Row, torch.Tensor]
"""A row with one new token: its column in the flat batch, and its table."""


class PagedKV:
    """Memory for `num_blocks` blocks of `block_size` tokens.

    Args:
        fill: what fresh and recycled blocks are filled with, for tests; None leaves what was there.
        native: attention of rows with one new token in C++, which reads the pages where they are.

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
        native: bool = False,
    ) -> None:
        shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        try:
            self.data = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError):  # torch's CPU allocator has no error class of its own
            size = math.prod(shape) * dtype.itemsize / 2**30
            raise InvalidRequest(
                f"{num_blocks} KV blocks of {block_size} tokens need {size:.3g} GiB, more than {device} has"
            ) from None
        self.block_size, self.fill, self.native = block_size, fill, native
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
        return PagedStep(self, rows)


class PagedStep:
    """One forward pass: `Llama.forward(tokens [1, all new tokens], positions, step, at=step.last)`.

    Attributes:
        positions: [1, all new tokens] int64. last: [rows] int64, the column of each row's newest token.
    """

    length = 0

    def __init__(self, memory: PagedKV, rows: Sequence[Row]) -> None:
        self._memory = memory
        size, device = memory.block_size, memory.data.device
        places = [torch.arange(r.past, r.total) for r in rows]
        tables = [torch.tensor(r.table[: math.ceil(r.total / size)]) for r in rows]
        flat = torch.cat(places)
        self.positions = flat.unsqueeze(0).to(device)
        blocks = torch.cat([t[p // size] for t, p in zip(tables, places, strict=True)])
        self._slots = (memory.pages(blocks) * size + flat % size).to(device)
        ends = torch.tensor([r.new for r in rows]).cumsum(0)
        self.last = (ends - 1).to(device)
        singles = [(int(e) - 1, r, t) for e, r, t in zip(ends, rows, tables, strict=True) if r.new == 1]
        self._native = _Native(memory, singles) if memory.native and singles else None
        self._singles = [] if memory.native else [_Singles(memory, group) for group in _alike(singles, memory)]
        self._longer = [
            (int(end) - r.new, int(end), r, memory.pages(t).to(device))
            for end, r, t in zip(ends, rows, tables, strict=True)
            if r.new > 1
        ]
        most = max((len(s.pages) for s in self._singles), default=0)
        self._scratch = memory.data.new_empty((2, most, memory.page))

    def extend(self, new: int) -> Attend:
        if new != self.positions.shape[1]:
            raise ValueError(f"this step stores {self.positions.shape[1]} tokens, not {new}")
        memory, width = self._memory, self._memory.page // self._memory.block_size

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = memory.layer(layer)
            for mine, fresh in ((keys, k), (values, v)):
                mine.view(-1, width).index_copy_(0, self._slots, fresh.reshape(-1, width))
            out = torch.empty_like(q)
            for begin, end, row, pages in self._longer:
                if row.past == 0:
                    mine = k[:, begin:end], v[:, begin:end]
                else:
                    mine = (t[pages].view(1, -1, *k.shape[2:])[:, : row.total] for t in (keys, values))
                past_and_new = (t.transpose(1, 2) for t in mine)
                out[:, begin:end] = attention(q[:, begin:end].transpose(1, 2), *past_and_new).transpose(1, 2)
            if self._native is not None:
                self._native.attend(q, keys, values, out)
            for group in self._singles:
                past_k, past_v = (
                    group.gather(t, s).unflatten(-1, k.shape[2:]).transpose(1, 2)
                    for t, s in zip((keys, values), self._scratch, strict=True)
                )
                mixed = attention(q[0, group.columns].unsqueeze(2), past_k, past_v, group.mask)
                out[0].index_copy_(0, group.columns, mixed.squeeze(2))
            return out

        return attend


def _alike(singles: list[_Single], memory: PagedKV) -> list[list[_Single]]:
    """Rows in groups of nearly equal length: little padding, and pages that stay in the cache while they are used."""
    groups: list[list[_Single]] = []
    for single in sorted(singles, key=lambda s: -len(s[2])):
        if groups:
            widest = len(groups[-1][0][2])
            page_bytes = memory.page * memory.data.itemsize
            fits = (len(groups[-1]) + 1) * widest * page_bytes <= GROUP_BYTES
            if fits and len(single[2]) >= GROUP_FILL * widest:
                groups[-1].append(single)
                continue
        groups.append([single])
    return groups


class _Native:
    """Rows with one new token for the C++ kernel, which needs neither a copy of their pages nor a mask."""

    def __init__(self, memory: PagedKV, rows: list[_Single]) -> None:
        self._page_shape = memory.data.shape[3:]
        self._columns = torch.tensor([column for column, _, _ in rows])
        self._pages = memory.pages(torch.nn.utils.rnn.pad_sequence([t for _, _, t in rows], batch_first=True))
        self._totals = torch.tensor([r.total for _, r, _ in rows])

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """q, out: [1, tokens, heads, head_dim]. keys, values: as `PagedKV.layer` gives them."""
        keys, values = (t[: len(values)].view(-1, *self._page_shape) for t in (keys, values))
        mixed = paged_attention(q[0, self._columns], keys, values, self._pages, self._totals)
        out[0].index_copy_(0, self._columns, mixed)


class _Singles:
    """Rows with one new token, together: their pages are gathered into one padded batch.

    What lies behind a row's end, the unwritten tail of its last block and the padding, is set to zero and masked: a
    mask alone does not hide a NaN, since 0 * NaN is NaN.

    Attributes:
        columns: [rows] int64, where their tokens are. mask: [rows, 1, 1, width] bool, None when equally long.
    """

    def __init__(self, memory: PagedKV, rows: Sequence[_Single]) -> None:
        device = memory.data.device
        self.columns = torch.tensor([column for column, _, _ in rows]).to(device)
        tables = torch.nn.utils.rnn.pad_sequence([t for _, _, t in rows], batch_first=True)
        self.pages = memory.pages(tables.flatten()).to(device)
        totals = torch.tensor([r.total for _, r, _ in rows])
        self._shape = len(rows), tables.shape[1] * memory.block_size
        self._width = int(totals.max())
        places = torch.arange(self._shape[1])
        hidden = (places >= totals.unsqueeze(1)) & (places < self._width)
        self._hidden = hidden.flatten().nonzero().squeeze(1).to(device) if hidden.any() else None
        self.mask = None if self._hidden is None else ~hidden[:, None, None, : self._width].to(device)

    def gather(self, pages: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """pages: of the keys or values of a layer; scratch: [>= its pages, page]. Returns [rows, width, kv_heads *
        head_dim] in `scratch`: fresh memory for every layer would cost more than the copy, in page faults."""
        mine = scratch[: len(self.pages)]
        torch.index_select(pages, 0, self.pages, out=mine)
        if self._hidden is not None:
            mine.view(self._shape[0] * self._shape[1], -1).index_fill_(0, self._hidden, 0)
        return mine.view(*self._shape, -1)[:, : self._width]
