"""The sampling kernels: the engine's own functions, and a float64 oracle that knows where rounding may decide."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cs336_kernels.ops import argmax, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bounds import FILLS

from cs336_infer import SamplingParams
from cs336_infer.sampling import draw, probabilities

RUNS = settings(derandomize=True, deadline=None, max_examples=15)
LAST = 1 - 2**-53


def ask(logits: torch.Tensor, t: Any = 1.0, k: Any = 0, p: Any = 1.0, u: Any = 0.5, path: str = "triton") -> list[int]:
    """Ids of rows that have these parameters, each one number for all or a list of one a row."""

    def column(x: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(x if isinstance(x, list) else [x] * len(logits), dtype=dtype)

    reals = (column(x, torch.float64) for x in (p, u))
    return sample(logits, column(t, torch.float64), column(k, torch.int64), *reals, path=path).tolist()


class Oracle:
    """One row in float64, by sorting. `allowed(u)`: the ids that a kernel within its error bound may choose."""

    def __init__(self, logits: torch.Tensor, t: float, k: int, p: float) -> None:
        self.x = logits.double().numpy()
        self.order = np.argsort(-self.x, kind="stable")[: k if 0 < k < len(self.x) else None]
        self.powers = (self.x - self.x.max()) / t
        self.sizes = [len(self.order)]
        if p < 1:
            sums = np.cumsum(self.shares(len(self.order))[self.order])
            e = self.bound(len(self.order))
            first, last = ((int((sums < at).sum()) + 1) for at in (p - e, p + e))
            self.sizes = list(range(min(first, len(sums)), min(last, len(sums)) + 1))

    def shares(self, size: int) -> np.ndarray:
        """[vocab] of the distribution of the `size` largest."""
        out = np.zeros(len(self.x))
        out[self.order[:size]] = np.exp(self.powers[self.order[:size]])
        return out / out.sum()

    def bound(self, size: int) -> float:
        """e of the docstring of `sample`."""
        shares, vocab = self.shares(size), len(self.x)
        some = shares > 0
        d = (shares[some] * (2.0**-22 + 3 * 2.0**-24 * -self.powers[some])).sum()
        d += (vocab + 1) * 2.0 ** (vocab.bit_length() - 62)
        return 2 * d / (1 - d)

    def allowed(self, u: float) -> set[int]:
        found: set[int] = set()
        for size in self.sizes:
            sums, e = np.cumsum(self.shares(size)), self.bound(size)
            kept = np.zeros(len(self.x), dtype=bool)
            kept[self.order[:size]] = True
            before = np.concatenate(([0.0], sums[:-1]))
            found |= set(np.flatnonzero(kept & (before <= u + e) & (sums >= u - e)).tolist())
        return found


def rows_of_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def settings_of_rows(rows: int, vocab: int, seed: int) -> Iterator[tuple[float, int, float, float]]:
    """(temperature, top_k, top_p, u): every rule on and off, and u at both ends now and then."""
    r = np.random.default_rng(seed)
    for _ in range(rows):
        yield (
            float(r.choice([0.2, 0.7, 1.0, 3.0])),
            int(r.choice([0, 1, 2, vocab // 2, vocab - 1, vocab, vocab + 5])),
            float(r.choice([1.0, 1e-9, 0.3, 0.9, 0.999])),
            float(r.choice([0.0, LAST, *r.random(8)])),
        )


@RUNS
@given(st.integers(1, 9), st.sampled_from([1, 2, 50, 1000]), st.integers(0, 99))
def test_reference_chooses_what_the_engine_chooses(rows, vocab, seed):
    logits = rows_of_logits(rows, vocab, seed)
    logits[0, : vocab // 3] = -torch.inf  # min_tokens does this
    columns = [list(c) for c in zip(*settings_of_rows(rows, vocab, seed), strict=True)]
    streams = [torch.Generator().manual_seed(seed + i) for i in range(rows)]
    columns[3] = [float(torch.rand((), generator=g, dtype=torch.float64)) for g in streams]
    got = ask(logits, *columns, path="reference")
    for i, (t, k, p, _) in enumerate(zip(*columns, strict=True)):
        params = SamplingParams(temperature=t, top_k=k or None, top_p=p)
        assert got[i] == draw(probabilities(logits[i], params), torch.Generator().manual_seed(seed + i))


@RUNS
@given(st.integers(1, 9), st.sampled_from([1, 2, 7, 64, 1000, 5000]), st.integers(0, 99))
def test_kernel_chooses_what_the_reference_chooses_but_for_rounding(rows, vocab, seed):
    logits = rows_of_logits(rows, vocab, seed)
    logits[0, vocab // 2 + 1 :] = -torch.inf
    cases = list(settings_of_rows(rows, vocab, seed))
    columns = [list(c) for c in zip(*cases, strict=True)]
    got, want = ask(logits, *columns), ask(logits, *columns, path="reference")
    for i, (t, k, p, u) in enumerate(cases):
        allowed = Oracle(logits[i], t, k, p).allowed(u)
        assert want[i] in allowed
        assert got[i] in allowed, f"row {i}: {got[i]}, not of {sorted(allowed)[:5]} at {cases[i]}"


@pytest.mark.parametrize("vocab", [49152, 151936])
def test_large_vocabularies(vocab):
    """Shares of the flat row are as small as they get, and still larger than the bound of their sum's error: in the
    middle of a share there is one right id."""
    logits = torch.stack([*rows_of_logits(3, vocab, 1, 2.0), *rows_of_logits(1, vocab, 2, 0.05)])
    t, k, p = [0.7, 1.0, 0.5, 1.0], [50, 0, 5000, 0], [1.0, 0.95, 0.9, 1.0]
    want, us = [], []
    for i, about in enumerate((0.3, 0.77, 1.0, 0.6)):
        oracle = Oracle(logits[i], t[i], k[i], p[i])
        shares = oracle.shares(oracle.sizes[0])
        likely = np.flatnonzero(shares > 3e-6)
        want.append(int(likely[np.searchsorted(shares.cumsum()[likely[:-1]], about)]))
        us.append(float(shares[: want[i]].sum() + shares[want[i]] / 2))
        assert max(map(oracle.bound, oracle.sizes)) < 1e-5
        assert oracle.allowed(us[i]) == {want[i]}
    assert ask(logits, t, k, p, us) == want
    assert ask(logits, t, k, p, us, path="reference") == want


@pytest.mark.parametrize("logit", [-15.0, -19.0])
def test_a_long_tail_keeps_its_share(logit):
    """Tokens too improbable for fewer bits of a weight, but 150,000 of them: 4 % or 0.08 % of the distribution."""
    logits = torch.full((1, 151936), logit)
    logits[0, 5] = 0.0
    tail = 1 - 1 / (1 + 151935 * math.exp(logit))
    for p, u in ((1.0, 1 - tail / 3), (1 - tail / 2, 1 - tail / 5)):
        allowed = Oracle(logits[0], 1.0, 0, p).allowed(u)
        assert max(allowed) - min(allowed) < (300 if logit > -17 else 10_000)
        assert ask(logits, 1.0, 0, p, u)[0] in allowed


@pytest.mark.parametrize(("k", "p"), [(0, 1.0), (9, 1.0), (0, 0.95), (12, 0.95)])
def test_u_beside_every_step_of_the_distribution(k, p):
    """Just outside of the error bound of a step there is one right id, on either side; on the step there are two."""
    logits, t = rows_of_logits(1, 16, 5, 1.0)[0], 0.9
    oracle = Oracle(logits, t, k, p)
    assert len(oracle.sizes) == 1
    shares, e = oracle.shares(oracle.sizes[0]), oracle.bound(oracle.sizes[0])
    kept = np.flatnonzero(shares)
    assert len(kept) > 5 and shares[kept].min() > 10 * e
    steps = np.cumsum(shares)[kept[:-1]]
    below, on, above = (
        ask(logits.expand(len(steps), -1), t, k, p, (steps + d).tolist()) for d in (-1.5 * e, 0, 1.5 * e)
    )
    assert below == kept[:-1].tolist() and above == kept[1:].tolist()
    assert all(i in pair for i, *pair in zip(on, below, above, strict=True))


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("rules", [{}, {"k": 4}, {"p": 0.7}, {"k": 5, "p": 0.9, "t": 2.0}])
def test_evenly_spaced_numbers_give_every_token_its_share(rules, path):
    logits = torch.tensor([2.0, -3.0, 1.5, 1.0, 0.5, 0.0, -1.0])
    n = 50
    us = ((np.arange(n) + 0.5) / n).tolist()
    params = SamplingParams(temperature=rules.get("t", 1.0), top_k=rules.get("k"), top_p=rules.get("p", 1.0))
    shares = probabilities(logits, params).numpy()
    counts = np.bincount(ask(logits.expand(n, -1), u=us, **rules, path=path), minlength=7)
    assert (np.abs(counts - n * shares) <= 1.001).all()
    assert not counts[shares == 0].any()


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_of_equal_logits_the_first_stay(path):
    """Logits of bfloat16 are often equal at the border of top-k."""
    logits = torch.tensor([0.0, 1.0, 0.0, 2.0, -0.0, 1.0, 0.0, 1.0, 0.0])

    def check(kept: list[int], k: int, p: float = 1.0) -> None:
        """Numbers in the middle of every kept token's share, and at both ends."""
        shares = logits[kept].double().softmax(0)
        us = [0.0, *(shares.cumsum(0) - shares / 2).tolist(), LAST]
        assert ask(logits.expand(len(us), -1), 1.0, k, p, us, path) == [kept[0], *kept, kept[-1]]

    by_rank = [3, 1, 5, 7, 0, 2, 4, 6, 8]
    for k in (1, 2, 4, 5, 7):
        check(sorted(by_rank[:k]), k)
    sums = logits[by_rank].double().exp().cumsum(0).tolist()
    for size, k in ((3, 0), (6, 0), (4, 5), (6, 7)):
        among = sums[(k or 9) - 1]
        check(sorted(by_rank[:size]), k, (sums[size - 2] + sums[size - 1]) / 2 / among)


