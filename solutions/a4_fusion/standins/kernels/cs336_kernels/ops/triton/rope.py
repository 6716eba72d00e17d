"""RoPE: your `rope_write_kernel` does it, once it is plugged in, in the layer that `a4_sockets` builds."""

from __future__ import annotations

import torch

from cs336_infer.course.plug import plugged


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Not by itself here.

    Raises:
        NotPlugged: names the exercise.
    """
    kernel = plugged("rope_write_kernel")
    raise NotImplementedError(f"{kernel.__name__} turns and stores at once: it has its place in a whole layer")
