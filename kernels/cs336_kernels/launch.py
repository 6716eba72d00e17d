"""The one way in which the ops here start a kernel."""

from __future__ import annotations

from typing import Any

import torch

from cs336_kernels.sanitizer import adapter, session


def launch(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """`kernel[grid](*args, **kwargs)` on a GPU; interpreted, program after program, when the tensors are on a CPU.

    Inside `sanitize(...)` both are sanitized.

    Args:
        kernel: a `@triton.jit` function. grid: 1 to 3 sizes, or a function of the arguments.
        kwargs: constants of compilation and launch options such as `num_warps`.
    """
    on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in (*args, *kwargs.values()))
    if on_gpu or session.active():
        kernel[grid](*args, **kwargs)
    else:
        adapter.run(kernel, grid, *args, **kwargs)
