"""An op of the catalogue against its reference in float64, with bounds that follow the number format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cs336_kernels.calls import Arguments
from cs336_kernels.catalogue import Op
from cs336_kernels.shapes import Shape


@dataclass(frozen=True)
class Verdict:
    """Whether one call was right.

    Attributes:
        error: the largest difference from the reference in float64; of an op that rounds nothing, how many numbers
            differ from the reference. allowed: the most that `error` may be. reason: "" when it is right.
    """

    op: str
    model: str
    dtype: str
    tokens: int
    error: float
    allowed: float
    reason: str = ""

    @property
    def right(self) -> bool:
        return not self.reason


def verify(
    op: Op, shape: Shape, dtype: torch.dtype, device: torch.device, tokens: int, seed: int = 0, path: str = "triton"
) -> Verdict:
    """Call an op on random numbers and compare.

    float32: off by at most 1e-5 of the largest number. Half precision: at most twice as far off as the reference in the
    same format, or one unit in the last place of the largest number where that is exact.

    What the op or the compiler raises is a reason, not an exception.
    """
    arguments = op.make(shape, dtype, device, tokens, seed)
    try:
        got = _results(op, arguments, path)
    except Exception as e:  # whatever a compiler or a driver raises
        return _verdict(op, shape, dtype, tokens, float("nan"), 0.0, f"{type(e).__name__}: {e}"[:300])
    honest = _results(op, arguments, "reference")
    if op.exact:
        differ = sum(int((~_same(a, b)).sum()) for a, b in zip(got, honest, strict=True))
        reason = f"{differ} numbers differ from the reference" if differ else ""
        return _verdict(op, shape, dtype, tokens, float(differ), 0.0, reason)
    oracle = _results(op, {name: _double(value) for name, value in arguments.items()}, "reference")
    pairs = [_compare(*three) for three in zip(got, honest, oracle, strict=True)]
    error, allowed = max(pairs, key=lambda pair: pair[0] / pair[1] if pair[0] == pair[0] else float("inf"))
    reason = "" if error <= allowed else f"off by {error:.3g}, allowed {allowed:.3g}"
    return _verdict(op, shape, dtype, tokens, error, allowed, reason)


def copy(arguments: Arguments) -> Arguments:
    """The same with memory of its own."""
    return {name: _each_tensor(value, torch.clone) for name, value in arguments.items()}


def _results(op: Op, arguments: Arguments, path: str) -> list[torch.Tensor]:
    own = arguments | {name: arguments[name].clone() for name in ("keys", "values") if "slots" in arguments}
    return op.results(own, op.call(**own, path=path))


def _compare(got: torch.Tensor, honest: torch.Tensor, oracle: torch.Tensor) -> tuple[float, float]:
    """(error, allowed); memory that both leave alone may hold anything."""
    if got.shape != oracle.shape:
        return float("nan"), 0.0
    error = _largest(got.double() - oracle)
    largest = _largest(oracle)
    if got.dtype == torch.float32:
        return error, 1e-5 * max(largest, 1e-3)
    return error, max(2 * _largest(honest.double() - oracle), largest * torch.finfo(got.dtype).eps, 1e-6)


def _largest(numbers: torch.Tensor) -> float:
    return float(numbers.abs().max()) if numbers.numel() else 0.0


def _same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.shape != b.shape:
        return torch.zeros(max(a.numel(), 1), dtype=torch.bool)
    return (a == b) | ((a != a) & (b != b))


def _double(value: Any) -> Any:
    """Numbers of the op's dtype as float64; integers, and weights that are integers with scales, stay."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if hasattr(value, "packed"):
        return type(value)(change(value.packed), change(value.scales), value.bits, value.group)
    return value


def _verdict(
    op: Op, shape: Shape, dtype: torch.dtype, tokens: int, error: float, allowed: float, reason: str
) -> Verdict:
    return Verdict(op.name, shape.name, str(dtype).removeprefix("torch."), tokens, error, allowed, reason)
