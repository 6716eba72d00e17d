"""The detector of doom loops: against a definition that looks at the whole text, and in the engine."""

from __future__ import annotations

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_infer import LLM, FinishReason, InvalidRequest, SamplingParams, load_model
from cs336_infer.text.loops import LoopDetector
from cs336_infer.types import LoopRule


def by_definition(tokens: list[int], rule: LoopRule, separators: set[int]) -> tuple[int, int] | None:
    """Period and length of the loop at the end of `tokens`."""
    best = None
    for period in range(1, rule.max_period + 1):
        length = period
        while length < len(tokens) and tokens[-length - 1] == tokens[-length - 1 + period]:
            length += 1
        if length > period and length >= max(rule.min_tokens, rule.min_copies * period):
            best = length
            break
    if best is None:
        return None
    end = tokens[-best:]
    primitive = next(p for p in range(1, best) if all(a == b for a, b in zip(end, end[p:], strict=False)))
    if primitive < rule.min_period or set(tokens[-primitive:]) <= separators:
        return None
    return primitive, best


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 8)), max_size=6),
    rule=st.builds(LoopRule, max_period=st.integers(4, 9), min_period=st.integers(1, 3), min_copies=st.integers(2, 4),
                   min_tokens=st.integers(2, 14)),
    separators=st.sets(st.integers(0, 3), max_size=2),
)  # fmt: skip
def test_it_is_its_definition(pieces, rule, separators):
    tokens = [t for unit, copies in pieces for t in unit * copies]
    detector = LoopDetector(rule, separators)
    for end in range(1, len(tokens) + 1):
        loop = detector.push(tokens[end - 1])
        got = None if loop is None else (loop.period, loop.covered)
        assert got == by_definition(tokens[:end], rule, separators)


def test_equal_separators_are_no_pattern_of_four():
    """vllm-project/vllm#52677: with a smallest period of 4 and 3 copies, twelve equal tokens are not a loop of 4."""
    detector = LoopDetector(LoopRule(max_period=8, min_period=4, min_copies=3, min_tokens=12))
    assert [detector.push(7) for _ in range(30)] == [None] * 30
    assert [detector.push(t) for t in [1, 2, 3, 4] * 3][-1] is not None


def test_a_long_block_is_found():
    """ggml-org/llama.cpp#26039: loops may repeat hundreds of tokens."""
    detector = LoopDetector(LoopRule(max_period=1024, min_copies=4, min_tokens=64))
    unit = list(range(1000))
    loops = [detector.push(t) for t in unit * 4]
    assert loops[:-1] == [None] * 3999 and loops[-1] is not None and loops[-1].period == 1000


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_period": 0}, "min_period"),
        ({"max_period": 100_000}, "max_period"),
        ({"min_copies": 1}, "min_copies"),
        ({"max_period": 4, "min_period": 5}, "max_period"),
        ({"min_tokens": 0}, "min_tokens"),
    ],
)
def test_rules_that_cannot_be(values, words):
    """vllm-project/vllm#31690, #46700: a smallest period of 0, a largest one that costs the scheduler its time."""
    with pytest.raises(InvalidRequest, match=words):
        LoopRule(**values)


def test_a_loop_ends_an_answer_under_its_own_name(tmp_path):
    """vllm-project/vllm#35451: a looping answer ends with a finish reason of its own, not at max_tokens."""
    tiny.write_model(tmp_path / "m")
    model = load_model(tmp_path / "m", dtype="float32", kernels="reference")
    llm = LLM(model, block_size=4, kv_tokens=1024)
    free = SamplingParams(max_tokens=150, ignore_eos=True)
    rule = LoopRule(max_period=16, min_copies=3, min_tokens=24)
    watched = SamplingParams(max_tokens=150, ignore_eos=True, loops=rule)
    prompts = [[s, s + 1, s + 2] for s in range(5, 290, 19)]
    answers = llm.generate(prompts, watched)
    assert {FinishReason.LOOP, FinishReason.LENGTH} == {a.finish_reason for a in answers}
    for long, cut in zip(llm.generate(prompts, free), answers, strict=True):
        ids = long.token_ids
        end = next((i for i in range(1, 151) if by_definition(ids[:i], rule, set())), None)
        assert cut.token_ids == ids[:end]
        assert (cut.finish_reason is FinishReason.LOOP) == (end is not None)
    assert llm.kv.pool.live == 0
