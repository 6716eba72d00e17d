"""Rows of a step with one new token, the whole of decoding: how their attention reads the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from cs336_kernels.ops import attention

if TYPE_CHECKING:
    from cs336_infer.kv.paged import PagedKV, Row

GROUP_BYTES = 1 << 20  # of the keys of a group of rows in one layer
GROUP_FILL = 0.8  # the shortest row of a group has at least this share of the blocks of its longest

Single = tuple[int, "Row", torch.Tensor]
"""A row with one new token: its column in the flat batch, and its table."""


class Group(Protocol):
    """Some of these rows."""

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """Fill their columns of `out`.

        Args:
            q, out: [1, tokens, heads, head_dim]. keys, values: as `PagedKV.layer` gives them.
        """
        ...


def groups_of(memory: PagedKV, singles: list[Single]) -> list[Group]:
    """All rows, in as many groups as suits the kernels."""
    if not singles:
        return []
    if memory.attention == "native":
        return [Native(memory, singles)]
    groups = _alike(singles, memory)
    most = max(len(group) * len(group[0][2]) for group in groups)
    scratch = memory.data.new_empty((2, most, memory.page))
    return [Gathered(memory, group, scratch) for group in groups]


def _alike(singles: list[Single], memory: PagedKV) -> list[list[Single]]:
    """Rows in groups of nearly equal length: little padding, and pages that stay in the cache while they are used."""
    groups: list[list[Single]] = []
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


class Native:
    """For the C++ kernel, which needs neither a copy of the pages nor a mask."""

    def __init__(self, memory: PagedKV, rows: list[Single]) -> None:
        self._page_shape = memory.data.shape[3:]
        self._columns = torch.tensor([column for column, _, _ in rows])
        self._pages = memory.pages(torch.nn.utils.rnn.pad_sequence([t for _, _, t in rows], batch_first=True))
        self._totals = torch.tensor([r.total for _, r, _ in rows])

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        from cs336_kernels.native import paged_attention

        keys, values = (t[: len(values)].view(-1, *self._page_shape) for t in (keys, values))
        mixed = paged_attention(q[0, self._columns], keys, values, self._pages, self._totals)
        out[0].index_copy_(0, self._columns, mixed)


class Gathered:
    """Their pages are gathered into one padded batch.

    What lies behind a row's end, the unwritten tail of its last block and the padding, is set to zero and masked: a
    mask alone does not hide a NaN, since 0 * NaN is NaN.

    Args:
        scratch: [2, pages at least, page], for keys and values: fresh memory for every layer would cost more than the
            copy, in page faults.
    """

    def __init__(self, memory: PagedKV, rows: list[Single], scratch: torch.Tensor) -> None:
        device = memory.data.device
        self._columns = torch.tensor([column for column, _, _ in rows]).to(device)
        tables = torch.nn.utils.rnn.pad_sequence([t for _, _, t in rows], batch_first=True)
        self._pages = memory.pages(tables.flatten()).to(device)
        self._scratch = scratch[:, : len(self._pages)]
        totals = torch.tensor([r.total for _, r, _ in rows])
        self._shape = len(rows), tables.shape[1] * memory.block_size
        self._width = int(totals.max())
        places = torch.arange(self._shape[1])
        hidden = (places >= totals.unsqueeze(1)) & (places < self._width)
        self._hidden = hidden.flatten().nonzero().squeeze(1).to(device) if hidden.any() else None
        self._mask = None if self._hidden is None else ~hidden[:, None, None, : self._width].to(device)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        mine = q[0, self._columns].unsqueeze(2)
        past_k, past_v = (
            self.gather(t, s).unflatten(-1, (-1, q.shape[3])).transpose(1, 2)
            for t, s in zip((keys, values), self._scratch, strict=True)
        )
        out[0].index_copy_(0, self._columns, attention(mine, past_k, past_v, self._mask).squeeze(2))

    def gather(self, pages: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Of the keys or values of a layer: [rows, width, kv_heads * head_dim]."""
        torch.index_select(pages, 0, self._pages, out=scratch)
        if self._hidden is not None:
            scratch.view(self._shape[0] * self._shape[1], -1).index_fill_(0, self._hidden, 0)
        return scratch.view(*self._shape, -1)[:, : self._width]
