"""Timing that survives a noisy machine: repeat, interleave, compare pair by pair.

Clocks drift: a neighbour wakes up, the processor heats up, a cache fills. Timing all of A and then all of B gives
the drift to one of them. `interleave` runs A B, B A, A B, ... and `ratio` compares only calls of the same round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from cs336_infer.types import InvalidRequest, check_integer


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated calls of one function, in the order in which they were made.

    Raises:
        InvalidRequest: there are no samples, or one is negative or not finite.
    """

    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.samples:
            raise InvalidRequest("a timing needs at least one sample, not none")
        for s in self.samples:
            if not math.isfinite(s) or s < 0:
                raise InvalidRequest(f"a timing sample must be a finite number of seconds >= 0, not {s!r}")

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples)

    @property
    def min_s(self) -> float:
        return min(self.samples)

    @property
    def max_s(self) -> float:
        return max(self.samples)


@dataclass(frozen=True)
class Ratio:
    """How many times longer A took than B, over the rounds of one `interleave`."""

    median: float
    min: float
    max: float


def measure(
    fn: Callable[[], object], *, repeats: int = 5, warmup: int = 1, device: str | torch.device = "cpu"
) -> Timing:
    """Time `repeats` calls of `fn` in seconds, after `warmup` calls that are not counted.

    On a CUDA device the time is the GPU's, between two events on the current stream, and includes the gaps in
    which the GPU waits for the host.

    Raises:
        InvalidRequest: repeats < 1, warmup < 0, or a device whose clock is not known here.
    """
    return interleave({"fn": fn}, repeats=repeats, warmup=warmup, device=device)["fn"]


def interleave(
    fns: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warmup: int = 1,
    device: str | torch.device = "cpu",
) -> dict[str, Timing]:
    """Time several functions in turn, `repeats` rounds of one call each, so that drift hits all alike.

    Round r starts with function r modulo their number: two functions run A B, B A, A B, ... Warm-up rounds follow
    the same order and are not counted. Sample i of every timing comes from the same round.

    Raises:
        InvalidRequest: no functions, repeats < 1, warmup < 0, or a device whose clock is not known here.
    """
    check_integer("repeats", repeats, 1, None)
    check_integer("warmup", warmup, 0, None)
    if not fns:
        raise InvalidRequest("interleave needs at least one function, not none")
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device must be cpu or cuda, not {where}: its work cannot be timed here")
    names = list(fns)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(warmup + repeats):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            seconds = _one_call(fns[name], where)
            if round_ >= warmup:
                samples[name].append(seconds)
    return {name: Timing(tuple(s)) for name, s in samples.items()}


def ratio(a: Timing, b: Timing) -> Ratio:
    """Median, smallest and largest of a/b over rounds; above 1 means that `a` is the slower one.

    Raises:
        InvalidRequest: different numbers of samples, or a sample of `b` too short for the clock to see.
    """
    if len(a.samples) != len(b.samples):
        raise InvalidRequest(
            f"ratio compares round by round, so both timings need as many samples: {len(a.samples)} against"
            f" {len(b.samples)}"
        )
    if min(b.samples) == 0:
        raise InvalidRequest("ratio cannot divide by a sample of 0 s: time more work per call")
    pairs = [x / y for x, y in zip(a.samples, b.samples, strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))


def _one_call(fn: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        fn()
        return time.perf_counter() - start
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3
