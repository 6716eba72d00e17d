"""`bench serve` against servers whose delays are known: the event loop's clock jumps instead of waiting, so that every
figure is exact. Then the real server."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from cs336_infer import InvalidRequest
from cs336_infer.cli import main
from cs336_infer.measure.workload import random_work
from cs336_infer.serve.bench import Outcome, Shot, arrivals, fire
from cs336_infer.serve.bench_report import figures, is_good, parse_goodput, table


class JumpingLoop(asyncio.SelectorEventLoop):
    """Nothing waits: when there is nothing to do, the clock goes to the next thing that was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def chunk(text: str = "", usage: tuple[int, int] | None = None, chat: bool = False) -> bytes:
    body: dict[str, Any] = {"choices": [] if usage else [{"delta": {"content": text}} if chat else {"text": text}]}
    if usage:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return f"data: {json.dumps(body)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def shoot(
    script: Callable[[int], list[tuple[float, bytes]]], shots: list[Shot], status: int = 200, **options: Any
) -> tuple[list[Outcome], float, list[dict[str, Any]]]:
    """`script(i)`: seconds to wait and bytes to send, for the request that arrives as number i."""
    bodies: list[dict[str, Any]] = []

    async def handler(request: httpx.Request) -> httpx.Response:
        number = len(bodies)
        bodies.append(json.loads(await request.aread()) | {"at": asyncio.get_running_loop().time() - 1000})

        async def answer() -> AsyncIterator[bytes]:
            for seconds, data in script(number):
                await asyncio.sleep(seconds)
                if data == b"cut":
                    raise httpx.ReadError("the connection was cut")
                yield data

        return httpx.Response(status, content=answer())

    async def go() -> tuple[list[Outcome], float]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://x") as client:
            return await fire(client, "/v1/completions", {"model": "m"}, shots, **options)

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        outcomes, seconds = runner.run(go())
    return outcomes, seconds, bodies


def steady(_: int) -> list[tuple[float, bytes]]:
    """Three tokens after 0.5, 0.6 and 0.8 s, behind an empty first chunk."""
    return [
        (0.1, chunk("")),
        (0.4, chunk("a")),
        (0.1, chunk("b")),
        (0.2, chunk("c")),
        (0.0, chunk(usage=(7, 3))),
        (0, DONE),
    ]


def test_times_of_one_request_are_exact() -> None:
    (one,), seconds, (body,) = shoot(steady, [Shot(0.0, [5, 6], 3)])
    assert one.error is None and (one.prompt_tokens, one.output_tokens) == (7, 3)
    assert one.ttft == pytest.approx(0.5) and one.latency == pytest.approx(0.8)
    assert one.tpot == pytest.approx((0.8 - 0.5) / 2) and one.gaps == pytest.approx([0.1, 0.2])
    assert seconds == pytest.approx(0.8)
    assert body["prompt"] == [5, 6] and body["max_tokens"] == 3 and body["stream_options"] == {"include_usage": True}


def test_arrivals_do_not_wait_for_answers_and_the_limit_on_concurrency_does() -> None:
    shots = [Shot(0.1 * i, [5], 3) for i in range(4)]
    outcomes, seconds, bodies = shoot(steady, shots)
    assert [b["at"] for b in bodies] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert seconds == pytest.approx(0.3 + 0.8) and all(o.ttft == pytest.approx(0.5) for o in outcomes)
    _, seconds, bodies = shoot(steady, shots, max_concurrency=1)
    assert [b["at"] for b in bodies] == pytest.approx([0.0, 0.8, 1.6, 2.4]) and seconds == pytest.approx(3.2)


@pytest.mark.parametrize(
    ("script", "status", "says"),
    [
        ([(0.1, b'{"error": "busy"}')], 503, "HTTP 503"),
        ([(0.1, b'data: {"error": {"message": "too slow"}}\n\n')], 200, "too slow"),
        ([(0.1, chunk("a")), (0.1, b"cut")], 200, "ReadError"),
        ([(0.1, chunk("a")), (0.1, chunk(usage=(1, 1)))], 200, "before [DONE]"),
        ([(0.1, chunk("")), (0.1, chunk(usage=(1, 1))), (0, DONE)], 200, "no text"),
        ([(0.1, chunk("a")), (0, DONE)], 200, "usage"),
        ([(0.1, b"data: {half\n\n")], 200, "JSONDecodeError"),
        ([(0.1, b"data: [1]\n\n")], 200, "AttributeError"),
    ],
)
def test_failures_are_told_and_counted(script, status, says) -> None:
    (one,), _, _ = shoot(lambda _: script, [Shot(0.0, "x", 3)], status)
    assert one.error is not None and says in one.error
    result = figures([one], 1.0, goodput={"ttft": 1e9})
    assert (result["completed"], result["failed"], result["request_goodput"]) == (0, 1, 0.0)
    assert result["mean_ttft_ms"] is None and result["errors"] == [one.error]


