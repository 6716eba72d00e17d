"""The simulated engine: small cases worked out by hand, and what holds for any trace and any policy."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from cs336_infer.simulate.serving import (
    Capacity,
    Demand,
    Flight,
    Schedule,
    ScheduleError,
    Server,
    StepCost,
    goodput,
    run,
)
from cs336_infer.simulate.serving_policies import POLICIES, FirstCome, OnTime, make_policy
from cs336_infer.types import InvalidRequest

COST = StepCost(fixed_s=1.0, prefill_s=0.1, decode_s=0.5, kv_s=0.01)
SMALL = Capacity(kv_tokens=40, step_tokens=8, max_batch=4)


def first_come(capacity=SMALL, cost=COST):
    return Server(cost, capacity, FirstCome(capacity))


class Asked:
    """Says what it is told to; keeps what it saw."""

    def __init__(self, *schedules):
        self.schedules, self.seen = list(schedules), []

    def schedule(self, now_s, flights):
        self.seen.append((now_s, [f.number for f in flights]))
        return self.schedules.pop(0)


def demands(seed, count=60):
    rng = random.Random(seed)
    time_s, found = 0.0, []
    for number in range(count):
        time_s += rng.expovariate(0.12)
        limits = rng.choice([(12.0, 2.5), (60.0, 8.0)])
        found.append(Demand(number, time_s, rng.randint(1, 25), rng.randint(1, 12), "ab"[number % 2], *limits))
    return found


def test_one_request_by_hand():
    """10 prompt tokens in chunks of 8 and 2, then 2 more tokens of the answer."""
    server = first_come()
    (flight,) = run(server, [Demand(0, 5.0, prompt=10, output=3)])
    first = 5 + (1 + 0.8 + 0.08) + (1 + 0.2 + 0.10)
    assert flight.first_s == pytest.approx(first)
    assert flight.last_s == pytest.approx(first + (1 + 0.5 + 0.11) + (1 + 0.5 + 0.12))
    assert flight.ttft_s == pytest.approx(3.18) and flight.tpot_s == pytest.approx((1.61 + 1.62) / 2)
    assert server.steps == 4 and server.busy_s == pytest.approx(flight.last_s - 5) and server.held == 0


def test_an_answer_comes_before_a_prompt_by_hand():
    """Request 1 comes while request 0 computes its prompt; the step that runs is not interrupted."""
    server = first_come()
    a, b = run(server, [Demand(0, 0.0, prompt=8, output=2), Demand(1, 0.5, prompt=12, output=1)])
    one = 1 + 0.8 + 0.08  # 8 tokens of a, and its first token
    two = one + 1 + 0.7 + 0.5 + 0.01 * (9 + 7)  # a's token, and 7 of b
    assert a.first_s == pytest.approx(one) and a.last_s == pytest.approx(two)
    assert b.first_s == pytest.approx(two + 1 + 0.5 + 0.12) and b.produced == 1 and b.tpot_s == 0


def test_preemption_by_hand():
    """Memory for 12: a holds 8 and its answer grows; b's 4 fit, then b gives way, and computes all of it again."""
    capacity = Capacity(kv_tokens=12, step_tokens=8, max_batch=4)
    server = first_come(capacity)
    a, b = run(server, [Demand(0, 0.0, prompt=8, output=3), Demand(1, 0.0, prompt=4, output=2)])
    steps = [1 + 0.8 + 0.08, 1 + 0.5 + 0.4 + 0.09]  # a's prompt; a's token, and b must wait: 9 + 4 > 12
    assert a.first_s == pytest.approx(steps[0])
    assert server.steps == 5 and a.finished and b.finished
    assert a.last_s < b.first_s


def test_a_last_chunk_of_one_token_is_not_an_answer():
    """9 tokens in chunks of 8 and 1: the second costs a prompt token, not an answer's."""
    server = first_come()
    (flight,) = run(server, [Demand(0, 0.0, prompt=9, output=1)])
    assert flight.first_s == pytest.approx((1 + 0.8 + 0.08) + (1 + 0.1 + 0.09))


def test_objectives_decide_and_drops_are_failures():
    ok = Demand(0, 0.0, prompt=10, output=3, ttft_s=3.2, tpot_s=1.62)
    for change, want in (({}, 1.0), ({"ttft_s": 3.1}, 0.0), ({"tpot_s": 1.61}, 0.0)):
        assert goodput(run(first_come(), [dataclasses.replace(ok, **change)])) == want
    server = Server(COST, SMALL, Asked(Schedule(drop=[1]), *[Schedule({0: n}) for n in (8, 2, 1, 1)]))
    server.submit(Demand(1, 0.0, 1, 1, "b"))
    server.submit(ok)
    server.advance()
    assert goodput(server.gone) == 0.5 and goodput(server.gone, "b") == 0.0 and goodput(server.gone, "") == 1.0
    assert math.isnan(goodput(server.gone, "c")) and math.isnan(goodput([]))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kv_tokens", [40, 60, 400])
@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_lost_and_littles_law_holds(name, kv_tokens, seed):
    capacity = Capacity(kv_tokens, 8, 4)
    server = Server(COST, capacity, make_policy(name, capacity, COST))
    flights = run(server, demands(seed))
    assert sorted(f.number for f in server.gone) == list(range(60)) and not server.flights and server.held == 0
    for f in flights:
        assert f.left_s >= f.demand.time_s and (f.finished or name == "on-time")
        if f.finished:
            assert f.demand.time_s < f.first_s <= f.last_s == f.left_s
            assert f.last_s - f.first_s >= (f.produced - 1) * (COST.fixed_s + COST.decode_s)
    # the integral of how many were there is the sum of how long each was there: L = lambda W, times the clock
    assert server.waited_s == pytest.approx(sum(f.left_s - f.demand.time_s for f in flights))
    assert server.busy_s <= server.now_s


