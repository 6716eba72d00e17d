"""A Triton kernel run slowly, with a note of every load and store: which program, in which order, which elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from cs336_kernels.sanitizer import adapter
from cs336_kernels.sanitizer.arguments import argument


@dataclass(frozen=True)
class Access:
    """One load or store of one program.

    Attributes:
        program: number in the order in which programs ran. what: "load" or "store". tensor: the kernel's argument.
        lanes: for each lane the element, or None where the mask turned the lane off.
    """

    program: int
    what: str
    tensor: str
    lanes: tuple[int | None, ...]

    @property
    def elements(self) -> list[int]:
        """What was really touched."""
        return [at for at in self.lanes if at is not None]


def trace(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> list[Access]:
    """Run `kernel[grid](*args, **kwargs)` on contiguous CPU tensors, one program after the other.

    Returns:
        Every load and store, in order.

    Raises:
        IndexError: a lane that is on points outside of all tensors. NotImplementedError: the kernel uses atomics.
    """
    bound, constants = adapter.bind(kernel, args, kwargs)
    sizes = adapter.grid_of(grid, bound)
    memory = _Notes({name: given for name, given in bound.items() if isinstance(given, torch.Tensor)})
    function = adapter.body(kernel)
    with adapter.language(memory):
        converted = {
            name: given if name in constants else argument(given, name, lambda _, tensor: tensor.data_ptr())
            for name, given in bound.items()
        }
        for number, program in enumerate(adapter.programs_of(sizes)):
            memory.program = number
            adapter.enter(program, sizes)
            function(**converted)
    return memory.accesses


class _Notes:
    """The tensors of one launch as a kernel's memory (`adapter.Memory`), with a list of what was done to them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._bytes = {name: t.view(-1).view(torch.uint8).numpy() for name, t in tensors.items()}
        self._first = {name: t.data_ptr() for name, t in tensors.items()}
        self.accesses: list[Access] = []
        self.program = 0

    def load(
        self, at: np.ndarray, mask: np.ndarray, other: np.ndarray | None, dtype: np.dtype, volatile: bool
    ) -> np.ndarray:
        result = np.zeros(at.shape, dtype) if other is None else np.array(other, dtype)
        memory, on, places = self._note("load", at, mask, dtype)
        result.reshape(-1)[on] = memory[places]
        return result

    def store(self, at: np.ndarray, mask: np.ndarray, values: np.ndarray) -> None:
        memory, on, places = self._note("store", at, mask, values.dtype)
        memory[places] = values.reshape(-1)[on]

    def rmw(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a trace shows loads and stores; run a kernel with atomics under the sanitizer")

    cas = poll = rmw

    def barrier(self) -> None:
        """Programs run one after the other: there is nobody to wait for."""

    def _note(
        self, what: str, at: np.ndarray, mask: np.ndarray, dtype: np.dtype
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tensor's memory as elements, which lanes are on, and where in the tensor these point."""
        flat = at.reshape(-1).astype(np.int64)
        on = np.flatnonzero(np.broadcast_to(mask, at.shape))
        for name, memory in self._bytes.items():
            places = (flat[on] - self._first[name]) // dtype.itemsize
            if ((places >= 0) & (places < len(memory) // dtype.itemsize)).all():
                lanes: list[int | None] = [None] * len(flat)
                for lane, place in zip(on, places, strict=True):
                    lanes[lane] = int(place)
                self.accesses.append(Access(self.program, what, name, tuple(lanes)))
                return memory.view(dtype), on, places
        raise IndexError(f"program {self.program} {what}s outside of {', '.join(self._bytes)}")
