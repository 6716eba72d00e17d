"""A second correct solution of assignment 1: other algorithms, and as noisy as students' code can be."""

# %%
import sys
import warnings

import torch
from tqdm import tqdm

print("loading...", file=sys.stderr)
warnings.warn("this is only a warning", stacklevel=1)


# %%
def rope(x, positions, theta):
    """Complex numbers instead of two halves."""
    print("rope", tuple(x.shape), file=sys.stderr)
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half].double(), x[..., half:].double())
    angle = positions.double()[:, None, :, None] / theta ** (torch.arange(half).double() / half)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1).float()


# %%
def causal_attention(q, k, v, starts=None):
    """One row, one head and one query at a time, with a running softmax."""
    batch, heads, new, head_dim = q.shape
    per_kv, past = heads // k.shape[1], k.shape[2] - new
    out = torch.zeros_like(q)
    for b in tqdm(range(batch), desc="rows"):
        first = int(starts[b]) if starts is not None else 0
        for h in range(heads):
            for i in range(new):
                top, mass, mean = -float("inf"), 0.0, torch.zeros(head_dim, dtype=torch.float64)
                for j in range(first, past + i + 1):
                    score = float(q[b, h, i].double() @ k[b, h // per_kv, j].double()) * head_dim**-0.5
                    new_top = max(top, score)
                    keep = torch.tensor(top - new_top).exp() if mass else torch.tensor(0.0)
                    weight = torch.tensor(score - new_top, dtype=torch.float64).exp()
                    mean = mean * keep + weight * v[b, h // per_kv, j].double()
                    mass, top = mass * float(keep) + float(weight), new_top
                if mass:
                    out[b, h, i] = (mean / mass).float()
    return out


# %%
def cached_attention(q, k, v, k_cache, v_cache, length):
    """New caches by concatenation."""
    end = length + k.shape[2]
    k_all = torch.cat((k_cache[:, :, :length], k), 2)
    v_all = torch.cat((v_cache[:, :, :length], v), 2)
    k_new, v_new = (torch.cat((a, c[:, :, end:]), 2) for a, c in ((k_all, k_cache), (v_all, v_cache)))
    return causal_attention(q, k_all, v_all), k_new, v_new


# %%
def next_token_distribution(logits, temperature, top_p, min_p):
    """A threshold found by looking at each token's competition."""
    warnings.warn("slow", stacklevel=1)
    p = torch.exp(torch.log_softmax(logits.double() / temperature, 0))
    above = torch.stack([p[p > x].sum() for x in p])
    kept = torch.where(above < top_p, p, 0.0)
    kept = torch.where(kept >= min_p * kept.max(), kept, 0.0)
    return kept / kept.sum()


# %%
def decode_step_cost(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, batch, context, bytes_per_number):
    """Matrix by matrix."""
    flops = numbers = 0
    for rows, columns in [
        *[(hidden, heads * head_dim), (hidden, kv_heads * head_dim), (hidden, kv_heads * head_dim)] * layers,
        *[(heads * head_dim, hidden)] * layers,
        *[(hidden, intermediate), (hidden, intermediate), (intermediate, hidden)] * layers,
        (hidden, vocab),
    ]:
        flops += 2 * rows * columns * batch
        numbers += rows * columns
    for _ in range(layers):
        flops += batch * heads * (context + 1) * head_dim * 4
        numbers += 2 * hidden + batch * (context + 1) * 2 * kv_heads * head_dim
    return flops, bytes_per_number * (numbers + hidden)
