"""Preemption by recomputing and by swapping, and deadlines: what is computed again, what is kept, and who is told."""

from __future__ import annotations

from typing import Any

import pytest
import tiny

from cs336_infer import (
    LLM,
    FinishReason,
    InvalidRequest,
    LoadedModel,
    SamplingParams,
    TierOptions,
    generate,
    load_model,
)
from cs336_infer.engine.engine import Engine
from cs336_infer.types import NO_TOKEN, TokenEvent

BLOCK = 4
BLOCK_BYTES = 3 * 2 * BLOCK * 2 * 8 * 4  # layers, K and V, block, KV heads, head size, float32
PROMPTS = [[5 + 7 * p + i for i in range(9 + p)] for p in range(4)]
P24 = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write_model(folder)
    return load_model(folder, dtype="float32", kernels="reference")


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> list[list[int]]:
    return [generate(model, p, P24, kv="none")[0].token_ids for p in PROMPTS]


def crowded(model: LoadedModel, **options: Any) -> LLM:
    """Four answers of up to 36 tokens each, in memory for 56."""
    defaults: dict[str, Any] = {"block_size": BLOCK, "kv_tokens": 56, "debug": True, "fill": float("nan")}
    return LLM(model, **(defaults | options))


def in_host(blocks: int, write: str = "back") -> TierOptions:
    return TierOptions(host_bytes=blocks * BLOCK_BYTES, write=write)


@pytest.mark.parametrize("write", ["back", "through"])
def test_a_swapped_sequence_computes_nothing_again(model: LoadedModel, alone: list[list[int]], write: str) -> None:
    with crowded(model, tiers=in_host(200, write), preemption="swap") as llm:
        assert [c.token_ids for c in llm.generate(PROMPTS, P24)] == alone
        device = llm.stats()["device"]
        assert device["preemptions"] > 0 and device["tokens_recomputed"] == 0


def test_without_swap_and_cache_all_of_it_is_computed_again(model: LoadedModel, alone: list[list[int]]) -> None:
    with crowded(model, prefix_cache=False) as llm:
        lost = 0
        preempt = llm.engine.scheduler.preempt

        def spy(sequence: Any) -> None:
            nonlocal lost
            lost += sequence.stored
            preempt(sequence)

        llm.engine.scheduler.preempt = spy  # type: ignore[method-assign]
        assert [c.token_ids for c in llm.generate(PROMPTS, P24)] == alone
        assert llm.stats()["device"]["tokens_recomputed"] == lost > 0


def test_a_small_host_tier_costs_a_recomputation(model: LoadedModel, alone: list[list[int]]) -> None:
    with crowded(model, tiers=in_host(2), preemption="swap") as llm:
        assert [c.token_ids for c in llm.generate(PROMPTS, P24)] == alone
        assert llm.stats()["device"]["tokens_recomputed"] > 0


