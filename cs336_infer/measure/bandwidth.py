"""The two ceilings of this machine: how fast memory can be read and how fast matrices can be multiplied.

Both are found by running several of torch's own kernels in turn and keeping the one with the best median, because
which kernel comes nearest the hardware differs from machine to machine. The result names the winner and the rates of
the others.
"""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from cs336_infer.devices import find_device
from cs336_infer.measure.bench import interleave
from cs336_infer.measure.machine import available_bytes, last_level_cache_bytes
from cs336_infer.types import InvalidRequest, check_integer

PAGE = 4096  # bytes; buffers are whole pages
ROWS = PAGE // 4  # float32 numbers of a page, so that every buffer divides into this many rows
CPU_BUFFER, GPU_BUFFER = 512 * 2**20, 4 * 2**30  # a GPU reads 512 MiB in less time than ten launches take
PROBE_ROWS, SLOWEST = 32, 4  # a kernel this many times slower than the best on so many rows is not measured further
CACHES = 4  # a buffer of this many last-level caches is read from memory
CPU_DTYPES = (torch.float32, torch.bfloat16)  # most processors do float16 one element at a time: minutes, not seconds
GPU_DTYPES = (*CPU_DTYPES, torch.float16)


@dataclass(frozen=True)
class Bandwidth:
    """Read-only bytes per second, in the order in which they were sampled."""

    method: str  # the kernel that won
    size_bytes: int
    samples: tuple[float, ...]
    candidates: dict[str, float]  # kernel -> its median bytes per second
    cache_bytes: int | None  # last-level cache of the device, when known

    @property
    def bytes_per_s(self) -> float:
        """Median: what memory gives under the load of this moment. Use it with times of the same moment."""
        return statistics.median(self.samples)

    @property
    def best_bytes_per_s(self) -> float:
        """Best sample, the figure that STREAM reports: nearest to what an idle machine gives."""
        return max(self.samples)

    @property
    def in_cache(self) -> bool:
        """True when the buffer was so small that a cache may have served part of it."""
        return self.cache_bytes is not None and self.size_bytes < CACHES * self.cache_bytes


@dataclass(frozen=True)
class Compute:
    """Matrix-product FLOPs per second, in the order in which they were sampled."""

    method: str  # the kernel that won
    dtype: torch.dtype
    shape: tuple[int, int, int]  # M, K, N of the winner
    samples: tuple[float, ...]
    candidates: dict[str, float]  # kernel and shape -> its median FLOPs per second

    @property
    def flops_per_s(self) -> float:
        """Median, as in `Bandwidth.bytes_per_s`."""
        return statistics.median(self.samples)


