"""Arguments of a launch, as the interpreted body of a kernel expects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as _ti
from triton.runtime.jit import TensorWrapper, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor


def pointer(tensor: Any, address: int) -> Any:
    """A kernel argument of the type of `tensor`, that points to `address`."""
    kind: Any = tl.str_to_ty(mangle_type(tensor), None)
    return tl.tensor(_ti.TensorHandle(np.array([address], dtype=np.uint64), kind), kind)


def value(argument: Any) -> Any:
    """Any other kernel argument, as the body of a kernel expects it."""
    return _ti._implicit_cvt(argument)


def tensors_in(thing: Any, name: str) -> dict[str, Any]:
    """The tensors of a kernel argument: itself, the base of a descriptor, or parts of a tuple, called `name[i]`."""
    if isinstance(thing, TensorWrapper):
        return {name: thing.base}  # type: ignore[dict-item]
    if hasattr(thing, "data_ptr"):
        return {name: thing}
    if isinstance(thing, TensorDescriptor):
        return {name: thing.base}
    if isinstance(thing, tuple):
        return {k: t for i, part in enumerate(thing) for k, t in tensors_in(part, f"{name}[{i}]").items()}
    return {}


def argument(thing: Any, name: str, address: Callable[[str, Any], int]) -> Any:
    """A kernel argument whose tensors lie where `address(name, tensor)` says; names as in `tensors_in`."""
    if hasattr(thing, "data_ptr"):
        return pointer(thing, address(name, thing))
    if isinstance(thing, TensorDescriptor):
        descriptor: Any = _ti.interpreter_semantic.make_tensor_descriptor(
            base=pointer(thing.base, address(name, thing.base)),
            shape=[value(size) for size in thing.shape],
            strides=[value(stride) for stride in thing.strides[:-1]] + [tl.constexpr(1)],
            block_shape=[tl.constexpr(size) for size in thing.block_shape],  # type: ignore[arg-type]
            padding_option=thing.padding,
        )
        descriptor.handle.round_f32_to_tf32 = getattr(thing, "round_f32_to_tf32", False)  # for Triton 3.9
        return descriptor
    if isinstance(thing, tuple):
        return _ti._tuple_create(thing, (argument(part, f"{name}[{i}]", address) for i, part in enumerate(thing)))
    return value(thing)
