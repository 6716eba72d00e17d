"""Scheduling policies for `serving`: what the engine does, and one that knows the objectives."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from cs336_infer.simulate.serving import Capacity, Flight, Policy, Schedule, StepCost
from cs336_infer.types import InvalidRequest, short


class FirstCome:
    """The engine's own rule (`engine.scheduler`) with blocks of one token: first come, first served; answers before
    prompts, prompts in chunks; the newest gives way when KV memory is full. It knows no objective, and drops only who
    needs more memory than there is."""

    def __init__(self, capacity: Capacity) -> None:
        self.limits = capacity

    def schedule(self, now_s: float, flights: Sequence[Flight]) -> Schedule:
        running = [flight for flight in flights if flight.stored]
        free = self.limits.kv_tokens - sum(flight.stored for flight in running)
        for flight in (flight for flight in flights if not flight.stored):
            if len(running) >= self.limits.max_batch or (running and flight.remaining > free):
                break
            running.append(flight)
        running.sort(key=lambda flight: flight.number)
        return self._step(running, free)

    def _step(self, running: list[Flight], free: int) -> Schedule:
        """`running` in order of arrival; those who give way leave it, the last one first."""
        compute: dict[int, int] = {}
        preempt: list[int] = []
        drop: list[int] = []
        budget = self.limits.step_tokens
        for flight in sorted(running, key=lambda flight: flight.remaining > 1):
            new = min(flight.remaining, budget)
            while new > free and flight in running:
                victim = running.pop()
                took = compute.pop(victim.number, 0)
                budget, free = budget + took, free + took + victim.stored
                if not running:
                    drop.append(victim.number)
                elif victim.stored:
                    preempt.append(victim.number)
            if new and flight in running:
                compute[flight.number] = new
                budget, free = budget - new, free - new
        return Schedule(compute, preempt, drop)


class OnTime:
    """As many requests within their objectives as it can.

    Who cannot be in time any more is dropped at once, so that nobody else is late because of it. Of the prompts that
    wait, the largest set that can be in time is computed, the earliest deadline first: whenever one of them would be
    late, the longest so far is put off (Moore, "An n job, one machine sequencing algorithm", 1968). Running answers
    get their token in every step, and a step takes on only so many prompt tokens that each answer keeps its pace.

    Args:
        margin: share of the time until an answer is behind its pace that a step may take.
        least: prompt tokens in a step, even where an answer is behind its pace.
    """

    def __init__(self, capacity: Capacity, cost: StepCost, *, margin: float = 0.9, least: int = 64) -> None:
        self.capacity, self.cost, self.margin, self.least = capacity, cost, margin, least
        self._rate = cost.prefill_s  # seconds per prompt token, as it turns out beside the answers
        self._newest = (0.0, 0)  # when the newest step began, and its prompt tokens

    def schedule(self, now_s: float, flights: Sequence[Flight]) -> Schedule:
        begun_s, tokens = self._newest
        if tokens:
            self._rate += 0.02 * ((now_s - begun_s) / tokens - self._rate)
        hopeful = [flight for flight in flights if self._can_be_in_time(flight, now_s)]
        staying = {flight.number for flight in hopeful}
        drop = [flight.number for flight in flights if flight.number not in staying]
        free = self.capacity.kv_tokens - sum(flight.stored for flight in hopeful)
        preempt: list[int] = []
        while len(hopeful) > 1 and sum(map(_answers, hopeful)) > free:
            victim = next(flight for flight in reversed(hopeful) if flight.stored)
            hopeful.remove(victim)
            preempt.append(victim.number)
            free += victim.stored
        compute = self._compute(hopeful, free, now_s)
        if not compute and hopeful:  # nothing fits, or only slower than hoped: somebody must go on
            simple = FirstCome(self.capacity).schedule(now_s, hopeful)
            compute = dict(simple.compute)
            preempt, drop = [*preempt, *simple.preempt], [*drop, *simple.drop]
        self._newest = (now_s, sum(compute[f.number] for f in hopeful if f.number in compute and not _answers(f)))
        return Schedule(compute, preempt, drop)

    def _due_s(self, flight: Flight) -> float:
        """When its next token must appear, so that it keeps its objectives."""
        if flight.produced:
            return flight.first_s + flight.demand.tpot_s * flight.produced
        return flight.demand.time_s + flight.demand.ttft_s

    def _can_be_in_time(self, flight: Flight, now_s: float) -> bool:
        if flight.produced:
            return flight.ttft_s <= flight.demand.ttft_s
        return now_s + self.cost.fixed_s + self.cost.prefill_s * flight.remaining <= self._due_s(flight)

    def _compute(self, hopeful: list[Flight], free: int, now_s: float) -> dict[int, int]:
        answers = sorted(filter(_answers, hopeful), key=self._due_s)[: min(self.capacity.max_batch, free)]
        compute = {flight.number: 1 for flight in answers}
        room = self.capacity.step_tokens - len(answers)
        if answers:
            seconds = self.cost.seconds(0, len(answers), sum(flight.stored + 1 for flight in answers))
            spare = self.margin * (self._due_s(answers[0]) - now_s) - seconds
            if spare < self.cost.prefill_s * room:
                room = min(room, max(self.least, int(spare / self.cost.prefill_s)))
        free -= len(answers)
        for flight in self._in_time((f for f in hopeful if not _answers(f)), now_s):
            new = min(flight.remaining, room, free)
            if new > 0 and len(compute) < self.capacity.max_batch and (flight.stored or flight.remaining <= free):
                compute[flight.number] = new
                room, free = room - new, free - flight.remaining
        return compute

    def _in_time(self, prompts: Iterable[Flight], now_s: float) -> list[Flight]:
        """The earliest deadline first; those that make others late are left out."""
        kept: list[tuple[float, int, Flight]] = []
        end_s = now_s
        for flight in sorted(prompts, key=self._due_s):
            seconds = self._rate * flight.remaining
            end_s += seconds
            heapq.heappush(kept, (-seconds, flight.number, flight))
            if end_s > self._due_s(flight):
                end_s += heapq.heappop(kept)[0]
        return sorted((flight for _, _, flight in kept), key=self._due_s)


POLICIES = ("first-come", "on-time")


def make_policy(name: str, capacity: Capacity, cost: StepCost) -> Policy:
    """A new policy by its name.

    Raises:
        InvalidRequest: there is none of this name.
    """
    if name == "first-come":
        return FirstCome(capacity)
    if name == "on-time":
        return OnTime(capacity, cost)
    raise InvalidRequest(f"unknown policy {short(name)} ({', '.join(POLICIES)})")


def _answers(flight: Flight) -> bool:
    """It has begun its answer, and only its newest token is missing."""
    return flight.produced > 0 and flight.remaining == 1
