"""The sanitizer's clocks against sets of events, and what counts as a poll in a kernel's source."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cs336_kernels.sanitizer import Kind, sanitize
from cs336_kernels.sanitizer.cell_clocks import CellClocks
from cs336_kernels.sanitizer.clocks import Clocks
from cs336_kernels.sanitizer.shadow import How, Shadow
from hypothesis import given, settings
from hypothesis import strategies as st

PROGRAMS, DATA, SYNC = 3, (0, 1, 2), (3, 4)
EVENTS = st.lists(
    st.tuples(
        st.integers(0, PROGRAMS - 1),
        st.one_of(
            st.tuples(st.sampled_from(["load", "store"]), st.sets(st.sampled_from(DATA), min_size=1)),
            st.tuples(st.sampled_from(["acquire", "release", "relaxed", "both"]), st.sampled_from(SYNC)),
            st.tuples(st.just("barrier"), st.none()),
        ),
    ),
    max_size=40,
)


def race_by_sets(events) -> bool:
    """Every program knows a set of earlier accesses; a race is an access that conflicts with one it does not know."""
    known: list[set[int]] = [set() for _ in range(PROGRAMS)]
    public: list[set[int]] = [set() for _ in range(PROGRAMS)]  # own accesses before the last barrier
    own: list[set[int]] = [set() for _ in range(PROGRAMS)]
    left: dict[int, set[int]] = {cell: set() for cell in SYNC}
    for i, (p, (what, where)) in enumerate(events):
        if what in ("load", "store"):
            for j, (q, (other, there)) in enumerate(events[:i]):
                conflict = other in ("load", "store") and "store" in (what, other) and where & there
                if conflict and p != q and j not in known[p]:
                    return True
            own[p].add(i)
        elif what == "barrier":
            public[p] = set(own[p])
        else:
            if what in ("acquire", "both"):
                known[p] |= left[where]
            if what in ("release", "both"):
                left[where] |= known[p] | public[p]
    return False


def race_by_clocks(events) -> bool:
    clocks, shadow = Clocks(PROGRAMS), Shadow(5, PROGRAMS)
    found = []
    for site, (p, (what, where)) in enumerate(events):
        if what == "load":
            found += shadow.loads(p, np.array(sorted(where)), site, clocks)
        elif what == "store":
            found += shadow.stores(p, np.array(sorted(where)), site, clocks)
        elif what == "barrier":
            clocks.barrier(p)
        else:
            cells = np.array([where])
            found += shadow.stores(p, cells, site, clocks, How.ATOMIC, leading=True)
            shadow.looks(p, cells, site, clocks, acquires=what in ("acquire", "both"))
            shadow.leaves(p, cells, site, clocks, releases=what in ("release", "both"), reads=True)
    assert all(conflict.other != events[conflict.site][0] or conflict.cell in DATA for conflict in found)
    assert all(conflict.other == events[conflict.site][0] for conflict in found if conflict.writes)
    return bool(found)


@settings(max_examples=600, deadline=None)
@given(EVENTS)
def test_clocks_see_a_race_exactly_when_sets_of_events_do(events):
    assert race_by_clocks(events) == race_by_sets(events)


def test_both_answers_occur():
    def orders(*middle) -> bool:
        return race_by_clocks([(0, ("store", {0})), *middle, (1, ("load", {0}))])

    barrier, release, acquire = (0, ("barrier", None)), (0, ("release", 3)), (1, ("acquire", 3))
    assert not orders(barrier, release, acquire)
    assert orders(release, acquire) and orders(barrier, release) and orders(barrier, acquire, release)
    assert orders(barrier, (0, ("relaxed", 3)), acquire) and orders(barrier, release, (1, ("relaxed", 3)))
    assert orders(barrier, (0, ("release", 4)), acquire)


CELLS = st.sets(st.integers(0, 11), min_size=1)
CHANGES = st.lists(st.tuples(st.sampled_from(["raise", "forget"]), CELLS, st.integers(1, 9)), max_size=25)


@settings(max_examples=200, deadline=None)
@given(CHANGES)
def test_shared_clocks_are_as_one_clock_for_each_cell(changes):
    shared, plain = CellClocks(12, 4), np.zeros((12, 4), np.int32)
    for what, cells, moment in changes:
        some = np.array(sorted(cells))
        if what == "raise":
            row = np.array([moment, 0, moment % 3, 1], np.int32)
            shared.raise_to(some, row)
            plain[some] = np.maximum(plain[some], row)
        else:
            shared.forget(np.concatenate([some, some]))
            plain[some] = 0
        assert all((shared.latest(np.array([cell])) == plain[cell]).all() for cell in range(12))
        assert (shared.latest(np.arange(12)) == plain.max(0)).all()
        assert {tuple(clock) for _, clock in shared.different(np.arange(12))} == set(map(tuple, plain)) - {(0, 0, 0, 0)}
        assert (shared.have(np.arange(12)) == plain.any(1)).all()


@triton.jit
def persistent(x, y, TILES: tl.constexpr):
    """A `while` loop that waits for nobody: its loads race, they do not poll."""
    tile = tl.program_id(0)
    while tile < TILES:
        tl.store(x + tile, tl.load(x + (tile + 1) % TILES))
        tile += tl.num_programs(0)


@triton.jit
def walk(nodes, y):
    """Follows a list, from one place to another."""
    if tl.program_id(0) == 0:
        tl.store(nodes + 3, 0)
    else:
        node = tl.load(nodes)
        while node > 0:
            node = tl.load(nodes + node)
        tl.store(y, node)


@triton.jit
def is_up(flag):
    return tl.load(flag) > 0


@triton.jit
def wait_in_helper(flag, y):
    if tl.program_id(0) == 0:
        tl.atomic_xchg(flag, 1, sem="release")
    else:
        done = False
        tries = 0
        while not done and tries < 1000:
            up = is_up(flag)
            done = up
            tries += 1


@pytest.mark.parametrize(("kernel", "kind"), [
    (persistent, Kind.RACE), (walk, Kind.RACE), (wait_in_helper, Kind.PLAIN_LOAD_POLL),
])  # fmt: skip
def test_only_a_load_that_looks_at_one_place_again_polls(kernel, kind):
    first, constants = torch.tensor([2, 0, 3, 0], dtype=torch.int32), {"TILES": 4} if kernel is persistent else {}
    if kernel is wait_in_helper:
        first = torch.zeros(1, dtype=torch.int32)
    with sanitize() as report:
        kernel[(2,)](first, torch.zeros(4, dtype=torch.int32), **constants)
    assert report.kinds() == {kind}
