"""What the sanitizer finds, each on a small kernel, how a finding is replayed, and that no part of it is idle."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cs336_kernels.sanitizer import Finding, Kind, clocks, programs, races, regions, sanitize, sanitized, shadow


@triton.jit
def hand_over(x, y, flag, BARRIER: tl.constexpr, POLL: tl.constexpr, SET: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(x + i, i)  # the data
        if BARRIER:
            tl.debug_barrier()
        if SET == "plain":
            tl.store(flag, 1)  # the flag, plain
        else:
            tl.atomic_xchg(flag, 1, sem=SET)
    else:
        if POLL == "plain":
            while tl.load(flag) == 0:  # the plain poll
                pass
        elif POLL == "volatile":
            while tl.load(flag, volatile=True) == 0:  # the volatile poll
                pass
        else:
            while tl.atomic_add(flag, 0, sem=POLL) == 0:  # the poll
                pass
        tl.store(y + tl.program_id(0) * BLOCK + i, tl.load(x + i))


def line(kernel, text: str) -> int:
    """The line of a kernel that has this text."""
    lines, first = inspect.getsourcelines(kernel.fn)
    (at,) = [number for number, code in enumerate(lines, start=first) if text in code]
    return at


def hand(BARRIER=True, POLL="acquire", SET="release", count=4, **options) -> list[Finding]:
    y, flag = torch.full((count * 8,), -1), torch.zeros(1, dtype=torch.int32)
    with sanitize(**options) as report:
        hand_over[(count,)](torch.full((8,), -1), y, flag, BARRIER, POLL, SET, BLOCK=8)
    assert y.tolist() == [-1] * 8 + list(range(8)) * (count - 1)
    return report.findings


@pytest.mark.parametrize(
    ("wrong", "kind", "where", "why"),
    [
        ({"BARRIER": False}, Kind.RACE, "# the data", "no tl.debug_barrier() stands before the release"),
        ({"SET": "relaxed"}, Kind.RACE, "# the data", "does not release"),
        ({"POLL": "relaxed"}, Kind.RACE, "# the data", "does not acquire"),
        ({"SET": "plain"}, Kind.RACE, "# the flag, plain", "is not atomic"),
        ({"POLL": "plain"}, Kind.PLAIN_LOAD_POLL, "# the plain poll", "may delete the loop"),
        ({"POLL": "volatile"}, Kind.PLAIN_LOAD_POLL, "# the volatile poll", "acquires nothing"),
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_a_weak_signal_is_one_finding_with_its_reason(wrong, kind, where, why, count):
    (found,) = hand(**wrong, count=count)
    assert (found.kind, found.line, found.file) == (kind, line(hand_over, where), __file__)
    assert why in found.message and found.kernel == "hand_over" and 0 in found.programs


def test_a_sound_signal_is_none():
    assert hand() == [] and hand(SET="acq_rel", POLL="acq_rel") == []


@triton.jit
def read_neighbour(x, y):
    p = tl.program_id(0)
    tl.store(x + p, p)
    tl.store(y + p, tl.load(x + (p + 1) % tl.num_programs(0)))


def test_a_race_names_both_lines_both_programs_and_the_place():
    with sanitize(schedules=4) as report:
        read_neighbour[(2,)](torch.zeros(2), torch.zeros(2))
    (found,) = report.findings
    assert (found.line, found.other_line) == (
        line(read_neighbour, "tl.store(x"),
        line(read_neighbour, "tl.store(y"),
    )
    assert sorted(found.programs) == [0, 1] and found.tensor == "x" and "nothing orders the two" in found.message
    assert str(found).startswith(f"{Path(__file__).name}:{found.line}: race: ")


@triton.jit
def rare(count, y, NEEDED: tl.constexpr):
    if tl.program_id(0) > 0:
        tl.atomic_add(count, 1, sem="relaxed")
    else:
        for _ in range(3):
            tl.atomic_add(count, 0, sem="relaxed")
        if tl.atomic_add(count, 0, sem="relaxed") == NEEDED:
            tl.store(y + 1, 1)


@pytest.mark.parametrize("policy", ["mixed", "random", "pct"])
def test_a_finding_is_replayed_by_its_seed(policy):
    def run(schedules: int, seed: int) -> list[Finding]:
        with sanitize(schedules=schedules, seed=seed, policy=policy) as report:
            rare[(7,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1), NEEDED=5)
        return report.findings

    (found,) = run(60, 3)
    assert found.kind is Kind.OUT_OF_BOUNDS and found.seed > 3
    assert run(1, found.seed) == [found]
    assert run(found.seed - 3, 3) == []


def test_two_runs_give_the_same_report():
    def run() -> object:
        with sanitize(seed=5) as report:
            read_neighbour[(6,)](torch.zeros(6), torch.zeros(6))
            flag = torch.zeros(1, dtype=torch.int32)
            hand_over[(4,)](torch.zeros(8), torch.zeros(32), flag, False, "relaxed", "plain", 8)
        return report.to_dict()

    assert run() == run()


@triton.jit
def add_float(x, total):
    tl.atomic_add(total, tl.load(x + tl.program_id(0)), sem="relaxed")


@triton.jit
def masked_sum(x, y, n, OTHER: tl.constexpr):
    i = tl.arange(0, 8)
    known = tl.load(x + i, mask=i < n, other=OTHER)
    tl.store(y + i, known, mask=i < n)
    tl.store(y, tl.sum(known, 0))


def test_a_result_that_depends_on_the_order_or_on_masked_lanes():
    with sanitize() as report:
        add_float[(3,)](torch.tensor([1e8, 1.0, -1e8]), torch.zeros(1))
    (found,) = report.findings
    assert (found.kind, found.line) == (Kind.NONDETERMINISM, line(add_float, "tl.atomic_add"))
    with sanitize() as report:
        add_float[(3,)](torch.tensor([1.0, 2.0, 3.0]), torch.zeros(1))
        masked_sum[(1,)](torch.ones(5), torch.zeros(5), 5, OTHER=0.0)
    assert report.findings == []
    with sanitize(schedules=1) as report:
        masked_sum[(1,)](torch.ones(5), torch.zeros(5), 5, OTHER=None)
    (found,) = report.findings
    assert (found.kind, found.line) == (Kind.NONDETERMINISM, line(masked_sum, "tl.load"))


@triton.jit
def lock(total, count, flag, KIND: tl.constexpr):
    if KIND == "cas":
        while tl.atomic_cas(flag, 0, 1, sem="acquire") == 1:
            pass
    else:
        while tl.atomic_xchg(flag, 1, sem="acquire") == 1:
            pass
    tl.store(total, tl.load(total) + 1)
    tl.store(count, tl.load(total))
    tl.debug_barrier()
    tl.atomic_xchg(flag, 0, sem="release")


@pytest.mark.parametrize("kind", ["cas", "xchg"])
def test_locks_order_what_they_guard(kind):
    total, count = torch.zeros(2, 1, dtype=torch.int32)
    with sanitize() as report:
        lock[(8,)](total, count, torch.zeros(1, dtype=torch.int32), KIND=kind)
    assert report.findings == [] and total.item() == count.item() == 8


@triton.jit
def read_counter(count, y):
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="acq_rel")
    while tl.atomic_add(count, 0, sem="acquire") < tl.num_programs(0):
        pass
    tl.store(y + tl.program_id(0), tl.load(count))


def test_a_poll_that_changes_nothing_does_not_write():
    """After the barrier some programs load the counter plainly while slower ones still poll it."""
    with sanitize() as report:
        read_counter[(4,)](torch.zeros(1, dtype=torch.int32), torch.zeros(4))
    assert report.findings == []


@triton.jit
def read_then_write(x, y):
    if tl.program_id(0) == 0:
        tl.store(y, tl.load(x))
    else:
        tl.store(x, 1)


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)


def kinds(launch, **options) -> set[Kind]:
    with sanitize(**options) as report:
        launch()
    return report.kinds()


PROBES = {
    "sound": lambda: {f.kind for f in hand()},
    "no barrier": lambda: {f.kind for f in hand(BARRIER=False)},
    "plain poll": lambda: {f.kind for f in hand(POLL="plain")},
    "unwritten": lambda: kinds(lambda: copy[(1,)](torch.empty(8), torch.empty(8), 8, BLOCK=8)),
    "masked": lambda: kinds(lambda: masked_sum[(1,)](torch.ones(5), torch.zeros(5), 5, OTHER=None)),
    "crowd": lambda: kinds(lambda: read_counter[(9,)](torch.zeros(1, dtype=torch.int32), torch.zeros(9)), schedules=1),
    "late write": lambda: kinds(
        lambda: read_then_write[(2,)](torch.zeros(1), torch.zeros(1)), schedules=1, policy="in-order"
    ),
}


class Roomy(programs.Programs):
    def __init__(self, n, *args, **options):
        super().__init__(n, *args, **options | {"resident": n})


@pytest.mark.parametrize(
    ("probe", "right", "wrong", "owner", "name", "mutant"),
    [
        ("sound", set(), {Kind.RACE}, clocks.Clocks, "barrier", lambda self, p: None),
        ("sound", set(), {Kind.RACE}, clocks.Clocks, "learn", lambda self, p, row: None),
        ("sound", set(), {Kind.RACE}, shadow.Shadow, "leaves", lambda self, *args, **options: None),
        ("no barrier", {Kind.RACE}, set(), clocks.Clocks, "given", lambda self, p: self.row(p).copy()),
        ("plain poll", {Kind.PLAIN_LOAD_POLL}, {Kind.RACE}, races, "polls", lambda site: False),
        ("unwritten", {Kind.UNINITIALISED_READ}, set(), regions, "unwritten", lambda data, dtype: np.zeros(8, bool)),
        ("masked", {Kind.NONDETERMINISM}, set(), sanitized, "OTHER_GARBAGE", float("nan")),
        ("crowd", {Kind.DEADLOCK}, set(), sanitized, "Programs", Roomy),
        ("late write", {Kind.RACE}, set(), shadow._Readers, "unordered", lambda self, p, cells, clocks: []),
    ],
)
def test_a_part_that_does_nothing_is_noticed(monkeypatch, probe, right, wrong, owner, name, mutant):
    assert PROBES[probe]() == right
    monkeypatch.setattr(owner, name, mutant)
    assert PROBES[probe]() - right == wrong


def test_corpus():
    """Every broken kernel is found by class and line, and its repaired twin is clean."""
    script = Path(__file__).parents[1] / "e2e" / "sanitize_corpus.py"
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ", 0/38 false alarms" in ran.stdout.splitlines()[-1]
