"""What the two attention kernels share: reading a tile of positions out of pages, and one step of online softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_pages(table, at, end, BLOCK_SIZE: tl.constexpr):
    """Pages of the positions `at`, int64, since page * stride passes 2^31. Behind `end` the table is not read."""
    return tl.load(table + at // BLOCK_SIZE, mask=at < end, other=0).to(tl.int64)


@triton.jit
def load_tile(
    memory, stride, pages, at, end, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Keys or values of the positions `at` of one KV head, [positions, BLOCK_D]; zeros from `end` on, and from head_dim
    on. The values must be zeros there: a weight of 0 does not hide a NaN.

    Args:
        memory: points to the head's numbers in slot 0 of page 0. stride: of pages.
    """
    d = tl.arange(0, BLOCK_D)
    slots = pages * stride + (at % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
    mask = (at < end)[:, None]
    if BLOCK_D != HEAD_DIM:
        mask = mask & (d < HEAD_DIM)[None, :]
    tile = tl.load(memory + slots[:, None] + d[None, :], mask=mask, other=0.0)
    if UPCAST:
        return tile.to(tl.float32)
    else:
        return tile


@triton.jit
def fold(q, k, v, seen, scale, top, total, acc, WEIGHTS: tl.constexpr, UPCAST: tl.constexpr):
    """Take one more tile of keys and values into a softmax average (Milakov and Gimelshein 2018).

    Args:
        q: [m, d]. k, v: [n, d]. seen: [m, n] or [1, n] bool, which keys a query may look at.
        scale: of the scores, that is of q k^T.
        top: [m] the largest of q k^T so far, -inf at first. total: [m] sum of weights, which are exp(scale * (q k^T -
            top)). acc: [m, d] sum of weights * value. All float32.
        WEIGHTS: dtype that the weights are rounded to for the second product.

    Returns:
        top, total, acc with this tile.
    """
    steep = scale * 1.4426950408889634  # exp(x) is 2^(x log2 e), and a GPU computes powers of 2
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a query that saw nothing yet: -inf - -inf is NaN
    weights = tl.exp2(scores * steep - (base * steep)[:, None])
    shrink = tl.exp2((top - base) * steep)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(WEIGHTS)
    if UPCAST:
        weights = weights.to(tl.float32)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc
