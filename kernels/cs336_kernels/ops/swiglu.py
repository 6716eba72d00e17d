"""SwiGLU's elementwise half (Shazeer 2020): silu(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [..., 2 * n], the gate in the first half. Returns [..., n]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
