"""Made-up traffic with the statistics of a real trace: conversations of several turns below one system prompt.

Conversations begin at random (Poisson). A turn sends the whole history again: the last prompt, the answer to it, and a
new message. Then the user thinks and goes on, or not. Lengths and times are drawn from quantiles near those of the
Mooncake conversation trace (kvcache-ai/Mooncake, FAST25-release: one hour of chat, 12,031 requests), so that the
prompts' lengths and what a cache of a given size saves come out as they are there; tests/public/test_traces.py
states the distances. What is not modelled: bursts, documents shared by several users, hours of the day.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TextIO

from cs336_infer.simulate.trace import MOONCAKE_BLOCK, TraceRequest
from cs336_infer.types import check_integer

REQUESTS = 12_031
"""As many as the published trace has in 3,537 s."""

_STARTS_PER_S = 2.26
_GO_ON_FIRST, _GO_ON_LATER = 0.28, 0.56  # chance of another turn; who has come back once often does again
_LONGEST = 126_195  # tokens: the context window in the trace

_Table = tuple[tuple[float, float], ...]

_FIRST_PROMPT: _Table = (  # (share of values below, value); between two rows the logarithm is linear
    (0.0, 891), (0.01, 894), (0.05, 898), (0.10, 908), (0.25, 1490), (0.50, 5989), (0.75, 14358), (0.90, 25900),
    (0.95, 37400), (0.99, 84500), (0.999, 118000), (1.0, 126195),
)  # fmt: skip
_ANSWER: _Table = (
    (0.0, 1), (0.01, 3), (0.05, 10), (0.10, 24), (0.25, 156), (0.50, 358), (0.75, 472), (0.90, 597), (0.95, 698),
    (0.99, 1118), (1.0, 2000),
)  # fmt: skip
_MESSAGE: _Table = (
    (0.0, 1), (0.25, 9), (0.50, 26), (0.75, 340), (0.90, 3900), (0.95, 6200), (0.99, 14500), (1.0, 40000),
)  # fmt: skip
_THINK_S: _Table = (
    (0.0, 7), (0.01, 13), (0.05, 30), (0.10, 44), (0.25, 74), (0.50, 138), (0.75, 299), (0.90, 531), (0.95, 679),
    (0.99, 1630), (1.0, 3360),
)  # fmt: skip


@dataclass
class _Conversation:
    prompt: int  # tokens of the next turn
    ids: list[int]  # of its blocks
    turns: int = 0


def generate(requests: int = REQUESTS, seed: int = 0) -> Iterator[TraceRequest]:
    """`requests` requests in order of time; the same seed gives the same ones on every machine.

    Block ids are numbered as they appear, 512 tokens each; id 0 is the system prompt's. Memory holds the conversations
    that are going on, about a thousand, and does not grow with `requests`.

    Raises:
        InvalidRequest: requests is not a positive integer, or the seed is not one from 0 to 2**64 - 1.
    """
    check_integer("requests", requests, 1, None)
    check_integer("seed", seed, 0, 2**64 - 1)
    return _generate(requests, random.Random(seed))


def _generate(requests: int, rng: random.Random) -> Iterator[TraceRequest]:
    waiting: list[tuple[float, int, _Conversation]] = []  # when the next turn comes, a number against ties, of whom
    start, next_id = 0.0, 1
    for number in range(requests):
        if waiting and waiting[0][0] <= start:
            now, _, talk = heapq.heappop(waiting)
        else:
            now, talk = start, _Conversation(_draw(_FIRST_PROMPT, rng), [0])
            start += rng.expovariate(_STARTS_PER_S)
        new = -(-talk.prompt // MOONCAKE_BLOCK) - len(talk.ids)
        talk.ids += range(next_id, next_id + new)
        next_id += new
        answer = _draw(_ANSWER, rng)
        yield TraceRequest(now, talk.prompt, answer, tuple(talk.ids), MOONCAKE_BLOCK)
        talk.turns += 1
        if rng.random() < (_GO_ON_FIRST if talk.turns == 1 else _GO_ON_LATER):
            del talk.ids[max(1, talk.prompt // MOONCAKE_BLOCK) :]  # the partly filled last block becomes another one
            talk.prompt += answer + _draw(_MESSAGE, rng)
            if talk.prompt <= _LONGEST:
                heapq.heappush(waiting, (now + _draw(_THINK_S, rng), number, talk))


def write(requests: Iterable[TraceRequest], file: TextIO) -> int:
    """Write requests with 512-token integer keys as Mooncake's JSONL. Returns how many."""
    count = 0
    for request in requests:
        row = {
            "timestamp": round(request.time_s * 1e3),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(request.keys or ()),
        }
        file.write(json.dumps(row) + "\n")
        count += 1
    return count


def _draw(table: _Table, rng: random.Random) -> int:
    share = rng.random()
    for (low, a), (high, b) in pairwise(table):
        if share <= high:
            return round(math.exp(math.log(a) + (share - low) / (high - low) * math.log(b / a)))
    raise AssertionError("the last row of a table is at 1")
