"""An engine in a simulated clock: what a scheduling policy makes of a trace, without a model and without noise.

A step takes a time that is linear in what it computes and reads (`StepCost`). Requests come at their times, a policy
says before every step who computes how many tokens, who gives up its KV memory and who is dropped, and each request
is judged by its own service level objective: time to first token (TTFT) and mean time per token after it (TPOT).
*Goodput* is the share of all requests that were served within both (DistServe, Zhong et al. 2024); one that was
dropped, or is not finished at the end, counts as a failure.

Servers know nothing of one another: a fleet is several of them, each advanced to the next arrival, and a router.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cs336_infer.types import InferError, check_integer, check_number, short


class ScheduleError(InferError):
    """A policy asked for a step that cannot be run. Nothing was changed."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: fixed, for each prompt token computed, for each answer that gets a token, and for each token
    whose keys and values are read.

    Raises:
        InvalidRequest: a figure is negative or not finite, or `fixed_s` is 0.
    """

    fixed_s: float
    prefill_s: float
    decode_s: float
    kv_s: float

    def __post_init__(self) -> None:
        check_number("fixed_s", self.fixed_s, 0.0, math.inf, "a number of seconds above 0", open_low=True)
        for name in ("prefill_s", "decode_s", "kv_s"):
            check_number(name, getattr(self, name), 0.0, math.inf, "a number of seconds, at least 0")

    def seconds(self, prefill: int, decode: int, kv: int) -> float:
        """Of a step with so many prompt tokens, answers and tokens read."""
        return self.fixed_s + self.prefill_s * prefill + self.decode_s * decode + self.kv_s * kv


@dataclass(frozen=True, slots=True)
class Demand:
    """What somebody wants: `output` tokens after a prompt of `prompt`, from `time_s` on, within `ttft_s` and `tpot_s`.

    `kind` names its class of service. A policy must not look at `output`.

    Raises:
        InvalidRequest: there is no token in its prompt or none in its answer.
    """

    number: int
    time_s: float
    prompt: int
    output: int
    kind: str = ""
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __post_init__(self) -> None:
        check_integer("prompt", self.prompt, 1, None)
        check_integer("output", self.output, 1, None)


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way.

    Attributes:
        stored: tokens in KV memory. produced: tokens of the answer so far.
        first_s, last_s: when its first and its newest token appeared.
        left_s: when it was finished or dropped; nan while it is there.
    """

    demand: Demand
    stored: int = 0
    produced: int = 0
    first_s: float = math.nan
    last_s: float = math.nan
    left_s: float = math.nan

    @property
    def number(self) -> int:
        return self.demand.number

    @property
    def total(self) -> int:
        """Tokens of prompt and answer so far."""
        return self.demand.prompt + self.produced

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one appears."""
        return self.total - self.stored

    @property
    def finished(self) -> bool:
        return self.produced == self.demand.output

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.demand.time_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first; 0 where there is only one."""
        return (self.last_s - self.first_s) / (self.produced - 1) if self.produced > 1 else 0.0

    @property
    def within(self) -> bool:
        """Finished within both objectives."""
        return self.finished and self.ttft_s <= self.demand.ttft_s and self.tpot_s <= self.demand.tpot_s


@dataclass(frozen=True)
class Schedule:
    """One step: tokens that requests compute, by number; who gives up its KV memory and computes again later; who is
    turned away for good."""

    compute: Mapping[int, int] = field(default_factory=dict)
    preempt: Sequence[int] = ()
    drop: Sequence[int] = ()


@dataclass(frozen=True)
class Capacity:
    """What a server can do: tokens in KV memory, tokens computed in a step, requests in a step.

    Raises:
        InvalidRequest: one of them is not a positive integer.
    """

    kv_tokens: int
    step_tokens: int
    max_batch: int

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "step_tokens", "max_batch"):
            check_integer(name, getattr(self, name), 1, None)


class Policy(Protocol):
    """Who computes what. Asked before every step; all requests that are there are given, in order of arrival."""

    def schedule(self, now_s: float, flights: Sequence[Flight]) -> Schedule: ...


