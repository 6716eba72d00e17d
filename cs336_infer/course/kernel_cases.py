"""Checking one launch of a student's kernel: what came out, what the sanitizer found, how many bytes were moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cs336_infer.course.checks import Ask, fail
from cs336_infer.course.expect import expect_equal, expect_shape

FILLS = (math.nan, 3.0e4, -7.5)
ALLOWED = 1.05
"""Unique bytes of a launch over the fewest possible."""
FLOATS = ("float32", "float16", "bfloat16")


@dataclass
class Case:
    """One launch of a kernel.

    Attributes:
        expected: output -> (in float64, an honest computation in the format under test). least: bytes.
        seen: output -> the part of it that is compared; the rest must not change.
    """

    kernel: str
    grid: tuple[int, ...]
    tensors: dict[str, Any]
    numbers: dict[str, Any]
    constants: dict[str, int]
    expected: dict[str, tuple[torch.Tensor, torch.Tensor]]
    least: int
    what: str
    seen: dict[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)

    def question(self, schedules: int = 1, seed: int = 0) -> dict[str, Any]:
        arguments = {**{name: name for name in self.tensors}, **self.numbers}
        return {
            "tensors": self.tensors,
            "launches": [[self.kernel, list(self.grid), arguments, self.constants]],
            "out": list(self.expected),
            "schedules": schedules,
            "seed": seed,
            "resident": 4,
        }


def run_case(ask: Ask, case: Case, schedules: int = 1, seed: int = 0) -> dict[str, Any]:
    """Launch it; the outputs must be right and the sanitizer must find nothing. Returns its whole answer."""
    return passed(ask, case, case.question(schedules, seed))


def passed(ask: Ask, case: Case, question: dict[str, Any]) -> dict[str, Any]:
    """As `run_case`, of a question of its own."""
    answer = clean(ask, case, question)
    for name, (oracle, honest) in case.expected.items():
        got = answer["tensors"].get(name)
        given = case.tensors[name]
        shape = given["shape"] if isinstance(given, dict) else given.shape
        expect_shape(got, shape, what=f"{case.what}: {name}")
        close(case.seen.get(name, lambda t: t)(got), oracle, honest, what=f"{case.what}: {name}")
    return answer


def launched(ask: Ask, case: Case) -> dict[str, Any]:
    """Launch it; the sanitizer must find nothing."""
    return clean(ask, case, case.question())


def clean(ask: Ask, case: Case, question: dict[str, Any]) -> dict[str, Any]:
    """What came back; the sanitizer must have found nothing."""
    answer = ask(case.kernel, question)
    if not isinstance(answer, dict) or not {"tensors", "findings", "unique_bytes"} <= set(answer):
        fail(f"{case.what}: no report came back")
    for finding in answer["findings"][:1]:
        where = f"`{finding['source']}`" if finding["source"] else f"line {finding['line']}"
        fail(f"{case.what}: {finding['kind']} in {where}: {finding['message']}")
    return answer


def close(got: torch.Tensor, oracle: torch.Tensor, honest: torch.Tensor, *, what: str) -> None:
    """float32: off by at most 1e-5 of the largest number. Half precision: at most twice as far off as `honest`, or one
    unit in the last place of the largest number where that is exact. Infinities must be the same ones."""
    if got.dtype != honest.dtype:
        fail(f"{what}: dtype {got.dtype} instead of {honest.dtype}")
    if not got.is_floating_point():
        expect_equal(got, honest, what=what)
        return
    finite = torch.isfinite(oracle)
    if not torch.equal(torch.isfinite(got), finite) or not torch.equal(got[~finite].double(), oracle[~finite]):
        fail(f"{what}: {int((torch.isfinite(got) != finite).sum())} of {got.numel()} numbers are not finite")
    if not finite.any():
        return
    largest = _largest(oracle[finite])
    allowed = 1e-5 * max(largest, 1e-3)
    if got.dtype != torch.float32:
        mine = _largest((honest.double() - oracle)[finite])
        allowed = max(2 * mine, largest * torch.finfo(got.dtype).eps, 1e-6)
    error = (got.double() - oracle).abs()
    error[~finite] = 0
    if float(error.max()) > allowed:
        place = [int(i) for i in np.unravel_index(int(error.argmax()), error.shape)]
        fail(
            f"{what}: at {place} got {float(got[tuple(place)]):.6g}, expected {float(oracle[tuple(place)]):.6g} "
            f"({got.dtype}: off by {float(error.max()):.3g}, allowed {allowed:.3g})"
        )


def expect_bytes(answer: dict[str, Any], case: Case) -> None:
    """Unique bytes within `ALLOWED` of the fewest possible."""
    ratio = answer["unique_bytes"] / case.least
    if not 0.5 < ratio <= ALLOWED:
        fail(f"{case.what}: {answer['unique_bytes']:,} unique bytes, {ratio:.2f} times the {case.least:,} it takes")


def expect_fills(ask: Ask, make: Callable[[float], Case]) -> None:
    """Right, and the same bits, whatever is in memory that nobody may read, or that will be written."""
    first: dict[str, torch.Tensor] | None = None
    for fill in FILLS:
        case = make(fill)
        case.what += f", unused memory holds {fill:g}"
        answer = run_case(ask, case)
        got = {name: case.seen.get(name, lambda t: t)(answer["tensors"][name]) for name in case.expected}
        first = got if first is None else first
        for name, tensor in got.items():
            if not torch.equal(tensor, first[name]):
                fail(f"{case.what}: {name} changes with it")


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: str, scale: float = 1.0) -> torch.Tensor:
    return (torch.from_numpy(rng.normal(size=tuple(shape))) * scale).to(getattr(torch, dtype))


def padded(t: torch.Tensor, extra: int, fill: float) -> torch.Tensor:
    """Rows of `t`, each followed by `extra` numbers of nobody."""
    return torch.cat([t, torch.full((len(t), extra), fill, dtype=t.dtype)], 1)


def next_power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def empty(shape: Sequence[int], dtype: str, fill: float | None) -> Any:
    if fill is None:
        return {"shape": list(shape), "dtype": dtype}
    return torch.full(tuple(shape), fill, dtype=getattr(torch, dtype))


def _largest(t: torch.Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def size(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
