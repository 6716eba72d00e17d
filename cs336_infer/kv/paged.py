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

from cs336_infer.models.attend import Attend
from cs336_infer.models.config import ModelConfig
from cs336_infer.types import InvalidRequest


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
    ) -> None:
        shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        try:
            self.data = torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError):  # torch's CPU allocator has no error class of its own
            size = math.prod(shape) * dtype.itemsize / 2**30
            raise InvalidRequest(
                f"{num_blocks} KV blocks of {block_size} tokens need {size:.3g} GiB, more than {device} has"
            ) from None
        self.block_size, self.fill = block_size, fill
        if fill is not None:
            self.data.fill_(fill)

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
        blocks = torch.cat([t[p // size] for t, p in zip(tables, places, strict=True)]).to(device)
        offsets = (flat % size).to(device)
        ends = torch.tensor([r.new for r in rows]).cumsum(0)
        self.last = (ends - 1).to(device)
        self._slots = blocks, offsets
        self._single = _Singles(rows, tables, ends, size, device)
        self._longer = [
            (int(end) - r.new, int(end), r, t.to(device))
            for end, r, t in zip(ends, rows, tables, strict=True)
            if r.new > 1
        ]

    def extend(self, new: int) -> Attend:
        if new != self.positions.shape[1]:
            raise ValueError(f"this step stores {self.positions.shape[1]} tokens, not {new}")
        data, single = self._memory.data, self._single

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = data[:, layer, 0], data[:, layer, 1]
            keys[self._slots] = k[0]
            values[self._slots] = v[0]
            out = torch.empty_like(q)
            for begin, end, row, table in self._longer:
                if row.past == 0:
                    mine = k[:, begin:end], v[:, begin:end]
                else:
                    mine = (_gathered(t, table)[:, : row.total] for t in (keys, values))
                past_and_new = (t.transpose(1, 2) for t in mine)
                out[:, begin:end] = attention(q[:, begin:end].transpose(1, 2), *past_and_new).transpose(1, 2)
            if single.count:
                out[0, single.columns] = single.attend(q[0, single.columns], keys, values)
            return out

        return attend


class _Singles:
    """The rows with one new token, together: their pages are gathered into one padded batch.

    What lies behind a row's end, the unwritten tail of its last block and the padding, is set to zero and masked: a
    mask alone does not hide a NaN, since 0 * NaN is NaN.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tables: Sequence[torch.Tensor],
        ends: torch.Tensor,
        block_size: int,
        device: torch.device,
    ) -> None:
        mine = [i for i, r in enumerate(rows) if r.new == 1]
        self.count = len(mine)
        if not mine:
            return
        self.columns = (ends[mine] - 1).to(device)
        widest = max(len(tables[i]) for i in mine)
        padded = [torch.cat((tables[i], tables[i][-1:].expand(widest - len(tables[i])))) for i in mine]
        self.tables = torch.cat(padded).to(device)
        totals = torch.tensor([rows[i].total for i in mine])
        longest = int(totals.max())
        self.width = longest
        hidden = torch.arange(longest) >= totals.unsqueeze(1)
        self.hidden = tuple(i.to(device) for i in hidden.nonzero(as_tuple=True)) if hidden.any() else None
        self.mask = (~hidden)[:, None, None].to(device) if self.hidden is not None else None

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q: [count, heads, head_dim] -> the same shape. keys, values: [num_blocks, block_size, kv_heads, head_dim]."""
        k, v = (_gathered(t, self.tables, self.count)[:, : self.width] for t in (keys, values))
        if self.hidden is not None:
            k[self.hidden] = 0
            v[self.hidden] = 0
        return attention(q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), self.mask).squeeze(2)


def _gathered(memory: torch.Tensor, blocks: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """A copy of the blocks of one layer, in order: [rows, tokens, kv_heads, head_dim]."""
    return memory.index_select(0, blocks).view(rows, -1, *memory.shape[2:])