@RUNS
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 45), st.floats(0.01, 1), st.integers(0, 99))
def test_kernel_and_reference_agree_among_equal_logits(vocab, levels, k, p, seed):
    logits = torch.randint(0, levels, (4, vocab), generator=torch.Generator().manual_seed(seed)).float()
    us = np.random.default_rng(seed).random(4).tolist()
    got, want = ask(logits, 0.8, k, p, us), ask(logits, 0.8, k, p, us, path="reference")
    assert all(
        g == w or {g, w} <= Oracle(x, 0.8, k, p).allowed(u) for x, u, g, w in zip(logits, us, got, want, strict=True)
    )


def test_ids_do_not_depend_on_block_size_neighbours_or_memory_behind_the_rows(monkeypatch):
    from cs336_kernels.ops.triton import sample as kernels

    rows, vocab = 4, 300
    logits = rows_of_logits(rows, vocab, 3)
    columns = [list(c) for c in zip(*settings_of_rows(rows, vocab, 7), strict=True)]
    columns[0][2] = 0.0
    logits[:2] = logits[:2].round()  # ties at the border lie in several blocks
    for i, rules in enumerate([(1.0, 140, 1.0, 0.8), (1.0, 0, 0.9, 0.7)]):
        for column, x in zip(columns, rules, strict=True):
            column[i] = x
    want = ask(logits, *columns)
    assert want == ask(logits, *columns, path="reference")
    for block in (32, 128):
        monkeypatch.setattr(kernels, "BLOCK", block)
        assert ask(logits, *columns) == want
        assert argmax(logits, path="triton").tolist() == logits.argmax(-1).tolist()
    assert [ask(logits[i : i + 1], *([c[i]] for c in columns))[0] for i in range(rows)] == want
    for fill in FILLS:
        wide = torch.full((rows, vocab + 9), fill)
        wide[:, 5 : 5 + vocab] = logits
        assert ask(wide[:, 5 : 5 + vocab], *columns) == want
        assert argmax(wide[:, 5 : 5 + vocab], path="triton").tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_greedy_rows_among_others_and_parameters_of_both_widths(path):
    logits = rows_of_logits(3, 300, 4)
    logits[1, [7, 9]] = 30.0
    want = [int(logits[0].argmax()), 7]
    assert ask(logits, [0.0, 0.0, 1.0], [3, 0, 1], [0.5, 1.0, 1.0], [0.99, 0.99, 0.5], path)[:2] == want
    half = [torch.full((3,), 0.5, dtype=d) for d in (torch.float32, torch.float64)]
    ids = [
        sample(logits, a, torch.full((3,), 9, dtype=k), b, c, path=path).tolist()
        for a, b, c, k in zip(half, half, half, (torch.int32, torch.int64), strict=True)
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_ends_of_the_interval_and_of_the_numbers(path):
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, 1.0, -torch.inf])
    assert ask(logits.expand(5, -1), u=[0.0, 0.4999, 0.5001, LAST, 1.0], path=path) == [1, 1, 3, 3, 3]
    assert ask(logits.expand(2, -1), k=4, u=[0.0, LAST], path=path) == [1, 3]
    far = torch.tensor([[3e38, -3e38, 2.9e38], [-3e38, -1e-45, 1e-45]])
    assert ask(far, u=LAST, path=path) == [0, 2]
    assert ask(far[1:], t=1e-300, u=LAST, path=path) == ask(far[1:], t=0.0, path=path) == [2]
    assert ask(torch.tensor([[5.0, -5.0]]), t=1e30, u=0.75, path=path) == [1]


