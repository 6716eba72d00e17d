"""What a sanitizer found, and how many bytes the kernels moved."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

Program = int | tuple[int, ...]
"""`tl.program_id(0)` in a grid of one dimension, else all ids."""


class Kind(StrEnum):
    """What is wrong with a kernel."""

    RACE = "race"
    DEADLOCK = "deadlock"
    OUT_OF_BOUNDS = "out-of-bounds"
    UNINITIALISED_READ = "uninitialised-read"
    PLAIN_LOAD_POLL = "plain-load-poll"
    NONDETERMINISM = "nondeterminism"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, with the first schedule that showed it.

    Attributes:
        kernel: name of the launched kernel. file, line: of the statement; of a race, of the access that writes.
        other_line: of a race, the other access. programs: who took part.
        seed: `sanitize(schedules=1, seed=seed, ...)` with the same policy and residency shows it again. Two kinds of
            schedules need those before them too: a result that differs from the first schedule's, and exhaustive ones.
        tensor: the kernel argument concerned, or None.
    """

    kind: Kind
    kernel: str
    file: str
    line: int
    programs: tuple[Program, ...]
    seed: int
    message: str
    tensor: str | None = None
    other_line: int | None = None

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}: {self.kind}: {self.message} (seed {self.seed})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"kind": str(self.kind), "programs": [list_of(p) for p in self.programs]}


def list_of(program: Program) -> int | list[int]:
    return list(program) if isinstance(program, tuple) else program


@dataclass
class Traffic:
    """Bytes of one tensor in one launch. Lanes that a mask turns off move nothing; a poll is an atomic operation.

    Attributes:
        loaded, stored, atomic: bytes of all programs together. unique_*: bytes of different places.
    """

    loaded: int = 0
    unique_loaded: int = 0
    stored: int = 0
    unique_stored: int = 0
    atomic: int = 0
    unique_atomic: int = 0

    @property
    def total(self) -> int:
        return self.loaded + self.stored + 2 * self.atomic

    @property
    def unique(self) -> int:
        """What an ideal cache would leave: every place is read at most once and written at most once."""
        return self.unique_loaded + self.unique_stored + 2 * self.unique_atomic


@dataclass
class Launch:
    """One launch under the sanitizer.

    Attributes:
        steps: memory operations of the first schedule. schedules: how many were run.
        exhausted: with the exhaustive policy, that there are no further schedules.
        traffic: of the first schedule, by name of the kernel's argument.
    """

    kernel: str
    grid: tuple[int, int, int]
    schedules: int = 0
    steps: int = 0
    exhausted: bool = False
    traffic: dict[str, Traffic] = field(default_factory=dict)


@dataclass
class Report:
    """What `sanitize` fills while its block runs.

    Attributes:
        findings: without repetitions, in the order of their appearance. launches: in their order.
    """

    findings: list[Finding] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """Bytes that all programs of all launches asked for."""
        return sum(t.total for launch in self.launches for t in launch.traffic.values())

    @property
    def unique_bytes(self) -> int:
        """Bytes that reach memory when each launch has a perfect cache of its own."""
        return sum(t.unique for launch in self.launches for t in launch.traffic.values())

    def kinds(self) -> set[Kind]:
        return {f.kind for f in self.findings}

    def table(self, minimal_bytes: int | None = None) -> str:
        """The traffic as text; `minimal_bytes` is what the computation needs at least."""
        head = f"{'kernel':24} {'tensor':16} {'loaded':>12} {'unique':>12} {'stored':>12} {'unique':>12} {'atomic':>8}"
        lines = [head]
        for launch in self.launches:
            for name, t in launch.traffic.items():
                lines.append(
                    f"{launch.kernel:24.24} {name:16.16} {t.loaded:12,} {t.unique_loaded:12,} "
                    f"{t.stored:12,} {t.unique_stored:12,} {t.atomic:8,}"
                )
        lines.append(f"unique bytes {self.unique_bytes:,}, all bytes {self.total_bytes:,}")
        if minimal_bytes is not None:
            unique, total = self.unique_bytes / minimal_bytes, self.total_bytes / minimal_bytes
            lines[-1] += f"; minimum {minimal_bytes:,}: {unique:.3f} and {total:.3f} times"
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "findings": [f.to_dict() for f in self.findings],
            "launches": [asdict(launch) for launch in self.launches],
            "unique_bytes": self.unique_bytes,
            "total_bytes": self.total_bytes,
        }
