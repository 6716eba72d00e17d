"""Prefill and decode: the cache changes nothing, batches change nothing, and every way to stop works."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_model

from cs336_infer import FinishReason, InvalidRequest, SamplingParams, generate, load_model, stream
from cs336_infer.generate import Run
from cs336_infer.kv import ContiguousKV
from cs336_infer.types import NonFiniteLogits


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder, max_position_embeddings=64)
    return load_model(folder, dtype="float32", device="cpu")


PROMPTS = st.lists(st.lists(st.integers(1, 299), min_size=1, max_size=40), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(PROMPTS, st.integers(1, 20), st.booleans())
def test_cache_equals_no_cache_equals_alone(model, prompts, max_tokens, ignore_eos):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    cached = generate(model, prompts, params)
    plain = generate(model, prompts, params, kv="none")
    alone = [generate(model, [p], params)[0] for p in prompts]
    assert [c.token_ids for c in cached] == [c.token_ids for c in plain] == [c.token_ids for c in alone]
    assert [c.finish_reason for c in cached] == [c.finish_reason for c in plain] == [c.finish_reason for c in alone]


@pytest.mark.parametrize("fill", [math.nan, 0.0, 1e4])
def test_unwritten_slots_are_never_read(model, fill, monkeypatch):
    """Fresh cache memory holds anything: ragged rows, and the output is the same bit for bit."""
    prompts = [[5, 6, 7], list(range(10, 40)), [9]]
    logits = []
    forward = type(model.net).forward

    def spy(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        logits.append(out)
        return out

    def poisoned(*args, **kwargs):
        kv = ContiguousKV(*args, **kwargs)
        for t in (*kv.k, *kv.v):
            t.fill_(fill)
        return kv

    monkeypatch.setattr(type(model.net), "forward", spy)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    want = generate(model, prompts, params)
    reference, logits = logits, []
    monkeypatch.setattr(importlib.import_module("cs336_infer.generate"), "ContiguousKV", poisoned)
    got = generate(model, prompts, params)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert len(logits) == 12
    for a, b in zip(logits, reference, strict=True):
        assert torch.isfinite(a).all() and torch.equal(a, b)


def test_decode_feeds_one_token_and_no_cache_feeds_all(model, monkeypatch):
    widths = []
    forward = type(model.net).forward
    monkeypatch.setattr(
        type(model.net), "forward", lambda self, t, *a, **k: widths.append(t.shape[1]) or forward(self, t, *a, **k)
    )
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    generate(model, [[1, 2, 3]], params)
    generate(model, [[1, 2, 3]], params, kv="none")
    assert widths == [3, 1, 1, 1, 3, 4, 5, 6]


def test_stops_at_eos_and_eos_is_not_text(model):
    long = generate(model, [[1, 2, 3]], SamplingParams(max_tokens=60, ignore_eos=True))[0]
    assert len(long.token_ids) == 60 and long.finish_reason is FinishReason.LENGTH
    eos = long.token_ids[10]
    first = long.token_ids.index(eos)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(model.tokenizer, "eos_ids", frozenset({eos}))
        done = generate(model, [[1, 2, 3]], SamplingParams(max_tokens=60))[0]
    assert done.token_ids == long.token_ids[: first + 1]
    assert done.finish_reason is FinishReason.EOS
    assert done.text == model.tokenizer.decode(done.token_ids[:-1])


def test_ends_where_the_context_ends(model):
    done = generate(model, [list(range(1, 60))], SamplingParams(max_tokens=64, ignore_eos=True))[0]
    assert done.finish_reason is FinishReason.CONTEXT
    assert len(done.prompt_token_ids) + len(done.token_ids) == model.config.context_length == 64
    exact = generate(model, [list(range(1, 60))], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert exact.finish_reason is FinishReason.LENGTH and exact.token_ids == done.token_ids


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 50), st.integers(1, 4))
def test_stop_strings_cut_the_text_and_end_the_row(model, start, length):
    free = generate(model, [[7, 8]], SamplingParams(max_tokens=60, ignore_eos=True))[0].text
    stop = free[start : start + length]
    done = generate(model, [[7, 8]], SamplingParams(max_tokens=60, ignore_eos=True, stop=(stop,)))[0]
    assert done.text == free[: free.index(stop)]
    assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, stop)


def test_a_row_that_ends_early_does_not_disturb_the_others(model):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 30, 7)]
    prompts = [[1, 2, 3], [4], [5, 6]]
    together = generate(model, prompts, params)
    assert [len(c.token_ids) for c in together] == [1, 30, 7]
    for prompt, p, c in zip(prompts, params, together, strict=True):
        assert generate(model, [prompt], p)[0].token_ids == c.token_ids


def test_stream_events_add_up_to_the_completion(model):
    prompts, params = [[1, 2], [3, 4, 5]], SamplingParams(max_tokens=25, temperature=1.0, seed=3, stop=("e",))
    events = list(stream(model, prompts, params))
    done = generate(model, prompts, params)
    for row in range(2):
        mine = [e for e in events if e.index == row]
        assert "".join(e.text for e in mine) == done[row].text
        assert [e.token_id for e in mine] == done[row].token_ids
        assert [e.finish_reason for e in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason is done[row].finish_reason


def test_streamed_characters_are_whole(model):
    """Random tokens of a byte-level vocabulary are mostly broken UTF-8: what is shown is what decode gives."""
    events = list(stream(model, [[200]], SamplingParams(max_tokens=60, temperature=3.0, seed=1, ignore_eos=True)))
    assert "".join(e.text for e in events) == model.tokenizer.decode([e.token_id for e in events])


def test_times_are_those_of_the_phases(model):
    one, many = generate(
        model, [[1], [2]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=9, ignore_eos=True)]
    )
    assert one.ttft_s > 0 and math.isnan(one.tpot_s)
    assert many.ttft_s == one.ttft_s and many.tpot_s > 0
    assert "kv=contiguous" in one.path and "float32" in one.path


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", None, "empty"),
        ([], None, "no prompt"),
        ([[]], None, "empty"),
        ([[320]], None, "320"),
        ([[-1]], None, "-1"),
        ([[True]], None, "True"),
        ([[1] * 64], None, "context of 64"),
        (["a \ud800 b"], None, "surrogate"),
        ([[1]], SamplingParams(max_tokens=65), "max_tokens=65"),
        ([[1], [2]], [SamplingParams()], "2 prompts and 1"),
    ],
)
def test_bad_requests_say_why_in_one_line(model, prompts, params, message):
    for call in (generate, stream):
        with pytest.raises(InvalidRequest, match=message) as e:
            call(model, prompts, params)
        assert "\n" not in str(e.value)


def test_a_cache_and_a_sampler_of_your_own_plug_in(model):
    made = []

    class Mine(ContiguousKV):
        def __init__(self, *args, **kwargs):
            made.append(kwargs["capacity"])
            super().__init__(*args, **kwargs)

    def second_best(logits):
        return logits.topk(2).indices[:, 1].tolist()

    params = SamplingParams(max_tokens=6, ignore_eos=True)
    want = generate(model, [[1, 2, 3]], params)[0]
    got = generate(model, [[1, 2, 3]], params, kv=Mine)[0]
    assert got.token_ids == want.token_ids and made == [3 + 6 - 1] and "kv=Mine" in got.path
    other = generate(model, [[1, 2, 3]], params, sampler=second_best)[0]
    assert other.token_ids[0] != want.token_ids[0] and "sampler=second_best" in other.path


def test_an_unknown_cache_is_refused(model):
    with pytest.raises(InvalidRequest, match="paged"):
        generate(model, "a", kv="paged")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_k", 0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", math.nan),
        ("seed", 2**64),
        ("seed", -1),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop", None),
        ("stop", 3),
        ("ignore_eos", "no"),
        ("temperature", 10**400),
        ("temperature", "1"),
    ],
)
def test_bad_parameters_are_named_with_their_value(name, value):
    with pytest.raises(InvalidRequest, match=name) as e:
        SamplingParams(**{name: value})
    shown = value[0] if isinstance(value, tuple) else value
    assert repr(shown)[:50] in str(e.value) and "\n" not in str(e.value) and len(str(e.value)) < 200


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 299), min_size=1, max_size=20),
        st.sampled_from([0.0, 0.7, 1.5]),
        st.integers(0, 5),
        st.sampled_from([1.0, 1.5]),
        st.sampled_from([0.0, 1.0]),
        st.sampled_from([(), ("a",), ("e", " ")]),
        st.integers(1, 25),
    ),
    min_size=2,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_every_row_obeys_its_own_parameters(model, rows):
    prompts = [r[0] for r in rows]
    params = [
        SamplingParams(
            temperature=t,
            seed=seed,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=presence / 2,
            stop=stop,
            max_tokens=n,
        )
        for _, t, seed, repetition, presence, stop, n in rows
    ]
    together = generate(model, prompts, params)
    for prompt, p, c in zip(prompts, params, together, strict=True):
        alone = generate(model, [prompt], p)[0]
        assert (c.token_ids, c.text, c.finish_reason) == (alone.token_ids, alone.text, alone.finish_reason)


class Scripted:
    """Chooses given tokens, so that the end of a text can be set up."""

    def __init__(self, tokens):
        self.tokens = iter(tokens)

    def __call__(self, logits):
        return [next(self.tokens)] * len(logits)


def scripted(model, monkeypatch, tokens, **params):
    monkeypatch.setattr(importlib.import_module("cs336_infer.generate"), "Sampler", lambda *a: Scripted(tokens))
    events = list(stream(model, [[1]], SamplingParams(max_tokens=len(tokens), **params)))
    return "".join(e.text for e in events), events[-1]


def test_a_text_that_ends_inside_a_character_shows_one_replacement(model, monkeypatch):
    tokens = model.tokenizer.encode("a🙂")
    pieces = [model.tokenizer.token_bytes(t) for t in tokens]
    assert len(pieces[-1]) == 1, "the last byte of the emoji must be a token of its own"
    text, last = scripted(model, monkeypatch, tokens[:-1])
    assert text == "a\ufffd" and last.finish_reason is FinishReason.LENGTH


def test_a_held_stop_prefix_is_shown_when_the_text_ends(model, monkeypatch):
    tokens = model.tokenizer.encode("ab")
    text, last = scripted(model, monkeypatch, tokens, stop=("bcd",))
    assert text == "ab" and last.finish_reason is FinishReason.LENGTH and last.stop_reason is None


def test_a_stop_in_the_flushed_tail_counts(model, monkeypatch):
    tokens = model.tokenizer.encode("a🙂")[:-1]
    text, last = scripted(model, monkeypatch, tokens, stop=("\ufffd",))
    assert text == "a" and last.finish_reason is FinishReason.STOP and last.stop_reason == "\ufffd"


def test_time_per_token_is_the_mean_over_the_steps_after_the_first(model, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(importlib.import_module("cs336_infer.generate").time, "perf_counter", lambda: next(clock))
    done = generate(model, [[1]], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert (done.ttft_s, done.tpot_s) == (1, 1)  # every step is one tick: the consumer's ticks are not counted


def test_damaged_weights_end_the_run_with_an_error(tmp_path):
    write_model(tmp_path)
    broken = load_model(tmp_path, dtype="float32", device="cpu")
    broken.net.norm[3] = math.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(NonFiniteLogits, match="NaN"):
            generate(broken, [[1]], SamplingParams(temperature=temperature))


def test_a_run_is_iterated_once(model):
    run = Run(model, [[5, 6, 7]], SamplingParams(max_tokens=3))
    next(iter(run))
    with pytest.raises(InvalidRequest, match="iterated before"):
        list(run)


@pytest.mark.parametrize(
    "prompts",
    [None, 3, b"abc", [b"abc"], {0: 1}, {1, 2}, [None], ["a", 1], [[[1]]], [[1.0]], [{}], iter([1])],
    ids=lambda p: type(p).__name__,
)
def test_odd_prompts_are_refused_in_one_line(model, prompts):
    with pytest.raises(InvalidRequest) as e:
        generate(model, prompts)
    assert "\n" not in str(e.value) and len(str(e.value)) < 200


@pytest.mark.parametrize("params", [{"max_tokens": 3}, "x", 3, False, [None], [{}]], ids=repr)
def test_odd_parameters_are_refused_in_one_line(model, params):
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        generate(model, [[1]], params)


def test_arrays_and_numpy_integers_are_prompts_too(model):
    want = generate(model, [[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids
    for prompt in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), [np.int64(1), np.int32(2), 3], range(1, 4), (1, 2, 3)):
        assert generate(model, prompt, SamplingParams(max_tokens=np.int64(4)))[0].token_ids == want
    assert generate(model, np.array([[1, 2, 3]]), SamplingParams(max_tokens=4))[0].token_ids == want


def test_a_huge_prompt_is_refused_before_it_is_tokenised(model, monkeypatch):
    monkeypatch.setattr(type(model.tokenizer), "encode", lambda *a, **k: pytest.fail("it was tokenised"))
    with pytest.raises(InvalidRequest, match="context of 64"):
        generate(model, "a " * 1_000_000)
