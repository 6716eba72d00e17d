"""SwiGLU's elementwise half (Shazeer 2020): silu(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cs336_kernels.ops.checks import need_triton


def swiglu(gate_up: torch.Tensor, path: str = "reference") -> torch.Tensor:
    """silu(gate) * up; silu is computed in float32 and rounded to the dtype, and so is the product.

    Args:
        gate_up: [..., 2 * n], the gate in the first half; float32, float16 or bfloat16. For "triton": one stride
            from row to row.
        path: "reference" or "triton".

    Returns:
        [..., n], contiguous.

    Raises:
        ValueError: an unknown path; a shape, dtype or stride the kernel does not take.
    """
    if path == "reference":
        return _reference(gate_up)
    need_triton("swiglu", path)
    from cs336_kernels.ops.triton import swiglu as kernel

    return kernel.swiglu(gate_up)


def _reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