def test_figures_of_a_run() -> None:
    right = [Outcome(10, 5, 0.1 * i, 0.1 * i + 0.4, [0.1] * 4) for i in (1, 2, 3)]
    one_token = Outcome(10, 1, 0.25, 0.25)
    outcomes = [*right, one_token, Outcome(error="x")]
    result = figures(outcomes, 2.0, percentiles=(50, 99), goodput={"ttft": 250, "tpot": 100.001})
    assert (result["completed"], result["failed"]) == (4, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 16)
    assert result["request_throughput"] == 2.0 and result["output_throughput"] == 8.0
    assert result["total_token_throughput"] == 28.0
    assert result["request_goodput"] == 1.5 and result["good_fraction"] == 3 / 5, "a failed request is not a good one"
    ttfts = [100, 200, 300, 250]
    assert result["mean_ttft_ms"] == pytest.approx(statistics.mean(ttfts))
    assert result["median_ttft_ms"] == result["p50_ttft_ms"] == pytest.approx(225)
    assert result["std_ttft_ms"] == pytest.approx(statistics.pstdev(ttfts))
    assert result["mean_tpot_ms"] == pytest.approx(100), "one token has no time per token after the first"
    assert result["mean_itl_ms"] == pytest.approx(100) and result["p99_e2el_ms"] == pytest.approx(697)
    text = "\n".join(table(result, ("ttft", "itl"), (50, 99)))
    assert "Failed requests:                         1" in text and "P99 TTFT (ms)" in text and "E2EL" not in text
    assert figures([], 0.0)["request_throughput"] == 0.0


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:200", "e2el:3e3"]) == {"ttft": 200.0, "e2el": 3000.0}
    for wrong in ("ttft", "itl:5", "ttft:-1", "ttft:nan", "ttft:x"):
        with pytest.raises(InvalidRequest, match="--goodput"):
            parse_goodput([wrong])
    assert is_good(Outcome(1, 2, 0.1, 0.2), {"tpot": 101}) and not is_good(Outcome(1, 2, 0.1, 0.2), {"tpot": 99})


def test_arrivals_have_the_rate_and_the_shape_that_were_asked_for() -> None:
    assert arrivals(3, math.inf, 1.0, 0) == [0.0] * 3
    for burstiness in (0.25, 1.0, 4.0):
        times = arrivals(20_001, 50.0, burstiness, seed=1)
        gaps = [b - a for a, b in pairwise(times)]
        assert times[0] == 0 and min(gaps) >= 0
        assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
        assert statistics.stdev(gaps) * 50 == pytest.approx(burstiness**-0.5, rel=0.05)  # of a gamma distribution
    assert arrivals(5, 2.0, 1.0, 3) == arrivals(5, 2.0, 1.0, 3) != arrivals(5, 2.0, 1.0, 4)
    for rate, burstiness in ((0, 1), (-1, 1), (math.nan, 1), (1, 0)):
        with pytest.raises(InvalidRequest):
            arrivals(3, rate, burstiness, 0)


def test_random_prompts_have_lengths_in_the_range() -> None:
    work = random_work(500, 256, input_len=100, output_len=20, ratio=0.5, seed=0)
    lengths, outputs = {len(w.prompt) for w in work}, {w.output for w in work}
    assert min(lengths) == 50 and max(lengths) == 150 and (min(outputs), max(outputs)) == (10, 30)
    assert all(3 <= i < 256 for w in work for i in w.prompt)
    assert work == random_work(500, 256, input_len=100, output_len=20, ratio=0.5, seed=0)
    with pytest.raises(InvalidRequest):
        random_work(1, 256, input_len=100, output_len=20, ratio=1.0, seed=0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--dataset-path", "x"], "--dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere"], "/nowhere"),
        (["--dataset-name", "timed_trace", "--dataset-path", "/nowhere"], "/nowhere"),
        (["--dataset-name", "timed_trace", "--dataset-path", "generated", "--request-rate", "2"], "--request-rate"),
        (["--endpoint", "/v1/chat/completions"], "--dataset-name custom"),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--goodput", "ttft"], "--goodput"),
        (["--request-rate", "0"], "--request-rate"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--random-range-ratio", "1"], "range ratio"),
        (["--result-filename", "x.json"], "--save-result"),
        (["--port", "9", "--num-prompts", "1"], "give --model"),
    ],
)
def test_what_cannot_be_obeyed_is_one_line(options, says, capsys) -> None:
    assert main(["bench", "serve", "--disable-tqdm", *options]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_trace_prompts_share_what_the_trace_shares() -> None:
    import argparse

    from cs336_infer.bench_cli import _from_trace

    args = argparse.Namespace(dataset_path="generated", num_prompts=40, seed=0, vocab_size=256)
    shots = _from_trace(args)
    assert len(shots) == 40 and [s.at for s in shots] == sorted(s.at for s in shots)
    first = shots[0].prompt
    assert all(s.prompt[:512] == first[:512] for s in shots), "the system prompt is everybody's first block"
    assert len({tuple(s.prompt) for s in shots}) == 40


def test_load_and_abuse_of_the_real_process() -> None:
    """The reduced form of tests/e2e/load_serve.py."""
    script = Path(__file__).resolve().parents[1] / "e2e" / "load_serve.py"
    command = [sys.executable, str(script), "--clients", "12", "--seconds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.strip().endswith(": ok"), done.stdout + done.stderr
