"""KV memory in pages, as the attention ops see it: what is checked, and the attention that their references share.

Token i of a row is in slot i % block_size of page tables[row, i // block_size] (Kwon et al. 2023, PagedAttention).
Nothing else may be read: slots behind a row's end, other pages and table entries behind the last needed one hold
anything at all.
"""

from __future__ import annotations

import math

import torch

from cs336_kernels.ops.checks import FLOATS, need_triton

MOST_HEAD_DIM = 256  # a wider head does not fit the registers of the kernels
INTEGERS = (torch.int32, torch.int64)


def check_path(op: str, path: str, dtype: torch.dtype) -> None:
    """Raises ValueError for a path that is unknown or not installed, and for numbers that it does not know."""
    if path == "reference":
        return
    need_triton(op, path)
    if dtype not in FLOATS:
        raise ValueError(f"{op}: the triton path knows float32, float16 and bfloat16, not {dtype}")


def check_pages(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor) -> None:
    """Raises ValueError if these are not queries and pages that belong together.

    Args:
        q: [n, heads, head_dim], stride of n free. keys, values: [pages, block_size, kv_heads, head_dim], stride of
            pages free. tables: [rows, max_blocks] int32 or int64, stride of rows free.
    """
    if q.dim() != 3:
        raise ValueError(f"q is {list(q.shape)}, not [tokens, heads, head_dim]")
    if keys.dim() != 4:
        raise ValueError(f"keys are {list(keys.shape)}, not [pages, block_size, kv_heads, head_dim]")
    if values.shape != keys.shape:
        raise ValueError(f"values are {list(values.shape)}, not {list(keys.shape)} like the keys")
    heads, head_dim = q.shape[1:]
    if keys.shape[3] != head_dim or not 1 <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(
            f"head_dim is {head_dim} in q and {keys.shape[3]} in keys, not one size of 1 to {MOST_HEAD_DIM}"
        )
    if heads < 1 or keys.shape[2] < 1 or heads % keys.shape[2]:
        raise ValueError(f"{heads} query heads are not a multiple of {keys.shape[2]} KV heads")
    if tables.dim() != 2:
        raise ValueError(f"tables are {list(tables.shape)}, not [rows, max_blocks]")
    check_integers("tables", tables)
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} are {tensor.dtype}, not {q.dtype} like q")
    for name, tensor in (("q", q), ("keys", keys), ("values", values), ("tables", tables)):
        if tensor.device != q.device:
            raise ValueError(f"{name} are on {tensor.device}, not on {q.device} like q")
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name} have strides {tensor.stride()}; only the first dimension's may be free")


def check_integers(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for anything but int32 and int64."""
    if tensor.dtype not in INTEGERS:
        raise ValueError(f"{name} are {tensor.dtype}, not int32 or int64")


def check_list(name: str, tensor: torch.Tensor, size: int, q: torch.Tensor) -> None:
    """Raises ValueError if `tensor` is not a contiguous list of `size` integers on the device of q."""
    check_integers(name, tensor)
    if tensor.shape != (size,) or not tensor.is_contiguous():
        raise ValueError(f"{name} are {list(tensor.shape)} with strides {tensor.stride()}, not contiguous [{size}]")
    if tensor.device != q.device:
        raise ValueError(f"{name} are on {tensor.device}, not on {q.device} like q")


def check_room(name: str, lengths: torch.Tensor, tables: torch.Tensor, block_size: int) -> None:
    """Raises ValueError if a row is longer than its table. Only on a CPU: to read a number of a GPU is to wait."""
    if lengths.device.type == "cpu" and len(lengths):
        room = tables.shape[1] * block_size
        if int(lengths.min()) < 0 or int(lengths.max()) > room:
            raise ValueError(
                f"{name} go from {int(lengths.min())} to {int(lengths.max())}; "
                f"a row of tables has room for 0 to {room} positions"
            )


def gather(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` positions of a row, [length, kv_heads, head_dim], from pages as in `check_pages`."""
    needed = table[: math.ceil(length / pages.shape[1])].to(torch.int64)
    return pages[needed].flatten(0, 1)[:length]


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T / sqrt(head_dim)) v; query head h reads KV head h // (heads / kv_heads).

    Scores, softmax and sums are float32, or float64 for float64. Weights are rounded to the dtype of v before the
    second product, as the tensor cores of a GPU want them; the result is not rounded.

    Args:
        q: [new, heads, head_dim]. k, v: [total, kv_heads, head_dim]. hidden: [new, total] bool, True where a query may
            not look. A query that may look nowhere gives zeros.

    Returns:
        out: [new, heads, head_dim]. lse: [new, heads], the natural logarithm of the sum of exp(scores), -inf for
            nothing. Both float32 or float64.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,thd->nht", q.to(work), k.to(work)) * q.shape[2] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().masked_fill(scores == -torch.inf, 0)
    return torch.einsum("nht,thd->nhd", weights.to(v.dtype).to(work), v.to(work)), lse