def test_the_clock_stands_still_for_nobody_but_waits_for_arrivals():
    asked = Asked(Schedule(), Schedule({0: 1}), Schedule({1: 1}))
    server = Server(COST, SMALL, asked)
    flights = run(server, [Demand(0, 0.0, 1, 1), Demand(1, 10.0, 1, 1)])
    assert asked.seen[:2] == [(0.0, [0]), (10.0, [0, 1])] and flights[0].first_s > 10
    stuck = Server(COST, SMALL, Asked(Schedule()))
    with pytest.raises(ScheduleError, match="none computes"):
        run(stuck, [Demand(0, 0.0, 1, 1)])


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (Schedule({7: 1}), "request 7 is not there"),
        (Schedule(drop=[7]), "request 7 is not there"),
        (Schedule(preempt=[-1]), "request -1 is not there"),
        (Schedule({0: 0}), "request 0 has 5 tokens to compute, not 0"),
        (Schedule({0: -3}), "not -3"),
        (Schedule({0: 6}), "not 6"),
        (Schedule({0: 1}, drop=[0]), "gives way"),
        (Schedule({0: 1, 1: 1, 2: 1, 3: 1, 4: 1}), "5 requests in one step, 4 at most"),
        (Schedule({0: 5, 1: 5}), "10 tokens in one step, 8 at most"),
    ],
)
def test_a_step_that_cannot_be_run_is_named_and_changes_nothing(schedule, says):
    server = Server(COST, SMALL, Asked(schedule))
    for number in range(5):
        server.submit(Demand(number, 0.0, 5, 2))
    with pytest.raises(ScheduleError) as error:
        server.advance()
    assert says in str(error.value) and "\n" not in str(error.value)
    assert server.now_s == server.steps == server.held == 0 and len(server.flights) == 5


@pytest.mark.parametrize("name", POLICIES)
def test_who_never_fits_is_turned_away_and_nobody_else(name):
    capacity = Capacity(10, 8, 4)
    server = Server(COST, capacity, make_policy(name, capacity, COST))
    a, b, c = run(server, [Demand(0, 0.0, 4, 2), Demand(1, 0.1, 12, 1), Demand(2, 0.2, 6, 9)])
    assert (a.finished, b.finished, c.finished) == (True, False, False)
    assert c.produced == 5  # 10 slots hold 6 tokens of the prompt and 4 of the answer; the fifth was only chosen


def test_memory_is_counted_with_those_who_leave():
    capacity = Capacity(8, 8, 4)
    asked = Asked(Schedule({0: 6}), Schedule({1: 6}, preempt=[0]), Schedule({0: 6}))
    server = Server(COST, capacity, asked)
    server.submit(Demand(0, 0.0, 7, 1))
    server.submit(Demand(1, 0.0, 7, 1))
    with pytest.raises(ScheduleError, match="room for 2 tokens, the step computes 6"):
        server.advance()
    assert server.steps == 2 and [f.stored for f in server.flights.values()] == [0, 6]


def test_what_cannot_be_asked_for():
    with pytest.raises(ValueError, match="cannot arrive"):
        first_come().submit(Demand(0, 1.0, 1, 1))
    server = first_come()
    server.submit(Demand(0, 0.0, 1, 1))
    with pytest.raises(ValueError, match="cannot arrive"):
        server.submit(Demand(0, 0.0, 1, 1))
    for bad in (lambda: Demand(0, 0.0, 0, 1), lambda: Demand(0, 0.0, 1, 0), lambda: StepCost(0, 1, 1, 1),
                lambda: StepCost(1, -1, 1, 1), lambda: StepCost(1, 1, math.nan, 1), lambda: Capacity(0, 1, 1),
                lambda: make_policy("lifo", SMALL, COST)):  # fmt: skip
        with pytest.raises(InvalidRequest):
            bad()


def test_on_time_puts_off_the_longest_as_moore_does():
    """Prompts of 4, 8 and 2 tokens at 1 s a token, due at 5, 11 and 13 s: all but one can be in time. Leaving out the
    longest serves two; the earliest deadline first without leaving out serves one."""
    cost = StepCost(1e-9, 1.0, 0.0, 0.0)
    capacity = Capacity(100, 8, 4)
    policy = OnTime(capacity, cost)
    flights = [Flight(Demand(n, 0.0, p, 1, "", due)) for n, (p, due) in enumerate([(4, 5.0), (8, 11.0), (2, 6.5)])]
    assert [f.number for f in policy._in_time(flights, 0.0)] == [0, 2]


def test_on_time_beats_first_come_where_it_matters_and_lets_everybody_in_where_it_does_not():
    busy, calm = [], []
    for seed in range(4):
        crowd = demands(seed)
        late = [Demand(d.number, 4 * d.time_s, d.prompt, d.output, d.kind, d.ttft_s, d.tpot_s) for d in crowd]
        for into, trace in ((busy, crowd), (calm, late)):
            capacity = Capacity(120, 8, 8)
            into.append([goodput(run(Server(COST, capacity, make_policy(p, capacity, COST)), trace)) for p in POLICIES])
    assert all(mine > first for first, mine in busy), busy
    assert all(first > 0.9 and mine > 0.9 for first, mine in calm), calm
