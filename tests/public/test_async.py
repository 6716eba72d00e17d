"""`AsyncLLM`: many tasks of an event loop over one engine, and what becomes of those that give up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import tiny

from cs336_infer import LLM, FinishReason, InvalidRequest, LoadedModel, SamplingParams, generate, load_model
from cs336_infer.engine import AsyncLLM
from cs336_infer.engine.runner import Stopped
from cs336_infer.serve.api import create_app

P16 = SamplingParams(max_tokens=16, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write_model(folder)
    return load_model(folder, dtype="float32", kernels="reference")


def run(model: LoadedModel, work: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    llm = LLM(model, block_size=4, kv_tokens=2048, debug=True, fill=float("nan"), step_tokens=64)

    async def main() -> Any:
        async with AsyncLLM(llm, **options) as engine:
            return await asyncio.wait_for(work(engine), 60)

    result = asyncio.run(main())
    assert llm.kv.pool.live == 0 and not llm.engine.busy
    return result


def test_tasks_share_the_engine_and_get_their_own_answers(model: LoadedModel) -> None:
    prompts = [[3 + i, 5, 7 + 2 * i] for i in range(8)]
    params = [SamplingParams(max_tokens=16, temperature=0.8, seed=i, ignore_eos=True) for i in range(8)]

    async def work(engine: AsyncLLM) -> Any:
        tasks = [engine.generate(p, its) for p, its in zip(prompts, params, strict=True)]
        return await asyncio.gather(*tasks), engine.llm.engine.steps

    answers, steps = run(model, work)
    for (done,), prompt, its in zip(answers, prompts, params, strict=True):
        assert done.token_ids == generate(model, prompt, its, kv="none")[0].token_ids
    assert steps < 8 * 16  # they ran together


def test_a_stream_is_the_whole_answer(model: LoadedModel) -> None:
    async def work(engine: AsyncLLM) -> Any:
        return [event async for event in engine.stream([[5, 6, 7], [8, 9]], P16)]

    events = run(model, work)
    for index, prompt in enumerate(([5, 6, 7], [8, 9])):
        want = generate(model, prompt, P16, kv="none")[0]
        assert [e.token_id for e in events if e.index == index] == want.token_ids
        assert "".join(e.text for e in events if e.index == index) == want.text


def test_several_answers_to_a_prompt_stand_together(model: LoadedModel) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=4, ignore_eos=True)

    async def work(engine: AsyncLLM) -> Any:
        return await engine.generate([[5, 6, 7], [8, 9]], params, n=3)

    answers = run(model, work)
    for index, done in enumerate(answers):
        prompt, seed = ([5, 6, 7], [8, 9])[index // 3], 4 + index % 3
        alone = SamplingParams(max_tokens=6, temperature=1.0, seed=seed, ignore_eos=True)
        assert done.token_ids == generate(model, prompt, alone, kv="none")[0].token_ids


def test_a_cancelled_task_gives_its_blocks_back(model: LoadedModel) -> None:
    async def work(engine: AsyncLLM) -> Any:
        gone = asyncio.ensure_future(engine.generate([5] * 40, LONG))
        reader = engine.stream([6] * 40, LONG)
        await anext(reader)
        gone.cancel()
        await reader.aclose()  # stops reading in the middle
        with pytest.raises(asyncio.CancelledError):
            await gone
        (done,) = await engine.generate([7, 8], P16)
        while engine.runner.requests:
            await asyncio.sleep(0.01)
        return done, engine.llm.kv.pool.live

    done, live = run(model, work)
    assert done.token_ids == generate(model, [7, 8], P16, kv="none")[0].token_ids
    assert live == 0


def test_bad_requests_raise_and_the_others_go_on(model: LoadedModel) -> None:
    async def work(engine: AsyncLLM) -> Any:
        good = asyncio.ensure_future(engine.generate([5, 6], P16))
        for prompts, options in (([], {}), ([99999], {}), ([5], {"timeout_s": -1}), ([5], {"n": 0})):
            with pytest.raises(InvalidRequest):
                await engine.generate(prompts, P16, **options)
        return await good

    (done,) = run(model, work)
    assert done.finish_reason is FinishReason.LENGTH


def test_stopping_finishes_what_runs_and_takes_nothing_new(model: LoadedModel) -> None:
    async def work(engine: AsyncLLM) -> Any:
        running = asyncio.ensure_future(engine.generate([5, 6], P16))
        while not engine.runner.requests:
            await asyncio.sleep(0.01)
        assert await engine.stop()
        with pytest.raises(Stopped):
            await engine.generate([5, 6], P16)
        return await running

    (done,) = run(model, work)
    assert len(done.token_ids) == 16


def test_a_deadline_reaches_the_engine(model: LoadedModel) -> None:
    async def work(engine: AsyncLLM) -> Any:
        engine.llm.engine.clock = lambda: float(engine.llm.engine.steps)  # deadlines in steps
        return await engine.generate([5, 6], LONG, timeout_s=4)

    (done,) = run(model, work)
    assert done.finish_reason is FinishReason.TIMEOUT and len(done.token_ids) == 4


def test_the_server_ends_an_answer_in_time(model: LoadedModel) -> None:
    llm = LLM(model, block_size=4, kv_tokens=2048)
    app = create_app(llm, "tiny", timeout_s=5)
    llm.engine.clock = lambda: float(llm.engine.steps)

    async def main() -> httpx.Response:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
                body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 100, "ignore_eos": True}
                return await client.post("/v1/completions", json=body)

    answer = asyncio.run(main()).json()
    assert answer["choices"][0]["finish_reason"] == "timeout" and answer["usage"]["completion_tokens"] == 5


def test_the_contiguous_rung_has_no_engine(model: LoadedModel) -> None:
    with pytest.raises(InvalidRequest, match="paged"):
        AsyncLLM(LLM(model, kv="contiguous"))