def read_bandwidth(
    device: str | torch.device = "cpu",
    *,
    size_bytes: int | None = None,
    repeats: int = 7,
    threads: int | None = None,
) -> Bandwidth:
    """Measure how fast `device` reads a buffer that does not fit in its caches.

    On a CPU the buffer asks for huge pages where the system has them: address translation costs a reader of small
    pages up to a tenth.

    Args:
        device: "cpu" or a CUDA device.
        size_bytes: buffer, rounded down to whole pages. By default 512 MiB (4 GiB on a GPU) or four last-level
            caches, whichever is more, but at most an eighth of the free memory.
        repeats: rounds over all kernels.
        threads: CPU threads; by default as many as torch uses now.

    Raises:
        InvalidRequest: a size below a page or above the free memory, repeats or threads below 1, threads together
            with a GPU, or a device that is not here.
    """
    where = find_device(device)
    cache, free = _cache_and_free(where)
    if size_bytes is None:
        smallest = GPU_BUFFER if where.type == "cuda" else CPU_BUFFER
        size_bytes = max(PAGE, min(max(smallest, CACHES * (cache or 0)), free // 8))
    check_integer("size_bytes", size_bytes, PAGE, free)
    with _threads(threads, where):
        buffer = filled_buffer(size_bytes // PAGE * PAGE, where)
        floats, words = buffer.view(torch.float32), buffer.view(torch.int64)
        kernels: dict[str, Callable[[], object]] = {
            "sum of float32": floats.sum,
            "sum of float32 by rows": lambda: floats.view(ROWS, -1).sum(1),
            "sum of int64": words.sum,
            "amax of float32": floats.amax,
        }
        rates = _rates(kernels, {name: buffer.numel() for name in kernels}, repeats, where)
    winner = _winner(rates)
    medians = {name: statistics.median(r) for name, r in rates.items()}
    return Bandwidth(winner, buffer.numel(), rates[winner], medians, cache)


def matmul_rate(
    dtype: torch.dtype, device: str | torch.device = "cpu", *, n: int | None = None, repeats: int = 5
) -> Compute:
    """Measure the best rate of matrix products [M, n] x [n, n], with M = 512 (a prompt) and M = n.

    Kernels: torch.mm, F.linear (weights as [out, in]) and, on a CPU with oneDNN, a product with weights packed for
    it beforehand, as an engine can store them. On a GPU, float32 obeys torch's TF32 setting.

    Args:
        dtype: float32 or bfloat16, and float16 on a GPU; accumulation is the kernel's own.
        device: "cpu" or a CUDA device.
        n: size of the square weights, by default 2048 (8192 on a GPU).
        repeats: rounds over all kernels.

    Raises:
        InvalidRequest: another dtype, n or repeats below 1, or a device that is not here.
    """
    where = find_device(device)
    allowed = GPU_DTYPES if where.type == "cuda" else CPU_DTYPES
    if dtype not in allowed:
        raise InvalidRequest(f"dtype on {where} must be one of {', '.join(map(str, allowed))}, not {dtype}")
    size = (8192 if where.type == "cuda" else 2048) if n is None else n
    check_integer("n", size, 1, None)
    weight = torch.randn(size, size, device=where).to(dtype)
    kernels: dict[str, Callable[[], object]] = {}
    shapes: dict[str, tuple[int, int, int]] = {}
    able = _able(_products(torch.randn(PROBE_ROWS, size, device=where).to(dtype), weight), where)
    for m in sorted({512, size}):
        for kind, fn in _products(torch.randn(m, size, device=where).to(dtype), weight).items():
            if kind not in able:
                continue
            name = f"{kind}, {m}x{size}x{size}"
            kernels[name], shapes[name] = fn, (m, size, size)
    work = {name: 2 * m * k * n_ for name, (m, k, n_) in shapes.items()}
    with torch.inference_mode():
        rates = _rates(kernels, work, repeats, where)
    winner = _winner(rates)
    medians = {name: statistics.median(r) for name, r in rates.items()}
    return Compute(winner, dtype, shapes[winner], rates[winner], medians)


def filled_buffer(size_bytes: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """A uint8 buffer whose every page was written, so that each has memory of its own.

    Fresh pages all show one shared page of zeros, which stays in the cache: reading them measures nothing.
    """
    if torch.device(device).type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel built without huge pages gives small ones
            pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    return torch.empty(size_bytes, dtype=torch.uint8, device=device).fill_(1)


def _products(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], object]]:
    transposed = weight.t().contiguous()
    kernels: dict[str, Callable[[], object]] = {
        "torch.mm": lambda: torch.mm(x, transposed),
        "F.linear": lambda: linear(x, weight),
    }
    if x.device.type == "cpu" and torch.backends.mkldnn.is_available():
        onednn = torch.ops.mkldnn
        try:
            packed = onednn._reorder_linear_weight(weight, x.shape[0])
            onednn._linear_pointwise(x, packed, None, "none", [], "")
        except (AttributeError, RuntimeError):  # private names of torch 2.13
            return kernels
        kernels["oneDNN with packed weights"] = lambda: onednn._linear_pointwise(x, packed, None, "none", [], "")
    return kernels


def _able(kernels: dict[str, Callable[[], object]], device: torch.device) -> set[str]:
    """The kernels worth measuring: where a processor has no bfloat16, torch.mm is 10 to 100 times slower than the
    others, and one large product takes minutes."""
    with torch.inference_mode():
        seconds = {name: t.min_s for name, t in interleave(kernels, repeats=1, device=device).items()}
    return {name for name, s in seconds.items() if s <= SLOWEST * min(seconds.values())}


def _rates(
    kernels: dict[str, Callable[[], object]], work: Mapping[str, int], repeats: int, device: torch.device
) -> dict[str, tuple[float, ...]]:
    timings = interleave(kernels, repeats=repeats, device=device)
    return {name: tuple(work[name] / max(s, 1e-9) for s in t.samples) for name, t in timings.items()}


def _winner(rates: dict[str, tuple[float, ...]]) -> str:
    return max(rates, key=lambda name: statistics.median(rates[name]))


def _cache_and_free(device: torch.device) -> tuple[int | None, int]:
    if device.type == "cpu":
        return last_level_cache_bytes(), available_bytes()
    return torch.cuda.get_device_properties(device).L2_cache_size, torch.cuda.mem_get_info(device)[0]


@contextmanager
def _threads(threads: int | None, device: torch.device) -> Iterator[None]:
    if threads is None:
        yield
        return
    check_integer("threads", threads, 1, None)
    if device.type != "cpu":
        raise InvalidRequest(f"threads={threads} has no meaning on {device}: leave it out")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
