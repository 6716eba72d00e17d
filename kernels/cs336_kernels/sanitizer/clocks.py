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
    """Actors are the threads of the programs, and behind them the programs' leading threads. Moments begin at 1.

    Attributes:
        now: [programs], each program's own moment. published: [programs], the moment of its last barrier.
    """

    def __init__(self, programs: int) -> None:
        self.programs = programs
        self.now, self.published = np.ones(programs, np.int32), np.zeros(programs, np.int32)
        self._rows: dict[int, np.ndarray] = {}
        self._meant: dict[int, np.ndarray] = {}
        self._releases: dict[int, list[tuple[int, int, Site]]] = {}
        self._relaxed_writes: dict[int, dict[Site, int]] = {}
        self._relaxed_reads: dict[int, dict[Site, np.ndarray]] = {}

    def row(self, program: int) -> np.ndarray:
        """[actors] up to which moment the program knows what each did."""
        if program not in self._rows:
            self._rows[program] = np.zeros(2 * self.programs, np.int32)
            self._rows[program][program :: self.programs] = self.now[program]
        return self._rows[program]

    def meant(self, program: int) -> np.ndarray:
        """Like `row`, of the order that was meant."""
        return np.maximum(self._meant[program], self.row(program)) if program in self._meant else self.row(program)

    def ended(self, program: int) -> None:
        """What a program knew that learned from nobody can be made again."""
        if program not in self._meant:
            self._rows.pop(program, None)

    def barrier(self, program: int) -> None:
        """All threads of the program have come here: what they did before can be published."""
        self.published[program] = self.now[program]
        self._tick(program)

    def _tick(self, program: int) -> None:
        row = self.row(program)
        self.now[program] += 1
        row[program :: self.programs] = self.now[program]

    def actor(self, program: int, *, leading: bool) -> int:
        return program + self.programs * leading

    def given(self, program: int) -> np.ndarray:
        """[actors] what a release by this program gives to who acquires it."""
        row = self.row(program).copy()
        row[program] = self.published[program]
        return row

    def learn(self, program: int, row: np.ndarray) -> None:
        own = self.row(program)
        np.maximum(own, row, out=own)
        own[program :: self.programs] = self.now[program]
        self._meant.setdefault(program, own.copy())

    def was_meant_to_learn(self, program: int, row: np.ndarray) -> None:
        self._meant[program] = np.maximum(self.meant(program), row)

    def released(self, program: int, site: Site) -> None:
        """After a release. What the program does from now on is later than it."""
        moment = int(self.now[program]), int(self.published[program]), site
        self._releases.setdefault(program, []).append(moment)
        self._tick(program)

    def wrote_relaxed(self, program: int, site: Site) -> None:
        """An atomic operation changed memory without a release."""
        self._relaxed_writes.setdefault(program, {})[site] = int(self.now[program])
        self._tick(program)

    def saw_relaxed(self, program: int, row: np.ndarray, site: Site) -> None:
        """An operation without acquire looked at what `row` was meant to be given by."""
        seen = self._relaxed_reads.setdefault(program, {})
        seen[site] = np.maximum(seen[site], row) if site in seen else row

    def weak_point(self, program: int, actor: int, moment: int) -> tuple[Site | None, str] | None:
        """Why `program` does not know what `actor` did at this moment, although it was meant to: where, and a reason
        with {line} for its line. None when nothing was meant to order the two."""
        if self.meant(program)[actor] < moment:
            return None
        other = actor % self.programs
        for now, published, site in self._releases.get(other, ()) if actor == other else ():
            if now >= moment > published:
                return site, "no tl.debug_barrier() stands before the release in line {line}"
        for site, row in self._relaxed_reads.get(program, {}).items():
            if row[actor] >= moment:
                return site, "line {line} sees the signal with an operation that does not acquire"
        for site, now in self._relaxed_writes.get(other, {}).items():
            if now >= moment:
                return site, "line {line} gives the signal with an operation that does not release"
        return None, "an atomic operation between them does not acquire or does not release"

    def release_before(self, program: int, other: int, moment: int) -> Site | None:
        """The last release of `other` that `program` has acquired, when it came before this moment."""
        seen = min(int(self.row(program)[self.actor(other, leading=True)]), moment - 1)
        return next((site for now, _, site in reversed(self._releases.get(other, ())) if now <= seen), None)
