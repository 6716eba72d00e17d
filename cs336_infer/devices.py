"""Which devices there are, and what they multiply in hardware."""

from __future__ import annotations

import ctypes
import sys

import torch

from cs336_infer.types import InvalidRequest

BF16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")  # of x86 and Arm processors, as torch names them
HUGE_PAGE = 2 << 20  # bytes
MADV_HUGEPAGE = 14  # of Linux


def find_device(device: str | torch.device) -> torch.device:
    """The device of this name: "cpu", "cuda", "cuda:N", or "auto", a GPU if there is one.

    Raises:
        InvalidRequest: no such kind of device, or it is not in this machine.
    """
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidRequest(f"unknown device {device!r} (cpu, cuda, cuda:N or auto)") from None
    if found.type not in ("cpu", "cuda") or (found.type == "cpu" and found.index not in (None, 0)):
        raise InvalidRequest(f"device {str(device)!r} is not supported (cpu, cuda, cuda:N or auto)")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(f"device {str(device)!r} is not here: torch sees {torch.cuda.device_count()} CUDA GPUs")
    return found


def bf16_is_native(device: torch.device) -> bool:
    """Whether this device multiplies bfloat16 in hardware."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(feature) for feature in BF16_FEATURES)


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask Linux to back a large tensor on a CPU with pages of 2 MiB, before it is first written.

    Whoever reads it in pieces far apart then misses the translation of addresses less often. It is advice: where the
    system has none to give, or is no Linux, nothing happens.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < HUGE_PAGE or not sys.platform.startswith("linux"):
        return
    first = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = (tensor.data_ptr() + tensor.nbytes - first) // HUGE_PAGE * HUGE_PAGE
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), MADV_HUGEPAGE)
