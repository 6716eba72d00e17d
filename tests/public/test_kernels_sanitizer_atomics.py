"""Atomic loads, stores and polls under the sanitizer: Triton has them from 3.9 on."""

from __future__ import annotations

import inspect

import pytest
import torch
import triton
import triton.language as tl
from cs336_kernels.sanitizer import Finding, Kind, Traffic, sanitize

REASON = f"triton {triton.__version__} has no atomic_poll"
pytestmark = pytest.mark.skipif(not hasattr(tl, "atomic_poll"), reason=REASON)


def counters(n: int = 1) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.int32)


@triton.jit
def hand_over(x, y, flag, BARRIER: tl.constexpr, SET: tl.constexpr, POLL: tl.constexpr, FORM: tl.constexpr):
    i = tl.arange(0, 8)
    if tl.program_id(0) == 0:
        tl.store(x + i, i)  # the data
        if BARRIER:
            tl.debug_barrier()
        tl.atomic_store(flag, 1, sem=SET)
    else:
        if FORM == "poll":
            tl.atomic_poll(flag, 1, sem=POLL)
        else:
            while tl.atomic_load(flag, sem=POLL) == 0:
                pass
        tl.store(y + tl.program_id(0) * 8 + i, tl.load(x + i))


def hand(BARRIER=True, SET="release", POLL="acquire", FORM="poll") -> list[Finding]:
    y = torch.full((32,), -1)
    with sanitize() as report:
        hand_over[(4,)](torch.full((8,), -1), y, counters(), BARRIER, SET, POLL, FORM)
    assert y[8:].tolist() == list(range(8)) * 3
    return report.findings


@pytest.mark.parametrize("form", ["poll", "load"])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, None),
        ({"BARRIER": False}, "no tl.debug_barrier() stands before the release"),
        ({"SET": "relaxed"}, "does not release"),
        ({"POLL": "relaxed"}, "does not acquire"),
    ],
)
def test_a_signal_by_atomic_store_and_load_or_poll(form, wrong, why):
    findings = hand(**wrong, FORM=form)
    if why is None:
        assert findings == []
    else:
        (found,) = findings
        lines, first = inspect.getsourcelines(hand_over.fn)
        at = next(number for number, code in enumerate(lines, start=first) if "# the data" in code)
        assert (found.kind, found.line) == (Kind.RACE, at) and why in found.message


@triton.jit
def wait_for(count, y, WANTED: tl.constexpr, TIMEOUT: tl.constexpr):
    p = tl.program_id(0)
    if p == 0:
        tl.store(y, tl.atomic_poll(count, WANTED, timeout_ns=TIMEOUT).to(tl.int32))
    else:
        tl.atomic_add(count, 1, sem="release")


@pytest.mark.parametrize(("wanted", "timeout", "kinds", "met"), [
    (3, None, set(), 1), (4, None, {Kind.DEADLOCK}, -1), (4, 1000, set(), 0), (3, 1000, set(), 1),
])  # fmt: skip
def test_a_poll_waits_for_one_value_and_may_give_up(wanted, timeout, kinds, met):
    y = torch.full((1,), -1, dtype=torch.int32)
    with sanitize() as report:
        wait_for[(4,)](counters(), y, WANTED=wanted, TIMEOUT=timeout)
    assert report.kinds() == kinds and y.item() == met


def test_a_value_that_is_passed_over_is_a_deadlock_in_some_schedule():
    with sanitize() as report:
        wait_for[(4,)](counters(), torch.zeros(1, dtype=torch.int32), WANTED=1, TIMEOUT=None)
    (found,) = report.findings
    assert found.kind is Kind.DEADLOCK and found.programs == (0,)
    assert found.line == wait_for.fn.__code__.co_firstlineno + 4


@triton.jit
def relay(x, y, flag, PASS_ON: tl.constexpr):
    p = tl.program_id(0)
    if p == 0:
        tl.store(x, 7)
        tl.debug_barrier()
        tl.atomic_store(flag, 1, sem="release")
    elif p == 1:
        tl.atomic_poll(flag, 1, sem="relaxed")
        if PASS_ON == "add":
            tl.atomic_add(flag, 1, sem="relaxed")
        else:
            tl.atomic_store(flag, 2, sem="relaxed")
    else:
        tl.atomic_poll(flag, 2, sem="acquire")
        tl.store(y, tl.load(x))


def test_an_addition_hands_a_release_on_and_a_store_does_not():
    kinds = {}
    for how in ("add", "store"):
        with sanitize() as report:
            relay[(3,)](torch.zeros(1), torch.zeros(1), counters(), PASS_ON=how)
        kinds[how] = report.kinds()
    assert kinds == {"add": set(), "store": {Kind.RACE}}


@triton.jit
def poll_both(flags, y):
    i = tl.arange(0, 2)
    if tl.program_id(0) == 0:
        met = tl.atomic_poll(flags + i, i + 1, timeout_ns=0)
        tl.store(y + i, met.to(tl.int32))
    else:
        tl.atomic_store(flags + i, i * 2, sem="relaxed")


def test_polls_of_several_places():
    y = torch.full((2,), -1, dtype=torch.int32)
    with sanitize() as report:
        poll_both[(2,)](torch.tensor([1, 2], dtype=torch.int32), y)
    assert report.kinds() <= {Kind.NONDETERMINISM} and y[1] == 1


@triton.jit
def load_and_store(x, y, n):
    i = tl.arange(0, 8)
    tl.atomic_store(y + i, tl.atomic_load(x + i, mask=i < n, sem="relaxed"), mask=i < n, sem="relaxed")


def test_what_they_move_and_what_they_may_not_read():
    with sanitize(schedules=2) as report:
        load_and_store[(1,)](torch.arange(8), torch.zeros(8, dtype=torch.int64), 5)
    assert report.findings == []
    assert report.launches[0].traffic == {
        "x": Traffic(loaded=40, unique_loaded=40),
        "y": Traffic(stored=40, unique_stored=40),
    }
    with sanitize(schedules=2) as report:
        load_and_store[(1,)](torch.empty(8, dtype=torch.int64), torch.empty(8, dtype=torch.int64), 5)
    (found,) = report.findings
    assert (found.kind, found.tensor) == (Kind.UNINITIALISED_READ, "x")
