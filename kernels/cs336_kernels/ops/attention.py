"""Attention of new tokens over all tokens so far, with grouped KV heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v; query head h reads KV head h // (heads / kv_heads).

    Args:
        q: [batch, heads, new, head_dim]: the newest `new` positions of each row.
        k, v: [batch, kv_heads, total, head_dim], total >= new.
        mask: [batch, 1, new, total] bool, True where a query may look. None means causal: new token i sees
            positions up to total - new + i.

    Returns:
        [batch, heads, new, head_dim].
    """
    batch, heads, new, head_dim = q.shape
    kv_heads, total = k.shape[1], k.shape[2]
    if new == 1:
        # The query heads of a group become rows of one product, so that each K and V row is read once.
        grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).view(batch, heads, 1, head_dim)
    if mask is None and new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=kv_heads != heads)