@pytest.mark.parametrize("path", ["reference", "triton"])
@pytest.mark.parametrize("vocab", [1, 5, 1000, 49152])
def test_argmax_is_the_first_of_equals(vocab, path):
    logits = rows_of_logits(4, vocab, 0)
    logits[1] = 0.0
    logits[1, vocab // 2] = -0.0
    logits[2] = -torch.inf
    logits[3, [vocab // 3, vocab - 1]] = 99.0
    got = argmax(logits, path=path)
    assert got.dtype == torch.int64
    assert got.tolist() == [int(np.argmax(row)) for row in logits.numpy()]


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_no_rows(path):
    logits, none = torch.empty(0, 9), torch.empty(0)
    assert argmax(logits, path=path).shape == (0,)
    assert sample(logits, none, none.long(), none, none, path=path).shape == (0,)


L, ONE, K = torch.zeros(2, 9), torch.ones(2), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: argmax(L, path="cuda"), "unknown path 'cuda' for argmax .reference, triton."),
        (lambda: sample(L, ONE, K, ONE, ONE, path="x"), "unknown path 'x' for sample .reference, triton."),
        (lambda: argmax(L.half()), "logits is .* torch.float16, not .* torch.float32"),
        (lambda: argmax(L[0]), r"logits is \[9\]"),
        (lambda: argmax(L[:, :0]), r"logits is \[2, 0\]"),
        (lambda: argmax(L.T.contiguous().T, path="triton"), "a row must be contiguous"),
        (lambda: sample(L, ONE[:1], K, ONE, ONE), r"temperature is \[1\] .* not \[2\]"),
        (lambda: sample(L, ONE, ONE, ONE, ONE), "top_k is .* not .2. torch.int32 or torch.int64"),
        (lambda: sample(L, ONE, K, ONE.half(), ONE), "top_p is .* torch.float16"),
        (lambda: sample(L, ONE, K, ONE, torch.rand(4)[::2]), "uniform has stride 2, not 1"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(call, says):
    with pytest.raises(ValueError, match=says) as e:
        call()
    assert "\n" not in str(e.value)
