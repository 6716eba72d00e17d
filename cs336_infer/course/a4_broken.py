"""Kernels of assignment 4 with a bug planted in each, as text, and how they are launched.

Lines count from the first line of the text, `import triton`, as `listing` prints them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cs336_infer.types import InferError

RESIDENT, SCHEDULES = 4, 20


@dataclass(frozen=True)
class Broken:
    """Attributes:
    text: a module with one kernel, which has the name of the entry. about: what it should do.
    launch: the grid, the arguments by name and the constants of a launch that shows the bug."""

    text: str
    about: str
    launch: Callable[[], tuple[tuple[int, ...], dict[str, Any], dict[str, int]]]


def _numbers(n: int) -> torch.Tensor:
    return torch.linspace(-1, 1, n)


def _flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


BROKEN: dict[str, Broken] = {
    "double": Broken(
        """import triton
import triton.language as tl


@triton.jit
def double(out, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(x + at, mask=at <= n, other=0.0)
    tl.store(out + at, 2 * numbers, mask=at < n)
""",
        "out = 2 x, of n numbers",
        lambda: ((3,), {"out": torch.empty(20), "x": _numbers(20), "n": 20}, {"BLOCK": 8}),
    ),
    "column_sums": Broken(
        """import triton
import triton.language as tl


@triton.jit
def column_sums(out, x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    row = tl.load(x + tl.program_id(0) * n + at, mask=inside, other=0.0)
    sums = tl.load(out + at, mask=inside, other=0.0)
    sums += row
    tl.store(out + at, sums, mask=inside)
""",
        "out, which begins with zeros, += the sums of the columns of x; a program for each row",
        lambda: ((4,), {"out": torch.zeros(5), "x": _numbers(20).view(4, 5), "n": 5}, {"BLOCK": 8}),
    ),
    "reversed_rows": Broken(
        """import triton
import triton.language as tl


@triton.jit
def reversed_rows(out, scratch, x, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    numbers = tl.load(x + row * n + at, mask=at < n, other=0.0)
    tl.store(scratch + row * BLOCK + at, numbers, mask=at < n)
    tl.debug_barrier()
    turned = tl.load(scratch + row * BLOCK + BLOCK - 1 - at, mask=at < n, other=0.0)
    tl.store(out + row * n + at, turned, mask=at < n)
""",
        "each row of x backwards, by way of a scratch row of BLOCK places",
        lambda: (
            (2,),
            {"out": torch.empty(2, 6), "scratch": torch.empty(2, 8), "x": _numbers(12).view(2, 6), "n": 6},
            {"BLOCK": 8},
        ),
    ),
    "after_the_first": Broken(
        """import triton
import triton.language as tl


@triton.jit
def after_the_first(out, flag, x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    program = tl.program_id(0)
    if program == 0:
        total = tl.sum(tl.load(x + at, mask=at < n, other=0.0), 0)
        tl.store(out, total)
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release")
    else:
        ready = 0
        while ready == 0:
            ready = tl.load(flag)
        ready = tl.atomic_add(flag, 0, sem="acquire")
        tl.debug_barrier()
        tl.store(out + program, tl.load(out) * program)
""",
        "out[p] = p * out[0], of all programs p > 0; program 0 computes out[0], the sum of x",
        lambda: ((3,), {"out": torch.empty(3), "flag": _flag(), "x": _numbers(6) + 2, "n": 6}, {"BLOCK": 8}),
    ),
    "all_arrive": Broken(
        """import triton
import triton.language as tl


@triton.jit
def all_arrive(out, count, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, at, mask=at < n)
    tl.debug_barrier()
    if tl.program_id(0) * BLOCK + BLOCK <= n:
        tl.atomic_add(count, 1, sem="acq_rel")
    arrived = tl.atomic_add(count, 0, sem="acquire")
    while arrived < tl.num_programs(0):
        arrived = tl.atomic_add(count, 0, sem="acquire")
""",
        "out[i] = i; nobody goes on before all have stored theirs",
        lambda: ((3,), {"out": torch.empty(20, dtype=torch.int32), "count": _flag(), "n": 20}, {"BLOCK": 8}),
    ),
    "row_maxima": Broken(
        """import triton
import triton.language as tl


@triton.jit
def row_maxima(out, x, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    numbers = tl.load(x + row * n + at, mask=at < n)
    largest = tl.max(numbers, 0)
    tl.store(out + row, largest)
""",
        "the largest number of each row of x",
        lambda: ((2,), {"out": torch.empty(2), "x": _numbers(12).view(2, 6), "n": 6}, {"BLOCK": 8}),
    ),
    "last_adds": Broken(
        """import triton
import triton.language as tl


@triton.jit
def last_adds(out, parts, count, x, n, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + program, tl.sum(tl.load(x + at, mask=at < n, other=0.0), 0))
    before = tl.atomic_add(count, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        tl.debug_barrier()
        p = tl.arange(0, PROGRAMS)
        mine = tl.load(parts + p, mask=p < tl.num_programs(0), other=0.0)
        tl.store(out, tl.sum(mine, 0))
""",
        "out[0] = the sum of x: each program stores its part, and the last to come adds them up",
        lambda: (
            (3,),
            {"out": torch.empty(1), "parts": torch.empty(3), "count": _flag(), "x": _numbers(20) + 2, "n": 20},
            {"BLOCK": 8, "PROGRAMS": 4},
        ),
    ),
}


def listing(name: str) -> str:
    """The kernel with a number before each line.

    Raises:
        InferError: there is none of that name.
    """
    if name not in BROKEN:
        raise InferError(f"no broken kernel is called {name!r}; there are {', '.join(BROKEN)}")
    one = BROKEN[name]
    return f"{name}: {one.about}\n" + "\n".join(f"{i:3}  {s}" for i, s in enumerate(one.text.splitlines(), 1))


def launch(name: str) -> None:
    """Launch it; inside `with sanitize(...) as report:` this is safe, and `report` says what is wrong."""
    from cs336_infer.course.kernel_runner import load

    listing(name)
    grid, arguments, constants = BROKEN[name].launch()
    load(BROKEN[name].text)[name][grid](**arguments, **constants)
