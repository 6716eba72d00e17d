"""The findings of one launch, each once however many schedules and places show it."""

from __future__ import annotations

from collections.abc import Sequence

from cs336_kernels.sanitizer.report import Finding, Kind, Program
from cs336_kernels.sanitizer.source import Site, place

Key = tuple[Kind, frozenset[Site], str | None]


class Findings:
    """Collects; `seed` is set to that of the schedule that runs."""

    def __init__(self, kernel: str, programs: Sequence[Program]) -> None:
        self._kernel, self._programs = kernel, programs
        self.seed = 0
        self._found: dict[Key, Finding] = {}

    def add(
        self,
        kind: Kind,
        site: Site,
        programs: Sequence[int],
        tensor: str | None,
        message: str,
        other: Site | None = None,
    ) -> None:
        """programs: numbers in the order of the grid; `{0}` and `{1}` in the message become their ids."""
        key = kind, frozenset({site, site if other is None else other}), tensor
        if key not in self._found:
            ids = tuple(self._programs[p] for p in programs)
            (file, line), also = place(site), None if other is None else place(other)
            if also is not None and also[0] != file:
                message += f" (the other access is in {also[0]})"
            self._found[key] = Finding(
                kind, self._kernel, file, line, ids, self.seed, message.format(*ids), tensor, also and also[1]
            )

    def all(self) -> list[Finding]:
        return list(self._found.values())
