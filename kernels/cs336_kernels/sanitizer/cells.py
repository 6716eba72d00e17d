"""Numbers of any type in the bytes of a region, and what atomic operations make of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cs336_kernels.sanitizer.regions import Region


def read(region: Region, offsets: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """offsets: [n] bytes, whatever their alignment. Returns [n] of `dtype`."""
    size = dtype.itemsize
    if size == 1 or not (offsets % size).any():
        whole = region.data[: len(region.data) // size * size].view(dtype)
        return whole[offsets // size]
    return region.data[offsets[:, None] + np.arange(size)].view(dtype)[:, 0]


def write(region: Region, offsets: np.ndarray, values: np.ndarray) -> bool:
    """Of equal offsets the last value stays. Returns whether any byte is another one now."""
    size = values.dtype.itemsize
    if not (offsets % size).any():
        kind = np.dtype(f"u{size}")
        whole = region.data[: len(region.data) // size * size].view(kind)
        new, places = np.ascontiguousarray(values).view(kind), offsets // size
    else:
        whole, places = region.data, offsets[:, None] + np.arange(size)
        new = np.ascontiguousarray(values).view(np.uint8).reshape(-1, size)
    if np.array_equal(whole[places], new):
        return False
    whole[places] = new
    return True


def combine(op: str, old: np.ndarray, value: np.ndarray) -> np.ndarray:
    """What an atomic operation leaves; bfloat16 numbers come as uint16."""
    if op == "fadd" and old.dtype == np.uint16:
        wide = (old.astype(np.uint32) << 16).view(np.float32) + (value.astype(np.uint32) << 16).view(np.float32)
        bits = wide.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    functions: dict[str, Any] = {
        "add": np.add, "fadd": np.add, "min": np.minimum, "umin": np.minimum, "max": np.maximum, "umax": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        "xchg": lambda _, v: v, "store": lambda _, v: v, "load": lambda old, _: old,
    }  # fmt: skip
    return functions[op](old, value)


def anything(shape: tuple[int, ...], dtype: np.dtype, garbage: float) -> np.ndarray:
    """What a lane holds that loaded nothing."""
    if dtype.kind == "f":
        return np.full(shape, garbage, dtype)
    if dtype == np.uint16:  # bfloat16
        return np.full(shape, np.array(garbage, np.float32).view(np.uint32) >> 16, dtype)
    return np.full(shape, 85 if np.isnan(garbage) else 0, dtype)


def other_bits(values: np.ndarray, fresh: np.ndarray) -> np.ndarray:
    """Numbers read from memory, of which some was never written: these lose the pattern that says so, because what is
    made from them is not unwritten as well.

    Args:
        values: [n]. fresh: [n * cells of an element] bool. Returns: [n], changed in place.
    """
    if fresh.any():
        values.view(f"u{values.dtype.itemsize}")[fresh.reshape(len(values), -1).any(1)] ^= 1
    return values
