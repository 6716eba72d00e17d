"""Attention of new tokens over all tokens so far, with grouped KV heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F

SCORES_AT_ONCE = 1 << 21  # scores of one block of queries on a CPU: they stay in the last-level cache


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v; query head h reads KV head h // (heads / kv_heads).

    Args:
        q: [batch, heads, new, head_dim]: the newest `new` positions of each row.
        k, v: [batch, kv_heads, total, head_dim], total >= new.
        mask: [batch, 1, new, total] bool, True where a query may look; nothing later than the query itself. None
            means causal: new token i sees positions up to total - new + i.

    Returns:
        [batch, heads, new, head_dim].
    """
    batch, heads, new, head_dim = q.shape
    kv_heads, total = k.shape[1], k.shape[2]
    if new == 1:
        # The query heads of a group become rows of one product, so that each K and V row is read once.
        grouped = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).view(batch, heads, 1, head_dim)
    if q.device.type == "cpu":
        return _by_query_blocks(q, k, v, mask)
    if mask is None and new < total:
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=kv_heads != heads)


def _by_query_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Prefill on a CPU: each block of queries meets only the keys it may see, so half of the square is never computed.

    Scores and softmax are float32 whatever the inputs are; the weights are rounded once, for the second product.
    """
    batch, heads, new, head_dim = q.shape
    kv_heads, total = k.shape[1], k.shape[2]
    group, past = heads // kv_heads, total - new
    rows = max(16, min(128, SCORES_AT_ONCE // (batch * heads * total)))
    keys, values = k.flatten(0, 1).transpose(1, 2).float(), v.flatten(0, 1)
    scaled = q.float() * head_dim**-0.5
    future = torch.full((rows, rows), -torch.inf).triu(1)
    out = torch.empty(batch, new, heads, head_dim, dtype=q.dtype).transpose(1, 2)
    for first in range(0, new, rows):
        last = min(first + rows, new)
        n, seen = last - first, past + last
        block = scaled[:, :, first:last].reshape(batch * kv_heads, group * n, head_dim)
        scores = torch.bmm(block, keys[:, :, :seen]).view(batch, kv_heads, group, n, seen)
        if mask is None:
            scores[..., past + first :] += future[:n, :n]
        else:
            scores.masked_fill_(~mask[:, :, None, first:last, :seen], -torch.inf)
        weights = scores.softmax(-1).to(q.dtype).view(batch * kv_heads, group * n, seen)
        out[:, :, first:last] = torch.bmm(weights, values[:, :seen]).view(batch, heads, n, head_dim)
    return out
