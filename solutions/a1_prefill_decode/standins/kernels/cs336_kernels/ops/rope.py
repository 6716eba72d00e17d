"""Rotary position embedding: here is your `rope`, once it is plugged in (`cs336_infer.course.plug`)."""

from __future__ import annotations

import torch


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What all layers need of the positions of one step.

    Args:
        positions: [batch, seq] integers >= 0.
        inv_freq: [head_dim / 2] float32, radians per position.
    """
    from cs336_infer.course import sockets

    return sockets.rope_tables(positions, inv_freq, dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, path: str = "reference") -> torch.Tensor:
    """Rotate x [batch, seq, heads, head_dim]; `cos` and `sin` are the two that `rope_tables` returned. Your function is
    the reference, and here there is no other path."""
    if path != "reference":
        raise ValueError(f"there is no path {path!r} here, only your own: reference")
    from cs336_infer.course import sockets

    return sockets.apply_rope(x, cos, sin)
