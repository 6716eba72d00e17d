"""Whatever can be launched can be sanitized, and computes what the stock interpreter computes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from cs336_kernels.sanitizer import adapter, sanitize
from cs336_kernels.sanitizer.arguments import tensors_in
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def scale(value, factor):
    return value * factor


@triton.jit(noinline=True)
def row_softmax(row):
    weights = tl.exp(row - tl.max(row, axis=0))
    return weights / tl.sum(weights, axis=0)


@triton.jit
def softmax(x, y, width, factor, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0) * width + i
    row = tl.load(x + at, mask=i < width, other=-float("inf")).to(tl.float32)
    tl.store(y + at, row_softmax(scale(row, factor)).to(y.dtype.element_ty), mask=i < width)


@triton.jit
def matmul(a, b, c, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(left, right, input_precision="ieee"))


@triton.jit
def first_larger(a, i, b, j):
    take = (a > b) | ((a == b) & (i < j))
    return tl.where(take, a, b), tl.where(take, i, j)


@triton.jit
def decay(a, x, b, y):
    return a * b, x * b + y


@triton.jit
def reductions(x, best, where, scanned, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    top, at = tl.reduce((value, i), 0, first_larger)
    tl.store(best, top)
    tl.store(where, at)
    _, state = tl.associative_scan((tl.full((BLOCK,), 0.5, tl.float32), value), 0, decay)
    tl.store(scanned + i, state + tl.cumsum(value, 0))


@triton.jit
def ids(y, FACTOR: tl.constexpr):
    x0, x1, x2 = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (x0 * tl.num_programs(1) + x1) * tl.num_programs(2) + x2
    tl.store(y + at, x0 * FACTOR * FACTOR + x1 * FACTOR + x2)


@triton.jit
def in_tuple(tensors, sizes, nothing, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    if nothing is None:
        tl.store(tensors[1] + i, tl.load(tensors[0] + i, mask=i < sizes[0], other=0) + 1, mask=i < sizes[0])


@triton.jit
def collatz(x, steps):
    """Loops and branches on what is loaded."""
    n = tl.load(x + tl.program_id(0))
    count = 0
    while n > 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        count += 1
    tl.store(steps + tl.program_id(0), count)


@triton.jit
def small_integers(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    tl.store(y + i, (value.to(tl.int32) * 3 // 2 >> 1).to(y.dtype.element_ty))


@triton.jit
def described(x, y, M: tl.constexpr, N: tl.constexpr):
    left = tl.make_tensor_descriptor(x, (M, N), (N, 1), (2, N))
    y.store([tl.program_id(0) * 2, 0], left.load([tl.program_id(0) * 2, 0]) * 2)


@triton.jit
def block_pointers(x, y, M: tl.constexpr, N: tl.constexpr):
    source = tl.make_block_ptr(x, (M, N), (N, 1), (tl.program_id(0) * 2, 0), (2, 4), (1, 0))
    target = tl.make_block_ptr(y, (M, N), (N, 1), (tl.program_id(0) * 2, 0), (2, 4), (1, 0))
    tl.store(target, tl.load(source, boundary_check=(0, 1), padding_option="zero") + 1, boundary_check=(0, 1))


class Case(NamedTuple):
    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]


def cases() -> dict[str, Case]:
    """Fresh arguments each time; the last tensors are the results."""
    draw = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    def nan(*shape: int, dtype=torch.float32) -> torch.Tensor:
        return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)

    halves = rand(16, 32).half(), rand(32, 16).half()
    int8 = torch.arange(-128, 128, dtype=torch.int8)
    found = {
        "softmax": Case(softmax, (3,), (rand(3, 13), nan(3, 13), 13, 0.5), {"BLOCK": 16}),
        "softmax-fp16": Case(softmax, lambda meta: (5,), (rand(5, 9).half(), nan(5, 9).half(), 9, 2.0), {"BLOCK": 16}),
        "matmul": Case(matmul, (1,), (rand(16, 32), rand(32, 16), nan(16, 16)), {"M": 16, "K": 32, "N": 16}),
        "matmul-fp16": Case(matmul, (1,), (*halves, nan(16, 16)), {"M": 16, "K": 32, "N": 16}),
        "reductions": Case(reductions, (1,), (rand(16), nan(1), nan(1, dtype=torch.int64), nan(16)), {"BLOCK": 16}),
        "ids-2d": Case(ids, (3, 4), (nan(12),), {"FACTOR": 10}),
        "ids-3d": Case(ids, (2, 3, 4), (nan(24),), {"FACTOR": 10}),
        "tuple": Case(in_tuple, (1,), ((rand(7), nan(7)), (7, (1, 2)), None), {"BLOCK": 8}),
        "collatz": Case(collatz, (5,), (torch.tensor([1, 2, 7, 9, 27]), nan(5, dtype=torch.int64)), {}),
        "int8": Case(small_integers, (1,), (int8, nan(256, dtype=torch.int8)), {"BLOCK": 256}),
    }
    if hasattr(tl, "make_tensor_descriptor"):
        x, y = rand(4, 8), nan(4, 8)
        found["descriptors"] = Case(described, (2,), (x, TensorDescriptor.from_tensor(y, [2, 8])), {"M": 4, "N": 8})
    if hasattr(tl, "make_block_ptr") and hasattr(adapter._ti.InterpreterBuilder, "create_make_block_ptr"):
        found["block pointers"] = Case(block_pointers, (3,), (rand(5, 3), nan(5, 3)), {"M": 5, "N": 3})
    return found


def results(case: Case) -> list[torch.Tensor]:
    return [t for i, argument in enumerate(case.args) for t in tensors_in(argument, str(i)).values()]


NAMES = list(cases())


def sanitized(name: str) -> list[torch.Tensor]:
    case = cases()[name]
    with sanitize(schedules=3) as report:
        case.kernel[case.grid](*case.args, **case.constants, num_warps=2)
    assert report.findings == [] and report.launches[0].schedules == 3
    return results(case)


def serial(name: str) -> list[torch.Tensor]:
    case = cases()[name]
    adapter.run(case.kernel, case.grid, *case.args, **case.constants)
    return results(case)


def same_bits(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(left, right, strict=True))


@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("name", NAMES)
def test_sanitized_and_serial_results_have_the_same_bits(name):
    assert same_bits(sanitized(name), serial(name))
    assert not any(t.isnan().any() for t in serial(name) if t.is_floating_point())


def test_results_are_right():
    x, y = serial("softmax-fp16")
    assert (y - (x.float() * 2).softmax(-1)).abs().max() <= 2**-11
    a, b, c = serial("matmul")
    assert (c - a @ b).abs().max() <= 1e-5
    x, best, where, scanned = serial("reductions")
    state, expected = torch.zeros(()), []
    for i, value in enumerate(x):
        state = state * 0.5 + value
        expected.append(state + x[: i + 1].sum())
    assert (best.item(), where.item()) == (x.max().item(), x.argmax().item())
    assert (scanned - torch.stack(expected)).abs().max() <= 1e-5
    assert serial("ids-2d")[0].tolist() == [100.0 * i + 10 * j for i in range(3) for j in range(4)]
    assert serial("ids-3d")[0][-5:].tolist() == [113.0, 120, 121, 122, 123]
    assert serial("collatz")[1].tolist() == [0, 1, 16, 19, 111]
    x, y = serial("tuple")
    assert torch.equal(y, x + 1)


AS_STOCK = """
import torch, test_kernels_sanitizer_launch as launch
for name in launch.NAMES:
    case = launch.cases()[name]
    assert type(case.kernel).__name__ == "InterpretedFunction"
    case.kernel[case.grid](*case.args, **case.constants)
    stock = launch.results(case)
    assert launch.same_bits(stock, launch.serial(name)), name
    assert launch.same_bits(stock, launch.sanitized(name)), name
print(len(launch.NAMES), "alike")
"""


def test_the_stock_interpreter_computes_the_same():
    """In a process of its own: there `@triton.jit` makes other functions, which can be sanitized too."""
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", AS_STOCK], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, f"{len(NAMES)} alike\n"), ran.stderr
