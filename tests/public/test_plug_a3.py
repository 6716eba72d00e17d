"""A student's scheduler, stop filter and loop detector in the real engine: the same steps, the same text, and a fault
of theirs ends a call with one line that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

from cs336_infer import LLM, FinishReason, LoadedModel, LoopRule, SamplingParams, TierOptions, generate, load_model
from cs336_infer.course.a3_sockets import plug_serving
from cs336_infer.course.assignment import Role, read_assignment
from cs336_infer.course.plug import PLUGGED
from cs336_infer.engine.roster import by_priority
from cs336_infer.engine.scheduler import Scheduler
from cs336_infer.text import StopStrings
from cs336_infer.text.loops import LoopDetector
from cs336_infer.types import InferError

REPO = Path(__file__).resolve().parents[2]
PROMPTS = [[5 + 7 * p + i for i in range(3 + 4 * p)] for p in range(6)]
PARAMS = SamplingParams(max_tokens=14, ignore_eos=True)
BLOCK_BYTES = 3 * 2 * 4 * 2 * 8 * 4  # layers, K and V, block, KV heads, head size, float32


def _namespace(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "student"}
    exec(compile(code, "solution", "exec"), namespace)
    return namespace


def reference() -> dict[str, Any]:
    cells = read_assignment(REPO / "solutions" / "a3_serving" / "a3_serving.py").cells
    return _namespace("import copy\n" + "\n\n\n".join(c.source for c in cells if c.role is Role.SOLUTION))


def second() -> dict[str, Any]:
    """Its scheduler; it has no classes for the engine."""
    return _namespace((REPO / "tests" / "mutants" / "a3_serving_second.py").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def mine() -> dict[str, Any]:
    return reference()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write_model(folder)
    tiny.write_tokenizer(folder)
    return load_model(folder, dtype="float32", kernels="reference")


@pytest.fixture(autouse=True)
def _nothing_left() -> Any:
    yield
    assert not PLUGGED
    from cs336_infer import answer
    from cs336_infer.engine import engine

    assert (engine.Scheduler, answer.StopStrings, answer.LoopDetector) == (Scheduler, StopStrings, LoopDetector)


def crowded(model: LoadedModel, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"block_size": 4, "kv_tokens": 64, "step_tokens": 12, "max_batch": 4, "debug": True}
    return LLM(model, **(defaults | {"fill": float("nan")} | options))


def recorded(llm: LLM) -> list[Any]:
    """What each step computes, by number, from here on."""
    steps: list[Any] = []
    decide = llm.engine.scheduler.next

    def next_step() -> Any:
        plan, failed = decide()
        steps.append((sorted((s.number, new) for s, new in plan), [s.number for s, _ in failed]))
        return plan, failed

    llm.engine.scheduler.next = next_step  # type: ignore[method-assign]
    return steps


OPTIONS: dict[str, dict[str, Any]] = {
    "crowded": {"prefix_cache": False},
    "roomy": {"prefix_cache": False, "kv_tokens": 400},
    "small steps": {"prefix_cache": False, "step_tokens": 3},
    "one at a time": {"prefix_cache": False, "max_batch": 1},
    "blocks of one token": {"prefix_cache": False, "block_size": 1, "kv_tokens": 45},
}


@pytest.mark.parametrize("who", [reference, second], ids=["reference", "second"])
@pytest.mark.parametrize("name", OPTIONS)
def test_step_by_step_it_is_the_engines_own_schedule(model: LoadedModel, name: str, who: Any) -> None:
    want_llm = crowded(model, **OPTIONS[name])
    want_steps = recorded(want_llm)
    want = want_llm.generate(PROMPTS, PARAMS)
    with plug_serving(schedule_step=who()["schedule_step"]):
        llm = crowded(model, **OPTIONS[name])
        steps = recorded(llm)
        got = llm.generate(PROMPTS, PARAMS)
    assert steps == want_steps
    assert [a.token_ids for a in got] == [a.token_ids for a in want]
    assert got[0].path.endswith("plugged=schedule_step") and "plugged" not in want[0].path
    for figure in ("preemptions", "tokens_recomputed", "steps", "free"):
        assert llm.stats()["device"][figure] == want_llm.stats()["device"][figure]
    assert name != "crowded" or llm.stats()["device"]["preemptions"] > 0


def test_shared_blocks_tiers_forks_and_ranks_change_no_answer(model: LoadedModel, mine: dict[str, Any]) -> None:
    """Prompts that begin alike, several answers to each, swapped out and in; memory that is shared frees less than the
    function believes."""
    begin = [7 + i for i in range(10)]
    prompts = [[*begin, 60 + n, *([90 + n] * n)] for n in range(5)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    want = [generate(model, p, params, kv="none")[0].token_ids for p in prompts for _ in range(2)]
    cases: list[dict[str, Any]] = [
        {},
        {"rank": by_priority},
        {"tiers": TierOptions(host_bytes=100 * BLOCK_BYTES, write="back"), "preemption": "swap"},
        {"tiers": TierOptions(host_bytes=100 * BLOCK_BYTES), "kv_tokens": 44},
    ]
    with plug_serving(schedule_step=mine["schedule_step"]):
        for options in cases:
            with crowded(model, **options) as llm:
                for _ in range(2):
                    assert [a.token_ids for a in llm.generate(prompts, params, n=2)] == want, options
                device = llm.stats()["device"]
                assert device["tokens_hit"] > 0 and device["live"] == 0


def test_one_that_never_fits_fails_and_its_neighbours_do_not(model: LoadedModel, mine: dict[str, Any]) -> None:
    with plug_serving(schedule_step=mine["schedule_step"]):
        llm = crowded(model, prefix_cache=False, kv_tokens=16)
        small, large = llm.generate([PROMPTS[0], list(range(5, 20))], SamplingParams(max_tokens=6, ignore_eos=True))
    assert small.finish_reason is FinishReason.LENGTH and len(small.token_ids) == 6
    assert large.finish_reason is FinishReason.ERROR and "too small for it, even alone" in str(large.error)


def step(**parts: Any) -> dict[str, Any]:
    return {"admit": [], "compute": [], "preempt": [], "fail": [], **parts}


BAD: dict[str, tuple[Any, str]] = {
    "None": (lambda w, r: None, "schedule_step returned None to the engine"),
    "lacks a part": (lambda w, r: {"admit": []}, "expects lists"),
    "nothing": (lambda w, r: step(), "computes nothing, and 0 requests run, 6 wait"),
    "unknown id": (lambda w, r: step(admit=[99]), "admit names 99, not one of [0, 1, 2, 3, 4, 5]"),
    "an id of text": (lambda w, r: step(admit=["0"]), "admit names '0'"),
    "computes who waits": (lambda w, r: step(compute=[[0, 1]]), "compute names 0, not one of []"),
    "no pair": (lambda w, r: step(admit=[0], compute=[0]), "compute holds 0, which is no [id, tokens]"),
    "negative": (lambda w, r: step(admit=[0], compute=[[0, -1]]), "[0, -1] of a request with 3 tokens"),
    "too many": (lambda w, r: step(admit=[0], compute=[[0, 4]]), "[0, 4] of a request with 3 tokens"),
    "twice": (lambda w, r: step(admit=[0], compute=[[0, 1], [0, 1]]), "compute names 0, not one of []"),
    "over the budget": (
        lambda w, r: step(admit=[2, 3], compute=[[2, 11], [3, 9]]),
        "computes 20 tokens, step_tokens is 12",
    ),
    "preempts who waits": (lambda w, r: step(preempt=[0]), "preempt names 0, not one of []"),
    "computes who gave way": (
        lambda w, r: step(admit=[0], preempt=[0], compute=[[0, 1]]),
        "compute names 0, not one of []",
    ),
    "raises": (lambda w, r: 1 / 0, "division by zero"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_step_that_cannot_be_is_named_and_the_engine_lives(
    model: LoadedModel, mine: dict[str, Any], name: str
) -> None:
    answer, says = BAD[name]
    broken = True

    def sometimes(waiting: Any, running: Any, *rest: Any) -> Any:
        return answer(waiting, running) if broken else mine["schedule_step"](waiting, running, *rest)

    with plug_serving(schedule_step=sometimes):
        llm = crowded(model, prefix_cache=False)
        with pytest.raises((InferError, ZeroDivisionError)) as error:
            llm.generate(PROMPTS, PARAMS)
        assert says in str(error.value) and "\n" not in str(error.value)
        assert llm.stats()["device"]["live"] == 0 and not llm.engine.busy
        broken = False
        got = llm.generate(PROMPTS[:2], PARAMS)
    assert [a.token_ids for a in got] == [generate(model, p, PARAMS)[0].token_ids for p in PROMPTS[:2]]


def test_more_than_fits_into_memory_is_named(model: LoadedModel) -> None:
    def greedy(waiting: Any, running: Any, *rest: Any) -> Any:
        return step(admit=[r["id"] for r in waiting], compute=[[r["id"], r["total"]] for r in waiting])

    with plug_serving(schedule_step=greedy):
        llm = crowded(model, prefix_cache=False, kv_tokens=16, step_tokens=99)
        with pytest.raises(InferError, match="computes more than fits into KV memory"):
            llm.generate(PROMPTS[:3], PARAMS)
        assert llm.stats()["device"]["live"] == 0


def test_stops_and_loops_as_the_engines_own(model: LoadedModel, mine: dict[str, Any]) -> None:
    plain = generate(model, PROMPTS[2], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    assert len(plain.text) > 12
    for begin, size in ((3, 1), (5, 4), (8, 3)):
        params = SamplingParams(max_tokens=40, ignore_eos=True, stop=(plain.text[begin : begin + size], "never here"))
        want = generate(model, PROMPTS[2], params)[0]
        with plug_serving(StopFilter=mine["StopFilter"], watch_loops=mine["watch_loops"]):
            llm = crowded(model)
            got = llm.generate(PROMPTS[2], params)[0]
            events = list(llm.stream(PROMPTS[2], params))
        assert (got.text, got.stop_reason, got.finish_reason) == (want.text, want.stop_reason, FinishReason.STOP)
        assert "".join(event.text for event in events) == want.text
    rule = LoopRule(max_period=4, min_copies=2, min_tokens=4)
    biased = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={9: 100.0}, loops=rule)
    want = generate(model, PROMPTS[2], biased)[0]
    with plug_serving(watch_loops=mine["watch_loops"]):
        got = crowded(model).generate(PROMPTS[2], biased)[0]
    assert got.token_ids == want.token_ids and got.finish_reason is want.finish_reason is FinishReason.LOOP


class Liar:
    """A filter whose answers are given."""

    matched = None
    pushed: Any = ""
    flushed: Any = ""

    def __init__(self, stops: list[str]) -> None:
        pass

    def push(self, text: str) -> Any:
        return self.pushed

    def flush(self) -> Any:
        return self.flushed


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pushed": "made up"}, "StopFilter.push gave 'made up', the text goes on"),
        ({"pushed": None}, "StopFilter.push gave None"),
        ({"flushed": "made up"}, "StopFilter.flush gave 'made up', the text goes on"),
        ({"matched": "elsewhere"}, "StopFilter matched 'elsewhere', but the text goes on"),
    ],
)
def test_text_that_the_model_did_not_write_is_named(model: LoadedModel, given: dict[str, Any], says: str) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, stop=("zzz",))
    with plug_serving(StopFilter=type("Liar", (Liar,), given)), pytest.raises(InferError) as error:
        crowded(model).generate(PROMPTS[2], params)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "watch_loops returned None to the engine"),
        ((None, []), "watch_loops found [] after one token"),
        ((None, [9]), "watch_loops found [9] after one token, which is no period"),
        ((None, [True]), "watch_loops found [True]"),
    ],
)
def test_periods_that_cannot_be_are_named(model: LoadedModel, answer: Any, says: str) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, loops=LoopRule(max_period=8))
    with plug_serving(watch_loops=lambda *a: answer), pytest.raises(InferError) as error:
        crowded(model).generate(PROMPTS[2], params)
    assert says in str(error.value) and "\n" not in str(error.value)
