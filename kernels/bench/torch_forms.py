"""What one would write with torch in place of a kernel: the reference op, except where that is made to be read."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from cs336_kernels.calls import Arguments
from cs336_kernels.catalogue import Op


def torch_form(op: Op, arguments: Arguments) -> partial[Any]:
    """A call without arguments; `.func` and `.keywords` are for torch.compile."""
    if op.name == "decode_attention":
        return partial(decode, **{name: value for name, value in arguments.items() if name != "splits"})
    if op.name == "prefill_attention":
        # A server knows these numbers on the host; reading them from the GPU in a call would be waiting for it.
        rest = {name: arguments[name] for name in ("q", "keys", "values", "tables")}
        return partial(prefill, **rest, starts=arguments["starts"].tolist(), totals=arguments["totals"].tolist())
    return partial(op.call, **arguments)


def decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Gather the pages of all rows, padded to the longest, and attend with a mask.

    Arguments and result as in `decode_attention`. Padding is set to zero: a mask does not hide a NaN.
    """
    places = torch.arange(tables.shape[1] * keys.shape[1], device=q.device)
    seen = places < lengths.unsqueeze(1)
    k, v = (
        torch.where(seen[..., None, None], pages[tables.clamp(min=0)].flatten(1, 2), 0).transpose(1, 2)
        for pages in (keys, values)
    )
    mask = seen[:, None, None]
    return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, attn_mask=mask, enable_gqa=True).squeeze(2)


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    starts: list[int],
    totals: list[int],
) -> torch.Tensor:
    """Row after row: gather its pages, attend with a mask. Arguments and result as in `prefill_attention`."""
    out = torch.empty_like(q)
    for row, total in enumerate(totals):
        mine = slice(starts[row], starts[row + 1])
        new, used = mine.stop - mine.start, -(-total // keys.shape[1])
        k, v = (pages[tables[row, :used]].flatten(0, 1)[:total].transpose(0, 1)[None] for pages in (keys, values))
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        mixed = F.scaled_dot_product_attention(q[mine].transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)
        out[mine] = mixed[0].transpose(0, 1)
    return out
