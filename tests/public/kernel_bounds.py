"""Bounds for the results of kernels that follow the number format, and the fills that unused memory gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

FILLS = (math.nan, 3.0e4, -7.5)
"""What memory holds that nobody may read: outputs are finite and bitwise equal whichever it is."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check(got: torch.Tensor, oracle: torch.Tensor, honest: torch.Tensor | None = None) -> None:
    """Compare a kernel's result with the same formula in float64.

    float32: at most 1e-5 of the largest number of the oracle. Half precision: at most twice the largest error that an
    honest computation in the same format makes (`honest`: float32 inside, rounded where the op says so), or one unit in
    the last place of the oracle's largest number where that is exact.

    Args:
        got: [...] in the format under test. oracle: [...] float64. honest: like `got`; needed for half precision.
    """
    assert got.shape == oracle.shape, f"shape {tuple(got.shape)}, not {tuple(oracle.shape)}"
    assert oracle.dtype == torch.float64
    if got.numel() == 0:
        return
    assert torch.isfinite(got).all(), "not finite"
    error = (got.double() - oracle).abs().max().item()
    largest = oracle.abs().max().item()
    if got.dtype == torch.float32:
        bound = 1e-5 * max(largest, 1e-3)
    else:
        assert honest is not None, "half precision needs an honest result to compare with"
        bound = max(2 * (honest.double() - oracle).abs().max().item(), largest * torch.finfo(got.dtype).eps, 1e-6)
    assert error <= bound, f"{got.dtype}: error {error:.3g}, allowed {bound:.3g} (largest number {largest:.3g})"


def same_over_fills(run: Callable[[float], torch.Tensor | Sequence[torch.Tensor]]) -> torch.Tensor | list[torch.Tensor]:
    """run(fill) for each of `FILLS`; the results must be finite and bitwise equal. Returns the first."""
    first: list[torch.Tensor] | None = None
    single = True
    for fill in FILLS:
        result = run(fill)
        single = isinstance(result, torch.Tensor)
        tensors = [result] if isinstance(result, torch.Tensor) else list(result)
        assert all(torch.isfinite(t).all() for t in tensors), f"not finite when unused memory holds {fill}"
        if first is None:
            first = tensors
        assert all(torch.equal(a, b) for a, b in zip(first, tensors, strict=True)), f"unused memory ({fill}) was read"
    assert first is not None
    return first[0] if single else first
