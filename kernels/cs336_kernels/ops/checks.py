"""What the elementwise ops check before a kernel runs: with a wrong shape it would read what lies behind a tensor."""

from __future__ import annotations

from importlib.util import find_spec

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def need_triton(op: str, path: str) -> None:
    """Raises ValueError if `path` is not "triton", or Triton is not installed."""
    if path != "triton":
        raise ValueError(f"unknown path {path!r} for {op} (reference, triton)")
    if find_spec("triton") is None:
        raise ValueError(f"path 'triton' of {op} needs the package triton, which is for Linux only; use 'reference'")


def rows_of(name: str, x: torch.Tensor) -> tuple[int, int]:
    """How many rows of contiguous numbers x [..., d] has, and how many numbers after a row the next one begins.

    Raises:
        ValueError: x is not floating point, a row is not contiguous, or no single stride leads from row to row.
    """
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} is {x.dtype}, not float32, float16 or bfloat16")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} is {list(x.shape)}, not rows of at least one number")
    if x.numel() == 0:
        return 0, x.shape[-1]
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} has strides {x.stride()}; the numbers of a row must be contiguous")
    rows, step = 1, x.shape[-1]
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if rows == 1:
            step = stride
        elif stride != rows * step:
            raise ValueError(f"{name} {list(x.shape)} has strides {x.stride()}, which are not one step from row to row")
        rows *= size
    return rows, step


def same(name: str, x: torch.Tensor, shape: torch.Size | tuple[int, ...], like: torch.Tensor) -> None:
    """Raises ValueError if x has not this shape, or not the dtype and device of `like`."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} is {list(x.shape)}, not {list(shape)}")
    if x.dtype != like.dtype or x.device != like.device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}, not {like.dtype} on {like.device}")
