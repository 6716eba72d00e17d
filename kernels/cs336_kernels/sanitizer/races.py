"""Turns conflicts of accesses into findings that say what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cs336_kernels.sanitizer.clocks import Clocks, Conflict, Shadow
from cs336_kernels.sanitizer.findings import Findings
from cs336_kernels.sanitizer.regions import Region
from cs336_kernels.sanitizer.report import Kind
from cs336_kernels.sanitizer.source import Site, in_while, place


class Races:
    """Of one schedule."""

    def __init__(self, clocks: Clocks, shadows: Mapping[int, Shadow], findings: Findings, programs: int) -> None:
        self._clocks, self._shadows, self._findings = clocks, shadows, findings
        self._saw: list[dict[tuple[int, int], Site]] = [{} for _ in range(programs)]

    def saw_without_acquire(self, p: int, region: Region, cells: np.ndarray, site: Site) -> None:
        """A relaxed operation of `p`: if it looked at what a release left, that may explain a race."""
        self._saw[p] |= {(region.base, int(cell)): site for cell in cells[:8]}

    def report(self, p: int, region: Region, conflicts: Sequence[Conflict], site: Site, *, writes: bool) -> None:
        """Conflicts of an access of `p` with earlier ones of other programs."""
        for c in conflicts:
            offset = c.cell * region.unit
            name, where = region.name(offset), region.element(offset)
            if not writes and in_while(site):
                self.poll(p, c.other, region, c.cell, site)
                continue
            if writes and not c.other_writes and in_while(c.site):
                self.poll(c.other, p, region, c.cell, c.site)
                continue
            message = (
                f"program {{1}} {'stores to' if writes else 'loads'} {where}, which program {{0}} "
                f"{'stores to' if c.other_writes else 'loads'}, and nothing orders the two"
            ) + self._why(p, c)
            main, other = (site, c.site) if writes else (c.site, site)
            self._findings.add(Kind.RACE, main, (c.other, p), name, message, other)

    def poll(self, p: int, other: int, region: Region, cell: int, site: Site) -> None:
        """`p` waits in a loop of plain loads for what `other` writes. From here on it counts as if it had acquired: one
        cause, one finding."""
        offset = cell * region.unit
        self._findings.add(
            Kind.PLAIN_LOAD_POLL, site, (p, other), region.name(offset),
            f"waits for {region.element(offset)} with a plain load: the compiler may delete the loop, and nothing is "
            "acquired; poll with an atomic operation that acquires",
        )  # fmt: skip
        left = self._shadows[region.base].left(cell)
        self._clocks.learn(p, left if left.any() else self._clocks.clock[other])

    def _why(self, p: int, c: Conflict) -> str:
        release = self._clocks.released_without_barrier(c.other, c.moment)
        if release is not None:
            return f"; no tl.debug_barrier() stands before the release in line {place(release)[1]}"
        for (base, cell), site in self._saw[p].items():
            if self._shadows[base].left(cell)[c.other] >= c.moment:
                return f"; line {place(site)[1]} saw the release with an operation that does not acquire"
        return ""

    def between_lanes(self, p: int, region: Region, offsets: np.ndarray, values: np.ndarray, site: Site) -> None:
        """Two lanes of one store that write different values to one place: which of them stays is not defined."""
        if len(offsets) < 2 or (np.diff(offsets) > 0).all():
            return
        order = np.argsort(offsets, kind="stable")
        bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")[order]
        clash = np.flatnonzero((np.diff(offsets[order]) == 0) & (bits[1:] != bits[:-1]))
        if len(clash):
            offset = int(offsets[order][clash[0]])
            message = f"two lanes of this store write different values to {region.element(offset)}"
            self._findings.add(Kind.RACE, site, (p,), region.name(offset), message)
