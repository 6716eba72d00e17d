"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import torch

from cs336_kernels.ops.checks import need_triton


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


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, path: str = "reference") -> torch.Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) by its position's angle.

    x * cos is rounded to the dtype; the second product is added to it in float32 and the sum rounded.

    Args:
        x: [batch, seq, heads, head_dim], float32, float16 or bfloat16. For "triton": any strides of the first three
            dimensions, head_dim even and at most 1024.
        cos, sin: from `rope_tables`, in the dtype of x; with batch 1 they serve every row of x.
        path: "reference" or "triton".

    Returns:
        A new tensor shaped like x.

    Raises:
        ValueError: an unknown path; a shape, dtype or stride the kernel does not take.
    """
    if path == "reference":
        return _reference(x, cos, sin)
    need_triton("apply_rope", path)
    from cs336_kernels.ops.triton import rope

    return rope.apply_rope(x, cos, sin)


def _reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
