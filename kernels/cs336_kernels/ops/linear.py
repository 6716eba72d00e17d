"""Matrix product with a weight, the op that moves nearly all bytes of decoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F

PACK_ROWS = 8  # batch size the packed layout is chosen for; measured as good as 1 at batch 1, and faster at 8


class Linear:
    """y = x W^T, optionally + residual, for a weight that does not change.

    Two rungs, chosen on creation:
        "reference": `torch.nn.functional.linear`.
        "packed": the weight is reordered once into the blocked layout of oneDNN's CPU kernels, which read it about
            twice as fast (docs/decisions.md). The original is not kept.

    Args:
        weight: [out_features, in_features], float32 or bfloat16.
        path: "reference" or "packed".
    """

    def __init__(self, weight: torch.Tensor, path: str = "reference") -> None:
        self.out_features, self.in_features = weight.shape
        self.path = path
        if path == "reference":
            self._weight = weight
        elif path == "packed":
            if not packing_available(weight.dtype, weight.device):
                raise ValueError(f"packed weights need a CPU build of torch with oneDNN, not {weight.device}")
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        else:
            raise ValueError(f"unknown path {path!r} for linear (reference, packed)")

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., in_features]; residual: [..., out_features] or None. Returns [..., out_features]."""
        if self.path == "packed":
            ops = torch.ops.mkldnn._linear_pointwise
            if residual is None:
                return ops(x, self._weight, None, "none", [], "")
            return ops.binary(x, residual, self._weight, None, "add")
        y = F.linear(x, self._weight)
        return y if residual is None else y.add_(residual)

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight [out_features, in_features]; a copy on the packed path."""
        return self._weight.to_dense() if self.path == "packed" else self._weight


def packing_available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch can prepack a weight of this dtype on this device."""
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
