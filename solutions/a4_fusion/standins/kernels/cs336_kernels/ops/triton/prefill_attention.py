"""Attention of a prompt over pages. Its kernel would give away yours, so this package has PyTorch here."""

from __future__ import annotations

import torch
from cs336_kernels.ops import prefill_attention


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    totals: torch.Tensor,
) -> torch.Tensor:
    """Arguments and result as in `prefill_attention`, checked there."""
    return prefill_attention(q, keys, values, tables, starts, totals)
