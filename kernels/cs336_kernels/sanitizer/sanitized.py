"""The sanitizer: every launch inside `with sanitize() as report:` runs under many schedules and is watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cs336_kernels.sanitizer import adapter, session
from cs336_kernels.sanitizer.findings import Findings
from cs336_kernels.sanitizer.programs import Ending, Programs
from cs336_kernels.sanitizer.regions import Regions, tensors_of
from cs336_kernels.sanitizer.report import Kind, Launch, Report, without_consequences
from cs336_kernels.sanitizer.schedule import POLICIES, Exhaustive, policy_of
from cs336_kernels.sanitizer.traffic import Meter
from cs336_kernels.sanitizer.watch import Watch

GARBAGE = (float("nan"), 3.0e4)  # of lanes that a mask turned off, by the seed's parity


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
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    report = Report()

    def handler(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        launch, findings = Sanitized(kernel, grid, args, kwargs).run(schedules, seed, resident, policy, max_steps)
        report.launches.append(launch)
        known = {(f.kind, f.file, f.line, f.other_line) for f in report.findings}
        for finding in without_consequences(findings.all()):
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
        self.regions = Regions(tensors_of(bound, constants))
        self._function = adapter.body(kernel)
        self._arguments = {
            name: argument if name in constants else adapter.argument(argument, name, self.regions.address)
            for name, argument in bound.items()
        }

    def run(self, schedules: int, seed: int, resident: int, policy: str, max_steps: int) -> tuple[Launch, Findings]:
        launch = Launch(self.name, self.grid)
        ids = [p if max(self.grid[1:]) > 1 else p[0] for p in self.programs]
        findings = Findings(self.name, ids)
        exhaustive = Exhaustive() if policy == "exhaustive" else None
        before = self.regions.snapshot()
        first: list[tuple[np.ndarray, np.ndarray]] | None = None
        for i in range(schedules):
            findings.seed = seed + i
            if i:
                self.regions.restore(before)
            meter = None if i else Meter()
            watch = Watch(
                self.regions,
                len(self.programs),
                findings,
                switch=lambda program: adapter.enter(self.programs[program], self.grid),
                meter=meter,
                garbage=GARBAGE[(seed + i) % 2],
            )
            runner = Programs(
                len(self.programs),
                lambda p, watch=watch: self._program(p, watch),
                exhaustive or policy_of(policy, seed + i, len(self.programs)),
                resident=resident,
                max_steps=max_steps,
            )
            watch.runner = runner
            with adapter.language(watch):
                ending = runner.run()
            launch.schedules += 1
            if meter is not None:
                launch.steps, launch.traffic = ending.steps, meter.result(self.regions)
            if ending.stuck:
                self._stuck(ending, watch, findings, resident)
            if first is None:
                first = self.regions.snapshot()
            else:
                self._compare(first, watch, findings)
            launch.exhausted = exhaustive is not None and not exhaustive.next()
            if launch.exhausted or ending.stuck:
                break
        assert first is not None
        self.regions.restore(first)
        for region in self.regions.all:
            region.copy_back()
        return launch, findings

    def _program(self, p: int, watch: Watch) -> None:
        adapter.enter(self.programs[p], self.grid)
        with np.errstate(all="ignore"):
            try:
                self._function(**self._arguments)
            except Exception as error:
                error.add_note(f"in program {self.programs[p]} of kernel {self.name}, seed {watch.findings.seed}")
                raise

    def _stuck(self, ending: Ending, watch: Watch, findings: Findings, resident: int) -> None:
        site = watch.sites[ending.stuck[0]]
        if ending.endless:
            message = f"program {{0}} and {len(ending.stuck) - 1} others still ran after {ending.steps:,} operations"
        else:
            message = f"program {{0}} and {len(ending.stuck) - 1} others wait for what nobody will write"
        if ending.unstarted:
            message += (
                f"; {len(ending.unstarted)} programs never started, because only {resident} of a grid of "
                f"{len(self.programs)} are resident"
            )
        findings.add(Kind.DEADLOCK, site, ending.stuck, None, message)

    def _compare(self, first: list[tuple[np.ndarray, np.ndarray]], watch: Watch, findings: Findings) -> None:
        """A result that depends on the schedule, or on lanes that a mask turned off."""
        for region, (data, _) in zip(self.regions.all, first, strict=True):
            differs = np.flatnonzero(region.data != data)
            if len(differs):
                offset = int(differs[0])
                site = int(watch.shadows[region.base].write_site[min(offset // region.unit, region.cells - 1)])
                findings.add(
                    Kind.NONDETERMINISM, site, (), region.name(offset),
                    f"{region.element(offset)} differs from the first schedule ({len(differs)} bytes do)",
                )  # fmt: skip
