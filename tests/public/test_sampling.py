"""Sampling: transformers' processors as oracle, distributions by counting, seeds and neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cs336_infer import SamplingParams
from cs336_infer.sampling import Sampler, apply_penalties, draw, probabilities

VOCAB = 50
LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB, unique=True).map(torch.tensor)


@settings(max_examples=150, deadline=None)
@given(
    LOGITS,
    st.floats(0.1, 5),
    st.none() | st.integers(1, 60),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_distribution_equals_transformers(logits, temperature, top_k, top_p, min_p):
    ours = probabilities(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        chain.append(MinPLogitsWarper(min_p))
    theirs = chain(torch.zeros(1, 1, dtype=torch.long), logits.double().unsqueeze(0))[0].softmax(-1)
    differing = (ours > 0) != (theirs > 0)
    # The two sum in another order: a token may fall on either side of a threshold only if it lies on it.
    if differing.any():
        edge = _edges(logits.double(), temperature, top_k, top_p, min_p)
        assert edge < 1e-12, "the kept sets differ away from a threshold"
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def _edges(logits, temperature, top_k, top_p, min_p):
    p = (logits / temperature).softmax(-1).sort(descending=True).values
    if top_k is not None:
        p = p[:top_k] / p[:top_k].sum()
    nucleus = float((p.cumsum(-1) - top_p).abs().min())
    return min(nucleus, float((p / p[0] - min_p).abs().min()))


@settings(max_examples=100, deadline=None)
@given(LOGITS, st.floats(0.5, 3), st.lists(st.integers(0, VOCAB - 1), max_size=20))
def test_repetition_penalty_equals_transformers(logits, penalty, seen_ids):
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[seen_ids] = True
    params = SamplingParams(repetition_penalty=penalty)
    ours = apply_penalties(logits, seen, torch.zeros(VOCAB), params)
    if seen_ids:
        ids = torch.tensor([seen_ids])
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.unsqueeze(0).clone())[0]
        torch.testing.assert_close(ours, theirs)
    else:
        assert torch.equal(ours, logits)


@settings(max_examples=60, deadline=None)
@given(
    LOGITS,
    st.lists(st.integers(0, VOCAB - 1), max_size=8),
    st.lists(st.integers(0, VOCAB - 1), max_size=8),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.floats(0.5, 2),
)
def test_penalties_by_their_definition(logits, prompt, output, presence, frequency, repetition):
    """Repetition looks at prompt and output; presence and frequency (OpenAI) at the output only."""
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    sampler = Sampler([params], [prompt], VOCAB)
    row = sampler.rows[0]
    for token in output:  # steer: a huge logit is chosen whatever the penalties
        steered = torch.full((1, VOCAB), -50.0)
        steered[0, token] = 1e4
        assert sampler(steered) == [token]
    want = logits.double().clone()
    for t in range(VOCAB):
        if t in prompt or t in output:
            want[t] = want[t] / repetition if want[t] > 0 else want[t] * repetition
        want[t] -= frequency * output.count(t) + presence * (t in output)
    got = apply_penalties(logits, row.seen, row.counts, params)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
def test_nucleus_of_a_large_vocabulary_equals_transformers(top_p, spread):
    """Flat distributions need more tokens than the short list holds."""
    logits = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * spread
    ours = probabilities(logits, SamplingParams(temperature=1.0, top_p=top_p))
    theirs = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.long), logits.double().unsqueeze(0))[0].softmax(-1)
    assert int((ours > 0).sum()) == pytest.approx(int((theirs > 0).sum()), abs=1)
    assert float((ours - theirs).abs().sum()) < 1e-3


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 2.0}])
def test_draws_follow_the_distribution(params):
    params = SamplingParams(**{"temperature": 1.0, **params})
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0, -3.0])
    p = probabilities(logits, params)
    g = torch.Generator().manual_seed(0)
    n = 20000
    counts = np.bincount([draw(p, g) for _ in range(n)], minlength=7)
    expected = p.numpy() * n
    assert not counts[expected == 0].any()
    kept = expected > 0
    chi2 = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    assert chi2 < 25, f"chi-square {chi2:.1f} with {kept.sum() - 1} degrees of freedom"


def test_never_draws_a_dropped_token_at_the_ends_of_the_interval():
    class Fixed:
        def __init__(self, u):
            self.u = u

    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64)
    with pytest.MonkeyPatch.context() as m:
        for u, want in [(0.0, 1), (0.2499999, 1), (0.25, 3), (1 - 2**-53, 3)]:
            m.setattr(torch, "rand", lambda *a, u=u, **k: torch.tensor(u, dtype=torch.float64))
            assert draw(p, torch.Generator()) == want


def test_a_seed_repeats_whatever_the_neighbours_do():
    torch.manual_seed(0)
    steps = torch.randn(30, 3, VOCAB)
    seeded = SamplingParams(temperature=1.3, seed=2**64 - 1)
    others = [SamplingParams(temperature=0.8), SamplingParams(), SamplingParams(temperature=2, seed=5)]

    def run(params, row):
        sampler = Sampler(params, [[1]] * len(params), VOCAB)
        return [sampler(s[: len(params)].roll(row, 0))[row] for s in steps[:, : len(params)]]

    alone = [int(t) for t in run([seeded], 0)]
    logits_of_row0 = steps[:, 0]
    sampler = Sampler([others[0], seeded, others[1]], [[2], [3], [4]], VOCAB)
    mixed = [sampler(torch.stack([steps[i, 1], logits_of_row0[i], steps[i, 2]]))[1] for i in range(30)]
    assert alone == mixed
    other_seed = Sampler([SamplingParams(temperature=1.3, seed=1)], [[1]], VOCAB)
    assert [other_seed(x.unsqueeze(0))[0] for x in logits_of_row0] != alone


def test_unseeded_rows_differ_from_run_to_run():
    logits = torch.zeros(1, VOCAB)
    runs = {
        tuple(Sampler([SamplingParams(temperature=1.0)], [[0]], VOCAB)(logits)[0] for _ in range(8)) for _ in range(4)
    }
    assert len(runs) > 1


def test_greedy_is_argmax_with_the_lowest_id_first():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, 0.0]])
    assert Sampler([SamplingParams(top_k=1, top_p=0.1, seed=3)] * 2, [[0]] * 2, 3)(logits) == [1, 0]
