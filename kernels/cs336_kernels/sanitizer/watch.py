"""The memory that programs see under the sanitizer: every operation is checked, counted, and a point where another
program may come in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cs336_kernels.sanitizer.cells import anything, combine, read, write
from cs336_kernels.sanitizer.clocks import Clocks, Shadow
from cs336_kernels.sanitizer.findings import Findings
from cs336_kernels.sanitizer.programs import Programs
from cs336_kernels.sanitizer.races import Races
from cs336_kernels.sanitizer.regions import Region, Regions
from cs336_kernels.sanitizer.report import Kind
from cs336_kernels.sanitizer.source import Site, here, in_while
from cs336_kernels.sanitizer.traffic import Meter

Part = tuple[Any, Region, np.ndarray, np.ndarray]
"""Lanes of an operation in one region: their indices, the region, byte offsets, cells [lanes * cells of an element]."""


class Watch:
    """The memory of one schedule of one launch (`adapter.Memory`).

    Args:
        switch: called with the program that goes on.
        garbage: what a masked-out lane without `other` gets: on a GPU anything. It differs between schedules, so that a
            result that depends on it does too.

    Attributes:
        sites: where each program was last.
    """

    def __init__(
        self,
        regions: Regions,
        programs: int,
        findings: Findings,
        *,
        switch: Callable[[int], None],
        meter: Meter | None,
        garbage: float,
    ) -> None:
        self.findings = findings
        self._regions, self._switch, self._meter, self._garbage = regions, switch, meter, garbage
        self._clocks = Clocks(programs)
        self.shadows = {r.base: Shadow(r.cells, programs) for r in regions.all}
        self._races = Races(self._clocks, self.shadows, findings, programs)
        self.sites: list[Site] = [0] * programs
        self._seen: list[set[tuple[Site, bytes, bytes]]] = [set() for _ in range(programs)]
        self.runner: Programs | None = None

    def load(self, at: np.ndarray, mask: np.ndarray, other: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
        p, site = self._begin()
        result = anything(at.shape, dtype, self._garbage) if other is None else np.array(other, dtype)
        flat = result.reshape(-1)
        for lanes, region, offsets, cells in self._parts(at, mask, dtype.itemsize, "reads"):
            self._count("loaded", region, cells)
            self._check_written(region, cells)
            conflicts = self.shadows[region.base].loads(p, cells, site, self._clocks)
            self._races.report(p, region, conflicts, site, writes=False)
            if len(offsets) == 1 and not conflicts and in_while(site):
                others = self.shadows[region.base].left(int(cells[0])).nonzero()[0]
                if (others != p).any():
                    self._races.poll(p, int(others[others != p][0]), region, int(cells[0]), site)
            flat[lanes] = read(region, offsets, dtype)
        self._end(at, result, changed=False)
        return result

    def store(self, at: np.ndarray, mask: np.ndarray, values: np.ndarray) -> None:
        p, site = self._begin()
        changed = False
        flat = values.reshape(-1)
        for lanes, region, offsets, cells in self._parts(at, mask, values.dtype.itemsize, "writes"):
            self._count("stored", region, cells)
            self._races.between_lanes(p, region, offsets, flat[lanes], site)
            conflicts = self.shadows[region.base].stores(p, cells, site, self._clocks)
            self._races.report(p, region, conflicts, site, writes=True)
            region.fresh[cells] = False
            changed |= write(region, offsets, flat[lanes])
        self._end(at, None, changed)

    def rmw(self, op: str, at: np.ndarray, mask: np.ndarray, values: np.ndarray, sem: str, scope: str) -> np.ndarray:
        def step(old: np.ndarray, lanes: Any) -> np.ndarray:
            return combine(op, old, values.reshape(-1)[lanes])

        return self._atomic(step, at, mask, values.dtype, sem, scope)

    def cas(self, at: np.ndarray, compare: np.ndarray, values: np.ndarray, sem: str, scope: str) -> np.ndarray:
        def step(old: np.ndarray, lanes: Any) -> np.ndarray:
            return np.where(old == compare.reshape(-1)[lanes], values.reshape(-1)[lanes], old)

        return self._atomic(step, at, np.ones(at.shape, bool), values.dtype, sem, scope)

    def barrier(self) -> None:
        assert self.runner is not None
        self._clocks.barrier(self.runner.current)

    def _atomic(self, step: Any, at: np.ndarray, mask: np.ndarray, dtype: np.dtype, sem: str, scope: str) -> np.ndarray:
        p, site = self._begin()
        result = anything(at.shape, dtype, self._garbage)
        flat = result.reshape(-1)
        changed = False
        among_all = scope != "cta"  # an atomic operation among the threads of a program is plain for other programs
        for lanes, region, offsets, cells in self._parts(at, mask, dtype.itemsize, "updates"):
            self._count("atomic", region, cells)
            self._check_written(region, cells)
            shadow = self.shadows[region.base]
            conflicts = shadow.stores(p, cells, site, self._clocks, atomic=among_all)
            self._races.report(p, region, conflicts, site, writes=True)
            if among_all and sem in ("acquire", "acq_rel"):
                shadow.acquire(p, cells, self._clocks)
            elif among_all:
                self._races.saw_without_acquire(p, region, cells, site)
            if among_all and sem in ("release", "acq_rel"):
                shadow.release(p, cells, site, self._clocks)
            region.fresh[cells] = False
            if len(np.unique(offsets)) == len(offsets):
                flat[lanes] = read(region, offsets, dtype)
                changed |= write(region, offsets, step(flat[lanes], lanes).astype(dtype))
            else:  # lanes that meet in one place, in their order
                for lane, offset in zip(lanes, offsets, strict=True):
                    one, place = np.array([lane]), np.array([offset])
                    flat[one] = read(region, place, dtype)
                    changed |= write(region, place, step(flat[one], one).astype(dtype))
        self._end(at, result, changed)
        return result

    def _begin(self) -> tuple[int, Site]:
        """Let others run; then who goes on, and where."""
        assert self.runner is not None
        self.runner.pause()
        p = self.runner.current
        self._switch(p)
        self.sites[p] = here()
        return p, self.sites[p]

    def _end(self, at: np.ndarray, result: np.ndarray | None, changed: bool) -> None:
        assert self.runner is not None
        p, again = self.runner.current, False
        if changed or not in_while(self.sites[p]):
            self._seen[p].clear()
        else:
            look = self.sites[p], at.tobytes(), b"" if result is None else result.tobytes()
            again = look in self._seen[p]
            self._seen[p].add(look)
        self.runner.looked(again=again, changed=changed)

    def _count(self, what: str, region: Region, cells: np.ndarray) -> None:
        if self._meter is not None:
            self._meter.count(what, region, cells)

    def _parts(self, at: np.ndarray, mask: np.ndarray, itemsize: int, verb: str) -> Iterator[Part]:
        """The lanes that are on, by region; those that point outside are reported and left out."""
        assert self.runner is not None
        p = self.runner.current
        flat = at.reshape(-1).astype(np.int64)
        on = np.flatnonzero(np.broadcast_to(mask, at.shape))
        while len(on):
            address = int(flat[on[0]])
            region = self._regions.at(address)
            if region is None:
                real = self._regions.of_real(address)
                if real is None:
                    message = f"{verb} address {address:#x}, which is in none of the kernel's tensors"
                    self.findings.add(Kind.OUT_OF_BOUNDS, self.sites[p], (p,), None, message)
                    return
                flat[on] += real - address
                continue
            offsets = flat[on] - region.base
            mine = np.abs(offsets) < self._regions.REACH
            lanes, offsets, on = on[mine], offsets[mine], on[~mine]
            inside = region.holds(offsets, itemsize)
            if not inside.all():
                outside = int(offsets[~inside][0])
                message = f"{verb} {region.element(outside)}, outside of the tensor ({int((~inside).sum())} lanes)"
                self.findings.add(Kind.OUT_OF_BOUNDS, self.sites[p], (p,), region.name(outside), message)
                lanes, offsets = lanes[inside], offsets[inside]
            if len(offsets):
                yield lanes, region, offsets, region.cells_at(offsets, itemsize)

    def _check_written(self, region: Region, cells: np.ndarray) -> None:
        assert self.runner is not None
        fresh = region.fresh[cells]
        if fresh.any():
            p, offset = self.runner.current, int(cells[fresh][0]) * region.unit
            message = f"reads {region.element(offset)}, which nobody has written ({int(fresh.sum())} places)"
            self.findings.add(Kind.UNINITIALISED_READ, self.sites[p], (p,), region.name(offset), message)
