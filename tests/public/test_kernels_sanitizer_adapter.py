"""The sanitizer inside Triton: decorators, odd launches, and that everything is put back."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from cs336_kernels.launch import launch
from cs336_kernels.sanitizer import Kind, adapter, sanitize
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOOKS: list[int] = []


def prune(configs, named, **kwargs):
    """Blocks larger than the tensor are left out."""
    return [c for c in configs if c.kwargs["BLOCK"] <= named["n"]]


def configs(*blocks: int) -> list[triton.Config]:
    def hook(given):
        HOOKS.append(given["BLOCK"])

    return [triton.Config({"BLOCK": n}, num_warps=n // 2, pre_hook=hook) for n in blocks]


@triton.autotune(configs(16, 8, 4), key=["n"], prune_configs_by={"early_config_prune": prune})
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def tuned(x, y, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(y + i, tl.load(x + i) + BLOCK)
    else:
        tl.store(y + i, tl.load(x + i, mask=i < n) + BLOCK, mask=i < n)


@triton.heuristics({"BLOCK": lambda given: triton.next_power_of_2(given["n"])})
@triton.jit
def by_size(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) + BLOCK, mask=i < n)


@pytest.mark.parametrize(("n", "block"), [(24, 16), (8, 8), (13, 8), (5, 4)])
@pytest.mark.parametrize("sanitized", [True, False])
def test_autotune_takes_the_first_config_that_is_left(n, block, sanitized):
    x, y = torch.arange(float(n)), torch.full((n,), float("nan"))
    HOOKS.clear()
    if sanitized:
        with sanitize(schedules=2) as report:
            tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
        assert report.findings == [] and report.launches[0].grid == (triton.cdiv(n, block), 1, 1)
    else:
        launch(tuned, lambda meta: (triton.cdiv(n, meta["BLOCK"]),), x, y, n)
    assert torch.equal(y, x + block) and [block] == HOOKS


def test_heuristics():
    x, y = torch.arange(5.0), torch.zeros(5)
    with sanitize(schedules=2):
        by_size[(1,)](x, y, 5)
    assert torch.equal(y, x + 8)


@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n, other=0) + 1, mask=i < n)


def test_no_programs_and_no_elements():
    x, nothing = torch.zeros(8), torch.zeros(0)
    with sanitize() as report:
        add_one[(0,)](x, 8, BLOCK=8)
        add_one[(2,)](nothing, 0, BLOCK=8)
        add_one[(1,)](torch.zeros(3, 0, 2), 0, BLOCK=8)
    assert report.findings == [] and x.sum() == 0
    assert [launch.steps for launch in report.launches] == [0, 4, 2]
    with sanitize() as report:
        add_one[(1,)](nothing, 1, BLOCK=8)
    assert report.kinds() == {Kind.OUT_OF_BOUNDS}


def test_several_launches_see_each_other_in_their_order():
    x = torch.zeros(8)
    with sanitize(schedules=5) as report:
        for _ in range(3):
            add_one[(1,)](x, 8, BLOCK=8)
            x *= 2
    assert x.tolist() == [14.0] * 8
    assert [(launch.kernel, launch.schedules) for launch in report.launches] == [("add_one", 5)] * 3


def test_a_block_in_a_block_has_its_own_launches():
    x = torch.zeros(8)
    with sanitize(schedules=2) as outer:
        add_one[(1,)](x, 8, BLOCK=8)
        with sanitize(schedules=3) as inner:
            add_one[(1,)](x, 9, BLOCK=16)
        add_one[(1,)](x, 8, BLOCK=8)
    assert [launch.schedules for launch in outer.launches] == [2, 2] and outer.findings == []
    assert [launch.schedules for launch in inner.launches] == [3] and inner.kinds() == {Kind.OUT_OF_BOUNDS}
    assert x.tolist() == [3.0] * 8


def test_hooks_before_a_run(monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(add_one, "pre_run_hooks", [lambda x, n, **_: seen.append(n)])
    with sanitize(schedules=2):
        add_one[(1,)](torch.zeros(8), 8, BLOCK=8)
    assert seen == [8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bfloat16_is_rounded_to_the_nearest_even(dtype):
    """1 + 2**-8 lies in the middle and goes to 1; 1 + 3 * 2**-8 goes up to 1 + 2**-6."""
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(2.0**-20), float("inf"), float("nan")], dtype=dtype)
    y = torch.zeros(5, dtype=torch.bfloat16)
    with sanitize(schedules=2):
        convert[(1,)](x, y, 5, BLOCK=8)
    assert torch.equal(y.nan_to_num(7), x.to(torch.bfloat16).nan_to_num(7))


@triton.jit
def convert(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0).to(tl.float32).to(tl.bfloat16), mask=i < n)


@triton.jit
def bad(x, n, WHAT: tl.constexpr):
    tl.store(x + tl.program_id(0), 1)
    if tl.program_id(0) == 2:
        if WHAT == "assert":
            tl.device_assert(n == 0, "n is not zero")
        elif WHAT == "static":
            tl.static_assert(WHAT == 0, "never")
        else:
            tl.load(x + tl.arange(0, 8) + tl.arange(0, 4))


def patchable() -> list[object]:
    owners = (tl, tl.core, tl.math, tl.tensor, adapter._ti.InterpreterBuilder, JITFunction, adapter.Autotuner)
    return [v for owner in owners for _, v in sorted(vars(owner).items())]


def compiles() -> bool:
    source = ASTSource(add_one, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {"BLOCK": 16})
    return "ret" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@pytest.mark.parametrize("what", ["assert", "static", "shape"])
def test_what_a_kernel_raises_reaches_the_user_and_triton_is_as_before(what):
    before = patchable()
    with pytest.raises(Exception) as raised, sanitize(schedules=4, seed=8):
        bad[(4,)](torch.zeros(4), 3, WHAT=what)
    assert raised.value.__notes__ == ["in program (2, 0, 0) of kernel bad, seed 8"]
    assert all(a is b for a, b in zip(before, patchable(), strict=True))


def test_compiling_after_sanitizing():
    with sanitize(schedules=1):
        add_one[(1,)](torch.zeros(8), 8, BLOCK=8)
        assert compiles()
    assert compiles()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [((8,), {}, "missing a required argument: 'BLOCK'"), ((8, 8, 8), {}, "too many"), ((8, 8), {"SIZE": 1}, "SIZE")],
)
def test_arguments_that_do_not_fit(args, kwargs, message):
    with pytest.raises(TypeError, match=message), sanitize():
        add_one[(1,)](torch.zeros(8), *args, **kwargs)
    with pytest.raises(TypeError, match="1 to 3 sizes"), sanitize():
        add_one[(1, 1, 1, 1)](torch.zeros(8), 8, BLOCK=8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu():
    x, unwritten = torch.zeros(16, device="cuda"), torch.empty(16, device="cuda")
    with sanitize(schedules=3) as report:
        add_one[(2,)](x, 16, BLOCK=8)
    assert report.findings == [] and x.tolist() == [1.0] * 16
    with sanitize(schedules=3) as report:
        add_one[(2,)](unwritten, 16, BLOCK=8)
        add_one[(3,)](x, 17, BLOCK=8)
    assert report.kinds() == {Kind.UNINITIALISED_READ, Kind.OUT_OF_BOUNDS}
