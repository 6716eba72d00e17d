"""Turns conflicts of accesses into findings that say what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cs336_kernels.sanitizer.clocks import Clocks
from cs336_kernels.sanitizer.findings import Findings
from cs336_kernels.sanitizer.regions import Region
from cs336_kernels.sanitizer.report import Kind
from cs336_kernels.sanitizer.shadow import Conflict, How, Shadow
from cs336_kernels.sanitizer.source import Site, place, polls


class Races:
    """Of one schedule. After a conflict whose cause is known the two programs count as ordered, as they were meant to
    be: what follows from the same cause is not found again."""

    def __init__(self, clocks: Clocks, shadows: Mapping[int, Shadow], findings: Findings) -> None:
        self._clocks, self._shadows, self._findings = clocks, shadows, findings
        self.volatile: set[Site] = set()

    def report(
        self, p: int, region: Region, conflicts: Sequence[Conflict], site: Site, how: How, *, writes: bool
    ) -> None:
        """Conflicts of an access of `p` with earlier ones of other programs."""
        for c in conflicts:
            if how is How.PLAIN and not writes and polls(site):
                self.poll(p, c.other, region, c.cell, site)
                continue
            if writes and c.how is How.PLAIN and not c.writes and polls(c.site):
                self.poll(c.other, p, region, c.cell, c.site)
                continue
            offset = c.cell * region.unit
            name, where = region.name(offset), region.element(offset)
            message = (
                f"program {{1}} {_verb(how, writes)} {where}, which program {{0}} "
                f"{_verb(c.how, c.writes)}, and nothing orders the two"
            )
            main, other = (site, c.site) if writes else (c.site, site)
            cause, why = self._too_weak(p, c)
            if cause in self.volatile and polls(cause):
                message = (
                    f"waits with a volatile load, which acquires nothing: programs {{0}} and {{1}} race for "
                    f"{where}; let an atomic operation that acquires follow the loop"
                )
                self._findings.add(Kind.PLAIN_LOAD_POLL, cause, (c.other, p), name, message)
                continue
            if not why:
                cause, why = self._between_kinds(p, c, site, how)
                if cause == other and ((writes and c.writes) or How.NARROW in (how, c.how)):
                    main, other = other, main
            self._findings.add(
                Kind.RACE, main, (c.other, p), name, message + (why or self._too_early(p, c)), other, cause
            )

    def poll(self, p: int, other: int, region: Region, cell: int, site: Site) -> None:
        """`p` waits in a loop of plain loads for what `other` writes. From here on it counts as if it had acquired."""
        offset = cell * region.unit
        self._findings.add(
            Kind.PLAIN_LOAD_POLL, site, (p, other), region.name(offset),
            f"waits for {region.element(offset)} with a plain load: the compiler may delete the loop, and nothing is "
            "acquired; poll with an atomic operation that acquires",
        )  # fmt: skip
        self._clocks.learn(p, np.maximum(self._shadows[region.base].left(cell), self._clocks.row(other)))

    def _between_kinds(self, p: int, c: Conflict, site: Site, how: How) -> tuple[Site | None, str]:
        """A place that is for atomic operations, and one access to it is none."""
        if how is How.PLAIN and c.how is How.PLAIN:
            return None, ""
        if how is not How.PLAIN:
            self._clocks.learn(p, self._clocks.row(c.other))
        narrow = site if how is How.NARROW else c.site if c.how is How.NARROW else None
        if narrow is not None:
            return narrow, '; to other programs an operation with scope="cta" is not atomic'
        plain = site if how is How.PLAIN else c.site
        return plain, f"; the access in line {place(plain)[1]} is not atomic"

    def _too_weak(self, p: int, c: Conflict) -> tuple[Site | None, str]:
        weak = self._clocks.weak_point(p, c.actor, c.moment)
        if weak is None:
            return None, ""
        self._clocks.learn(p, self._clocks.meant(p))
        cause, why = weak
        return cause, "; " + why.format(line=cause is not None and place(cause)[1])

    def _too_early(self, p: int, c: Conflict) -> str:
        for index, knows, did, moment in ((0, p, c.other, c.moment), (1, c.other, p, int(self._clocks.now[p]))):
            site = self._clocks.release_before(knows, did, moment)
            if site is not None:
                return f"; the release in line {place(site)[1]} comes before what program {{{index}}} does here"
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


def _verb(how: How, writes: bool) -> str:
    if how is not How.PLAIN:
        return "updates atomically" if writes else "reads atomically"
    return "stores to" if writes else "loads"
