"""Hidden checks of assignment 1: other shapes, ragged batches, grouped heads, unwritten memory.

The references come first. They are small and slow on purpose: loops over positions in float64, from the definitions.
"""

from __future__ import annotations

import numpy as np
import torch

from cs336_infer.course.a1_prefill_decode import tensor
from cs336_infer.course.checks import Ask, check, expect_close, expect_equal, expect_shape, fail, listed


def rope_by_definition(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate the pair (i, i + head_dim / 2) by position * theta^(-2 i / head_dim), one pair at a time."""
    out, half = x.double().clone(), x.shape[-1] // 2
    for i in range(half):
        angle = positions.double() * theta ** (-2 * i / x.shape[-1])
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., i].double(), x[..., i + half].double()
        out[..., i], out[..., i + half] = a * cos - b * sin, b * cos + a * sin
    return out


def attention_by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """One query at a time, over exactly the positions it may see. Rows of padding queries are left at zero."""
    batch, heads, new, head_dim = q.shape
    group, past = heads // k.shape[1], k.shape[2] - new
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(batch):
        first = 0 if starts is None else int(starts[b])
        for i in range(new):
            last = past + i + 1
            if last <= first:
                continue
            for h in range(heads):
                keys, values = (t[b, h // group, first:last].double() for t in (k, v))
                weights = (keys @ q[b, h, i].double() / head_dim**0.5).softmax(-1)
                out[b, h, i] = weights @ values
    return out


def distribution_by_definition(logits: torch.Tensor, temperature: float, top_p: float, min_p: float) -> np.ndarray:
    """Sorted by hand: tokens in falling probability until their sum reaches top_p, then the min-p cut."""
    x = logits.double().numpy() / temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    kept, total = [], 0.0
    for i in sorted(range(len(p)), key=lambda j: -p[j]):
        if total >= top_p:
            break
        kept.append(i)
        total += p[i]
    out = np.zeros_like(p)
    out[kept] = p[kept]
    out[out < min_p * out.max()] = 0
    return out / out.sum()


def cost_by_definition(**shape: int) -> tuple[int, int]:
    """(FLOPs, bytes) of one decode step, from `cs336_infer.measure`: weights and KV cache, no activations."""
    from cs336_infer import measure
    from cs336_infer.measure.phases import memory_traffic
    from cs336_infer.models import ModelConfig

    config = ModelConfig(
        family="llama",
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_layers=shape["layers"],
        num_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        context_length=1 << 20,
        tie_embeddings=True,
    )
    size = shape["bytes_per_number"]
    cost = measure.decode(config, shape["batch"], shape["context"], dtype_bytes=size, kv_bytes=size)
    return cost.flops, int(memory_traffic(cost))


@check("rope", points=1, title="every row has its own positions, and they need not start at 0")
def rope_rows(ask: Ask, rng: np.random.Generator) -> None:
    x = tensor(rng, 3, 2, 5, 12)
    positions = torch.from_numpy(rng.integers(0, 60, (3, 5)))
    expect_close(ask("rope", x, positions, 1e4), rope_by_definition(x, positions, 1e4).float(), what="rope", atol=1e-4)


@check("rope", points=1, title="frequencies follow theta and the head size")
def rope_theta(ask: Ask, rng: np.random.Generator) -> None:
    theta, dim = float(rng.choice([100.0, 5e5])), int(rng.choice([6, 64]))
    x, positions = tensor(rng, 1, 3, 4, dim), torch.from_numpy(rng.integers(0, 300, (1, 4)))
    want = rope_by_definition(x, positions, theta).float()
    expect_close(ask("rope", x, positions, theta), want, what=f"rope with theta {theta:g}", atol=2e-4)


@check("rope", points=1, title="products of rotated vectors depend on the distance only")
def rope_relative(ask: Ask, rng: np.random.Generator) -> None:
    x, shift = tensor(rng, 1, 1, 2, 16), int(rng.integers(1, 50))
    turned = []
    for first in (0, shift):
        got = ask("rope", x, torch.tensor([[first, first + 7]]), 1e4)
        expect_shape(got, (1, 1, 2, 16), what="rope")
        turned.append(torch.as_tensor(got)[0, 0].double())
    if not torch.isfinite(torch.stack(turned)).all():
        fail("a rotated vector is not finite")
    if (turned[0] - turned[1]).abs().max() < 1e-3:
        fail(f"the vectors are the same after a shift of {shift}: a position must turn them")
    products = [a @ b for a, b in turned]
    expect_close(products[1], products[0], what=f"the product after a shift of {shift}", rtol=1e-3, atol=1e-3)


@check("causal_attention", points=2, title="grouped heads read their own KV head")
def grouped(ask: Ask, rng: np.random.Generator) -> None:
    group, kv_heads, n = int(rng.integers(2, 4)), int(rng.integers(2, 4)), int(rng.integers(3, 9))
    q, k, v = tensor(rng, 2, group * kv_heads, n, 8), tensor(rng, 2, kv_heads, n, 8), tensor(rng, 2, kv_heads, n, 8)
    expect_close(ask("causal_attention", q, k, v), attention_by_definition(q, k, v).float(), what="attention")


@check("causal_attention", points=2, title="a chunk of new tokens sees everything before it")
def chunk(ask: Ask, rng: np.random.Generator) -> None:
    new, total = int(rng.integers(1, 5)), int(rng.integers(6, 12))
    q, k, v = tensor(rng, 2, 2, new, 4), tensor(rng, 2, 1, total, 4), tensor(rng, 2, 1, total, 4)
    want = attention_by_definition(q, k, v).float()
    expect_close(ask("causal_attention", q, k, v), want, what=f"attention of {new} new among {total} tokens")


@check("causal_attention", points=2, title="padding at the left is never attended to")
def ragged(ask: Ask, rng: np.random.Generator) -> None:
    n, starts = 7, torch.tensor([0, int(rng.integers(1, 4)), 5])
    q, k, v = tensor(rng, 3, 2, n, 4), tensor(rng, 3, 2, n, 4), tensor(rng, 3, 2, n, 4)
    got, want = ask("causal_attention", q, k, v, starts), attention_by_definition(q, k, v, starts).float()
    if not torch.isfinite(torch.as_tensor(got)).all():
        fail("the outputs of padding queries must be finite: a softmax over no position gives NaN")
    for row, first in enumerate(starts.tolist()):
        expect_close(got[row, :, first:], want[row, :, first:], what=f"row {row}, which starts at position {first}")


@check("causal_attention", points=1, title="large scores do not overflow")
def large_scores(ask: Ask, rng: np.random.Generator) -> None:
    q, k, v = tensor(rng, 1, 1, 4, 4, scale=60), tensor(rng, 1, 1, 4, 4, scale=60), tensor(rng, 1, 1, 4, 4)
    expect_close(
        ask("causal_attention", q, k, v), attention_by_definition(q, k, v).float(), what="attention", atol=1e-3
    )


@check("cached_attention", points=3, title="unwritten memory is never read")
def poison(ask: Ask, rng: np.random.Generator) -> None:
    length, new, capacity = int(rng.integers(0, 5)), int(rng.integers(1, 4)), 12
    q, k, v = tensor(rng, 2, 4, new, 4), tensor(rng, 2, 2, new, 4), tensor(rng, 2, 2, new, 4)
    old_k, old_v = tensor(rng, 2, 2, capacity, 4), tensor(rng, 2, 2, capacity, 4)
    answers = []
    for fill in (0.0, 1e4, float("nan")):
        k_cache, v_cache = old_k.clone(), old_v.clone()
        k_cache[:, :, length:], v_cache[:, :, length:] = fill, fill
        out = ask("cached_attention", q, k, v, k_cache, v_cache, length)[0]
        if not torch.isfinite(torch.as_tensor(out)).all():
            fail(f"with {fill:g} in unwritten positions the output is not finite")
        answers.append(out)
    all_k, all_v = (torch.cat((old[:, :, :length], t), 2) for old, t in ((old_k, k), (old_v, v)))
    for fill, out in zip((0, "10000", "NaN"), answers, strict=True):
        want = attention_by_definition(q, all_k, all_v).float()
        expect_close(out, want, what=f"attention with {fill} in unwritten positions")


@check("cached_attention", points=2, title="new positions are stored, all others stay")
def stored(ask: Ask, rng: np.random.Generator) -> None:
    length, new, capacity = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(7, 9))
    q, k, v = tensor(rng, 1, 2, new, 4), tensor(rng, 1, 1, new, 4), tensor(rng, 1, 1, new, 4)
    k_cache, v_cache = tensor(rng, 1, 1, capacity, 4), tensor(rng, 1, 1, capacity, 4)
    answer = ask("cached_attention", q, k, v, k_cache, v_cache, length)
    for name, got, old, fresh in (("k_cache", answer[1], k_cache, k), ("v_cache", answer[2], v_cache, v)):
        want = old.clone()
        want[:, :, length : length + new] = fresh
        expect_close(got, want, what=name, rtol=0, atol=0)


@check("cached_attention", points=1, title="a cache may be filled to the last position")
def full(ask: Ask, rng: np.random.Generator) -> None:
    q, k, v = tensor(rng, 1, 2, 1, 4), tensor(rng, 1, 1, 1, 4), tensor(rng, 1, 1, 1, 4)
    k_cache, v_cache = tensor(rng, 1, 1, 6, 4), tensor(rng, 1, 1, 6, 4)
    all_k, all_v = torch.cat((k_cache[:, :, :5], k), 2), torch.cat((v_cache[:, :, :5], v), 2)
    out = ask("cached_attention", q, k, v, k_cache, v_cache, 5)[0]
    expect_close(out, attention_by_definition(q, all_k, all_v).float(), what="attention over a full cache")


@check("next_token_distribution", points=2, title="temperature, top-p and min-p, in this order")
def all_cuts(ask: Ask, rng: np.random.Generator) -> None:
    for _ in range(4):
        logits = tensor(rng, 40, scale=2.0)
        temperature, top_p, min_p = rng.uniform(0.3, 2), rng.uniform(0.3, 0.95), rng.uniform(0.05, 0.4)
        _distribution(ask, logits, float(temperature), float(top_p), float(min_p))


@check("next_token_distribution", points=1, title="top-p by itself")
def top_p_alone(ask: Ask, rng: np.random.Generator) -> None:
    _distribution(ask, tensor(rng, 60, scale=2.0), 1.0, float(rng.uniform(0.2, 0.9)), 0.0)


@check("next_token_distribution", points=1, title="min-p is relative to the most probable token")
def min_p_alone(ask: Ask, rng: np.random.Generator) -> None:
    _distribution(ask, tensor(rng, 60, scale=1.0), 1.0, 1.0, float(rng.uniform(0.2, 0.8)))


@check("next_token_distribution", points=1, title="logits in the hundreds do not overflow")
def large_logits(ask: Ask, rng: np.random.Generator) -> None:
    _distribution(ask, 900 + tensor(rng, 10), float(rng.uniform(0.5, 1)), 0.9, 0.0)


def _distribution(ask: Ask, logits: torch.Tensor, temperature: float, top_p: float, min_p: float) -> None:
    got = torch.as_tensor(ask("next_token_distribution", logits, temperature, top_p, min_p)).double()
    want = torch.from_numpy(distribution_by_definition(logits, temperature, top_p, min_p))
    what = f"distribution at temperature {temperature:.2f}, top_p {top_p:.2f}, min_p {min_p:.2f}"
    expect_close(got, want, what=what, atol=1e-6)


@check("decode_step_cost", points=2, title="a model of random shape")
def any_shape(ask: Ask, rng: np.random.Generator) -> None:
    shape = _shape(rng, batch=1, context=int(rng.integers(0, 500)))
    expect_equal(listed(ask("decode_step_cost", **shape)), list(cost_by_definition(**shape)), what="(FLOPs, bytes)")


@check("decode_step_cost", points=2, title="a batch shares the weights and nothing else")
def batched(ask: Ask, rng: np.random.Generator) -> None:
    shape = _shape(rng, batch=int(rng.integers(2, 20)), context=int(rng.integers(1, 500)))
    expect_equal(listed(ask("decode_step_cost", **shape)), list(cost_by_definition(**shape)), what="(FLOPs, bytes)")


def _shape(rng: np.random.Generator, *, batch: int, context: int) -> dict[str, int]:
    kv_heads = int(rng.integers(1, 4))
    return {
        "layers": int(rng.integers(2, 40)),
        "hidden": int(rng.integers(8, 500)),
        "heads": kv_heads * int(rng.integers(2, 4)),
        "kv_heads": kv_heads,
        "head_dim": 2 * int(rng.integers(2, 64)),
        "intermediate": int(rng.integers(8, 900)),
        "vocab": int(rng.integers(100, 9000)),
        "batch": batch,
        "context": context,
        "bytes_per_number": int(rng.choice([1, 2, 4])),
    }
