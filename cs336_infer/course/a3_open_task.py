"""The open task of assignment 3: the share of requests that an overloaded server serves in time, by your policy.

The number does not depend on a clock: time is simulated (`simulate.serving`), and so is the server, whose books and
traffic are here. A policy only says what the next step computes. When graded it does so by message (`score`): before
every step it is told the time, who came and who has left, and answers with a step. One that cannot be run ends the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from cs336_infer.course.ask import Ask, AskError, local_ask
from cs336_infer.simulate import serving
from cs336_infer.simulate.serving import Capacity, Demand, Flight, Schedule, ScheduleError, Server, StepCost
from cs336_infer.simulate.synthetic import generate
from cs336_infer.types import short

COST = StepCost(fixed_s=0.010, prefill_s=3e-5, decode_s=5e-5, kv_s=3e-8)
CAPACITY = Capacity(kv_tokens=500_000, step_tokens=2048, max_batch=64)
CLASSES = {"live": (2.0, 0.05), "chat": (5.0, 0.1), "report": (30.0, 0.2)}
"""Class -> seconds until the first token, mean seconds per token after it."""
REQUESTS, PACE = 400, 1.2
"""Requests of a run, and how much faster they come than in the published trace that the generator follows."""
NOTEBOOK_SEED = 0
YARDSTICK = (0.205, 0.89)
"""Goodput of first come, first served and of the package's best policy on the traffic of the notebook."""


def goodput(answer: Callable[..., Any]) -> str:
    """For the notebook: the goodput of the policy behind `answer`, on traffic that is always the same."""
    flights, _, message = _serve(local_ask({"answer": answer}), traffic(NOTEBOOK_SEED))
    if message:
        return f"the run ended: {message}"
    first_come, best = YARDSTICK
    by_class = ", ".join(f"{kind} {serving.goodput(flights, kind):.3f}" for kind in CLASSES)
    share = serving.goodput(flights)
    return f"goodput {share:.3f} ({by_class}); first come, first served {first_come:.3f}, to beat {best:.3f}"


def score(ask: Ask, seed: int) -> dict[str, Any]:
    """Let the student's `answer(server, now, come, gone)` fill the steps, on fresh traffic.

    Returns:
        {"ok", "goodput" (None unless ok), one for each class, "first_come", "on_time" (what the package's policies
        reach), "messages", "message" (one line, empty when ok)}.
    """
    from cs336_infer.simulate.serving_policies import make_policy

    demands = traffic(seed)
    flights, messages, message = _serve(ask, demands)
    yardsticks = {}
    for name in ("first-come", "on-time"):
        server = Server(COST, CAPACITY, make_policy(name, CAPACITY, COST))
        yardsticks[name.replace("-", "_")] = serving.goodput(serving.run(server, demands))
    shares = {"goodput": serving.goodput(flights), **{kind: serving.goodput(flights, kind) for kind in CLASSES}}
    ok = not message
    known = {**yardsticks, "messages": messages, "message": message}
    return {"ok": ok, **{name: share if ok else None for name, share in shares.items()}, **known}


def traffic(seed: int) -> list[Demand]:
    """`REQUESTS` made-up requests. Classes are drawn without regard to anything else."""
    rng = random.Random(seed)
    demands = []
    for number, request in enumerate(generate(REQUESTS, rng.getrandbits(64))):
        kind = rng.choice(list(CLASSES))
        time_s = request.time_s / PACE
        demands.append(Demand(number, time_s, request.input_tokens, request.output_tokens, kind, *CLASSES[kind]))
    return demands


def _serve(ask: Ask, demands: Sequence[Demand]) -> tuple[list[Flight], int, str]:
    """What became of them, how many messages it took, and why it ended early ("")."""
    policy = ByMessage(ask)
    try:
        return serving.run(Server(COST, CAPACITY, policy), demands), policy.messages, ""
    except (AskError, ScheduleError) as error:
        return [], policy.messages, str(error)


class ByMessage:
    """A policy that lives somewhere else. It is told what it cannot know: the time, who came, who has left."""

    def __init__(self, ask: Ask) -> None:
        self._ask, self.messages = ask, 0
        self._there: set[int] = set()  # whom it knows of, as far as it knows

    def schedule(self, now_s: float, flights: Sequence[Flight]) -> Schedule:
        """
        Raises:
            ScheduleError: the answer has not the form of a step.
        """
        here = {flight.number for flight in flights}
        come = [_described(flight.demand) for flight in flights if flight.number not in self._there]
        server = None if self.messages else {**asdict(CAPACITY), **asdict(COST)}
        answer = self._ask("answer", server, now_s, come, sorted(self._there - here))
        self.messages += 1
        schedule = _as_schedule(answer)
        self._there = here - set(schedule.drop)
        return schedule


def _described(demand: Demand) -> dict[str, Any]:
    """What a policy may know of a request: all but how long its answer will be."""
    told = {"id": demand.number, "class": demand.kind, "arrived": demand.time_s, "prompt": demand.prompt}
    return {**told, "ttft": demand.ttft_s, "tpot": demand.tpot_s}


def _as_schedule(answer: Any) -> Schedule:
    if type(answer) not in (list, tuple) or len(answer) != 3 or any(type(part) not in (list, tuple) for part in answer):
        raise ScheduleError(f"a step is [[[id, tokens], ...], [id, ...], [id, ...]], not {short(answer)}")
    compute, preempt, drop = answer
    for pair in compute:
        if type(pair) not in (list, tuple) or [type(n) for n in pair] != [int, int]:
            raise ScheduleError(f"who computes is a pair [id, tokens] of whole numbers, not {short(pair)}")
    numbers = [*(pair[0] for pair in compute), *preempt, *drop]
    if odd := [number for number in numbers if type(number) is not int]:
        raise ScheduleError(f"an id is a whole number, not {short(odd[0])}")
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ScheduleError(f"request {twice} is named twice in one step")
    return Schedule(dict(compute), preempt, drop)
