"""Who runs when under the sanitizer: policies, every interleaving, residency, and loops that end or do not."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from cs336_kernels.sanitizer import Kind, sanitize
from cs336_kernels.sanitizer.schedule import POLICIES, Exhaustive, Pct, policy_of


def counters(n: int = 1) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


@triton.jit
def barrier(count, until):
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release")
    while tl.atomic_add(count, 0, sem="acquire") < until:
        pass


@triton.jit
def rounds(x, y, count, ROUNDS: tl.constexpr):
    p, programs = tl.program_id(0), tl.num_programs(0)
    for step in range(ROUNDS):
        tl.store(x + p, tl.load(x + p) + 1)
        barrier(count, (2 * step + 1) * programs)
        tl.store(y + p, tl.load(y + p) + tl.load(x + (p + 1) % programs))
        barrier(count, (2 * step + 2) * programs)


@triton.jit
def contend(total, attempts, lock):
    """A spin lock whose waiting changes memory, so that a policy cannot see who waits."""
    while tl.atomic_xchg(lock, 1, sem="acquire") == 1:
        tl.atomic_add(attempts, 1, sem="relaxed")
    tl.store(total, tl.load(total) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release")


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "exhaustive"])
def test_policies_end_and_are_functions_of_the_seed(policy):
    def run() -> object:
        x, y, total = torch.zeros(4), torch.zeros(4), counters()
        with sanitize(schedules=4, seed=11, policy=policy) as report:
            rounds[(4,)](x, y, counters(), ROUNDS=2)
            contend[(4,)](total, counters(), counters())
        # How often somebody tried is up to the schedule, and nothing else is.
        assert {(f.kind, f.tensor) for f in report.findings} <= {(Kind.NONDETERMINISM, "attempts")}
        assert (x.tolist(), y.tolist(), total.item()) == ([2.0] * 4, [3.0] * 4, 4)
        return report.to_dict()

    assert run() == run()


def test_policies_differ():
    def order(name: str, seed: int = 0) -> list[int]:
        policy, left, taken = policy_of(name, seed, 3), {p: 4 for p in range(3)}, []
        while left:
            taken.append(policy.choose(sorted(left)))
            left[taken[-1]] -= 1
            left = {p: n for p, n in left.items() if n}
        return taken

    assert order("in-order") == [0] * 4 + [1] * 4 + [2] * 4
    assert order("reverse") == [2] * 4 + [1] * 4 + [0] * 4
    assert order("round-robin") == [0, 1, 2] * 4
    for name in ("random", "pct"):
        assert len({tuple(order(name, seed)) for seed in range(20)}) > 3
    assert order("mixed", 0) == order("round-robin") and order("mixed", 4) == order("reverse")
    assert order("mixed", 1) == order("random", 1) and order("mixed", 2) == order("pct", 2)


@triton.jit
def stores(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    p = tl.program_id(0)
    if p == 0:
        for i in range(A):
            tl.store(x + i, i)
    elif p == 1:
        for i in range(B):
            tl.store(x + 10 + i, i)
    else:
        for i in range(C):
            tl.store(x + 20 + i, i)


@pytest.mark.parametrize(("a", "b", "c"), [(1, 1, 0), (2, 3, 0), (4, 3, 0), (0, 3, 0), (2, 2, 2), (3, 1, 2)])
def test_exhaustive_runs_every_interleaving_once(a, b, c):
    with sanitize(schedules=10_000, policy="exhaustive") as report:
        stores[(3,)](torch.zeros(30), A=a, B=b, C=c)
    total = math.factorial(a + b + c) // math.factorial(a) // math.factorial(b) // math.factorial(c)
    assert (report.launches[0].schedules, report.launches[0].exhausted) == (total, True)
    assert report.launches[0].steps == a + b + c


def test_exhaustive_paths_are_different_and_complete():
    policy, seen = Exhaustive(), set()
    while True:
        left, path = [2, 2], []
        while any(left):
            able = [p for p in (0, 1) if left[p]]
            path.append(policy.choose(able) if len(able) > 1 else able[0])
            left[path[-1]] -= 1
        assert tuple(path) not in seen
        seen.add(tuple(path))
        if not policy.next():
            break
    assert len(seen) == math.comb(4, 2)


def test_exhaustive_may_be_cut_short():
    with sanitize(schedules=9, policy="exhaustive") as report:
        stores[(2,)](torch.zeros(30), A=3, B=2, C=0)
    assert (report.launches[0].schedules, report.launches[0].exhausted) == (9, False)


@triton.jit
def in_turn(cell, y, STEPS: tl.constexpr):
    """Only if the two programs take strict turns does the last one reach the place outside of y."""
    p = tl.program_id(0)
    for i in range(STEPS):
        if tl.atomic_cas(cell, 2 * i + p, 2 * i + p + 1, sem="relaxed") == 2 * STEPS - 1:
            tl.store(y + 1, 1)


def test_exhaustive_finds_what_one_order_alone_shows():
    with sanitize(schedules=1000, policy="exhaustive") as report:
        in_turn[(2,)](counters(), torch.zeros(1), STEPS=3)
    assert Kind.OUT_OF_BOUNDS in report.kinds() and report.launches[0].exhausted
    assert report.launches[0].schedules == math.comb(6, 3)  # the store comes after all choices
    with sanitize(schedules=3, policy="in-order") as report:
        in_turn[(2,)](counters(), torch.zeros(1), STEPS=3)
    assert report.findings == []


@triton.jit
def all_before(count, y, STEPS: tl.constexpr):
    """Program 1 does all its steps before program 0 does one."""
    if tl.program_id(0) == 1:
        for _ in range(STEPS):
            tl.atomic_add(count, 1, sem="relaxed")
    elif tl.program_id(0) == 0 and tl.atomic_add(count, 0, sem="relaxed") == STEPS:
        tl.store(y + 1, 1)


def test_pct_finds_orders_that_chance_does_not():
    found = {}
    for policy in ("random", "pct"):
        with sanitize(schedules=20, policy=policy) as report:
            all_before[(3,)](counters(), torch.zeros(1), STEPS=30)
        found[policy] = Kind.OUT_OF_BOUNDS in report.kinds()
    assert found == {"random": False, "pct": True}


def test_pct_runs_by_priority_and_lowers_who_waits():
    policy = Pct(0, 4, changes=0)
    order = []
    for _ in range(4):
        order.append(policy.choose([0, 1, 2, 3]))
        assert policy.choose([0, 1, 2, 3]) == order[-1]
        policy.waits(order[-1])
    assert sorted(order) == [0, 1, 2, 3] and policy.choose([0, 1, 2, 3]) == order[0]


@pytest.mark.parametrize(("programs", "resident", "fits"), [(8, 8, True), (9, 8, False), (9, 9, True), (2, 1, False)])
def test_a_barrier_needs_all_programs_at_once(programs, resident, fits):
    with sanitize(schedules=3, resident=resident) as report:
        rounds[(programs,)](torch.zeros(programs), torch.zeros(programs), counters(), ROUNDS=1)
    assert report.kinds() == (set() if fits else {Kind.DEADLOCK})
    if not fits:
        (found,) = report.findings
        assert f"only {resident} of a grid of {programs} are resident" in found.message
        assert f"{programs - resident} programs never started" in found.message


@triton.jit
def chain(x, flags):
    p = tl.program_id(0)
    if p > 0:
        while tl.atomic_add(flags + p - 1, 0, sem="acquire") == 0:
            pass
        tl.store(x + p, tl.load(x + p - 1) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(flags + p, 1, sem="release")


def test_waiting_for_earlier_programs_needs_no_room():
    x = torch.zeros(6)
    with sanitize(schedules=8, resident=1) as report:
        chain[(6,)](x, counters(6))
    assert report.findings == [] and x.tolist() == [0.0, 1, 2, 3, 4, 5]


@triton.jit
def watchdog(flag, y, TRIES: tl.constexpr):
    tries = 0
    seen = 0
    while (seen == 0) & (tries < TRIES):
        seen = tl.atomic_add(flag, 0, sem="acquire")
        tries += 1
    tl.store(y + tl.program_id(0), tries)


@triton.jit
def wait_for_ever(flag):
    while tl.atomic_add(flag, 0, sem="acquire") == 0:
        pass


def test_a_loop_that_gives_up_is_no_deadlock():
    y = torch.zeros(2)
    with sanitize(schedules=2) as report:
        watchdog[(2,)](counters(), y, TRIES=200)
    assert report.findings == [] and y.tolist() == [200.0, 200.0]
    with sanitize(schedules=2) as report:
        wait_for_ever[(2,)](counters())
    assert report.kinds() == {Kind.DEADLOCK} and report.findings[0].programs == (0, 1)
    assert report.launches[0].schedules == 1  # the others would hang as well


@triton.jit
def wait_in_helper(flag):
    while is_down(flag):
        pass


@triton.jit
def is_down(flag):
    return tl.load(flag) == 0


@triton.jit
def wait_in_one_line_each(flags, x):
    if tl.program_id(0) == 0:
        tl.store(x, 1)
        while tl.atomic_add(flags, 0, sem="acquire") == 0:
            pass
    else:
        while tl.atomic_add(flags + 1, 0, sem="acquire") == 0:
            pass


def test_deadlocks_in_helpers_and_in_several_lines():
    with sanitize(schedules=2) as report:
        wait_in_helper[(1,)](counters())
    (found,) = report.findings
    assert (found.kind, found.line) == (Kind.DEADLOCK, is_down.fn.__code__.co_firstlineno + 2)
    with sanitize(schedules=2) as report:
        wait_in_one_line_each[(2,)](counters(2), torch.zeros(1))
    (found,) = report.findings
    first = wait_in_one_line_each.fn.__code__.co_firstlineno
    assert (found.line, found.programs) == (first + 7, (1, 0)), "the program that has done less comes first"
    assert f"in lines {first + 4}" in found.message


@triton.jit
def grow(count):
    while tl.atomic_add(count, 1, sem="relaxed") >= 0:
        pass


def test_an_endless_loop_ends():
    with sanitize(schedules=2, max_steps=3000) as report:
        grow[(2,)](counters())
    (found,) = report.findings
    assert found.kind is Kind.DEADLOCK and "still ran after 3,000 operations" in found.message
