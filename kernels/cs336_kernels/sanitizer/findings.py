"""The findings of one launch, each once however many schedules and places show it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from cs336_kernels.sanitizer.report import Finding, Kind, Program
from cs336_kernels.sanitizer.source import Site, place


class Findings:
    """Collects; `seed` is set to that of the schedule that runs."""

    def __init__(self, kernel: str, programs: Sequence[Program]) -> None:
        self._kernel, self._programs = kernel, programs
        self.seed = 0
        self._known: set[Hashable] = set()
        self._found: list[Finding] = []
        self._racing: set[tuple[str, int]] = set()

    def add(
        self,
        kind: Kind,
        site: Site,
        programs: Sequence[int],
        tensor: str | None,
        message: str,
        other: Site | None = None,
        cause: Site | None = None,
    ) -> None:
        """Programs are numbers in the order of the grid; `{0}` and `{1}` in the message become their ids.

        Findings of one kind about one statement are the same; races also when they have the same cause or the same two
        statements, but not when they are about different tensors.
        """
        here, also = place(site), None if other is None else place(other)
        if kind is Kind.RACE:
            self._racing |= {here} if also is None else {here, also}
        keys: set[Hashable] = {(kind, here)}
        if kind is Kind.RACE:
            keys = {(kind, tensor, here), (kind, tensor, frozenset({here, also or here}))}
            if cause is not None:
                keys.add((kind, place(cause)))
        if keys.isdisjoint(self._known):
            ids = tuple(self._programs[p] for p in programs)
            message = message.format(*ids)
            if also is not None and also[0] != here[0]:
                message += f" (the other access is in {also[0]})"
            line = None if also is None else also[1]
            self._found.append(Finding(kind, self._kernel, *here, ids, self.seed, message, tensor, line))
        self._known |= keys

    def all(self) -> list[Finding]:
        """One finding for one cause: a race explains that one of its two accesses reads what was not written, and a
        result that differs between schedules follows from anything else that is wrong."""
        kept = [f for f in self._found if f.kind is not Kind.UNINITIALISED_READ or (f.file, f.line) not in self._racing]
        if any(f.kind is not Kind.NONDETERMINISM for f in kept):
            kept = [f for f in kept if f.kind is not Kind.NONDETERMINISM]
        return kept
