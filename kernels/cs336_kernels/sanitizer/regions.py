"""The memory of one launch: copies of the tensors it got, each alone in an address space of its own.

Addresses are made up. Tensors lie so far apart that an address names the tensor it was computed from, however far an
index runs past the end: nothing lands by accident in a neighbour, and nothing can crash the process.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from cs336_kernels.sanitizer.allocations import unwritten

SPACING_BITS = 44
PAD = 64  # bytes behind the data, so that a view in any element type has whole elements


class Region:
    """All views of one storage that a launch got.

    Attributes:
        first: where in the storage it begins, in bytes. data: the bytes from there to the last element of any view.
        unit: bytes of a cell, what is tracked as one.
        allowed: [cells] bool, True where a view has an element; None when everywhere.
        fresh: [cells] bool, True where nobody has written yet.
    """

    def __init__(self, index: int, views: Mapping[str, torch.Tensor]) -> None:
        self.views = dict(views)
        self.base = (index + 1) << SPACING_BITS
        spans = {name: _span(view) for name, view in views.items()}
        self.first = min(begin for begin, _ in spans.values())
        last = max(end for _, end in spans.values())
        self.unit = min(view.element_size() for view in views.values())
        self._storage = next(iter(views.values())).untyped_storage()
        self._device = next(iter(views.values())).device
        self.size = last - self.first
        host = self._bytes().cpu().numpy()
        self.data = np.zeros(self.size + PAD, np.uint8)
        self.data[: self.size] = host
        self.cells = -(-self.size // self.unit)
        self._spans = {n: (b - self.first, e - self.first) for n, (b, e) in spans.items()}
        self.allowed = self._allowed()
        self.fresh = np.zeros(self.cells, bool)
        for name, view in views.items():
            begin, end = self._spans[name]
            new = unwritten(self.data[begin:end], view.dtype)
            self.fresh[begin // self.unit :][: len(new) * (view.element_size() // self.unit)] |= np.repeat(
                new, view.element_size() // self.unit
            )

    def _bytes(self) -> torch.Tensor:
        raw = torch.tensor([], dtype=torch.uint8, device=self._device).set_(self._storage)
        return raw[self.first : self.first + self.size]

    def _allowed(self) -> np.ndarray | None:
        if any(v.is_contiguous() and self._spans[n] == (0, self.size) for n, v in self.views.items()):
            return None
        allowed = np.zeros(self.cells, bool)
        for name in self.views:
            allowed[self.places(name)] = True
        return None if allowed.all() else allowed

    def places(self, name: str) -> np.ndarray | slice:
        """The cells of a view's elements."""
        view, (begin, end) = self.views[name], self._spans[name]
        if view.is_contiguous():
            return slice(begin // self.unit, end // self.unit)
        first = np.full((), begin, np.int64)
        for size, stride in zip(view.shape, view.stride(), strict=True):
            first = first[..., None] + np.arange(size) * (stride * view.element_size())
        return self.cells_at(first.reshape(-1), view.element_size())

    def holds(self, offsets: np.ndarray, itemsize: int) -> np.ndarray:
        """[n] bool: whether an element of `itemsize` bytes at each of these bytes belongs to a view."""
        inside = (offsets >= 0) & (offsets + itemsize <= self.size)
        if self.allowed is not None:
            inside &= self.allowed[np.clip(offsets // self.unit, 0, self.cells - 1)]
        return inside

    def cells_at(self, offsets: np.ndarray, itemsize: int) -> np.ndarray:
        """[n * cells of an element]: the cells that elements at these bytes cover."""
        cells = offsets // self.unit
        if itemsize > self.unit:
            cells = (cells[:, None] + np.arange(itemsize // self.unit)).reshape(-1)
        return cells

    def address(self, name: str) -> int:
        """Where this view begins."""
        return self.base + self._spans[name][0]

    def name(self, offset: int) -> str:
        """The argument whose memory this is, and the nearest one outside of all."""
        inside = [n for n, (b, e) in self._spans.items() if b <= offset < e]
        return inside[0] if inside else next(iter(self.views))

    def element(self, offset: int) -> str:
        """A place for a message: the argument's name with an index into its memory."""
        name = self.name(offset)
        return f"{name}[{(offset - self._spans[name][0]) // self.views[name].element_size()}]"

    def copy_back(self) -> None:
        """The tensors get what the kernel left."""
        if self.size:
            self._bytes().copy_(torch.from_numpy(self.data[: self.size]))


def _span(view: torch.Tensor) -> tuple[int, int]:
    """First byte of a view in its storage, and the one behind its last element."""
    begin = int(view.storage_offset()) * view.element_size()
    if view.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return begin, begin + (int(last) + 1) * view.element_size()


class Regions:
    """The tensors of a launch by name, and where an address points."""

    REACH = 1 << (SPACING_BITS - 1)  # bytes before and behind a tensor that are taken for an index that ran away

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        groups: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            key = storage.data_ptr() or -id(tensor)  # storages without memory share the address 0
            groups.setdefault(key, {})[name] = tensor
        self.all = [Region(i, views) for i, views in enumerate(groups.values())]
        self._of = {name: region for region in self.all for name in region.views}
        self._real = {key: region for key, region in zip(groups, self.all, strict=True) if key > 0}

    def address(self, name: str) -> int:
        return self._of[name].address(name)

    def of_real(self, address: int) -> int | None:
        """The made-up address of a real one that lies in a tensor of this launch, for pointers stored in memory."""
        for start, region in self._real.items():
            first = start + region.first
            if first <= address < first + region.size:
                return region.base + address - first
        return None

    def at(self, address: int) -> Region | None:
        index = (address >> SPACING_BITS) - 1
        low = (address & ((1 << SPACING_BITS) - 1)) >= self.REACH
        index += low  # far below a region's base is an index run backwards
        return self.all[index] if 0 <= index < len(self.all) else None

    def snapshot(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(r.data.copy(), r.fresh.copy()) for r in self.all]

    def restore(self, saved: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for region, (data, fresh) in zip(self.all, saved, strict=True):
            region.data[:], region.fresh[:] = data, fresh
