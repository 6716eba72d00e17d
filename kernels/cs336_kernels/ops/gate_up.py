"""The first half of a gated MLP: RMSNorm, gate and up, silu(gate) * up (Shazeer 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cs336_kernels.ops.matrices import check_like, check_path
from cs336_kernels.ops.rmsnorm import rms_norm
from cs336_kernels.ops.swiglu import swiglu


def gate_up(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float, path: str = "reference"
) -> torch.Tensor:
    """silu(gate) * up of gate, up = RMSNorm(x) W^T.

    Rounding. The reference rounds to the dtype of x after the norm, after the product, after silu and at the end. The
    triton path keeps everything in float32 and rounds at the end; only with more than 8 tokens it also rounds after the
    norm, because the tensor cores take operands of that dtype.

    The triton path is one launch. Every program computes the norm again from x, which is small, in place of waiting
    for another kernel. Up to 8 tokens that costs no second pass: the norm is one factor a token, applied to the
    products. For the choice between the two kernels see `linear`.

    Args:
        x: [tokens, d], tokens >= 0, float32, float16 or bfloat16 (the reference also takes float64).
        norm_weight: [d] like x. weight: [2 * n, d] like x, the rows of the gate first.
            Strides of the first dimension of x and weight are free.
        eps: of the norm. path: "reference" or "triton".

    Returns:
        [tokens, n], contiguous, dtype of x.

    Raises:
        ValueError: a shape, dtype, stride or path is wrong.
    """
    check_path("gate_up", path, x)
    check_like("norm_weight", norm_weight, (x.shape[1],), x)
    check_like("weight", weight, (len(weight), x.shape[1]), x)
    if len(weight) % 2:
        raise ValueError(f"weight has {len(weight)} rows, not an even number: gate and up")
    if path == "reference":
        return _reference(x, norm_weight, weight, eps)
    from cs336_kernels.ops.triton.gate_up import fused

    return fused(x, norm_weight, weight, eps)


def _reference(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return swiglu(F.linear(rms_norm(x, norm_weight, eps), weight))
