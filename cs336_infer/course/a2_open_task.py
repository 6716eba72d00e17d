"""The open task of assignment 2: the share of prompt tokens that a cache of a given size saves, by your policy.

The number does not depend on a clock. The cache, its books and the traffic are here; a policy only names victims. When
graded it does so by message (`score`): before a request gets its blocks, the policy is told what happened since it was
last asked, and names as many victims as are needed. One that the cache cannot give up ends the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cs336_infer.course.ask import Ask, AskError
from cs336_infer.kv.policy import EvictionPolicy, Key, PolicyError
from cs336_infer.kv.pool import BlockPool
from cs336_infer.kv.replay import replay
from cs336_infer.simulate.sources import GENERATED, open_source
from cs336_infer.simulate.synthetic import generate
from cs336_infer.simulate.trace import TraceError, TraceRequest
from cs336_infer.types import short

BLOCKS, REQUESTS = 2000, 3000
YARDSTICK = {GENERATED: (0.0654, 0.2458), "conversation": (0.0499, 0.2414)}
"""Trace -> token hit rates of LRU and of Belady's rule with `BLOCKS` blocks, on `REQUESTS` requests."""


def hit_rate(policy: Callable[[int], EvictionPolicy], trace: str = GENERATED) -> str:
    """For the notebook: the token hit rate of `policy(BLOCKS)` on the first `REQUESTS` requests of a trace.

    Args:
        trace: "generated", or "conversation", a real one, which the folder `CS336_TRACES` must have.
    """
    try:
        requests = list(open_source(trace, limit=REQUESTS).requests())
    except TraceError as error:
        return f"{trace}: {error}"
    rate = replay(requests, BLOCKS, policy(BLOCKS)).token_hit_rate
    lru, belady = YARDSTICK[trace]
    return f"{trace}: token hit rate {rate:.4f}; LRU {lru:.4f}, Belady {belady:.4f}"


def score(ask: Ask, seed: int) -> dict[str, Any]:
    """Let the student's `answer(events, count)` choose the victims on fresh traffic.

    Returns:
        {"ok", "token_hit_rate" (None unless ok), "lru", "belady", "messages", "message" (one line, empty when ok)}.
    """
    from cs336_infer.kv.policies import make_policy

    requests = traffic(seed)
    policy, rate, message = ByMessage(ask, BLOCKS), None, ""
    try:
        rate = _replay(requests, policy)
    except (AskError, PolicyError) as error:
        message = str(error)
    lru, belady = (
        replay(requests, BLOCKS, make_policy(name, BLOCKS, lambda: (r.keys or () for r in requests))).token_hit_rate
        for name in ("lru", "belady")
    )
    known = {"lru": lru, "belady": belady, "messages": policy.messages, "message": message}
    return {"ok": not message, "token_hit_rate": rate, **known}


def traffic(seed: int) -> list[TraceRequest]:
    """`REQUESTS` made-up requests whose keys are random numbers: they say nothing about what comes."""
    rng = random.Random(seed)
    names: dict[Key, int] = {}
    drawn = []
    for request in generate(REQUESTS, rng.getrandbits(64)):
        keys = tuple(names.setdefault(key, rng.getrandbits(62)) for key in request.keys or ())
        drawn.append(replace(request, keys=keys))
    return drawn


class ByMessage:
    """An eviction policy that lives somewhere else. What happens is kept until a victim is needed."""

    def __init__(self, ask: Ask, blocks: int) -> None:
        self._ask, self._events = ask, [["begin", blocks]]
        self._wanted, self._named, self.messages = 0, [], 0

    def expect(self, victims: int) -> None:
        """So many will be asked for in a row."""
        self._wanted = victims

    def released(self, key: Key) -> None:
        self._events.append(["released", key])

    def reused(self, key: Key) -> None:
        self._events.append(["reused", key])

    def evicted(self, key: Key) -> None:
        """Only victims leave here, and their side knows those."""

    def victim(self) -> Key:
        if not self._named:
            answer = self._ask("answer", self._events, self._wanted)
            self._events, self.messages = [], self.messages + 1
            if type(answer) is not list or len(answer) != self._wanted or any(type(key) is not int for key in answer):
                raise PolicyError(f"{self._wanted} victims were asked for, the answer is {short(answer)}")
            self._named = answer[::-1]
        return self._named.pop()


def _replay(requests: Sequence[TraceRequest], policy: ByMessage) -> float:
    """As `replay`, and the policy is told how many victims a request needs."""
    pool = BlockPool(BLOCKS, policy=policy)
    hits = tokens = 0
    for request in requests:
        keys = request.keys or ()
        held = pool.take(keys)
        hits += min(len(held) * request.block_size, request.input_tokens)
        tokens += request.input_tokens
        if len(keys) <= BLOCKS:
            policy.expect(len(keys) - len(held) - pool.free)
            new = pool.allocate(len(keys) - len(held))
            pool.publish_all(new, keys[len(held) :])
            held += new
        pool.release(held)
    return hits / tokens
