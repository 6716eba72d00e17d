"""Public checks of assignment 1.

Students read this file, so no answer is in it: what is expected are numbers worked out on paper, properties, and
library calls that a submission is refused for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from cs336_infer.course.checks import Ask, check, expect_close, expect_equal, expect_shape, fail, listed, make_check

check_public = make_check(__name__)


def tensor(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal random numbers, float32."""
    return torch.from_numpy((scale * rng.standard_normal(shape)).astype(np.float32))


@check("rope", points=1, title="position 0 is not rotated")
def rope_at_zero(ask: Ask, rng: np.random.Generator) -> None:
    x = tensor(rng, 1, 2, 3, 8)
    expect_close(ask("rope", x, torch.zeros(1, 3, dtype=torch.long), 10000.0), x, what="rope at position 0")


@check("rope", points=1, title="one pair turns by its angle")
def rope_one_pair(ask: Ask, rng: np.random.Generator) -> None:
    x = torch.tensor([[[[1.0, 0.0]]]])
    got = ask("rope", x, torch.tensor([[3]]), 10000.0)
    expect_shape(got, (1, 1, 1, 2), what="rope")
    want = torch.tensor([[[[-0.9899925, 0.1411200]]]])  # cos 3, sin 3
    expect_close(got, want, what="(1, 0) turned by 3 radians")


@check("causal_attention", points=1, title="no query sees the future")
def no_future(ask: Ask, rng: np.random.Generator) -> None:
    q, k, v = tensor(rng, 1, 2, 6, 4), tensor(rng, 1, 2, 6, 4), tensor(rng, 1, 2, 6, 4)
    before = ask("causal_attention", q, k, v)
    expect_shape(before, (1, 2, 6, 4), what="causal_attention")
    for j in range(1, 6):
        changed = v.clone()
        changed[:, :, j] += 1
        moved = (ask("causal_attention", q, k, changed) - before).abs().amax((0, 1, 3)) > 1e-6
        early = [i for i in range(j) if moved[i]]
        if early:
            fail(f"row {early[0]} attends to position {j}, which is after it")


@check("causal_attention", points=1, title="values are right for a small case")
def attention_small(ask: Ask, rng: np.random.Generator) -> None:
    q, k, v = tensor(rng, 1, 2, 5, 4), tensor(rng, 1, 2, 5, 4), tensor(rng, 1, 2, 5, 4)
    want = scaled_dot_product_attention(q, k, v, is_causal=True)
    expect_close(ask("causal_attention", q, k, v), want, what="attention")


@check("cached_attention", points=1, title="one chunk after another equals all at once")
def cached_small(ask: Ask, rng: np.random.Generator) -> None:
    q, k, v = tensor(rng, 1, 2, 6, 4), tensor(rng, 1, 2, 6, 4), tensor(rng, 1, 2, 6, 4)
    k_cache, v_cache = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4)
    pieces = []
    for begin, end in ((0, 4), (4, 5), (5, 6)):
        new = (q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end])
        out, k_cache, v_cache = ask("cached_attention", *new, k_cache, v_cache, begin)
        pieces.append(out)
    want = scaled_dot_product_attention(q, k, v, is_causal=True)
    expect_close(torch.cat(pieces, 2), want, what="attention in chunks")


@check("next_token_distribution", points=1, title="temperature 1 without cuts is softmax")
def plain_softmax(ask: Ask, rng: np.random.Generator) -> None:
    logits = tensor(rng, 7, scale=2.0)
    got = ask("next_token_distribution", logits, 1.0, 1.0, 0.0)
    expect_close(torch.as_tensor(got).double(), logits.double().softmax(-1), what="distribution", atol=1e-6)


@check("next_token_distribution", points=1, title="top-p keeps the token that reaches p")
def top_p_by_hand(ask: Ask, rng: np.random.Generator) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    got = torch.as_tensor(ask("next_token_distribution", logits, 1.0, 0.6, 0.0)).double()
    expect_close(got, torch.tensor([0.625, 0.375, 0, 0], dtype=torch.float64), what="distribution", atol=1e-6)


@check("decode_step_cost", points=1, title="a model small enough to count on paper")
def cost_on_paper(ask: Ask, rng: np.random.Generator) -> None:
    shape = {"layers": 1, "hidden": 2, "heads": 1, "kv_heads": 1, "head_dim": 2, "intermediate": 3, "vocab": 5}
    got = ask("decode_step_cost", **shape, batch=1, context=0, bytes_per_number=2)
    expect_equal(listed(got), [96, 108], what="(FLOPs, bytes)")
