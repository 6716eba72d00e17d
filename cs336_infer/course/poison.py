"""Does an engine read memory that nobody wrote? Fill it with different things and compare every score, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from cs336_infer.engine.llm import LLM
from cs336_infer.models.load import LoadedModel
from cs336_infer.types import SamplingParams

FILLS = (math.nan, 1e4, -7.0)


def poisoned(
    model: LoadedModel, prompts: Sequence[list[int]], fills: Sequence[float] = FILLS, tokens: int = 5, **options: Any
) -> str:
    """ "clean" when all scores of a greedy run are the same over each of `fills`; else what was seen.

    Args:
        prompts: token ids; give several of different lengths, so that blocks end anywhere. options: of `LLM`.
    """
    seen = [_scores(model, prompts, fill, tokens, options) for fill in fills]
    if not all(bool(s.isfinite().all()) for s in seen):
        return "unwritten memory is read: scores that are not finite"
    shapes = {s.shape for s in seen}
    if len(shapes) > 1 or not all(torch.equal(seen[0], s) for s in seen[1:]):
        return "unwritten memory is read: scores differ with its content"
    return "clean"


def _scores(
    model: LoadedModel, prompts: Sequence[list[int]], fill: float, tokens: int, options: dict[str, Any]
) -> torch.Tensor:
    """All scores of the run, in the order of its steps, flat."""
    net, scores = model.net, []
    forward = net.forward

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        scores.append(forward(*args, **kwargs))
        return scores[-1]

    net.forward = spy  # type: ignore[method-assign]
    try:
        llm = LLM(model, **({"kv_tokens": 2048, "prefix_cache": False, "fill": fill} | options))
        llm.generate(list(prompts), SamplingParams(max_tokens=tokens, ignore_eos=True))
    finally:
        del net.forward
    return torch.cat([s.flatten() for s in scores])
