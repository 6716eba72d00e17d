"""Values as bytes, between the grader and a student's process. Nothing here can run code: no pickle, no names, no
calls.

A value is one tag byte and its content. Only exact types travel: None, bool, int, float, str, bytes, list, tuple,
dict with str keys, numpy arrays and numbers, torch tensors on the CPU. A subclass is refused, because what it
overrides would be lost or, worse, kept.

A frame is `length (8 bytes) | nonce (16) | question number (8) | value`, little-endian; the length counts what
follows it.

Decoding checks every length against the bytes that are there before it allocates. What it builds is at most the
size of the input plus about 100 bytes for each of at most `MAX_ITEMS` items.

This file also travels into the sandbox: it imports the standard library, and numpy or torch only when a value needs
them.
"""

import math
import struct
import sys
from typing import Any

MAX_DEPTH = 32
MAX_ITEMS = 1_000_000
MAX_INT_BYTES = 64
MAX_DIMS = 32
NONCE_BYTES = 16
FRAME = struct.Struct(f"<Q{NONCE_BYTES}sQ")
FRAME_REST = FRAME.size - 8
DEFAULT_LIMIT = 64 * 2**20

_LENGTH = struct.Struct("<Q")
_FLOAT = struct.Struct("<d")
_BOTH = ["bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64", "complex64", "complex128"]
_NUMPY = (*_BOTH, "uint16", "uint32", "uint64")
_TORCH = (*_BOTH, "bfloat16")


class WireError(ValueError):
    """A value that does not travel, or bytes that are not a value. The message is one line."""


def encode(value: Any, limit: int = DEFAULT_LIMIT) -> bytes:
    """The bytes of `value`. `WireError` when a type, the depth, the number of items or the size (bytes) is not
    allowed."""
    writer = _Writer(limit)
    writer.value(value, 0)
    return b"".join(writer.parts)


def decode(data: bytes, limit: int = DEFAULT_LIMIT) -> Any:
    """The value in `data`, which may come from anybody. `WireError` for whatever `encode` would not have written."""
    if len(data) > limit:
        raise WireError(f"{len(data)} bytes are over the limit of {limit}")
    reader = _Reader(data)
    value = reader.value(0)
    if reader.at != len(data):
        raise WireError(f"{len(data) - reader.at} bytes are left over after the value")
    return value


def frame(nonce: bytes, number: int, body: bytes) -> bytes:
    """One message on the pipe."""
    return FRAME.pack(FRAME_REST + len(body), nonce, number) + body


