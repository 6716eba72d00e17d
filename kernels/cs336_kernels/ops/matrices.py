"""What the ops that multiply by a weight check of their arguments."""

from __future__ import annotations

import torch

from cs336_kernels.ops.checks import FLOATS, need_triton, same


def check_path(op: str, path: str, x: torch.Tensor) -> None:
    """Raises ValueError for an unknown path, without Triton, and for an x that is not [tokens, features].

    The reference takes every float; the kernels take float32, float16 and bfloat16.
    """
    if path != "reference":
        need_triton(op, path)
        if x.dtype not in FLOATS:
            raise ValueError(f"x is {x.dtype}; the triton path of {op} knows float32, float16 and bfloat16")
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"x is {list(x.shape)}, not [tokens, features]")
    check_like("x", x, tuple(x.shape), x)


def check_like(name: str, tensor: torch.Tensor, shape: tuple[int, ...], x: torch.Tensor) -> None:
    """Raises ValueError for another shape, for another dtype or device than x has, and for a strided last dimension."""
    same(name, tensor, shape, x)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")
