"""The distribution a token is drawn from."""

from __future__ import annotations

import torch

from cs336_infer.types import SamplingParams


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution a token is drawn from: temperature, then top-k, top-p and min-p, each on what is left.

    Args:
        logits: [vocab] float32.

    Returns:
        [vocab] float64, sums to 1; dropped tokens have probability 0. Of equal logits at the edge of top-k or top-p the
        first stay.
    """
    scaled = logits.double()
    p = ((scaled - scaled.max()) / params.temperature).softmax(-1)
    if params.top_k is not None and params.top_k < len(p):
        p = _only(p, scaled, params.top_k)
    if params.top_p < 1:
        p = p / p.sum()
        p = _only(p, scaled, _nucleus(p, params.top_p))
    if params.min_p > 0:
        p = torch.where(p >= params.min_p * p.max(), p, 0.0)
    return p / p.sum()


def _nucleus(p: torch.Tensor, top_p: float) -> int:
    """How many of the most probable tokens it takes for their sum to reach top_p.

    Few tokens nearly always suffice, and finding them is much cheaper than sorting the vocabulary.
    """
    kept = len(p)
    for shortlist in (min(256, len(p)), min(4096, len(p)), len(p)):
        best = p.topk(shortlist).values
        kept = int((best.cumsum(-1) - best < top_p).sum())
        if kept < shortlist:
            break
    return kept


def _only(p: torch.Tensor, logits: torch.Tensor, count: int) -> torch.Tensor:
    """p of the `count` largest logits, of equals the first. Far-off logits may round to equal probabilities."""
    best = logits.topk(count)
    border = best.values[-1]
    equal = (logits == border).nonzero()[:, 0]
    kept = torch.cat((best.indices[best.values > border], equal[: int((best.values == border).sum())]))
    return torch.zeros_like(p).index_copy_(0, kept, p[kept])