class _Writer:
    def __init__(self, limit: int) -> None:
        self.parts: list[bytes] = []
        self.left = limit
        self.limit = limit
        self.items = 0

    def put(self, data: bytes) -> None:
        self.room(len(data))
        self.parts.append(data)

    def room(self, size: int) -> None:
        """Takes `size` bytes off what is left."""
        self.left -= size
        if self.left < 0:
            raise WireError(f"an answer larger than {self.limit} bytes")

    def sized(self, tag: bytes, data: bytes) -> None:
        self.put(tag + _LENGTH.pack(len(data)))
        self.put(data)

    def text(self, tag: bytes, value: str) -> None:
        try:
            self.sized(tag, value.encode())
        except UnicodeEncodeError:
            raise WireError("a str with half a surrogate pair") from None

    def value(self, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise WireError(f"a value nested deeper than {MAX_DEPTH} levels")
        self.items += 1
        if self.items > MAX_ITEMS:
            raise WireError(f"a value with more than {MAX_ITEMS} items")
        kind = type(value)
        if value is None:
            self.put(b"N")
        elif kind is bool:
            self.put(b"T" if value else b"F")
        elif kind is int:
            size = value.bit_length() // 8 + 1
            if size > MAX_INT_BYTES:
                raise WireError(f"an int of {size} bytes")
            self.sized(b"I", value.to_bytes(size, "little", signed=True))
        elif kind is float:
            self.put(b"D" + _FLOAT.pack(value))
        elif kind is str:
            self.text(b"S", value)
        elif kind is bytes:
            self.sized(b"B", value)
        elif kind is list or kind is tuple:
            self.put((b"L" if kind is list else b"U") + _LENGTH.pack(len(value)))
            for item in value:
                self.value(item, depth + 1)
        elif kind is dict:
            self.put(b"M" + _LENGTH.pack(len(value)))
            for key, item in value.items():
                if type(key) is not str:
                    raise WireError(f"a dict with a key of type {type(key).__name__}")
                self.text(b"S", key)
                self.value(item, depth + 1)
        elif not (self.numpy(value, kind) or self.torch(value, kind)):
            raise WireError(f"a {type_name(kind)}")

    def array(self, tag: bytes, dtype: str, shape: tuple[int, ...], size: int) -> None:
        """The head of an array. Asks for the room of its content first, so that a huge one is refused before it is
        copied."""
        self.room(size)
        self.left += size
        if len(shape) > MAX_DIMS:
            raise WireError(f"an array of {len(shape)} dimensions")
        self.text(tag, dtype)
        self.put(struct.pack(f"<B{len(shape)}Q", len(shape), *shape))

    def numpy(self, value: Any, kind: type) -> bool:
        np = sys.modules.get("numpy")
        if np is None or not (kind is np.ndarray or (isinstance(value, np.generic) and kind is value.dtype.type)):
            return False
        if value.dtype.name not in _NUMPY:
            raise WireError(f"a numpy array of dtype {value.dtype.name[:40]}")
        self.array(b"A" if kind is np.ndarray else b"G", value.dtype.name, value.shape, value.nbytes)
        self.put(np.asarray(value, dtype=value.dtype.newbyteorder("<")).tobytes())
        return True

    def torch(self, value: Any, kind: type) -> bool:
        torch = sys.modules.get("torch")
        if torch is None or not (kind is torch.Tensor or kind is torch.nn.Parameter):
            return False
        dtype = str(value.dtype).removeprefix("torch.")
        if value.device.type != "cpu" or value.layout is not torch.strided:
            raise WireError(f"a tensor on device {value.device.type} with layout {str(value.layout).split('.')[-1]}")
        if dtype not in _TORCH:
            raise WireError(f"a tensor of dtype {dtype}")
        self.array(b"t", dtype, tuple(value.shape), value.numel() * value.element_size())
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        self.put(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        return True


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.items = 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise WireError(f"a length of {size} bytes where {len(self.data) - self.at} are left")
        self.at += size
        return self.data[self.at - size : self.at]

    def length(self) -> int:
        return _LENGTH.unpack(self.take(8))[0]

    def text(self) -> str:
        try:
            return self.take(self.length()).decode()
        except UnicodeDecodeError:
            raise WireError("a str that is not UTF-8") from None

    def count(self, each: int) -> int:
        """A number of items, each of which takes at least `each` bytes."""
        count = self.length()
        if count * each > len(self.data) - self.at:
            raise WireError(f"{count} items where {len(self.data) - self.at} bytes are left")
        return count

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise WireError(f"nested deeper than {MAX_DEPTH} levels")
        self.items += 1
        if self.items > MAX_ITEMS:
            raise WireError(f"more than {MAX_ITEMS} items")
        tag = self.take(1)
        if tag in (b"N", b"T", b"F"):
            return {b"N": None, b"T": True, b"F": False}[tag]
        if tag == b"I":
            size = self.length()
            if not 0 < size <= MAX_INT_BYTES:
                raise WireError(f"an int of {size} bytes")
            return int.from_bytes(self.take(size), "little", signed=True)
        if tag == b"D":
            return _FLOAT.unpack(self.take(8))[0]
        if tag == b"S":
            return self.text()
        if tag == b"B":
            return self.take(self.length())
        if tag in (b"L", b"U"):
            items = [self.value(depth + 1) for _ in range(self.count(1))]
            return items if tag == b"L" else tuple(items)
        if tag == b"M":
            return self.mapping(depth)
        if tag in (b"A", b"G", b"t"):
            return self.array(tag)
        raise WireError(f"an unknown tag {tag!r}")

    def mapping(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for _ in range(self.count(10)):
            if self.take(1) != b"S":
                raise WireError("a dict key that is not a str")
            key = self.text()
            pairs[key] = self.value(depth + 1)
        return pairs

    def array(self, tag: bytes) -> Any:
        dtype = self.text()
        if dtype not in (_TORCH if tag == b"t" else _NUMPY):
            raise WireError(f"an array of dtype {dtype[:40]!r}")
        dims = self.take(1)[0]
        if dims > MAX_DIMS or (tag == b"G" and dims):
            raise WireError(f"an array of {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", self.take(8 * dims))
        if max(shape, default=0) > len(self.data) and 0 not in shape:
            raise WireError(f"a shape {shape} larger than the message")
        size = math.prod(shape) * _item_bytes(dtype)
        raw = bytearray(self.take(size))
        if dtype == "bool" and raw.translate(None, b"\0\1"):
            raise WireError("a bool that is neither 0 nor 1")
        try:
            return _torch_array(dtype, shape, raw) if tag == b"t" else _numpy_array(tag, dtype, shape, raw)
        except (ValueError, TypeError, OverflowError, RuntimeError):
            raise WireError(f"a shape {shape} that no array can have") from None


def type_name(kind: type) -> str:
    """`module.Name` of a type that cannot travel, on one line."""
    module = str(getattr(kind, "__module__", "?"))
    name = str(getattr(kind, "__qualname__", "?"))
    return " ".join((name if module == "builtins" else f"{module}.{name}").split())[:100]


def _item_bytes(dtype: str) -> int:
    if dtype == "bool":
        return 1
    return int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8


def _numpy_array(tag: bytes, dtype: str, shape: tuple[int, ...], raw: bytearray) -> Any:
    import numpy as np

    array = np.frombuffer(raw, dtype=np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False).reshape(shape)
    return array[()] if tag == b"G" else array


def _torch_array(dtype: str, shape: tuple[int, ...], raw: bytearray) -> Any:
    import torch

    kind = getattr(torch, dtype)
    return torch.frombuffer(raw, dtype=kind).reshape(shape) if raw else torch.empty(shape, dtype=kind)
