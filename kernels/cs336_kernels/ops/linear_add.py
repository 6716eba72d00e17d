"""Products with a weight, and with a residual that is added before the only rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cs336_kernels.ops.matrices import check_like, check_path


def linear(x: torch.Tensor, weight: torch.Tensor, path: str = "reference") -> torch.Tensor:
    """x W^T. Sums are float32, the result is rounded once.

    The triton path chooses its kernel by the number of tokens. Up to 8 (decoding): CUDA cores, one warp a program, and
    each weight is read once. More: tensor cores, tiles of 16 to 128 tokens, and each weight is read once a tile. The
    products of float32 are exact in both (no TF32).

    Args:
        x: [tokens, d], tokens >= 0, float32, float16 or bfloat16 (the reference also takes float64).
        weight: [n, d] like x. Strides of the first dimension are free in both.
        path: "reference" or "triton".

    Returns:
        [tokens, n], contiguous, dtype of x.

    Raises:
        ValueError: a shape, dtype, stride or path is wrong.
    """
    _check("linear", x, weight, path)
    if path == "reference":
        return F.linear(x, weight)
    from cs336_kernels.ops.triton.linear_add import product

    return product(x, weight, None)


def linear_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, path: str = "reference") -> torch.Tensor:
    """x W^T + residual; the sum is taken in float32 and rounded once. Otherwise as `linear`.

    Args:
        residual: [tokens, n] like x, the stride of its first dimension is free; it is not changed.
    """
    _check("linear_add", x, weight, path)
    check_like("residual", residual, (len(x), len(weight)), x)
    if path == "reference":
        return _reference(x, weight, residual)
    from cs336_kernels.ops.triton.linear_add import product

    return product(x, weight, residual)


def _check(op: str, x: torch.Tensor, weight: torch.Tensor, path: str) -> None:
    check_path(op, path, x)
    check_like("weight", weight, (len(weight), x.shape[1]), x)


def _reference(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    work = torch.promote_types(x.dtype, torch.float32)
    return (F.linear(x.to(work), weight.to(work)) + residual).to(x.dtype)
