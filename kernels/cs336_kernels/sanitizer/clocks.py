"""What happened before what, between programs: vector clocks and, for each place in memory, who touched it last.

The rules are FastTrack's (Flanagan and Freund 2009), with what a GPU adds: a program is many threads, so its store is
published by a release only if a `tl.debug_barrier()` stands between them. A program's own clock therefore has two
readings: now, which dates its accesses, and the last barrier, which is what a release gives away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cs336_kernels.sanitizer.source import Site

NOBODY = -1


class Clocks:
    """clock[p, q]: up to which moment of program q program p knows what q did.

    Attributes:
        published: [programs], the moment of each program's last barrier.
        releases: per program its releases: (now, published, where).
    """

    def __init__(self, programs: int) -> None:
        self.clock = np.zeros((programs, programs), np.int32)
        np.fill_diagonal(self.clock, 1)
        self.published = np.zeros(programs, np.int32)
        self.releases: list[list[tuple[int, int, int]]] = [[] for _ in range(programs)]

    def barrier(self, program: int) -> None:
        """All threads of the program have come here: what they did before can be published."""
        self.published[program] = self.clock[program, program]
        self.clock[program, program] += 1

    def given(self, program: int, site: Site) -> np.ndarray:
        """[programs] what a release by this program gives to who acquires it."""
        row = self.clock[program].copy()
        row[program] = self.published[program]
        self.releases[program].append((int(self.clock[program, program]), int(self.published[program]), site))
        return row

    def learn(self, program: int, row: np.ndarray) -> None:
        own = self.clock[program, program]
        np.maximum(self.clock[program], row, out=self.clock[program])
        self.clock[program, program] = own

    def released_without_barrier(self, program: int, moment: int) -> Site | None:
        """Where a release after this moment did not publish it, or None."""
        return next((site for now, out, site in self.releases[program] if now >= moment > out), None)


@dataclass(frozen=True)
class Conflict:
    """Two accesses without an order. cell: where. other: the earlier program; moment, site: of its access.
    other_writes: whether that was a store; else it was a load."""

    cell: int
    other: int
    moment: int
    site: Site
    other_writes: bool


class Shadow:
    """For each cell of a region its last writer, its readers since, and what releases left in it."""

    def __init__(self, cells: int, programs: int) -> None:
        def empty() -> np.ndarray:
            return np.full(cells, NOBODY, np.int32)

        self.writer, self.wrote, self.write_site = empty(), np.zeros(cells, np.int32), np.zeros(cells, np.int32)
        self.by_atomic = np.zeros(cells, bool)
        self.reader, self.read, self.read_site = empty(), np.zeros(cells, np.int32), np.zeros(cells, np.int32)
        self._shared, self._sync = _Rows(cells, programs), _Rows(cells, programs)

    def loads(self, p: int, cells: np.ndarray, site: Site, clocks: Clocks) -> list[Conflict]:
        """A plain load of distinct or repeated cells."""
        found = self._unordered_writes(p, cells, clocks, atomic=False)
        now = clocks.clock[p, p]
        last = self.reader[cells]
        alone = (last == NOBODY) | (last == p) | (self.read[cells] <= clocks.clock[p, last])
        shared = self._shared.have(cells)
        if not (alone & ~shared).all():
            several = np.unique(cells[~alone | shared])
            rows = self._shared.rows(several)
            before = self.reader[several]
            held = before != NOBODY
            rows[held, before[held]] = np.maximum(rows[held, before[held]], self.read[several][held])
            rows[:, p] = now
            self._shared.put(several, rows)
        self.reader[cells], self.read[cells], self.read_site[cells] = p, now, site
        return found

    def stores(self, p: int, cells: np.ndarray, site: Site, clocks: Clocks, *, atomic: bool = False) -> list[Conflict]:
        """A store, or an atomic operation of a scope that other programs are in."""
        found = self._unordered_writes(p, cells, clocks, atomic) + self._unordered_reads(p, cells, clocks)
        self.writer[cells], self.wrote[cells], self.write_site[cells] = p, clocks.clock[p, p], site
        self.by_atomic[cells] = atomic
        self.reader[cells] = NOBODY
        self._shared.forget(cells)
        if not atomic:
            self._sync.forget(cells)
        return found

    def acquire(self, p: int, cells: np.ndarray, clocks: Clocks) -> None:
        if self._sync.have(cells).any():
            clocks.learn(p, self._sync.rows(cells).max(0))

    def release(self, p: int, cells: np.ndarray, site: Site, clocks: Clocks) -> None:
        """A read-modify-write hands on what earlier releases left, as in a release sequence."""
        distinct = np.unique(cells)
        self._sync.put(distinct, np.maximum(self._sync.rows(distinct), clocks.given(p, site)))

    def left(self, cell: int) -> np.ndarray:
        """[programs] what releases left in a cell."""
        return self._sync.rows(np.array([cell]))[0]

    def _unordered_writes(self, p: int, cells: np.ndarray, clocks: Clocks, atomic: bool) -> list[Conflict]:
        by = self.writer[cells]
        bad = (by != NOBODY) & (by != p) & (self.wrote[cells] > clocks.clock[p, by])
        if atomic:
            bad &= ~self.by_atomic[cells]
        return list(self._first_of_each(cells[bad], self.writer, self.wrote, self.write_site, writes=True))

    def _unordered_reads(self, p: int, cells: np.ndarray, clocks: Clocks) -> list[Conflict]:
        by = self.reader[cells]
        bad = (by != NOBODY) & (by != p) & (self.read[cells] > clocks.clock[p, by])
        found = list(self._first_of_each(cells[bad], self.reader, self.read, self.read_site, writes=False))
        shared = self._shared.have(cells)
        if shared.any():
            late = self._shared.rows(cells[shared]) > clocks.clock[p]
            late[:, p] = False
            for at, other in np.argwhere(late)[:64]:
                cell = int(cells[shared][at])
                moment = int(self._shared.rows(cells[shared][at : at + 1])[0, other])
                found.append(Conflict(cell, int(other), moment, int(self.read_site[cell]), other_writes=False))
        return found

    def _first_of_each(
        self, cells: np.ndarray, who: np.ndarray, when: np.ndarray, lines: np.ndarray, *, writes: bool
    ) -> Iterator[Conflict]:
        seen = set()
        for cell in cells:
            key = int(who[cell]), int(lines[cell])
            if key not in seen:
                seen.add(key)
                yield Conflict(int(cell), key[0], int(when[cell]), key[1], writes)


class _Rows:
    """A clock per cell for the few cells that have one."""

    def __init__(self, cells: int, programs: int) -> None:
        self._slot = np.full(cells, NOBODY, np.int32)
        self._table = np.zeros((0, programs), np.int32)
        self._used = 0

    def have(self, cells: np.ndarray) -> np.ndarray:
        return self._slot[cells] != NOBODY

    def rows(self, cells: np.ndarray) -> np.ndarray:
        """[len(cells), programs], zeros for a cell without a clock; a copy."""
        slots = self._slot[cells]
        rows = np.zeros((len(cells), self._table.shape[1]), np.int32)
        rows[slots != NOBODY] = self._table[slots[slots != NOBODY]]
        return rows

    def put(self, cells: np.ndarray, rows: np.ndarray) -> None:
        """cells: distinct."""
        new = cells[self._slot[cells] == NOBODY]
        if self._used + len(new) > len(self._table):
            grown = np.zeros((max(64, 2 * (self._used + len(new))), self._table.shape[1]), np.int32)
            grown[: self._used] = self._table[: self._used]
            self._table = grown
        self._slot[new] = np.arange(self._used, self._used + len(new))
        self._used += len(new)
        self._table[self._slot[cells]] = rows

    def forget(self, cells: np.ndarray) -> None:
        if self._used:
            self._slot[cells] = NOBODY
