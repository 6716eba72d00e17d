"""x W^T for a tile of tokens and a list of weight rows: the part that the matvec kernels share.

Two forms, chosen on the host by the number of tokens.

`few` (up to 8): CUDA cores, no shared memory. Weights stream through registers, 16 bytes a load; a lane multiplies its
own piece of k and keeps its own sums, so lanes meet once, at the end. Each weight is read once.
`many` (above): tensor cores, tiles of at least 16 tokens, loads pipelined through shared memory. Each weight is read
once for each tile of tokens; the tiles of one block of rows are neighbours in the grid, so all but the first find it
in L2.

The border is where a core's arithmetic overtakes its memory: a multiprocessor of an H100 gets about 10 bfloat16 weights
a clock and has 128 multiply-adds for them, 12 tokens less what conversion costs.

Which rows, the caller says: a list that alternates between two blocks of the weight (gate and up, the halves of a
rotated head) puts what the epilogue combines into neighbouring columns, which `tl.split` takes apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_FEW = 8
"""Tokens that `few` takes in one tile."""

PROGRAMS = 128
"""About one for each of the 132 multiprocessors of an H100 or H200."""


@triton.jit
def few(
    x, stride_x, tokens, gain, eps, weight, stride_w, rows, depth, NORM: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Products of all tokens with some rows of the weight, in float32.

    With NORM, x becomes its RMSNorm in the same pass: it is multiplied by `gain`, its squares are summed beside the
    products, and the factor that comes of them, one number a token, is applied at the end. Nothing is rounded.

    Warps share nothing: each has its own rows, and its own copy of x. So x gets a dimension of WARPS equal entries,
    without which the compiler would deal its columns to the warps and pass them around through shared memory.

    Args:
        x: [tokens, depth]. gain: [depth]. weight: [any, depth]. rows: [ROWS] int32, which of them; all must exist.
        TOKENS: tile, a power of 2 >= tokens; surplus rows of the result repeat the last token.
        CHUNK: numbers in 16 bytes. EVEN: whether BLOCK_K divides depth.

    Returns:
        [TOKENS, ROWS].
    """
    k = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, None, None, :], [1, 1, WARPS, BLOCK_K])
    t = tl.minimum(tl.arange(0, TOKENS), tokens - 1)[:, None, None, None]
    x_at = x + t.to(tl.int64) * stride_x + k
    w_at = weight + tl.reshape(rows, [1, ROWS // WARPS, WARPS, 1]).to(tl.int64) * stride_w + k
    sums = tl.zeros([TOKENS, ROWS // WARPS, WARPS, BLOCK_K // CHUNK], tl.float32)
    squares = tl.zeros([TOKENS, 1, WARPS, BLOCK_K // CHUNK], tl.float32)
    for begin in range(0, depth, BLOCK_K):
        inside = k < depth - begin
        if EVEN:
            w = tl.load(w_at + begin).to(tl.float32)
            v = tl.load(x_at + begin).to(tl.float32)
        else:
            w = tl.load(w_at + begin, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(x_at + begin, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += sum_chunks(v * v, CHUNK)
            v *= tl.load(gain + begin + k, mask=inside, other=0.0).to(tl.float32)
        sums += sum_chunks(v * w, CHUNK)
    acc = tl.sum(sums, 3)
    if NORM:
        acc *= tl.rsqrt(tl.sum(squares, 3) / depth + eps)
    return tl.reshape(acc, [TOKENS, ROWS])


@triton.jit
def sum_chunks(v, CHUNK: tl.constexpr):
    """[..., k] -> [..., k / CHUNK]; what one lane loaded at once it also sums, without talking to the others."""
    return tl.sum(tl.reshape(v, [v.shape[0], v.shape[1], v.shape[2], v.shape[3] // CHUNK, CHUNK]), 4)


@triton.jit
def many(
    x, stride_x, t, gain, eps, weight, stride_w, rows, depth, NORM: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Products of some tokens with some rows of the weight: operands as stored, sums in float32.

    With NORM, x becomes its RMSNorm, computed in float32 and rounded once to the dtype of x, as the tensor cores want
    it. The tile is read twice for that: once for its squares.

    Args:
        t: [m] int32, which tokens of x [any, depth]; rows: [r] int32, which rows of the weight. All must exist.
        UPCAST: for the interpreter, whose products of half precision are wrong.

    Returns:
        [m, r] float32.
    """
    k = tl.arange(0, BLOCK_K)
    x_at = x + t.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_at = weight + rows.to(tl.int64)[None, :] * stride_w + k[:, None]
    scale = tl.zeros([t.shape[0]], tl.float32)
    if NORM:
        for begin in range(0, depth, BLOCK_K):
            if EVEN:
                v = tl.load(x_at + begin).to(tl.float32)
            else:
                v = tl.load(x_at + begin, mask=(k < depth - begin)[None, :], other=0.0).to(tl.float32)
            scale += tl.sum(v * v, 1)
        scale = tl.rsqrt(scale / depth + eps)
    acc = tl.zeros([t.shape[0], rows.shape[0]], tl.float32)
    for begin in range(0, depth, BLOCK_K):
        inside = k < depth - begin
        if EVEN:
            tile = tl.load(x_at + begin)
            w = tl.load(w_at + begin)
        else:
            tile = tl.load(x_at + begin, mask=inside[None, :], other=0.0)
            w = tl.load(w_at + begin, mask=inside[:, None], other=0.0)
        if NORM:
            g = tl.load(gain + begin + k, mask=inside, other=0.0).to(tl.float32)
            tile = (tile.to(tl.float32) * scale[:, None] * g[None, :]).to(x.dtype.element_ty)
        if UPCAST:
            acc = tl.dot(tile.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(tile, w, acc, input_precision="ieee")
    return acc


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def block_of_rows(tokens: int, rows: int, interpreted: bool, least: int = 1) -> int:
    """How many rows of the weight a program around `few` takes, a power of 2.

    A program is one warp, or one for 8 of `least` rows. There should be thousands, so it takes few rows of a small
    weight; but enough to use a loaded x more than once where tokens are several.

    Args:
        rows: of the whole weight. least: that a program must have.
    """
    if interpreted:  # a program costs Python's time, whatever its size
        return max(64, least)
    block = 1 if rows < 4096 else 2 if rows < 8192 else 4
    return max(block, least, min(4, power_of_2(tokens) // 2))


def few_tile(x: torch.Tensor, rows: int, interpreted: bool, least: int = 1) -> dict[str, int | bool]:
    """Constants of a kernel around `few` for x [tokens, depth] and this many rows of the weight in all.

    Each lane has 64 bytes of weights on the way: 1024 numbers in bfloat16 for a warp.
    """
    tokens, depth = x.shape
    block = block_of_rows(tokens, rows, interpreted, least)
    warps = min(16, max(1, least // 8))
    block_k = min(1024 // min(block, 4), max(16, power_of_2(depth)))
    return {
        "TOKENS": power_of_2(tokens),
        "ROWS": block,
        "BLOCK_K": block_k,
        "CHUNK": 16 // x.element_size(),
        "EVEN": depth % block_k == 0,
        "WARPS": warps,
        "num_warps": warps,
    }


def many_tile(x: torch.Tensor, rows: int, interpreted: bool, whole: int = 0) -> dict[str, int | bool]:
    """Constants of a kernel around `many`: the largest tile that leaves a program for each multiprocessor.

    Up to 32 tokens the bytes of the weight still decide: small blocks of rows, long runs of k. All fits 99 KiB of
    shared memory, what consumer GPUs have.

    Args:
        whole: rows that a program must have, 0 for any number.
    """
    tokens, depth = x.shape
    m = min(128, max(16, power_of_2(tokens)))
    if x.dtype == torch.float32:  # products on CUDA cores: operands and sums share the registers
        m = min(m, 64, 4096 // max(64, whole))
    shapes = [(m, 32), (m, 16)] if m <= 32 else [(128, 128), (128, 64), (64, 64), (64, 32)][0 if m == 128 else 2 :]
    if whole:
        shapes = [(min(m, 64), whole)]
    fitting = (s for s in shapes if triton.cdiv(tokens, s[0]) * triton.cdiv(rows, s[1]) >= PROGRAMS)
    m, n = next(fitting, shapes[-1])
    block_k, stages = (128 if m <= 32 and n <= 64 else 64), (4 if m + n <= 160 else 3 if m + n <= 256 else 2)
    warps = 8 if n >= m > 32 else 4 if m * n > 1024 else 2
    if x.dtype == torch.float32:
        block_k, stages, warps = 32, 2, 8 if n >= 128 else 4 if m * n >= 1024 else 2
    block_k = min(block_k, max(16, power_of_2(depth)))
    return {
        "BLOCK_M": m,
        "ROWS": n,
        "BLOCK_K": block_k,
        "EVEN": depth % block_k == 0,
        "UPCAST": interpreted,
        "num_warps": warps,
        "num_stages": stages,
    }
