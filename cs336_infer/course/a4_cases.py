"""Launches of assignment 4: inputs, what must come out, and the fewest bytes that it takes.

What must come out is computed by the package's torch references in float64. Numbers that nobody may read, between rows,
in unused slots and in pages of nobody, hold `fill`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from cs336_kernels.ops import apply_rope, rms_norm, swiglu

from cs336_infer.course.kernel_cases import Case, empty, next_power, normal, padded, size


def add_rms_norm(
    rng: np.random.Generator, rows: int, d: int, dtype: str = "float32", fill: float | None = None, scale: float = 1.0
) -> Case:
    """`fill` None: outputs are memory that nobody wrote."""
    x, residual = (normal(rng, (rows, d), dtype, scale) for _ in range(2))
    weight, eps = normal(rng, (d,), dtype), 1e-5 * scale**2
    summed = x + residual
    wide = summed.double()
    honest = rms_norm(summed, weight, eps)
    hole = math.nan if fill is None else fill
    return Case(
        "add_rms_norm_kernel",
        (rows,),
        {
            "normed": empty((rows, d), dtype, fill),
            "summed": empty((rows, d), dtype, fill),
            "x": padded(x, 3, hole),
            "residual": padded(residual, 1, hole),
            "weight": weight,
        },
        {"step_x": d + 3, "step_residual": d + 1, "eps": eps},
        {"D": d, "BLOCK": next_power(d)},
        {"normed": (rms_norm(wide, weight.double(), eps), honest), "summed": (wide, summed)},
        size(dtype) * (4 * rows * d + d),
        f"{rows} rows of {d} in {dtype}",
    )


def swiglu_case(
    rng: np.random.Generator, rows: int, n: int, dtype: str = "float32", fill: float | None = None, scale: float = 2.0
) -> Case:
    gate_up = normal(rng, (rows, 2 * n), dtype, scale)
    honest = swiglu(gate_up.float()).to(gate_up.dtype)
    block = min(next_power(n), 16)
    return Case(
        "swiglu_kernel",
        (rows, -(-n // block)),
        {"out": empty((rows, n), dtype, fill), "gate_up": padded(gate_up, 5, math.nan if fill is None else fill)},
        {"step": 2 * n + 5},
        {"N": n, "BLOCK": block},
        {"out": (swiglu(gate_up.double()), honest)},
        size(dtype) * 3 * rows * n,
        f"{rows} rows, n = {n}, in {dtype}",
    )


def rope_write(
    rng: np.random.Generator,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 4,
    dtype: str = "float32",
    fill: float = math.nan,
) -> Case:
    """Pages of which some are nobody's, and tokens whose slots are anywhere."""
    q, k, v = (normal(rng, (tokens, h, head_dim), dtype) for h in (heads, kv_heads, kv_heads))
    angles = torch.from_numpy(rng.uniform(-3, 3, size=(tokens, head_dim // 2)))
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    pages = -(-tokens // block_size) + 2
    slots = torch.from_numpy(rng.permutation(pages * block_size)[:tokens].astype(np.int64))
    width, step = kv_heads * head_dim, block_size * kv_heads * head_dim + 6
    memory = {name: torch.full((pages, step), fill, dtype=q.dtype) for name in ("keys", "values")}
    filled = memory["keys"][0, 0]

    def stored(numbers: torch.Tensor) -> torch.Tensor:
        pages_of = torch.full((pages, step), 0.0, dtype=numbers.dtype)
        for token, slot in enumerate(slots.tolist()):
            begin = slot % block_size * width
            pages_of[slot // block_size, begin : begin + width] = numbers[token].flatten()
        return pages_of

    there = stored(torch.ones_like(k, dtype=torch.float64)).bool()

    def zeroed(t: torch.Tensor) -> torch.Tensor:
        """The memory with zeros where `fill` was and must be."""
        untouched = t.isnan() if math.isnan(filled) else t == filled
        return torch.where(~there & untouched, torch.zeros_like(t), t)

    def turned(x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([cos, cos], 1).to(x.dtype), torch.cat([-sin, sin], 1).to(x.dtype)
        return apply_rope(x[None], both[0][None, :, None], both[1][None, :, None])[0]

    outs = {"q_out": q, "keys": k}
    wide = {name: turned(t.double()) for name, t in outs.items()}
    honest = {name: turned(t.float()).to(t.dtype) for name, t in outs.items()}
    expected = {"q_out": (wide["q_out"].flatten(1), honest["q_out"].flatten(1))}
    expected |= {"keys": (stored(wide["keys"]), stored(honest["keys"])), "values": (stored(v.double()), stored(v))}
    steps = {
        "step_q": heads * head_dim + 2,
        "step_k": width + 4,
        "step_v": width,
        "step_keys": step,
        "step_values": step,
    }
    return Case(
        "rope_write_kernel",
        (tokens, heads + kv_heads),
        {
            "q_out": empty((tokens, heads * head_dim), dtype, None),
            **memory,
            "q": padded(q.flatten(1), 2, fill),
            "k": padded(k.flatten(1), 4, fill),
            "v": v.flatten(1),
            "cos": cos,
            "sin": sin,
            "slots": slots,
        },
        steps,
        {
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK": next_power(head_dim // 2),
        },
        expected,
        size(dtype) * tokens * (2 * (heads + 2 * kv_heads) + 1) * head_dim + 8 * tokens,
        f"{tokens} tokens, {heads} + {kv_heads} heads of {head_dim}, pages of {block_size}, in {dtype}",
        {"keys": zeroed, "values": zeroed},
    )
