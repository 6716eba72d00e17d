"""The sanitizer: every launch inside `with sanitize() as report:` runs under many schedules and is watched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from cs336_kernels.sanitizer import adapter, session
from cs336_kernels.sanitizer.arguments import argument, tensors_in
from cs336_kernels.sanitizer.findings import Findings
from cs336_kernels.sanitizer.programs import Ending, Programs
from cs336_kernels.sanitizer.regions import Region, Regions
from cs336_kernels.sanitizer.report import Kind, Launch, Report
from cs336_kernels.sanitizer.schedule import POLICIES, Exhaustive, Policy, policy_of
from cs336_kernels.sanitizer.source import Site, place
from cs336_kernels.sanitizer.traffic import Meter
from cs336_kernels.sanitizer.watch import Watch

GARBAGE, OTHER_GARBAGE = float("nan"), 3.0e4  # of lanes that a mask turned off

Contents = list[tuple[np.ndarray, np.ndarray]]
"""Of all regions, from `Regions.snapshot`."""


@contextmanager
def sanitize(
    schedules: int = 20,
    seed: int = 0,
    resident: int = 8,
    policy: str = "mixed",
    max_steps: int = 1_000_000,
) -> Iterator[Report]:
    """Run every Triton launch of the block in a concurrent interpreter, and report what is wrong with it.

    Each launch runs `schedules` times from the same memory, its programs interleaved at every memory operation. The
    tensors get the result of the first schedule. Works with tensors on a CPU or a GPU; no GPU is needed. Memory that
    `torch.empty` and its kin return counts as unwritten from the first use of this function's module on.

    Args:
        schedules: runs of each launch; schedule i has the seed `seed + i`. With `policy="exhaustive"` the most.
        seed: of the first schedule; a finding names the one that shows it.
        resident: programs that exist at once; the others start when one ends, as on a GPU that is full.
        policy: one of `schedule.POLICIES`.
        max_steps: memory operations after which a schedule counts as endless.

    Raises:
        ValueError: an option makes no sense. What a kernel's body raises is passed on.
    """
    for name, number in (("schedules", schedules), ("resident", resident), ("max_steps", max_steps)):
        if number < 1:
            raise ValueError(f"{name} must be >= 1, not {number}")
    if not isinstance(seed, int):
        raise ValueError(f"seed must be an integer, not {seed!r}")
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    report = Report()

    def handler(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        launch, findings = Sanitized(kernel, grid, args, kwargs).run(schedules, seed, resident, policy, max_steps)
        report.launches.append(launch)
        known = {(f.kind, f.file, f.line, f.other_line) for f in report.findings}
        for finding in findings.all():
            if (finding.kind, finding.file, finding.line, finding.other_line) not in known:
                report.findings.append(finding)

    with adapter.launches_go_to(handler), session.watching(report):
        yield report


class Sanitized:
    """One launch, to be run under several schedules."""

    def __init__(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound, constants = adapter.bind(kernel, args, kwargs)
        self.name: str = kernel.fn.__name__
        self.grid = adapter.grid_of(grid, bound)
        self.programs = adapter.programs_of(self.grid)
        self._constants = {name: bound.pop(name) for name in constants}
        self._arguments = bound
        self.regions = Regions({k: t for name, a in bound.items() for k, t in tensors_in(a, name).items()})
        self._function = adapter.body(kernel)

    def run(self, schedules: int, seed: int, resident: int, policy: str, max_steps: int) -> tuple[Launch, Findings]:
        launch = Launch(self.name, self.grid)
        ids = [p if max(self.grid[1:]) > 1 else p[0] for p in self.programs]
        findings = Findings(self.name, ids)
        exhaustive = Exhaustive() if policy == "exhaustive" else None
        before, first = self.regions.snapshot(), None
        for i in range(schedules):
            findings.seed = seed + i
            order = exhaustive or policy_of(policy, seed + i, len(self.programs))
            watch, ending = self._schedule(order, findings, resident, max_steps, Meter() if first is None else None)
            launch.schedules += 1
            if ending.stuck:
                self._stuck(ending, watch, findings, resident)
            if first is None:
                launch.steps, launch.traffic = ending.steps, watch.traffic()
                first = self.regions.snapshot()
                if watch.holes and not ending.stuck:
                    self._fill_holes(before, first, watch, policy, resident, max_steps)
            else:
                self._compare(first, watch, findings)
            launch.exhausted = exhaustive is not None and not exhaustive.next()
            if launch.exhausted or ending.stuck:
                break
            self.regions.restore(before)
        assert first is not None
        self.regions.restore(first)
        for region in self.regions.all:
            region.copy_back()
        return launch, findings

    def _schedule(
        self,
        order: Policy,
        findings: Findings,
        resident: int,
        max_steps: int,
        meter: Meter | None = None,
        garbage: float = GARBAGE,
        garbage_at: Mapping[Site, float] | None = None,
    ) -> tuple[Watch, Ending]:
        """One run of all programs over the regions as they are."""
        arguments: dict[str, Any] = {}
        watch = Watch(
            self.regions,
            len(self.programs),
            findings,
            switch=lambda program: adapter.enter(self.programs[program], self.grid),
            meter=meter,
            garbage=garbage,
            garbage_at=garbage_at or {},
        )
        runner = Programs(
            len(self.programs),
            lambda p: self._program(p, watch, arguments),
            order,
            resident=resident,
            max_steps=max_steps,
        )
        watch.runner = runner
        with adapter.language(watch):
            for name, given in self._arguments.items():
                arguments[name] = argument(given, name, lambda name, _: self.regions.address(name))
            return watch, runner.run()

    def _fill_holes(
        self, before: Contents, first: Contents, watch: Watch, policy: str, resident: int, max_steps: int
    ) -> None:
        """Run the first schedule again with something else in the lanes that a mask turned off: all of them, and when
        that changes the result, each statement's alone."""

        def difference(**garbage: Any) -> str | None:
            self.regions.restore(before)
            order = policy_of("in-order" if policy == "exhaustive" else policy, watch.findings.seed, len(self.programs))
            self._schedule(order, watch.findings, resident, max_steps, **garbage)
            return next((region.element(offset) for region, offset, _ in self._differences(first)), None)

        if difference(garbage=OTHER_GARBAGE) is None:
            return
        for site in sorted(watch.holes):
            found = difference(garbage_at={site: OTHER_GARBAGE})
            if found is not None:
                message = f"lanes that the mask turns off have no `other` and may hold anything; it reaches {found}"
                watch.findings.add(Kind.NONDETERMINISM, site, (), None, message)

    def _program(self, p: int, watch: Watch, arguments: Mapping[str, Any]) -> None:
        adapter.enter(self.programs[p], self.grid)
        with np.errstate(all="ignore"):
            try:
                self._function(**arguments, **self._constants)
                watch.ended(p)
            except Exception as error:
                error.add_note(f"in program {self.programs[p]} of kernel {self.name}, seed {watch.findings.seed}")
                raise

    def _stuck(self, ending: Ending, watch: Watch, findings: Findings, resident: int) -> None:
        programs = sorted(ending.stuck, key=lambda p: (watch.progress[p], p))  # the one that is furthest behind
        site, others = watch.sites[programs[0]], [place(watch.sites[p])[1] for p in programs[1:]]
        if ending.endless:
            message = f"program {{0}} and {len(others)} more still ran after {ending.steps:,} operations"
        else:
            who = f"program {{0}} and {len(others)} more wait" if others else "program {0} waits"
            message = who + " for what nobody will write"
            if set(others) - {place(site)[1]}:
                message += f", the others in lines {', '.join(map(str, sorted(set(others))))}"
        if ending.unstarted:
            message += (
                f"; {len(ending.unstarted)} programs never started, because only {resident} of a grid of "
                f"{len(self.programs)} are resident"
            )
        findings.add(Kind.DEADLOCK, site, programs, None, message)

    def _compare(self, first: Contents, watch: Watch, findings: Findings) -> None:
        """A result that depends on the schedule."""
        for region, offset, count in self._differences(first):
            site = int(watch.shadows[region.base].write_site[min(offset // region.unit, region.cells - 1)])
            findings.add(
                Kind.NONDETERMINISM, site, (), region.name(offset),
                f"{region.element(offset)} differs from the first schedule ({count} bytes do)",
            )  # fmt: skip

    def _differences(self, first: Contents) -> Iterator[tuple[Region, int, int]]:
        """Regions that are not as they were, the first byte that differs, and how many do."""
        for region, (data, _) in zip(self.regions.all, first, strict=True):
            differs = np.flatnonzero(region.data != data)
            if len(differs):
                yield region, int(differs[0]), len(differs)
