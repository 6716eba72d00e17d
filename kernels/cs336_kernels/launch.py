"""The one way in which the ops here start a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cs336_kernels.sanitizer import adapter, session

_recorders: list[tuple[Callable[..., None], int]] = []


def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """`kernel[grid](*args, **kwargs)` on a GPU; interpreted, program after program, when the tensors are on a CPU.

    Inside `sanitize(...)` both are sanitized; inside `recording(...)` nothing runs.

    Args:
        kernel: a `@triton.jit` function. grid: 1 to 3 sizes, or a function of the arguments.
        kwargs: constants of compilation and launch options such as `num_warps`.
    """
    if _recorders:
        _recorders[-1][0](kernel, grid, *args, **kwargs)
        return
    on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in (*args, *kwargs.values()))
    if on_gpu or session.active():
        kernel[grid](*args, **kwargs)
    else:
        adapter.run(kernel, grid, *args, **kwargs)


def interpreted(tensor: torch.Tensor) -> bool:
    """Whether a kernel started now on this tensor is interpreted, and so needs operands of `tl.dot` in float32."""
    return capability(tensor) == 0


def capability(tensor: torch.Tensor) -> int:
    """Compute capability of the GPU that a kernel started now on this tensor is for: 80, 90, ...; 0 if interpreted."""
    if _recorders:
        return _recorders[-1][1]
    if session.active() or not tensor.is_cuda:
        return 0
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


@contextmanager
def recording(handler: Callable[..., None], capability: int = 90) -> Iterator[None]:
    """Inside, `launch` calls `handler(kernel, grid, *args, **kwargs)` with what a GPU would get, and runs nothing.

    Tensors may be on a CPU and hold nothing: no element is read or written. Not for threads.

    Args:
        capability: of the GPU that is meant, for kernels whose sizes depend on it.
    """
    _recorders.append((handler, capability))
    try:
        yield
    finally:
        _recorders.pop()
