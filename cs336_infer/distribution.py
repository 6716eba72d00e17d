"""The distribution a token is drawn from."""

from __future__ import annotations

import torch

from cs336_infer.types import SamplingParams


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution a token is drawn from: temperature, then top-k, top-p and min-p, each on what is left.

    Args:
        logits: [vocab] float32.

    Returns:
        [vocab] float64, sums to 1; dropped tokens have probability 0. Which of several equal logits at the edge of
        top-k or top-p stays is left to `torch.topk`.
    """
    scaled = logits.double()
    p = ((scaled - scaled.max()) / params.temperature).softmax(-1)
    if params.top_k is not None and params.top_k < len(p):
        p = _only(p, scaled.topk(params.top_k).indices)  # of logits: far-off ones may round to equal probabilities
    if params.top_p < 1:
        p = _nucleus(p / p.sum(), params.top_p)
    if params.min_p > 0:
        p = torch.where(p >= params.min_p * p.max(), p, 0.0)
    return p / p.sum()


def _nucleus(p: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the most probable tokens until their sum reaches top_p; the one that reaches it stays.

    Few tokens nearly always suffice, and finding them is much cheaper than sorting the vocabulary.
    """
    for shortlist in (min(256, len(p)), min(4096, len(p)), len(p)):
        best = p.topk(shortlist)
        kept = best.values.cumsum(-1) - best.values < top_p
        if not kept.all():
            break
    return _only(p, best.indices[kept])


def _only(p: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(p).index_copy_(0, kept, p[kept])
