"""The attention op against float64, in every shape a prefill or a decode step gives it."""

from __future__ import annotations

import sys

import pytest
import torch
from cs336_kernels.ops import attention
from hypothesis import given, settings
from hypothesis import strategies as st

MODULE = sys.modules["cs336_kernels.ops.attention"]


def exact(q, k, v, mask):
    """The definition, in float64, one query at a time."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def case(batch, kv_heads, group, new, past, head_dim, dtype, ragged, seed=0):
    g = torch.Generator().manual_seed(seed)
    total = new + past

    def rand(heads, n):
        return torch.randn(batch, heads, n, head_dim, generator=g).to(dtype)

    q, k, v = rand(kv_heads * group, new), rand(kv_heads, total), rand(kv_heads, total)
    causal = torch.ones(new, total, dtype=torch.bool).tril(past)
    if not ragged:
        return q, k, v, None, causal
    starts = torch.randint(0, past + 1, (batch,), generator=g)
    mask = (causal & (torch.arange(total) >= starts[:, None, None])).unsqueeze(1)
    return q, k, v, mask, mask


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(0, 50),
    st.sampled_from([2, 8, 64]),
    st.booleans(),
    st.integers(1, 5000),
)
def test_equals_the_definition(batch, kv_heads, group, new, past, head_dim, ragged, budget):
    q, k, v, mask, seen = case(batch, kv_heads, group, new, past, head_dim, torch.float32, ragged)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(MODULE, "SCORES_AT_ONCE", budget)  # blocks of 16 to 128 queries
        got = attention(q, k, v, mask)
    assert got.shape == q.shape
    assert float((got - exact(q, k, v, seen)).abs().max()) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 8, 4, 300, 400, 128), (2, 2, 3, 300, 200, 16), (8, 3, 3, 128, 0, 64)])
@pytest.mark.parametrize("ragged", [False, True])
def test_half_precision_errs_at_most_twice_as_much_as_torch(shape, dtype, ragged):
    q, k, v, mask, seen = case(*shape, dtype, ragged)
    want = exact(q, k, v, seen)
    honest = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    def error(x):
        return float((x.double() - want).pow(2).mean().sqrt())

    assert error(attention(q, k, v, mask)) <= 2 * error(honest)


def test_what_the_mask_hides_may_be_anything():
    """Keys that no query may see can hold NaN: fresh cache memory does."""
    q, k, v, mask, _ = case(2, 2, 2, 20, 30, 8, torch.float32, True, seed=3)
    hidden = ~mask.any(2).squeeze(1)  # [batch, total]
    want = attention(q, k, v, mask)
    k = k.masked_fill(hidden[:, None, :, None], 1e4)
    assert torch.equal(attention(q, k, v, mask), want)
