"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import torch


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and signed sine of every position's angles, made once per step and used by all layers.

    Args:
        positions: [batch, seq] integers >= 0.
        inv_freq: [head_dim / 2] float32, radians per position.

    Returns:
        cos, sin: [batch, seq, 1, head_dim] in `dtype`. The first half of `sin` is negated, so that rotating is
        `x * cos + roll(x, head_dim / 2) * sin`.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).unsqueeze(2).to(dtype), torch.cat((-sin, sin), -1).unsqueeze(2).to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) by its position's angle.

    Args:
        x: [batch, seq, heads, head_dim].
        cos, sin: from `rope_tables`.

    Returns:
        A new tensor shaped like x.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
