"""RoPE: a program rotates some heads of one token, with that token's angles."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cs336_kernels.launch import launch
from cs336_kernels.ops.checks import FLOATS, same

MOST_HEAD_DIM = 1024
TILE = 2048  # pairs in a program


@triton.jit
def rope_kernel(
    out, x, cos, sin, seq, heads,
    batch_x, seq_x, head_x, batch_cos, seq_cos, batch_sin, seq_sin,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (token, i): heads i * HEADS and up to HEADS - 1 more, of the token's place in [batch, seq]."""
    token = tl.program_id(0).to(tl.int64)
    row, place = token // seq, token % seq
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    tile = (head < heads)[:, None] & inside[None, :]

    my_cos = cos + row * batch_cos + place * seq_cos + at
    my_sin = sin + row * batch_sin + place * seq_sin + at
    cos_low = tl.load(my_cos, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(my_cos + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(my_sin, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(my_sin + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]

    my_x = x + row * batch_x + place * seq_x + head.to(tl.int64)[:, None] * head_x + at[None, :]
    low = tl.load(my_x, mask=tile, other=0.0).to(tl.float32)
    high = tl.load(my_x + HALF, mask=tile, other=0.0).to(tl.float32)

    kind = out.dtype.element_ty
    my_out = out + (token * heads + head[:, None]) * (2 * HALF) + at[None, :]
    tl.store(my_out, ((low * cos_low).to(kind).to(tl.float32) + high * sin_low).to(kind), mask=tile)
    tl.store(my_out + HALF, ((high * cos_high).to(kind).to(tl.float32) + low * sin_high).to(kind), mask=tile)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [batch, seq, heads, head_dim]; cos, sin: [batch or 1, seq, 1, head_dim]. Returns a tensor shaped like x."""
    if x.dim() != 4 or x.dtype not in FLOATS:
        raise ValueError(f"x is {list(x.shape)} {x.dtype}, not [batch, seq, heads, head_dim] of floats")
    batch, seq, heads, head_dim = x.shape
    if head_dim % 2 or not 2 <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"head_dim of x is {head_dim}, not an even number of 2 to {MOST_HEAD_DIM}")
    for name, table in (("cos", cos), ("sin", sin)):
        same(name, table, (table.shape[0] if table.shape[:1] in ((1,), (batch,)) else batch, seq, 1, head_dim), x)
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; the last dimension must be contiguous")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        cos, sin = (table.expand(batch, -1, -1, -1) for table in (cos, sin))
        block = triton.next_power_of_2(head_dim // 2)
        rows = min(triton.next_power_of_2(heads), max(TILE // block, 1))
        strides = (*x.stride()[:3], *cos.stride()[:2], *sin.stride()[:2])
        grid = (batch * seq, triton.cdiv(heads, rows))
        sizes = {"HALF": head_dim // 2, "HEADS": rows, "BLOCK": block, "num_warps": min(max(rows * block // 256, 1), 4)}
        launch(rope_kernel, grid, out, x, cos, sin, seq, heads, *strides, **sizes)
    return out