class Server:
    """One engine and its clock, `now_s`.

    Attributes:
        flights: who is there, by number. gone: who was here, in order of leaving. steps, busy_s: so far.
        waited_s: the integral over time of how many were there, up to `now_s`.
    """

    def __init__(self, cost: StepCost, capacity: Capacity, policy: Policy) -> None:
        self.cost, self.capacity, self.policy = cost, capacity, policy
        self.now_s = self.busy_s = self.waited_s = 0.0
        self.steps = 0
        self.flights: dict[int, Flight] = {}
        self.gone: list[Flight] = []

    @property
    def held(self) -> int:
        return sum(flight.stored for flight in self.flights.values())

    def submit(self, demand: Demand) -> Flight:
        """A request arrives; the clock must have been advanced to its time.

        Raises:
            ValueError: its number is taken, or it comes from the future.
        """
        if demand.number in self.flights or demand.time_s > self.now_s:
            raise ValueError(f"request {demand.number} at {demand.time_s} s cannot arrive at {self.now_s} s")
        flight = self.flights[demand.number] = Flight(demand)
        self.waited_s += self.now_s - demand.time_s  # it waited while the step ran in which it came
        return flight

    def advance(self, until_s: float = math.inf) -> None:
        """Run steps until the clock is at `until_s` or beyond it, or, where that is infinite, until nobody is there.

        Raises:
            ScheduleError: the policy's step cannot be run, or it lets everybody wait with nothing to wait for.
        """
        while self.flights and self.now_s < until_s:
            schedule = self.policy.schedule(self.now_s, list(self.flights.values()))
            self._check(schedule)
            self._leave(schedule)
            if schedule.compute:
                self._run(schedule.compute)
            elif self.flights and not schedule.drop:
                if until_s == math.inf:
                    raise ScheduleError(f"{len(self.flights)} requests are there, nobody else comes, and none computes")
                break
        if until_s < math.inf and self.now_s < until_s:
            self._pass(until_s - self.now_s)

    def _check(self, schedule: Schedule) -> None:
        """Raises `ScheduleError` where it cannot be run."""
        compute, capacity = schedule.compute, self.capacity
        leaving = {*schedule.preempt, *schedule.drop}
        for number in (*schedule.preempt, *schedule.drop, *compute):
            if number not in self.flights:
                raise ScheduleError(f"request {short(number)} is not there: it has not come, or has left")
        for number, new in compute.items():
            remaining = self.flights[number].remaining
            if number in leaving:
                raise ScheduleError(f"request {number} computes in the step in which it gives way")
            if not 0 < new <= remaining:
                raise ScheduleError(f"request {number} has {remaining} tokens to compute, not {short(new)}")
        if len(compute) > capacity.max_batch:
            raise ScheduleError(f"{len(compute)} requests in one step, {capacity.max_batch} at most")
        if sum(compute.values()) > capacity.step_tokens:
            raise ScheduleError(f"{sum(compute.values())} tokens in one step, {capacity.step_tokens} at most")
        kept = self.held - sum(self.flights[number].stored for number in leaving)
        if kept + sum(compute.values()) > capacity.kv_tokens:
            room = capacity.kv_tokens - kept
            raise ScheduleError(f"KV memory has room for {room} tokens, the step computes {sum(compute.values())}")

    def _leave(self, schedule: Schedule) -> None:
        for number in schedule.preempt:
            self.flights[number].stored = 0
        for number in schedule.drop:
            self._gone(number)

    def _run(self, compute: Mapping[int, int]) -> None:
        rows = [(self.flights[number], new) for number, new in compute.items()]
        decode = sum(flight.produced > 0 and flight.remaining == 1 for flight, _ in rows)
        seconds = self.cost.seconds(sum(compute.values()) - decode, decode, sum(f.stored + new for f, new in rows))
        self._pass(seconds)
        self.busy_s += seconds
        self.steps += 1
        for flight, new in rows:
            flight.stored += new
            if flight.remaining == 0:
                flight.produced += 1
                flight.last_s = self.now_s
                if flight.produced == 1:
                    flight.first_s = self.now_s
                if flight.finished:
                    self._gone(flight.number)

    def _pass(self, seconds: float) -> None:
        self.waited_s += seconds * len(self.flights)
        self.now_s += seconds

    def _gone(self, number: int) -> None:
        flight = self.flights.pop(number, None)
        if flight is not None:
            flight.left_s, flight.stored = self.now_s, 0
            self.gone.append(flight)


def run(server: Server, demands: Iterable[Demand]) -> list[Flight]:
    """All of `demands`, in order of time, through one server, until nobody is left. What became of each, in order."""
    flights = []
    for demand in demands:
        server.advance(demand.time_s)
        flights.append(server.submit(demand))
    server.advance()
    return flights


def goodput(flights: Iterable[Flight], kind: str | None = None) -> float:
    """The share of requests (of one kind) that were finished within their objectives; nan where there are none."""
    chosen = [flight for flight in flights if kind is None or flight.demand.kind == kind]
    return sum(flight.within for flight in chosen) / len(chosen) if chosen else math.nan
