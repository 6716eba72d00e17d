"""New keys and values into their slots of paged memory (Kwon et al. 2023, PagedAttention)."""

from __future__ import annotations

import torch

from cs336_kernels.ops.checks import FLOATS, need_triton, same


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    path: str = "reference",
) -> None:
    """keys[page, offset] = k[i] and values[page, offset] = v[i], with page, offset = divmod(slots[i], block_size).

    Args:
        keys, values: [pages, block_size, kv_heads, head_dim], changed in place; pages at any stride, each contiguous.
            float32, float16 or bfloat16.
        k, v: [tokens, kv_heads, head_dim] of the same dtype; tokens at any stride, each contiguous.
        slots: [tokens] int64, distinct, 0 <= slot < pages * block_size.
        path: "reference" or "triton".

    Raises:
        ValueError: an unknown path; a wrong shape, dtype or stride; on a CPU also a slot outside of the pages. On a
            GPU, where looking would mean waiting for it, the kernel writes nothing for such a slot.
    """
    _check(keys, values, k, v, slots)
    if path == "reference":
        _reference(keys, values, k, v, slots)
        return
    need_triton("write_kv", path)
    from cs336_kernels.ops.triton import write_kv as kernel

    kernel.write_kv(keys, values, k, v, slots)


def _reference(keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    where = (slots // keys.shape[1], slots % keys.shape[1])
    keys.index_put_(where, k)
    values.index_put_(where, v)


def _check(keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    if keys.dim() != 4 or keys.dtype not in FLOATS:
        raise ValueError(
            f"keys is {list(keys.shape)} {keys.dtype}, not [pages, block_size, kv_heads, head_dim] of floats"
        )
    same("values", values, keys.shape, keys)
    same("k", k, (*k.shape[:1], *keys.shape[2:]), keys)
    same("v", v, k.shape, keys)
    for name, tensor in (("keys", keys), ("values", values), ("k", k), ("v", v)):
        if len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; only the first may be free")
    if slots.shape != k.shape[:1] or slots.dtype != torch.int64 or slots.device != k.device:
        raise ValueError(
            f"slots is {list(slots.shape)} {slots.dtype} on {slots.device}, not [{len(k)}] torch.int64 on {k.device}"
        )
    if not slots.is_contiguous():
        raise ValueError(f"slots has stride {slots.stride(0)}, not 1")
    room = keys.shape[0] * keys.shape[1]
    if len(slots) and not room:
        raise ValueError(f"keys is {list(keys.shape)}: there is no slot for {len(slots)} tokens")
    if slots.device.type == "cpu" and len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < room:
        raise ValueError(f"slots go from {int(slots.min())} to {int(slots.max())}; there are {room}")
