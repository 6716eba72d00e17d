"""Fresh memory that says so: what `torch.empty` and its kin return is filled with a pattern no computation makes.

The pattern is a NaN with a payload in every floating-point format, so that a result made from it is seen at once, and a
number nobody uses in every integer format. An element that still holds it at a launch was never written.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

PATTERN = 0x7FD3  # of every two bytes: a NaN as float16, bfloat16, float32 and float64
LARGEST = 64 << 20  # bytes; larger memory is left alone, since filling it would make it resident

_ALLOCATORS: list[tuple[Any, str]] = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a fresh tensor's memory with the pattern; returns it.

    No operation of torch is used on a CPU: who counts or traces operations sees none that the program did not make.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor
    with torch._C.DisableTorchFunction():
        dense = tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda") and not tensor.is_quantized
        storage = tensor.untyped_storage() if dense else None
        if storage is None or not 0 < storage.nbytes() <= LARGEST:
            return tensor
        if tensor.device.type == "cpu":
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()))
            even = len(memory) // 2 * 2
            memory[:even].view(np.uint16)[:] = PATTERN
            memory[even:] = PATTERN & 0xFF
        else:
            raw = torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(storage)
            with torch.no_grad():
                raw[: len(raw) // 2 * 2].view(torch.int16).fill_(PATTERN)
    return tensor


def _filled(allocate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        fresh = allocate(*args, **kwargs)
        if kwargs.get("out") is None and isinstance(fresh, torch.Tensor):
            poison(fresh)
        return fresh

    wrapper.poisons = True  # type: ignore[attr-defined]
    return wrapper


def watch() -> None:
    """From now on fresh memory of this process carries the pattern. Calling it again changes nothing."""
    for owner, name in _ALLOCATORS:
        if not hasattr(getattr(owner, name), "poisons"):
            setattr(owner, name, _filled(getattr(owner, name)))


def unwritten(data: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Which elements hold nothing but the pattern.

    Integers of one or two bytes take all values: of them only whole aligned groups of eight bytes count as unwritten.

    Args:
        data: [n * itemsize] uint8. Returns: [n] bool.
    """
    n = len(data) // dtype.itemsize
    pattern = np.full(4, PATTERN, np.uint16).view(np.uint8)
    if dtype.itemsize == 1 or dtype == torch.int16 or dtype == torch.uint16:
        whole = len(data) // 8
        groups = (data[: whole * 8].reshape(whole, 8) == pattern).all(1)
        result = np.zeros(n, bool)
        result[: whole * 8 // dtype.itemsize] = np.repeat(groups, 8 // dtype.itemsize)
        return result
    if dtype.itemsize == 2:
        return data.view(np.uint16) == PATTERN
    kind = np.dtype(f"u{min(dtype.itemsize, 8)}")
    equal = data[: n * dtype.itemsize].view(kind) == pattern[: kind.itemsize].view(kind)[0]
    return equal if dtype.itemsize <= 8 else equal.reshape(n, -1).all(1)
