"""Weights of 8 or 4 bits: a product moves half or a quarter of the bytes, and computes as before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cs336_kernels.ops.matrices import check_like, check_path

GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class QuantWeight:
    """A weight [n, d] as integers, with one scale for each group of neighbours in a row: w = scale * integer.

    Attributes:
        packed: [n, d * bits / 32] int32, contiguous. Four words hold a run of 128 / bits neighbours: word j has the
            numbers 2 * j, 2 * j + 1, 8 + 2 * j, 8 + 2 * j + 1, 16 + 2 * j... of the run, from its lowest bits up, each
            plus 2^(bits - 1). So what a thread loads at once becomes, two by two, pieces of 8 neighbours, the 16 bytes
            that it loads of x.
        scales: [n, d / group] float16, contiguous.
        bits: 8 or 4. group: 32, 64 or 128.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d)."""
        return len(self.packed), self.packed.shape[1] * 32 // self.bits

    @property
    def nbytes(self) -> int:
        """All that a product reads of the weight."""
        return self.packed.nbytes + self.scales.nbytes

    def dequantise(self) -> torch.Tensor:
        """[n, d] float32, exactly what the kernels multiply by."""
        n, d = self.shape
        fields = self.packed.view(n, -1, 1, 4, 1) >> _shifts(self.bits, self.packed.device)
        integers = (fields & (1 << self.bits) - 1) - (1 << self.bits - 1)
        return (integers.reshape(n, -1, self.group) * self.scales.float().unsqueeze(-1)).view(n, d)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    """[pieces, 1, 2]: where in its word a number is, by its piece of 8 and by whether it is the first of its pair."""
    return (torch.arange(32 // bits, dtype=torch.int32, device=device) * bits).view(-1, 1, 2)


def quantise(weight: torch.Tensor, bits: int = 8, group: int = 64) -> QuantWeight:
    """Round a weight to `bits` bits, symmetrically: the largest number of a group becomes 127 or 7.

    Every number is off by at most half of its group's scale.

    Args:
        weight: [n, d] of any float dtype, finite; group divides d. bits: 8 or 4. group: 32, 64 or 128.

    Raises:
        ValueError: an argument is none of these, or a group holds a number whose scale float16 cannot hold.
    """
    if bits not in (8, 4):
        raise ValueError(f"bits is {bits}, not 8 or 4")
    if group not in GROUPS:
        raise ValueError(f"group is {group}, not one of {', '.join(map(str, GROUPS))}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}, not floats [n, d]")
    n, d = weight.shape
    if d == 0 or d % group:
        raise ValueError(f"weight is {list(weight.shape)}: its rows are not a multiple of group {group}")
    numbers, most = weight.float().reshape(n, -1, group), (1 << bits - 1) - 1
    peak = numbers.abs().amax(-1)
    scales = (peak / most).to(torch.float16)
    # Near the smallest numbers of float16 rounding down may cut the peak off: take the next larger scale.
    short = scales.float() * (most + 0.5) < peak
    scales = (scales.view(torch.int16) + short.to(torch.int16)).view(torch.float16)
    if not scales.isfinite().all():
        raise ValueError(f"weight goes up to {float(peak.max()):.3g}, too large for a float16 scale, or is not finite")
    steps = scales.float().unsqueeze(-1)
    integers = torch.where(steps > 0, numbers / steps, 0).round().clamp(-most, most).long() + most + 1
    words = (integers.view(n, -1, 16 // bits, 4, 2) << _shifts(bits, weight.device)).sum((2, 4))
    return QuantWeight(words.to(torch.int32).view(n, -1), scales, bits, group)


def quant_linear(
    x: torch.Tensor, weight: QuantWeight, residual: torch.Tensor | None = None, path: str = "reference"
) -> torch.Tensor:
    """x W^T, optionally + residual, with a weight from `quantise`. Sums are float32, the result is rounded once.

    The triton path reads the packed bytes and the scales, and nothing else of the weight. No dequantised number is
    rounded: integers are multiplied, and the sum over some of a group gets the group's scale. CUDA cores are used up to
    4 tokens at 8 bits and 2 tokens at 4 bits, half of that in float32; above, tensor cores (see `linear`).

    Args:
        x: [tokens, d], tokens >= 0, float32, float16 or bfloat16 (the reference also takes float64). residual:
            [tokens, n] like x, or None; it is not changed. Strides of the first dimension are free in both.
        path: "reference" (dequantises the whole weight) or "triton".

    Returns:
        [tokens, n], contiguous, dtype of x.

    Raises:
        ValueError: a shape, dtype, stride or path is wrong.
    """
    check_path("quant_linear", path, x)
    n, d = weight.shape
    if x.shape[1] != d:
        raise ValueError(f"x is {list(x.shape)}, not [tokens, {d}] for a weight {[n, d]}")
    for name, tensor in (("weight.packed", weight.packed), ("weight.scales", weight.scales)):
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, not on {x.device} like x")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, which are not contiguous")
    if residual is not None:
        check_like("residual", residual, (len(x), n), x)
    if path == "reference":
        return _reference(x, weight, residual)
    from cs336_kernels.ops.triton.quant_linear import product

    return product(x, weight, residual)


def _reference(x: torch.Tensor, weight: QuantWeight, residual: torch.Tensor | None) -> torch.Tensor:
    work = torch.promote_types(x.dtype, torch.float32)
    y = F.linear(x.to(work), weight.dequantise().to(work))
    return (y if residual is None else y + residual).to(x.dtype)