def test_a_damaged_block_of_the_host_is_computed_again(
    model: LoadedModel, alone: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with crowded(model, tiers=in_host(200), preemption="swap") as llm:
        suspend = llm.kv.suspend

        def damaged(sequence: Any) -> None:
            suspend(sequence)
            for slab in llm.tiers.host._slab:
                slab[:, 17] ^= 1

        llm.kv.suspend = damaged  # type: ignore[method-assign]
        assert [c.token_ids for c in llm.generate(PROMPTS, P24)] == alone
        assert llm.stats()["device"]["tokens_recomputed"] > 0
    assert "damaged" in caplog.text


def test_a_wrong_tail_would_be_seen(model: LoadedModel, alone: list[list[int]]) -> None:
    """The tests above can fail: give the unfinished block another content and the ids change."""
    with crowded(model, tiers=in_host(200), preemption="swap") as llm:
        resume, wrong = llm.kv.resume, []

        def other(sequence: Any, tokens: list[int]) -> None:
            before = len(sequence.table)
            resume(sequence, tokens)
            for block in sequence.table[before:]:
                llm.kv.memory.data[block] = 3.0
                wrong.append(block)

        llm.kv.resume = other  # type: ignore[method-assign]
        ids = [c.token_ids for c in llm.generate(PROMPTS, P24)]
        assert wrong and ids != alone


def test_what_was_computed_before_a_preemption_is_no_cache_hit(model: LoadedModel) -> None:
    with crowded(model, step_tokens=3) as llm:
        for done in llm.generate(PROMPTS, P24):
            assert done.cached_tokens == 0
        assert llm.stats()["device"]["preemptions"] > 0


@pytest.mark.parametrize(
    "options",
    [{"preemption": "swap"}, {"preemption": "swap", "prefix_cache": False}, {"preemption": "discard"}],
)
def test_a_preemption_that_cannot_be_is_refused(model: LoadedModel, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="preemption"):
        crowded(model, **options)


# Deadlines


def ticking(llm: LLM) -> Engine:
    """An engine whose clock counts its steps."""
    llm.engine.clock = lambda: float(llm.engine.steps)
    return llm.engine


def run(engine: Engine) -> list[TokenEvent]:
    events = []
    while engine.busy:
        events += engine.step()
    return events


def test_an_answer_ends_as_it_is_at_its_deadline(model: LoadedModel, alone: list[list[int]]) -> None:
    llm = crowded(model, kv_tokens=240)
    engine = ticking(llm)
    (late,) = engine.add(PROMPTS[0], P24, llm.root(), timeout_s=5)
    (other,) = engine.add(PROMPTS[1], P24, llm.root())
    events = run(engine)
    assert late.completion.finish_reason is FinishReason.TIMEOUT
    assert late.completion.token_ids == alone[0][:5]  # its last step began at 4
    assert other.completion.token_ids == alone[1] and other.completion.finish_reason is FinishReason.LENGTH
    mine = [e for e in events if e.index == late.number]
    assert mine[-1].token_id == NO_TOKEN and mine[-1].finish_reason is FinishReason.TIMEOUT
    assert "".join(e.text for e in mine) == late.completion.text
    assert llm.kv.pool.live == 0


def test_waiting_requests_and_forks_have_deadlines_too(model: LoadedModel) -> None:
    llm = crowded(model, max_batch=1, kv_tokens=240)
    engine = ticking(llm)
    (first,) = engine.add(PROMPTS[0], P24, llm.root())
    waiting = engine.add(PROMPTS[1], P24, llm.root(), n=3, timeout_s=4)
    events = run(engine)
    assert first.completion.finish_reason is FinishReason.LENGTH
    for each in waiting:
        assert each.completion.finish_reason is FinishReason.TIMEOUT and not each.completion.token_ids
        assert sum(e.index == each.number for e in events) == 1
    assert llm.kv.pool.live == 0


def test_text_that_was_held_back_is_shown_at_the_deadline(model: LoadedModel) -> None:
    whole = generate(model, PROMPTS[0], P24, kv="none")[0].text
    llm = crowded(model, kv_tokens=240)
    engine = ticking(llm)
    stop = whole[2:] + "never"  # from its third character on everything waits for the rest of the stop string
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop=(stop,))
    (late,) = engine.add(PROMPTS[0], params, llm.root(), timeout_s=12)
    events = run(engine)
    assert late.completion.finish_reason is FinishReason.TIMEOUT
    assert whole.startswith(late.completion.text) and len(late.completion.text) > 2
    assert "".join(e.text for e in events) == late.completion.text
    assert len(events[-1].text) > len("".join(e.text for e in events[:-1]))


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "5", True])
def test_a_time_that_is_none_is_refused(model: LoadedModel, seconds: Any) -> None:
    llm = crowded(model)
    with pytest.raises(InvalidRequest, match="timeout_s"):
        llm.generate(PROMPTS[0], P24, timeout_s=seconds)
    assert not llm.engine.busy and llm.kv.pool.live == 0


def test_the_contiguous_rung_refuses_what_it_cannot_do(model: LoadedModel) -> None:
    llm = LLM(model, kv="contiguous")
    for options in ({"timeout_s": 5}, {"salt": "a"}):
        with pytest.raises(InvalidRequest, match="contiguous"):
            llm.stream(PROMPTS[0], P24, **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="contiguous"):
            llm.generate(PROMPTS[0], P24, **options)  # type: ignore[arg-type]
