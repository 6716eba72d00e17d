"""The memory that programs see under the sanitizer: every operation is checked, counted, and a point where another
program may come in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from cs336_kernels.sanitizer.cells import anything, combine, other_bits, read, write
from cs336_kernels.sanitizer.clocks import Clocks
from cs336_kernels.sanitizer.findings import Findings
from cs336_kernels.sanitizer.programs import Programs
from cs336_kernels.sanitizer.races import Races
from cs336_kernels.sanitizer.regions import Region, Regions
from cs336_kernels.sanitizer.report import Kind, Traffic
from cs336_kernels.sanitizer.shadow import How, Shadow
from cs336_kernels.sanitizer.source import Site, discards, here, in_while, polls
from cs336_kernels.sanitizer.traffic import Meter

POLL_LOOKS = 100  # after which `tl.atomic_poll` with a timeout gives up

Part = tuple[Any, Region, np.ndarray, np.ndarray]
"""Lanes of an operation in one region: their indices, the region, byte offsets, cells [lanes * cells of an element]."""


class Watch:
    """The memory of one schedule of one launch (`adapter.Memory`).

    Args:
        switch: called with the program that goes on.
        garbage: what a lane gets that loads nothing because of its mask and has no `other`: on a GPU that is anything.
        garbage_at: the same for single statements.

    Attributes:
        sites: where each program was last. progress: how many of its operations showed it something new.
        holes: statements with lanes that got garbage.
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
        garbage_at: Mapping[Site, float],
    ) -> None:
        self.findings = findings
        self._regions, self._switch, self._meter = regions, switch, meter
        self._garbage, self._garbage_at = garbage, garbage_at
        self._clocks = Clocks(programs)
        self.shadows = {r.base: Shadow(r.cells, programs) for r in regions.all}
        self._races = Races(self._clocks, self.shadows, findings)
        self.sites: list[Site] = [0] * programs
        self.progress = [0] * programs
        self.holes: set[Site] = set()
        self._seen: list[set[tuple[Site, bytes, bytes]]] = [set() for _ in range(programs)]
        self.runner: Programs | None = None

    def load(
        self, at: np.ndarray, mask: np.ndarray, other: np.ndarray | None, dtype: np.dtype, volatile: bool
    ) -> np.ndarray:
        p, site = self._begin()
        how = How.ATOMIC if volatile else How.PLAIN  # a volatile load is a relaxed one
        if volatile:
            self._races.volatile.add(site)
        result = self._hole(at.shape, mask, dtype, site) if other is None else np.array(other, dtype)
        flat = result.reshape(-1)
        for lanes, region, offsets, cells in self._parts(at, mask, dtype.itemsize, "reads"):
            self._count("loaded", region, cells)
            fresh = self._check_written(region, cells)
            shadow = self.shadows[region.base]
            conflicts = shadow.loads(p, cells, site, self._clocks, how)
            self._races.report(p, region, conflicts, site, how, writes=False)
            if volatile:
                shadow.looks(p, cells, site, self._clocks, acquires=False)
            elif len(offsets) == 1 and not conflicts and polls(site):
                others = shadow.left(int(cells[0])).nonzero()[0] % len(self.sites)
                if (others != p).any():
                    self._races.poll(p, int(others[others != p][0]), region, int(cells[0]), site)
            flat[lanes] = other_bits(read(region, offsets, dtype), fresh)
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
            self._races.report(p, region, conflicts, site, How.PLAIN, writes=True)
            region.fresh[cells] = False
            changed |= write(region, offsets, flat[lanes])
        self._end(at, None, changed)

    def rmw(self, op: str, at: np.ndarray, mask: np.ndarray, values: np.ndarray, sem: str, scope: str) -> np.ndarray:
        def step(old: np.ndarray, lanes: Any) -> np.ndarray:
            return combine(op, old, values.reshape(-1)[lanes])

        moves = {"load": "loaded", "store": "stored"}.get(op, "atomic")
        return self._atomic(step, at, mask, values.dtype, sem, scope, moves)

    def cas(self, at: np.ndarray, compare: np.ndarray, values: np.ndarray, sem: str, scope: str) -> np.ndarray:
        def step(old: np.ndarray, lanes: Any) -> np.ndarray:
            return np.where(old == compare.reshape(-1)[lanes], values.reshape(-1)[lanes], old)

        return self._atomic(step, at, np.ones(at.shape, bool), values.dtype, sem, scope)

    def poll(self, at: np.ndarray, wanted: np.ndarray, may_give_up: bool, sem: str, scope: str) -> np.ndarray:
        """Look until all places were seen to hold what is wanted, or with `may_give_up` some times; which were."""
        met, looks = np.zeros(at.shape, bool), 0
        while not met.all() and not (may_give_up and looks == POLL_LOOKS):
            seen = self._atomic(lambda old, _: old, at, ~met, wanted.dtype, "none", scope, "loaded", waits=True)
            new, looks = ~met & (seen == wanted), looks + 1
            met |= new
            assert self.runner is not None
            p = self.runner.current
            for _, region, _, cells in self._parts(at, new, wanted.dtype.itemsize, "reads"):
                if scope != "cta":
                    self.shadows[region.base].looks(p, cells, self.sites[p], self._clocks, acquires=sem == "acquire")
        return met

    def barrier(self) -> None:
        assert self.runner is not None
        self._clocks.barrier(self.runner.current)

    def _atomic(
        self,
        step: Callable[[np.ndarray, Any], np.ndarray],
        at: np.ndarray,
        mask: np.ndarray,
        dtype: np.dtype,
        sem: str,
        scope: str,
        moves: str = "atomic",
        waits: bool = False,
    ) -> np.ndarray:
        """`step(old, lanes)` is what the places are set to. waits: it is repeated until something else happens."""
        p, site = self._begin()
        result = np.zeros(at.shape, dtype) if waits or moves == "stored" else self._hole(at.shape, mask, dtype, site)
        flat, any_changed = result.reshape(-1), False
        how = How.NARROW if scope == "cta" else How.ATOMIC
        verb = {"loaded": "reads", "stored": "writes", "atomic": "updates"}[moves]
        for lanes, region, offsets, cells in self._parts(at, mask, dtype.itemsize, verb):
            self._count(moves, region, cells)
            if moves != "stored":
                self._check_written(region, cells)
            before = read(region, offsets, dtype)
            if len(offsets) == 1 or len(np.unique(offsets)) == len(offsets):
                flat[lanes] = before
                write(region, offsets, step(before, lanes).astype(dtype))
            else:  # lanes that meet in one place, in their order
                for lane, offset in zip(lanes, offsets, strict=True):
                    one, there = np.array([lane]), np.array([offset])
                    flat[one] = read(region, there, dtype)
                    write(region, there, step(flat[one], one).astype(dtype))
            kind = np.dtype(f"u{dtype.itemsize}")
            changed = read(region, offsets, dtype).view(kind) != before.view(kind)
            any_changed |= bool(changed.any())
            changed |= moves == "stored"
            for writes, places in ((False, offsets[~changed]), (True, offsets[changed])):
                if len(places):
                    self._updates(p, region, region.cells_at(places, dtype.itemsize), site, how, at.size == 1, writes)
            if how is How.ATOMIC and sem != "none":
                shadow, reads, releases = self.shadows[region.base], moves != "stored", sem in ("release", "acq_rel")
                acquires = sem in ("acquire", "acq_rel")
                if acquires or (reads and not discards(site)):
                    shadow.looks(p, cells, site, self._clocks, acquires=acquires)
                if releases or changed.any():
                    shadow.leaves(p, cells, site, self._clocks, releases=releases, reads=reads)
            region.fresh[cells] &= moves == "loaded"
        self._end(at, result, any_changed, waits)
        return result

    def _updates(
        self, p: int, region: Region, cells: np.ndarray, site: Site, how: How, single: bool, writes: bool
    ) -> None:
        """Places that an atomic operation changed, or left as they were: then it has only read them."""
        shadow = self.shadows[region.base]
        leading = single and how is How.ATOMIC
        conflicts = (shadow.stores if writes else shadow.loads)(p, cells, site, self._clocks, how, leading=leading)
        self._races.report(p, region, conflicts, site, how, writes=writes)

    def ended(self, p: int) -> None:
        self._clocks.ended(p)

    def traffic(self) -> dict[str, Traffic]:
        return {} if self._meter is None else self._meter.result(self._regions)

    def _hole(self, shape: tuple[int, ...], mask: np.ndarray, dtype: np.dtype, site: Site) -> np.ndarray:
        """What an operation returns where it does nothing."""
        if not mask.all():
            self.holes.add(site)
        return anything(shape, dtype, self._garbage_at.get(site, self._garbage))

    def _begin(self) -> tuple[int, Site]:
        """Let others run; then who goes on, and where."""
        assert self.runner is not None
        self.runner.pause()
        p = self.runner.current
        self._switch(p)
        self.sites[p] = here()
        return p, self.sites[p]

    def _end(self, at: np.ndarray, result: np.ndarray | None, changed: bool, waits: bool = False) -> None:
        assert self.runner is not None
        p, again = self.runner.current, False
        in_loop = waits or in_while(self.sites[p])
        if changed or not in_loop:
            self._seen[p].clear()
        else:
            look = self.sites[p], at.tobytes(), b"" if result is None else result.tobytes()
            again = look in self._seen[p]
            self._seen[p].add(look)
        self.progress[p] += not again
        self.runner.looked(again=again, changed=changed, in_loop=in_loop)

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

    def _check_written(self, region: Region, cells: np.ndarray) -> np.ndarray:
        """[len(cells)] bool: which cells nobody has written."""
        assert self.runner is not None
        fresh = region.fresh[cells]
        if fresh.any():
            p, offset = self.runner.current, int(cells[fresh][0]) * region.unit
            message = f"reads {region.element(offset)}, which nobody has written ({int(fresh.sum())} places)"
            self.findings.add(Kind.UNINITIALISED_READ, self.sites[p], (p,), region.name(offset), message)
        return fresh
