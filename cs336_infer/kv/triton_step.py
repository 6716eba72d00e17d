"""A step over KV pages whose attention is a Triton kernel: nothing is gathered, pages are read where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cs336_kernels.ops import decode_attention, prefill_attention, write_kv
from cs336_kernels.ops.decode_attention import choose_splits

from cs336_infer.kv.paged import PagedKV, PagedStep, Row


class TritonStep(PagedStep):
    """One forward pass. When every row has one new token it is decoding, with the pages of a row split among programs;
    any longer row makes it prefill.

    Attributes:
        slots: [tokens] int64, block * block_size + place, where the new tokens' keys and values go.
        tables: [rows, blocks] int64, padded. totals: [rows] int64, positions after this step.
        splits: programs that share a row's pages when decoding.
    """

    def __init__(self, memory: PagedKV, rows: Sequence[Row]) -> None:
        super().__init__(memory, rows)
        device, size = memory.data.device, memory.block_size
        new = torch.tensor([r.new for r in rows])
        row_of = torch.repeat_interleave(torch.arange(len(rows)), new)
        places = self.positions[0].cpu()
        padded = torch.nn.utils.rnn.pad_sequence(self._tables, batch_first=True)
        self.slots = (padded[row_of, places // size] * size + places % size).to(device)
        self.decoding = bool((new == 1).all())
        self.tables = padded.to(device)
        self._starts = torch.nn.functional.pad(new.cumsum(0), (1, 0)).to(device)
        self.totals = torch.tensor([r.total for r in rows]).to(device)
        self.splits = choose_splits(max(r.total for r in rows), len(rows), memory.data.shape[4])

    def extend(self, new: int) -> TritonStep:
        if new != self.positions.shape[1]:
            raise ValueError(f"this step stores {self.positions.shape[1]} tokens, not {new}")
        return self

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store, then attend: `models.attend.Attend`."""
        write_kv(*self.pages_of(layer), k[0], v[0], self.slots, path="triton")
        return self.attend(layer, q[0]).unsqueeze(0)

    def pages_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer: views [blocks, block_size, kv_heads, head_dim] of the memory."""
        return self._memory.data[:, layer, 0], self._memory.data[:, layer, 1]

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention over what is stored, the new tokens included; q and result [tokens, heads, head_dim]."""
        keys, values = self.pages_of(layer)
        if self.decoding:
            return decode_attention(q, keys, values, self.tables, self.totals, self.splits, path="triton")
        return prefill_attention(q, keys, values, self.tables, self._starts, self.totals, path="triton")
