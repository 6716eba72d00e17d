"""For each place in memory who touched it last, and what releases left there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from cs336_kernels.sanitizer.cell_clocks import CellClocks
from cs336_kernels.sanitizer.clocks import Clocks
from cs336_kernels.sanitizer.source import Site


class How(IntEnum):
    """Kind of an access. NARROW: atomic among the threads of one program only."""

    PLAIN = 0
    ATOMIC = 1
    NARROW = 2


@dataclass(frozen=True)
class Conflict:
    """An earlier access that nothing orders before the one at hand.

    Attributes:
        cell: where. other, actor: its program and who in it, see `Clocks`. moment, site: of the access.
        writes: whether it was a store; else it was a load.
    """

    cell: int
    other: int
    actor: int
    moment: int
    site: Site
    how: How
    writes: bool


class Shadow:
    """For each cell of a region its last writer, its readers since, and what releases left in it.

    Attributes:
        write_site: [cells], where each was last written.
    """

    def __init__(self, cells: int, programs: int) -> None:
        self.write_site = np.zeros(cells, np.int32)
        self._writer, self._wrote = np.zeros(cells, np.int32), np.zeros(cells, np.int32)
        self._how = np.zeros(cells, np.int8)
        self._readers = {how: _Readers(cells, programs, how) for how in (How.PLAIN, How.ATOMIC)}
        self._sync, self._meant = CellClocks(cells, 2 * programs), CellClocks(cells, 2 * programs)

    def loads(
        self, p: int, cells: np.ndarray, site: Site, clocks: Clocks, how: How = How.PLAIN, *, leading: bool = False
    ) -> list[Conflict]:
        """A load, or an atomic operation that leaves memory as it was.

        Args:
            cells: distinct or repeated. leading: one thread of the program does it, the one that releases.
        """
        found = self._unordered_writes(p, cells, clocks, how)
        kind = How.ATOMIC if how is How.ATOMIC else How.PLAIN
        self._readers[kind].add(p, clocks.actor(p, leading=leading), cells, site, clocks)
        return found

    def stores(
        self, p: int, cells: np.ndarray, site: Site, clocks: Clocks, how: How = How.PLAIN, *, leading: bool = False
    ) -> list[Conflict]:
        """A store, or an atomic operation that changes memory."""
        found = self._unordered_writes(p, cells, clocks, how) + self._readers[How.PLAIN].unordered(p, cells, clocks)
        if how is not How.ATOMIC:
            found += self._readers[How.ATOMIC].unordered(p, cells, clocks)
            self._sync.forget(cells)
            self._meant.forget(cells)
        self._writer[cells], self._wrote[cells] = clocks.actor(p, leading=leading), clocks.now[p]
        self.write_site[cells] = site
        self._how[cells] = how
        for readers in self._readers.values():
            readers.forget(cells)
        return found

    def looks(self, p: int, cells: np.ndarray, site: Site, clocks: Clocks, *, acquires: bool) -> None:
        """An atomic operation sees what was left in the cells."""
        if not self._meant.used:
            return
        meant = self._meant.latest(cells)
        if acquires:
            clocks.learn(p, self._sync.latest(cells))
        elif (meant > clocks.row(p)).any():
            clocks.saw_relaxed(p, meant, site)
        clocks.was_meant_to_learn(p, meant)

    def leaves(self, p: int, cells: np.ndarray, site: Site, clocks: Clocks, *, releases: bool, reads: bool) -> None:
        """After an atomic operation that released or changed memory.

        Args:
            reads: it has read what was there, and hands on what earlier releases left, as in a release sequence.
        """
        if not reads:
            self._sync.forget(cells)
            self._meant.forget(cells)
        distinct = cells if len(cells) == 1 else np.unique(cells)
        self._meant.raise_to(distinct, clocks.meant(p))
        if releases:
            self._sync.raise_to(distinct, clocks.given(p))
            clocks.released(p, site)
        else:
            clocks.wrote_relaxed(p, site)

    def left(self, cell: int) -> np.ndarray:
        """[actors] what is meant to be known by who looks at this cell."""
        return self._meant.latest(np.array([cell]))

    def _unordered_writes(self, p: int, cells: np.ndarray, clocks: Clocks, how: How) -> list[Conflict]:
        bad = self._wrote[cells] > clocks.row(p)[self._writer[cells]]
        if how is How.ATOMIC:
            bad &= self._how[cells] != How.ATOMIC
        if not bad.any():
            return []
        late = _one_of_each(cells[bad], self._writer, self.write_site)
        return [_conflict(clocks, c, self._writer, self._wrote, self.write_site, How(self._how[c]), True) for c in late]


class _Readers:
    """Who read each cell since it was written: the last one, and a clock for cells with several."""

    def __init__(self, cells: int, programs: int, how: How) -> None:
        self._how = how
        self._reader, self._read = np.zeros(cells, np.int32), np.zeros(cells, np.int32)
        self._site = np.zeros(cells, np.int32)
        self._shared = CellClocks(cells, 2 * programs)
        self._any = False

    def add(self, p: int, actor: int, cells: np.ndarray, site: Site, clocks: Clocks) -> None:
        now, self._any = clocks.now[p], True
        several = self._read[cells] > clocks.row(p)[self._reader[cells]]
        if self._shared.used:
            several |= self._shared.have(cells)
        if several.any():
            those = np.unique(cells[several])
            last = self._reader[those].astype(np.int64) << 20 | (self._read[those] & 0xFFFFF)
            for cell, clock in self._shared.change(those, last):
                before = self._reader[cell]
                clock[before] = max(clock[before], self._read[cell])
                clock[actor] = now
        self._reader[cells], self._read[cells], self._site[cells] = actor, now, site

    def unordered(self, p: int, cells: np.ndarray, clocks: Clocks) -> list[Conflict]:
        if not self._any:
            return []
        found = []
        bad = self._read[cells] > clocks.row(p)[self._reader[cells]]
        if bad.any():
            late = _one_of_each(cells[bad], self._reader, self._site)
            found += [_conflict(clocks, c, self._reader, self._read, self._site, self._how, False) for c in late]
        if self._shared.used:
            for cell, clock in self._shared.different(cells):
                for late in np.flatnonzero(clock > clocks.row(p)):
                    actor, moment, site = int(late), int(clock[late]), int(self._site[cell])
                    found.append(Conflict(cell, actor % clocks.programs, actor, moment, site, self._how, False))
        return found

    def forget(self, cells: np.ndarray) -> None:
        if self._any:
            self._read[cells] = 0
            self._shared.forget(cells)


def _conflict(
    clocks: Clocks, c: int, who: np.ndarray, when: np.ndarray, where: np.ndarray, how: How, writes: bool
) -> Conflict:
    return Conflict(c, int(who[c]) % clocks.programs, int(who[c]), int(when[c]), int(where[c]), how, writes)


def _one_of_each(cells: np.ndarray, who: np.ndarray, lines: np.ndarray) -> list[int]:
    """Of the cells one for each pair of an actor and a line."""
    _, first = np.unique(who[cells].astype(np.int64) << 32 | lines[cells], return_index=True)
    return [int(cells[i]) for i in np.sort(first)]
