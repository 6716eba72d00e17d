"""Runs kernels that came as text: compiles them for a GPU, then launches them under the sanitizer.

This file also travels into the sandbox, where beside it there is only the sanitizer: torch, Triton and
`cs336_kernels.sanitizer`.
"""

from __future__ import annotations

import hashlib
import linecache
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton
from cs336_kernels.sanitizer import Report, sanitize, sanitized
from cs336_kernels.sanitizer.traffic import Meter
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import interpreter_builder
from triton.runtime.jit import mangle_type

TARGET = GPUTarget("cuda", 90, 32)
MOST_STEPS = 200_000
"""Memory operations of a schedule, after which it counts as endless."""

_modules: dict[str, dict[str, Any]] = {}
_compiled: set[Any] = set()


class DoesNotCompile(Exception):
    """The compiler's own words, on one line."""


def answer(text: str, question: dict[str, Any]) -> dict[str, Any]:
    """Launch the kernels of `text`, a module, one after the other.

    Args:
        question: "tensors": name -> a tensor, or {"shape", "dtype"} of one that nobody wrote. "launches": a list of
            [kernel, grid, {parameter: number, or name of a tensor}, {constant: value}]. "out": names of the tensors
            that are wanted. "schedules", "seed", "resident": of `sanitize`.

    Returns:
        {"tensors": name -> tensor, "findings": [{"kind", "line", "source", "tensor", "message"}, ...],
        "launches": [{parameter: {"loaded", "unique_loaded", "stored", "unique_stored", "atomic", ...}}, ...],
        "largest": for each launch the bytes of the program that moved most, "unique_bytes", "total_bytes"}.

    Raises:
        DoesNotCompile: a kernel is not one for a GPU. What its body raises is passed on.
    """
    module = load(text)
    options = {name: question[name] for name in ("schedules", "seed", "resident")}
    with programs_counted() as meters, sanitize(max_steps=MOST_STEPS, **options) as report:
        tensors = {name: _tensor(given) for name, given in question["tensors"].items()}
        for kernel, grid, arguments, constants in question["launches"]:
            bound = {name: tensors[a] if isinstance(a, str) else a for name, a in arguments.items()}
            compile_for_gpu(text, kernel, bound, constants)
            module[kernel][tuple(grid)](**bound, **constants)
    largest = [max(meter.by_program.values(), default=0) for meter in meters]
    out = {name: tensors[name] for name in question["out"]}
    return {"tensors": out, "largest": largest, **described(report, text)}


class ProgramMeter(Meter):
    """As the sanitizer's, and adds up what each program moves; an atomic operation reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.by_program: Counter[Any] = Counter()

    def count(self, what: str, region: Any, cells: Any) -> None:
        super().count(what, region, cells)
        self.by_program[interpreter_builder.grid_idx] += len(cells) * region.unit * (1 + (what == "atomic"))


@contextmanager
def programs_counted() -> Iterator[list[ProgramMeter]]:
    """Inside, launches under the sanitizer are counted by a `ProgramMeter` each."""
    meters: list[ProgramMeter] = []

    def meter() -> ProgramMeter:
        meters.append(ProgramMeter())
        return meters[-1]

    with patch.object(sanitized, "Meter", meter):
        yield meters


def described(report: Report, text: str) -> dict[str, Any]:
    """A report as plain values; findings with the line of the text that they are about."""
    lines = text.splitlines()
    return {
        "findings": [
            {
                "kind": str(f.kind),
                "line": f.line,
                "source": lines[f.line - 1].strip() if 0 < f.line <= len(lines) else "",
                "tensor": f.tensor,
                "message": f.message,
            }
            for f in report.findings
        ],
        "launches": [{name: dict(vars(t)) for name, t in each.traffic.items()} for each in report.launches],
        "unique_bytes": report.unique_bytes,
        "total_bytes": report.total_bytes,
    }


def load(text: str) -> dict[str, Any]:
    """The names of a module made of `text`; the same text gives the same module."""
    name = f"<kernels {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    if name not in _modules:
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        namespace: dict[str, Any] = {"__name__": name}
        exec(compile(text, name, "exec"), namespace)
        _modules[name] = namespace
    return _modules[name]


def compile_for_gpu(text: str, kernel: str, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    """Compile once for each choice of types and constants.

    Raises:
        DoesNotCompile: it cannot be.
    """
    function = load(text)[kernel]
    given = {**arguments, **constants}
    if odd := set(function.arg_names) ^ set(given):
        name = min(odd)
        raise DoesNotCompile(f"{kernel} {'has no parameter' if name in given else 'is launched without'} `{name}`")
    signature = {name: mangle_type(value) for name, value in arguments.items()} | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in function.arg_names}
    key = text, kernel, tuple(signature.items()), tuple(constants.items())
    if key in _compiled:
        return
    try:
        triton.compile(ASTSource(function, signature, constants), target=TARGET)
    except Exception as error:  # the compiler's own errors have no common base
        raise DoesNotCompile(f"{kernel} for sm_90: {_said(error)}"[:250]) from None
    _compiled.add(key)


def _said(error: BaseException) -> str:
    """What went wrong: the compiler shows the place, and what it was about is the cause, or stands below."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    said = lines[-1] if lines else type(error).__name__
    return said if error.__cause__ is None else f"{said}: {_said(error.__cause__)}"


def _tensor(given: Any) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given
    return torch.empty(given["shape"], dtype=getattr(torch, given["dtype"]))
