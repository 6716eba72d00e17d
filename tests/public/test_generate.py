"""Prefill and decode: the cache changes nothing, batches change nothing, and every way to stop works."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_model

from cs336_infer import FinishReason, InvalidRequest, SamplingParams, generate, load_model, stream
from cs336_infer.kv import ContiguousKV


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
    ],
)
def test_bad_parameters_are_named_with_their_value(name, value):
    with pytest.raises(InvalidRequest, match=name) as e:
        SamplingParams(**{name: value})
    shown = value[0] if isinstance(value, tuple) else value
    assert repr(shown) in str(e.value) and "\n" not in str(e.value)
