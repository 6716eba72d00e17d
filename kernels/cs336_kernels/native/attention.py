"""Attention over KV pages on a CPU, in C++."""

from __future__ import annotations

import ctypes

import torch

from cs336_kernels.native.build import library

SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    totals: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v of one new token per row; query head h reads KV head h // (heads // kv_heads).

    Numbers become float32 when they are read; nothing is copied. What lies behind a row's end is never read.

    Args:
        q: [rows, heads, head_dim] contiguous, float32 or bfloat16, on a CPU.
        keys, values: [pages, block_size, kv_heads, head_dim] contiguous, like q.
        pages: [rows, width] int64 contiguous, where each row's blocks lie; entries behind a row's end may be anything.
        totals: [rows] int64 contiguous, positions of each row; 0 gives zeros.
        out: [rows, heads, head_dim] contiguous, to be written; None makes one.

    Raises:
        ValueError: a shape, dtype, device or stride is not as above.
        Unavailable: there is no compiler.
    """
    out = torch.empty_like(q) if out is None else out
    for name, t, like in (("q", q, 3), ("keys", keys, 4), ("values", values, 4), ("out", out, 3)):
        if t.dtype != q.dtype or t.dtype not in SUFFIX or t.dim() != like or not t.is_contiguous() or t.is_cuda:
            raise ValueError(f"{name} is {list(t.shape)} {t.dtype}, not {like} contiguous dimensions like q on a CPU")
    rows, heads, head_dim = q.shape
    if keys.shape != values.shape or keys.shape[3] != head_dim or heads % keys.shape[2] or out.shape != q.shape:
        raise ValueError(f"q {list(q.shape)}, keys {list(keys.shape)} and values {list(values.shape)} do not fit")
    for name, t, dims in (("pages", pages, 2), ("totals", totals, 1)):
        if t.dtype != torch.int64 or t.dim() != dims or len(t) != rows or not t.is_contiguous():
            raise ValueError(
                f"{name} is {list(t.shape)} {t.dtype}, not {dims} contiguous dimensions of int64 for {rows} rows"
            )
    function = getattr(library("attention"), f"paged_attention_{SUFFIX[q.dtype]}")
    function.argtypes, function.restype = [_POINTER] * 6 + [_NUMBER] * 6 + [ctypes.c_int], None
    function(
        q.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), pages.data_ptr(), totals.data_ptr(),
        rows, pages.shape[1], keys.shape[1], heads, keys.shape[2], head_dim, torch.get_num_threads(),
    )  # fmt: skip
    return out
