"""RMSNorm of every query and key head, as Qwen3 has it (Yang et al. 2025; Dehghani et al. 2023)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from cs336_kernels.ops.checks import need_triton


def qk_norm(
    qk: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    num_heads: int,
    eps: float,
    path: str = "reference",
) -> torch.Tensor:
    """Each head's head_dim numbers through RMSNorm, query heads by one weight and key heads by the other.

    All of it is computed in float32 and rounded once, as in `rms_norm`.

    Args:
        qk: [..., heads + kv_heads, head_dim], query heads first; float32, float16 or bfloat16. For "triton": one stride
            from token to token, any stride from head to head, head_dim <= 1024.
        q_weight, k_weight: [head_dim], same dtype.
        num_heads: query heads, 0 to heads + kv_heads.
        path: "reference" or "triton".

    Returns:
        [..., heads + kv_heads, head_dim], contiguous, in the dtype of qk.

    Raises:
        ValueError: an unknown path, an impossible number of heads; a shape, dtype or stride the kernel does not take.
    """
    if qk.dim() < 2 or not 0 <= num_heads <= qk.shape[-2]:
        raise ValueError(f"qk is {list(qk.shape)}, not [..., heads, head_dim] with at least {num_heads} query heads")
    if path == "reference":
        return _reference(qk, q_weight, k_weight, num_heads, eps)
    need_triton("qk_norm", path)
    from cs336_kernels.ops.triton import qk_norm as kernel

    return kernel.qk_norm(qk, q_weight, k_weight, num_heads, eps)


def _reference(
    qk: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, num_heads: int, eps: float
) -> torch.Tensor:
    q, k = qk.split([num_heads, qk.shape[-2] - num_heads], -2)
    size = (qk.shape[-1],)
    return torch.cat((F.rms_norm(q, size, q_weight, eps), F.rms_norm(k, size, k_weight, eps)), -2)
