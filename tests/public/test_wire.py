"""Values on the wire: what goes in comes out, and hostile bytes give a `WireError` or a plain value."""

from __future__ import annotations

import math
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cs336_infer.course import wire

PLAIN = {type(None), bool, int, float, str, bytes, list, tuple, dict, np.ndarray, torch.Tensor}
NUMPY = st.sampled_from(wire._NUMPY).map(np.dtype)
ARRAYS = NUMPY.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_dims=4)))
TORCH = st.sampled_from(wire._TORCH).map(lambda name: getattr(torch, name))
TENSORS = st.builds(
    lambda dtype, shape: torch.randint(0, 2, shape).to(dtype), TORCH, hnp.array_shapes(min_dims=0, min_side=0)
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
INTS = st.integers(-(2**500), 2**500)
LEAVES = st.none() | st.booleans() | INTS | st.floats() | TEXT | st.binary() | ARRAYS | TENSORS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return struct.pack("<d", a) == struct.pack("<d", b) if isinstance(a, float) else a == b


def plain(value: Any) -> bool:
    if isinstance(value, np.generic):
        return type(value) is value.dtype.type
    children = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return type(value) in PLAIN and all(map(plain, children))


@settings(max_examples=300, deadline=None)
@given(VALUES)
def test_what_goes_in_comes_out(value: Any) -> None:
    assert same(wire.decode(wire.encode(value)), value)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300) | st.tuples(st.sampled_from(list(b"NTFIDSBLUMAGt")), st.binary()).map(
    lambda pair: bytes([pair[0]]) + pair[1]))  # fmt: skip
def test_any_bytes_give_a_plain_value_or_an_error(data: bytes) -> None:
    try:
        value = wire.decode(data)
    except wire.WireError as error:
        assert "\n" not in str(error)
    else:
        assert plain(value)


@settings(max_examples=500, deadline=None)
@given(VALUES.map(wire.encode), st.data())
def test_damaged_values_give_a_plain_value_or_an_error(good: bytes, data: st.DataObject) -> None:
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(bad)))
    for candidate in (bytes(bad), bytes(bad[:cut])):
        try:
            assert plain(wire.decode(candidate))
        except wire.WireError:
            continue


LARGE = struct.pack("<Q", 2**60)
HEAD = struct.pack("<Q", 7) + b"float32"


@pytest.mark.parametrize(
    "data",
    [
        b"S" + LARGE,
        b"B" + LARGE,
        b"L" + LARGE,
        b"M" + LARGE,
        b"I" + LARGE,
        b"A" + HEAD + b"\x01" + LARGE,
        b"t" + HEAD + b"\x02" + LARGE + LARGE,
        b"t" + HEAD + b"\x02" + LARGE + bytes(8),
        b"A" + HEAD + b"\x03" + LARGE + LARGE + bytes(8),
        b"A" + HEAD + b"\xff" + bytes(8 * 255),
        b"G" + HEAD + b"\x01" + struct.pack("<Q", 1) + bytes(4),
        b"A" + struct.pack("<Q", 1) + b"O" + b"\x00",
        (b"L" + struct.pack("<Q", 1)) * 10**5 + b"N",
        b"L" + struct.pack("<Q", 2 * 10**6) + b"N" * (2 * 10**6),
    ],
    ids=range(14),
)
def test_a_length_is_checked_before_memory_is_taken(data: bytes) -> None:
    tracemalloc.start()
    try:
        value = wire.decode(data)
    except wire.WireError:
        pass
    else:
        assert value.size == 0 if isinstance(value, np.ndarray) else value.numel() == 0
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < len(data) + 100 * wire.MAX_ITEMS


def test_what_does_not_travel() -> None:
    loop: list[Any] = []
    loop.append(loop)
    wide: Any = 0
    for _ in range(5):
        wide = [wide] * 99
    refused = [loop, wide, {1}, {1: 2}, object(), 1 << 1000, "\ud800", range(3), np.array([None]), np.array(["a"])]
    refused += [np.ones(2).view(np.matrix), np.ma.array([1]), torch.empty(2, device="meta"), torch.eye(2).to_sparse()]
    refused += [np.zeros(1, dtype=[("a", "i4")]), np.datetime64(1, "s"), bytes(100), np.zeros(100), torch.zeros(100)]
    refused += [type("Number", (float,), {})(1), type("Text", (str,), {})("a"), torch.zeros(1).expand(2**50)]
    for value in refused:
        with pytest.raises(wire.WireError):
            wire.encode(value, 90 if isinstance(value, bytes | np.ndarray | torch.Tensor) else wire.DEFAULT_LIMIT)
    with pytest.raises(wire.WireError, match="left over"):
        wire.decode(b"NN")
    with pytest.raises(wire.WireError, match="over the limit"):
        wire.decode(b"N" * 10, 5)


def test_awkward_arrays() -> None:
    grown = np.arange(24.0).reshape(4, 6)
    for array in (grown[::2, ::-1], grown.T, np.asfortranarray(grown), grown.astype(">f8"), np.broadcast_to(1.5, (3,))):
        back = wire.decode(wire.encode(array))
        assert np.array_equal(back, array) and back.dtype.isnative and back.flags.writeable
    tensor = torch.randn(3, 4)
    z = torch.randn(2, dtype=torch.complex64)
    for value in (tensor.T, tensor[:, ::2], tensor.clone().requires_grad_(), z.conj(), z.conj().imag):
        back = wire.decode(wire.encode(value))
        assert torch.equal(back, value.detach()) and not back.requires_grad
    assert type(wire.decode(wire.encode(torch.nn.Parameter(tensor)))) is torch.Tensor
    assert math.isnan(wire.decode(wire.encode(np.float64("nan"))))


def test_a_frame() -> None:
    message = wire.frame(b"n" * 16, 7, b"body")
    length, nonce, number = wire.FRAME.unpack(message[: wire.FRAME.size])
    assert (length, nonce, number) == (len(message) - 8, b"n" * 16, 7)
