"""Times on an NVIDIA GPU: calls in a CUDA graph, and the bandwidth that a plain copy reaches."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import triton
from cs336_kernels.compiled import compile_for
from cs336_kernels.record import Variant

REPLAYS = 20
CALLS = 20  # in a graph, at least
COPY_BYTES = 1 << 30

Call = Callable[[], object]


class Clock:
    """The GPU that torch uses now.

    Attributes:
        device: for tensors. capability: 80, 90, ... l2_bytes: its cache.
        bandwidth: bytes per second that a copy reads and writes.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self._properties = torch.cuda.get_device_properties(self.device)
        self.capability = 10 * self._properties.major + self._properties.minor
        self.l2_bytes: int = self._properties.L2_cache_size
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.bandwidth = 2 * COPY_BYTES / (_median(lambda: target.copy_(source), 1, REPLAYS) / 1e6)

    def compile(self, variants: Iterable[Variant]) -> None:
        """Fill Triton's cache on all cores, where a launch would compile on one. What does not compile is left out: its
        launch says why."""

        def one(variant: Variant) -> None:
            with suppress(Exception):  # the compiler's own errors have no common base
                compile_for(variant, self.capability)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(one, variants))

    def microseconds(self, calls: Sequence[Call]) -> tuple[float, str]:
        """Median time of one of these calls, and how it was taken.

        "graph": all calls in a CUDA graph, one after the other, without the host. "events": one by one with their
        launches, where a call waits for the GPU and so cannot be in a graph.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls[:2]:
                call()
        torch.cuda.synchronize()
        graph, often = torch.cuda.CUDAGraph(), -(-CALLS // len(calls))
        try:
            with torch.cuda.graph(graph, stream=side):
                for call in list(calls) * often:
                    call()
        except RuntimeError:  # a synchronisation inside
            torch.cuda.synchronize()
            return _median(lambda: [call() for call in calls], len(calls), REPLAYS // 4), "events"
        return _median(graph.replay, len(calls) * often, REPLAYS), "graph"

    def release(self) -> None:
        """Give memory of dead tensors back."""
        torch.cuda.empty_cache()

    def hardware(self) -> dict[str, Any]:
        p = self._properties
        sizes = {"multiprocessors": p.multi_processor_count, "memory_bytes": p.total_memory, "l2_bytes": self.l2_bytes}
        versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
        return {"gpu": p.name, "capability": f"{p.major}.{p.minor}", **sizes, **versions}


def _median(run: Call, calls: int, repeats: int) -> float:
    """Microseconds of one call, of `calls` in a run."""
    run()
    samples = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(samples)
