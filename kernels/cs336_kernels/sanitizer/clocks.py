"""What happened before what, between programs: vector clocks.

The rules are FastTrack's (Flanagan and Freund 2009), with what a GPU adds: a program is many threads, so its store is
published by a release only if a `tl.debug_barrier()` stands between them. A program's own clock therefore has two
readings: now, which dates its accesses, and the last barrier, which is what a release gives away. Atomic operations on
single places are all done by one thread, the one that releases: they count as done by an actor of their own.

A second set of clocks runs beside the first, as if every atomic operation acquired and released and a barrier stood
before it: the order that the kernel's author meant. A race that this order would forbid has a cause that can be named.
"""

from __future__ import annotations

import numpy as np

from cs336_kernels.sanitizer.source import Site


class Clocks:
    """clock[p, a]: up to which moment of actor a program p knows what a did. Moments begin at 1. Actors are the threads
    of the programs, and behind them the programs' leading threads.

    Attributes:
        meant: like clock, of the order that was meant.
        published: [programs], the moment of each program's last barrier.
    """

    def __init__(self, programs: int) -> None:
        self.programs = programs
        self.clock = np.tile(np.eye(programs, dtype=np.int32), 2)
        self.meant = np.zeros_like(self.clock)
        self.published = np.zeros(programs, np.int32)
        self._releases: list[list[tuple[int, int, Site]]] = [[] for _ in range(programs)]
        self._relaxed_writes: list[dict[Site, int]] = [{} for _ in range(programs)]
        self._relaxed_reads: list[dict[Site, np.ndarray]] = [{} for _ in range(programs)]

    def barrier(self, program: int) -> None:
        """All threads of the program have come here: what they did before can be published."""
        self.published[program] = self.clock[program, program]
        self._tick(program)

    def _tick(self, program: int) -> None:
        self.clock[program, program :: self.programs] += 1

    def actor(self, program: int, *, leading: bool) -> int:
        return program + self.programs * leading

    def given(self, program: int) -> np.ndarray:
        """[actors] what a release by this program gives to who acquires it."""
        row = self.clock[program].copy()
        row[program] = self.published[program]
        return row

    def given_as_meant(self, program: int) -> np.ndarray:
        return np.maximum(self.meant[program], self.clock[program])

    def learn(self, program: int, row: np.ndarray) -> None:
        own = self.clock[program, program]
        np.maximum(self.clock[program], row, out=self.clock[program])
        self.clock[program, program :: self.programs] = own

    def released(self, program: int, site: Site) -> None:
        """After a release. What the program does from now on is later than it."""
        self._releases[program].append((int(self.clock[program, program]), int(self.published[program]), site))
        self._tick(program)

    def wrote_relaxed(self, program: int, site: Site) -> None:
        """An atomic operation changed memory without a release."""
        self._relaxed_writes[program][site] = int(self.clock[program, program])
        self._tick(program)

    def saw_relaxed(self, program: int, row: np.ndarray, site: Site) -> None:
        """An operation without acquire looked at what `row` was meant to be given by."""
        before = self._relaxed_reads[program].get(site)
        self._relaxed_reads[program][site] = row if before is None else np.maximum(before, row)

    def weak_point(self, program: int, actor: int, moment: int) -> tuple[Site | None, str] | None:
        """Why `program` does not know what `actor` did at this moment, although it was meant to: where, and a reason
        with {line} for its line. None when nothing was meant to order the two."""
        if self.meant[program, actor] < moment:
            return None
        other = actor % self.programs
        for now, published, site in self._releases[other] if actor == other else ():
            if now >= moment > published:
                return site, "no tl.debug_barrier() stands before the release in line {line}"
        for site, row in self._relaxed_reads[program].items():
            if row[actor] >= moment:
                return site, "line {line} sees the signal with an operation that does not acquire"
        for site, now in self._relaxed_writes[other].items():
            if now >= moment:
                return site, "line {line} gives the signal with an operation that does not release"
        return None, "an atomic operation between them does not acquire or does not release"
