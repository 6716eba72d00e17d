"""Random lives of an engine: whatever arrives, forks, is cancelled, is late, is evicted or preempted, and whatever is
found in the prefix cache or fetched from a tier, every answer is that of a run without any cache, as far as it goes.
Unused KV slots hold NaN, or numbers that would be seen."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cs336_infer import FinishReason, LoadedModel, SamplingParams, generate, load_model
from cs336_infer.course.poison import poisoned
from cs336_infer.engine import LLM
from cs336_infer.engine.roster import by_priority, first_come
from cs336_infer.kv.tier_options import TierOptions

EXAMPLES = int(os.environ.get("SCHEDULES", "40"))  # 300 in the soak
MOST = 12  # tokens of an answer
FAMILIES = [[7 + 11 * f + i % 5 for i in range(40)] for f in range(3)]  # prompts of a family share their beginning


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write_model(folder)
    return load_model(folder, dtype="float32", kernels="reference")


@cache
def alone(model: LoadedModel, prompt: tuple[int, ...], temperature: float, seed: int | None) -> list[int]:
    """The longest answer any schedule asks for, by the oldest oracle there is: no cache, one request."""
    params = SamplingParams(max_tokens=MOST, temperature=temperature, seed=seed, ignore_eos=True)
    return generate(model, list(prompt), params, kv="none")[0].token_ids


prompts = st.builds(
    lambda family, shared, own: (*FAMILIES[family][:shared], *own),
    st.integers(0, 2),
    st.integers(1, 40),
    st.lists(st.integers(1, 299), max_size=9),
)
params = st.builds(
    lambda most, seed: SamplingParams(
        max_tokens=most, temperature=0.0 if seed is None else 0.9, seed=seed, ignore_eos=True
    ),
    st.integers(1, MOST),
    st.one_of(st.none(), st.integers(0, 3)),
)
actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            prompts,
            params,
            st.integers(1, 3),
            st.integers(-1, 1),
            st.one_of(st.none(), st.none(), st.integers(1, 12)),
        ),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("fork"), st.integers(0, 20), st.integers(1, MOST)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("forget")),
    ),
    min_size=3,
    max_size=20,
)
tiers = st.one_of(
    st.none(),
    st.builds(
        lambda host, disk, write: (host, disk, write),
        st.sampled_from([0, 2, 5]),
        st.sampled_from([0, 3, 50]),
        st.sampled_from(["through", "back"]),
    ),
)


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    actions=actions,
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare=st.integers(0, 12),
    max_batch=st.integers(1, 6),
    step_tokens=st.sampled_from([1, 2, 7, 2048]),
    prefix_cache=st.booleans(),
    rank=st.sampled_from([first_come, by_priority]),
    fill=st.sampled_from([float("nan"), 1e4, -3.0]),
    below=tiers,
    swap=st.booleans(),
)
def test_every_answer_is_that_of_a_run_alone(
    model: LoadedModel,
    tmp_path: Path,
    actions: list[Any],
    block_size: int,
    spare: int,
    max_batch: int,
    step_tokens: int,
    prefix_cache: bool,
    rank: Any,
    fill: float,
    below: tuple[int, int, str] | None,
    swap: bool,
) -> None:
    largest = -(-(49 + MOST) // block_size)  # blocks of the largest request
    block_bytes = 2 * 3 * 2 * 8 * 4 * block_size
    options = None
    if below is not None and prefix_cache and below[0] + below[1]:
        host, disk, write = below
        folder = tmp_path / f"{block_size}"
        options = TierOptions(host * block_bytes, disk * (block_bytes + 4096), folder if disk else None, write)
    llm = LLM(
        model,
        block_size=block_size,
        kv_tokens=(largest + spare) * block_size,
        prefix_cache=prefix_cache,
        tiers=options,
        max_batch=max_batch,
        step_tokens=step_tokens,
        rank=rank,
        preemption="swap" if swap and options is not None else "recompute",
        debug=True,
        fill=fill,
    )
    with llm:
        engine, pool = llm.engine, llm.kv.pool
        engine.clock = lambda: float(engine.steps)  # a deadline is a number of steps
        everybody = []
        for action, *args in actions:
            if action == "add":
                prompt, its, n, priority, late = args
                everybody += engine.add(list(prompt), its, llm.root(), n=n, priority=priority, timeout_s=late)
            elif action == "step":
                for _ in range(args[0]):
                    engine.step()
            elif action == "fork":
                which, most = args
                running = [s for s in engine.running if s.params.greedy]
                if running:
                    child = SamplingParams(max_tokens=most, ignore_eos=True)
                    everybody.append(engine.fork(running[which % len(running)], child))
            elif action == "cancel" and everybody:
                engine.cancel(everybody[args[0] % len(everybody)])
            elif action == "forget":
                pool.forget()
            assert_one_owner(llm)
        bound = 50 + sum(s.total + s.answer.room for s in everybody) * (len(everybody) + 1) * 4
        while engine.busy:
            engine.step()
            assert engine.steps < bound, "no progress"
        for s in everybody:
            assert s.ended and s.completion.finish_reason is not FinishReason.ERROR, s.completion.error
            want = alone(model, tuple(s.completion.prompt_token_ids), s.params.temperature, s.params.seed)
            got = s.completion.token_ids
            assert got == want[: len(got)], f"sequence {s.number}"
            if s.completion.finish_reason is FinishReason.TIMEOUT:
                assert engine.steps >= s.deadline
            elif s.completion.finish_reason is not FinishReason.CANCELLED:
                assert len(got) == s.params.max_tokens or len(got) > s.params.max_tokens  # a fork may begin longer
        llm.kv.flush()
        pool.check()
        assert pool.live == 0, "blocks leaked"


def assert_one_owner(llm: LLM) -> None:
    """Every block has exactly the references that sequences and copies on their way hold."""
    held: dict[int, int] = {}
    for s in llm.engine.running:
        assert s.kv is not None
        assert len(set(s.kv.table)) == len(s.kv.table)
        for block in s.kv.table:
            held[block] = held.get(block, 0) + 1
    for block, _ in llm.kv._leaving:
        held[block] = held.get(block, 0) + 1
    pool = llm.kv.pool
    assert pool.live == len(held)
    assert all(pool.refs(block) == count for block, count in held.items())
    # Nobody writes into a block that somebody else reads: the next token of each goes to an owned or a full block.
    for s in llm.engine.running:
        tail = s.kv.table[-1:] if s.kv is not None and s.kv.length % llm.kv.memory.block_size else []
        assert all(pool.content(block) is None for block in tail), "an unfinished block was published"


def test_unwritten_memory_never_reaches_an_answer(model: LoadedModel) -> None:
    """The same batch over three fillings gives finite, bitwise equal logits: nothing unwritten was read into them."""
    prompts = [[5, 6, 7], [9] * 13, list(range(20, 41))]
    options = {"block_size": 4, "kv_tokens": 160, "prefix_cache": True}
    assert poisoned(model, prompts, (float("nan"), 1e4, -7.0), tokens=9, **options) == "clean"
