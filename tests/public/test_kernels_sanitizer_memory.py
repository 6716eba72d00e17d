"""Memory under the sanitizer: what is outside, what nobody wrote, and how many bytes move."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from cs336_kernels.sanitizer import Kind, Traffic, sanitize
from cs336_kernels.sanitizer.allocations import LARGEST


@triton.jit
def copy(x, y, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i + SHIFT, mask=i < n, other=0), mask=i < n)


def found(launch, **options) -> list[tuple[Kind, str | None, str]]:
    with sanitize(**{"schedules": 4} | options) as report:
        launch()
    return [(f.kind, f.tensor, f.message) for f in report.findings]


@pytest.mark.parametrize(("shift", "index"), [(1, 16), (-1, -1), (100_000, 100_000), (-(1 << 30), -(1 << 30))])
def test_an_index_outside_of_a_tensor(shift, index):
    ((kind, tensor, message),) = found(lambda: copy[(2,)](torch.zeros(16), torch.zeros(16), 16, SHIFT=shift, BLOCK=8))
    assert (kind, tensor) == (Kind.OUT_OF_BOUNDS, "x") and message.startswith(f"reads x[{index}], outside")


def test_a_slice_ends_where_it_ends_though_its_storage_goes_on():
    storage = torch.arange(32.0)
    for part, outside in ((storage[8:16], "x[8]"), (storage[24:], "x[8]")):
        ((kind, _, message),) = found(lambda part=part: copy[(1,)](part, torch.zeros(8), 8, SHIFT=1, BLOCK=8))
        assert kind is Kind.OUT_OF_BOUNDS and message.startswith(f"reads {outside}, ")
    ((_, _, message),) = found(lambda: copy[(1,)](storage[8:16], torch.zeros(8), 8, SHIFT=-1, BLOCK=8))
    assert message.startswith("reads x[-1], ")


@triton.jit
def rows(x, y, stride, width, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0) * stride + i
    tl.store(y + at, tl.load(x + at, mask=i < width, other=0) + 1, mask=i < width)


def test_the_gaps_of_a_view_are_outside():
    wide = torch.zeros(4, 8)
    assert found(lambda: rows[(4,)](wide[:, :5], wide[:, :5], 8, 5, BLOCK=8)) == []
    assert wide.tolist() == [[1.0] * 5 + [0.0] * 3] * 4
    kinds = found(lambda: rows[(4,)](wide[:, :5], wide[:, :5], 8, 6, BLOCK=8))
    assert {(kind, message.split(",")[0]) for kind, _, message in kinds} == {(Kind.OUT_OF_BOUNDS, "reads x[5]")}
    assert wide.tolist() == [[2.0] * 5 + [0.0] * 3] * 4, "nothing is written outside"


def test_a_view_may_be_reached_through_another_one_of_its_storage():
    """Two slices of one storage that meet: an index that leaves the first is inside of the second."""
    storage = torch.arange(16.0)
    y = torch.zeros(8)
    assert found(lambda: copy[(1,)](storage[:8], storage[8:], 8, SHIFT=0, BLOCK=8)) == []
    assert storage.tolist() == list(range(8)) * 2
    assert found(lambda: copy[(1,)](storage[4:12], y, 8, SHIFT=0, BLOCK=8)) == []
    assert y.tolist() == [4.0, 5, 6, 7, 0, 1, 2, 3]


def test_tensors_that_overlap_race():
    storage = torch.arange(24.0)
    ((kind, _, _),) = found(lambda: copy[(2,)](storage[:16], storage[8:], 16, SHIFT=0, BLOCK=8))
    assert kind is Kind.RACE
    same = torch.arange(16.0)
    assert found(lambda: copy[(2,)](same, same, 16, SHIFT=0, BLOCK=8)) == []
    ((kind, _, _),) = found(lambda: copy[(2,)](same, same, 12, SHIFT=4, BLOCK=8))
    assert kind is Kind.RACE


@triton.jit
def through_table(table, y):
    """Reads from addresses that are stored in memory."""
    p = tl.program_id(0)
    tl.store(y + p, tl.load(tl.load(table + p).to(tl.pointer_type(tl.float32)) + 1))


def test_addresses_stored_in_memory():
    a, b, y = torch.arange(4.0), torch.arange(10.0, 14.0), torch.zeros(2)
    table = torch.tensor([a.data_ptr(), b.data_ptr()])
    ((kind, tensor, message),) = found(lambda: through_table[(2,)](table, y))
    assert (kind, tensor) == (Kind.OUT_OF_BOUNDS, None) and "in none of the kernel's tensors" in message
    y = torch.arange(4.0)
    table = torch.tensor([y.data_ptr() + 4, y.data_ptr() + 8])
    assert found(lambda: through_table[(2,)](table, y)) == [] and y.tolist() == [2.0, 3, 2, 3]


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [torch.empty, lambda n, dtype: torch.zeros(1).new_empty(n, dtype=dtype)])
def test_memory_that_nobody_wrote(dtype, make):
    outside = make(16, dtype=dtype)
    with sanitize(schedules=1) as report:
        inside = torch.empty_like(outside)
        for launches, x in enumerate((outside, inside), start=1):
            copy[(2,)](x, torch.zeros(16, dtype=dtype), 16, SHIFT=0, BLOCK=8)
            assert [f.kind for f in report.findings] == [Kind.UNINITIALISED_READ]
            assert len(report.launches) == launches, "one line, one finding"
    assert "reads x[0], which nobody has written (8 places)" in report.findings[0].message


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_that_torch_or_a_kernel_wrote(dtype):
    x, y = torch.empty(24, dtype=dtype), torch.empty(24, dtype=dtype)
    x[:16] = 1
    assert found(lambda: copy[(2,)](x, y, 16, SHIFT=0, BLOCK=8)) == []
    assert found(lambda: copy[(2,)](y, torch.empty(16, dtype=dtype), 16, SHIFT=0, BLOCK=8)) == []
    for source in (x, y):
        ((kind, _, message),) = found(lambda source=source: copy[(2,)](source, x, 9, SHIFT=15, BLOCK=16))
        assert kind is Kind.UNINITIALISED_READ and message.startswith("reads x[16], ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.int8], ids=str)
def test_what_is_made_from_unwritten_memory_is_written(dtype):
    x, y, z = (torch.empty(16, dtype=dtype) for _ in range(3))
    with sanitize(schedules=2) as report:
        copy[(2,)](x, y, 16, SHIFT=0, BLOCK=8)
        assert len(report.findings) == 1
        report.findings.clear()
        copy[(2,)](y, z, 16, SHIFT=0, BLOCK=8)
    assert report.findings == []


def test_small_integers_count_by_groups_of_eight_bytes():
    x = torch.empty(16, dtype=torch.int8)
    x[9] = 0
    ((_, _, message),) = found(lambda: copy[(1,)](x, torch.zeros_like(x), 16, SHIFT=0, BLOCK=16))
    assert "(8 places)" in message


@triton.jit
def count_up(count):
    tl.atomic_add(count, 1, sem="relaxed")


def test_a_counter_that_nobody_set():
    ((kind, tensor, _),) = found(lambda: count_up[(2,)](torch.empty(1, dtype=torch.int32)))
    assert (kind, tensor) == (Kind.UNINITIALISED_READ, "count")


def test_large_memory_is_left_alone(monkeypatch):
    from cs336_kernels.sanitizer import allocations

    monkeypatch.setattr(allocations, "LARGEST", 63)
    x = torch.empty(16)
    assert LARGEST > 63 and not allocations.unwritten(x.view(torch.uint8).numpy(), torch.float32).all()


@triton.jit
def weighted(x, w, y, total, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0) * BLOCK + i
    value = tl.load(x + at, mask=at < n, other=0) * tl.load(w + i)
    tl.store(y + at, value, mask=at < n)
    tl.atomic_add(total + i % 2, value.to(tl.float32), mask=i < 6, sem="relaxed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=str)
def test_bytes_of_masks_repetitions_and_atomics(dtype):
    size = dtype.itemsize
    with sanitize(schedules=3) as report:
        weighted[(4,)](
            torch.ones(29, dtype=dtype), torch.ones(8, dtype=dtype), torch.zeros(29, dtype=dtype), torch.zeros(2), 29,
            BLOCK=8,
        )  # fmt: skip
    assert report.findings == []
    (launch,) = report.launches
    assert launch.traffic == {
        "x": Traffic(loaded=29 * size, unique_loaded=29 * size),
        "w": Traffic(loaded=32 * size, unique_loaded=8 * size),
        "y": Traffic(stored=29 * size, unique_stored=29 * size),
        "total": Traffic(atomic=4 * 6 * 4, unique_atomic=8),
    }
    assert report.total_bytes == (29 + 32 + 29) * size + 2 * 96
    assert report.unique_bytes == (29 + 8 + 29) * size + 2 * 8
    assert (launch.steps, launch.schedules) == (16, 3)
    assert f"unique bytes {report.unique_bytes:,}, all bytes {report.total_bytes:,}; minimum 100" in report.table(100)


@triton.jit
def step_copy(x, y, stride_x, stride_y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i * stride_y, tl.load(x + i * stride_x))


def test_bytes_of_views_of_one_storage():
    eight = Traffic(loaded=32, unique_loaded=32), Traffic(stored=32, unique_stored=32)
    storage = torch.zeros(24)
    for x, y, strides in (
        (storage[:8], storage[8:16], (1, 1)),
        (storage[::2][:8], storage[1::2][:8], (2, 2)),
        (storage[8:16], storage[:8], (1, 1)),
    ):
        with sanitize(schedules=1) as report:
            step_copy[(1,)](x, y, *strides, BLOCK=8)
        assert report.findings == []
        assert tuple(report.launches[0].traffic.values()) == eight
    with sanitize(schedules=1) as report:
        step_copy[(1,)](storage, storage, 1, 1, BLOCK=8)
    assert report.launches[0].traffic == {"x": Traffic(32, 32, 32, 32), "y": Traffic()}


@triton.jit
def bytes_of(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x.to(tl.pointer_type(tl.uint8)) + i).to(tl.int32))


def test_a_cast_pointer_reads_parts_of_elements():
    x, y = torch.tensor([1.0, -2.0]), torch.zeros(8, dtype=torch.int32)
    assert found(lambda: bytes_of[(1,)](x, y, BLOCK=8)) == []
    assert y.tolist() == list(x.view(torch.uint8))


def test_filling_fresh_memory_is_no_operation_of_torch():
    """Who counts operations, as the open task of a1 does, must not count the sanitizer's."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Listen():
        fresh = torch.empty(3)
    assert seen == ["aten.empty.memory_format"] and fresh.isnan().all()
