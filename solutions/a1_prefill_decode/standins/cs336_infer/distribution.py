"""The distribution a token is drawn from: your `next_token_distribution`, once it is plugged in."""

from __future__ import annotations

import torch

from cs336_infer.types import SamplingParams


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """logits: [vocab] float32 -> [vocab] float64, sums to 1."""
    from cs336_infer.course import sockets

    return sockets.probabilities(logits, params)
