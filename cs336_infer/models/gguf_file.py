"""Read a GGUF file: its metadata, and its tensors one at a time from a memory map.

The `gguf` package dequantises the blocks. The header is parsed here, because `gguf.GGUFReader` keeps two array
objects per string: on a 49k-token vocabulary that costs 2.7 s and 160 MB, more than the weights may take on top
(docs/decisions.md). Layout: the GGUF specification of the ggml project, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from cs336_infer.types import ModelLoadError

SUPPORTED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ROWS_AT_ONCE = 4 << 20  # elements dequantised per chunk: bounds the temporary fp32 memory to 16 MB


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in torch order: the contiguous dimension last."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int  # from the start of the file
    nbytes: int


class GGUFFile:
    """A parsed GGUF file.

    Attributes:
        metadata: key -> int, float, bool, str or list of these.
        tensors: name -> GGUFTensor.

    Raises:
        ModelLoadError: the file is missing, empty, truncated, not GGUF, or holds an unsupported tensor type.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as f:
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelLoadError(f"{self.path}: the file is empty, not a GGUF model") from None
        except OSError as e:
            raise ModelLoadError(f"{self.path}: cannot open the model file: {e.strerror}") from None
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, RecursionError) as e:
            raise ModelLoadError(f"{self.path}: damaged or truncated GGUF header ({type(e).__name__})") from None

    def _parse(self) -> None:
        cursor = _Cursor(self._map, self.path)
        if self._map[:4] != b"GGUF":
            raise ModelLoadError(f"{self.path}: not a GGUF file (it starts with {self._map[:4]!r})")
        cursor.pos = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            hint = " (big-endian file)" if version in (2 << 24, 3 << 24) else ""
            raise ModelLoadError(f"{self.path}: GGUF version {version}{hint} is not supported, only 2 and 3")
        n_tensors, n_keys = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [self._tensor_info(cursor) for _ in range(n_tensors)]
        align = self.metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1:
            raise ModelLoadError(f"{self.path}: general.alignment must be a positive integer, not {align!r}")
        start = -(-cursor.pos // align) * align
        self.tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset, nbytes in infos:
            if start + offset + nbytes > len(self._map):
                raise ModelLoadError(
                    f"{self.path}: truncated: tensor {name} ends at byte {start + offset + nbytes}, "
                    f"the file has {len(self._map)}"
                )
            self.tensors[name] = GGUFTensor(name, shape, kind, start + offset, nbytes)

    def _tensor_info(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
        name = cursor.string()
        n_dims = cursor.scalar("I")
        if n_dims > 4:
            raise ModelLoadError(f"{self.path}: tensor {name} has {n_dims} dimensions, at most 4 exist")
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(n_dims)]))
        code, offset = cursor.scalar("I"), cursor.scalar("Q")
        kind = next((t for t in GGMLQuantizationType if t.value == code), None)
        if kind is None or kind.name not in SUPPORTED:
            found = kind.name if kind else f"number {code}"
            raise ModelLoadError(
                f"{self.path}: tensor {name} has type {found}, which is not supported (only {', '.join(SUPPORTED)})"
            )
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = int(np.prod(shape, dtype=object)) if shape else 1
        if not shape or shape[-1] % block:
            raise ModelLoadError(f"{self.path}: tensor {name}: shape {shape} does not fit blocks of {block}")
        return name, shape, kind, offset, elements // block * block_bytes

    def rows(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, fp32 array [rows, columns]) until the tensor is through; 1-D tensors have one column row.

        Pages already read are given back to the system, so that a load never holds the whole file.
        """
        t = self.tensors[name]
        columns = t.shape[-1]
        n_rows = int(np.prod(t.shape[:-1], dtype=np.int64))
        step = max(1, _ROWS_AT_ONCE // columns)
        row_bytes = t.nbytes // n_rows if n_rows else 0
        for first in range(0, n_rows, step):
            count = min(step, n_rows - first)
            begin = t.offset + first * row_bytes
            raw = np.frombuffer(self._map, np.uint8, count * row_bytes, begin).reshape(count, row_bytes)
            rows = np.asarray(dequantize(raw, t.type), np.float32).reshape(count, columns)
            yield first, rows if rows.flags.writeable else rows.copy()  # F32 comes back as a view of the map
            del raw, rows
            self._forget(begin, begin + count * row_bytes)

    def _forget(self, begin: int, end: int) -> None:
        if not hasattr(mmap, "MADV_DONTNEED"):  # macOS and Windows: the system drops the pages when it needs to
            return
        page = mmap.PAGESIZE
        first, last = -(-begin // page) * page, end // page * page
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


class _Cursor:
    """A bounds-checked reader of little-endian values."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer, self.path, self.pos = buffer, path, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.pos)
        self.pos += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self._need(length)
        text = self.buffer[self.pos : self.pos + length].decode("utf-8")
        self.pos += length
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in (_STRING, _ARRAY):
                self._need(count * (8 if item == _STRING else 12))
                return [self.value(item) for _ in range(count)]
            code = self._code(item)
            size = struct.calcsize("<" + code) * count
            self._need(size)
            values = list(struct.unpack_from(f"<{count}{code}", self.buffer, self.pos))
            self.pos += size
            return values
        return self.scalar(self._code(kind))

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path}: damaged GGUF header: value type {kind} does not exist")
        return _SCALARS[kind]

    def _need(self, nbytes: int) -> None:
        if nbytes > len(self.buffer) - self.pos:
            raise ModelLoadError(f"{self.path}: damaged or truncated GGUF header (wants {nbytes} bytes past the end)")
