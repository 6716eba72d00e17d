"""The load generator of `cs336-infer bench serve`: requests leave at their times, whether or not the server keeps up.

Open loop: a slow answer does not delay the next arrival, unless `max_concurrency` says so. The clock is the event
loop's. A request's times begin when it is sent; the first token is the first chunk that has text, so that the opening
chunk of a chat does not count.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from cs336_infer.types import InvalidRequest, check_integer, check_number

CHAT = "/v1/chat/completions"
DETAIL = 300  # characters of an error that are kept


@dataclass(frozen=True)
class Shot:
    """One request. `at` is its arrival in seconds after the start; `prompt` a text or token ids."""

    at: float
    prompt: str | list[int]
    output: int


@dataclass
class Outcome:
    """What became of one request; times in seconds. `gaps` are those between chunks that have text.

    Attributes:
        error: why it failed, or None.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = math.nan
    latency: float = math.nan
    gaps: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def tpot(self) -> float:
        """(latency - ttft) / (tokens - 1); nan for one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Times of `count` arrivals, the first at 0. Gaps are gamma distributed with the mean 1 / rate and the shape
    `burstiness`: 1 is a Poisson process, less comes in bursts, more is regular. An infinite rate: all at 0.

    Raises:
        InvalidRequest: rate or burstiness is not above 0.
    """
    check_integer("--num-prompts", count, 1, 1 << 24)
    if not rate > 0:
        raise InvalidRequest(f"--request-rate must be above 0, or inf, not {rate}")
    check_number("--burstiness", burstiness, 0, math.inf, "a finite number above 0", open_low=True)
    if math.isinf(rate):
        return [0.0] * count
    draw, times = random.Random(seed), [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.gammavariate(burstiness, 1 / (rate * burstiness)))
    return times


async def fire(
    client: httpx.AsyncClient,
    endpoint: str,
    body: dict[str, Any],
    shots: Sequence[Shot],
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[Outcome], None] = lambda _: None,
) -> tuple[list[Outcome], float]:
    """Send every request at its time; the outcomes in order, and the seconds from the start to the last of them.

    Args:
        body: what all requests have in common. on_end: called with each outcome.
    """
    clock = asyncio.get_running_loop().time
    places = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
    begun = clock()

    async def one(shot: Shot) -> Outcome:
        await asyncio.sleep(begun + shot.at - clock())
        if places is not None:
            await places.acquire()
        try:
            outcome = await send(client, endpoint, body, shot)
        finally:
            if places is not None:
                places.release()
        on_end(outcome)
        return outcome

    outcomes = list(await asyncio.gather(*map(one, shots)))
    return outcomes, clock() - begun


async def send(client: httpx.AsyncClient, endpoint: str, body: dict[str, Any], shot: Shot) -> Outcome:
    """One streamed request. Whatever goes wrong is in `Outcome.error`."""
    clock = asyncio.get_running_loop().time
    chat = endpoint.endswith(CHAT)
    asked: dict[str, Any] = {"max_tokens": shot.output, "stream": True, "stream_options": {"include_usage": True}}
    asked |= {"messages": [{"role": "user", "content": shot.prompt}]} if chat else {"prompt": shot.prompt}
    done, begun, last, whole = Outcome(), clock(), math.nan, False
    try:
        async with client.stream("POST", endpoint, json=body | asked) as response:
            if response.status_code != 200:
                await response.aread()
                done.error = f"HTTP {response.status_code}: {response.text[:DETAIL]}"
                return done
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    whole = True
                    break
                chunk = json.loads(data)
                if "error" in chunk:
                    done.error = str(chunk["error"].get("message", chunk["error"]))[:DETAIL]
                    return done
                if usage := chunk.get("usage"):
                    done.prompt_tokens, done.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                if any(_text(choice) for choice in chunk.get("choices", ())):
                    now = clock()
                    if math.isnan(last):
                        done.ttft = now - begun
                    else:
                        done.gaps.append(now - last)
                    last = now
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        done.error = f"{type(error).__name__}: {error}"[:DETAIL]
        return done
    done.latency = last - begun
    if not whole:
        done.error = "the stream ended before [DONE]"
    elif math.isnan(last):
        done.error = "the answer has no text"
    elif not done.output_tokens:
        done.error = "the server did not report its usage"
    return done


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
