"""What an op asks the compiler for: its launches, written down in place of being run."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction, mangle_type

from cs336_kernels.launch import recording
from cs336_kernels.sanitizer import adapter

ALIGNMENT = 16  # bytes of an address, or a divisor of an integer: what Triton tells the compiler about an argument


@dataclass(frozen=True)
class Variant:
    """One kernel as the compiler gets it. Two launches with equal variants run the same binary.

    Attributes:
        kernel: the `@triton.jit` function.
        signature: (parameter, type) in order; "constexpr" for constants.
        constants: (parameter, value). divisible: parameters known to be divisible by `ALIGNMENT`.
        options: launch options such as num_warps.
    """

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that the machine code has."""
        return [name for name, kind in self.signature if kind != "constexpr"]

    @property
    def fingerprint(self) -> str:
        """12 hexadecimal digits of all that decides the binary: the code of the kernel and of its helpers, comments and
        layout left out, and the fields of this object."""
        fields = (_code_of(self.kernel, {}), self.signature, self.constants, self.divisible, self.options)
        return hashlib.sha256(repr(fields).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Launch:
    """A launch that was recorded: what to compile, how many programs, and how large its tensors are in bytes."""

    variant: Variant
    grid: tuple[int, int, int]
    tensor_bytes: dict[str, int] = field(hash=False)


def record(call: Callable[[], object], capability: int = 90) -> list[Launch]:
    """The launches that `call()` would make on a GPU of this compute capability.

    Its tensors may be on a CPU and hold nothing.
    """
    launches: list[Launch] = []

    def handler(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        bound, constants = adapter.bind(kernel, args, kwargs)
        options = {k: v for k, v in kwargs.items() if k not in bound}
        sizes = {n: a.numel() * a.element_size() for n, a in bound.items() if isinstance(a, torch.Tensor)}
        launches.append(Launch(_variant(kernel, bound, constants, options), adapter.grid_of(grid, bound), sizes))

    with recording(handler, capability):
        call()
    return launches


def _code_of(kernel: Any, known: dict[str, str]) -> dict[str, str]:
    """Name -> code, of a `@triton.jit` function and the `@triton.jit` functions and constants that it names."""
    function = kernel.fn
    known[function.__qualname__] = ast.dump(ast.parse(kernel.src))
    for name in function.__code__.co_names:
        named = function.__globals__.get(name)
        if isinstance(named, tl.constexpr):
            known[name] = repr(named)
        elif isinstance(named, JITFunction) and named.fn.__qualname__ not in known:
            _code_of(named, known)
    return known


_compiled_forms: dict[Any, Any] = {}


def _variant(kernel: Any, bound: dict[str, Any], constants: set[str], options: dict[str, Any]) -> Variant:
    """Specialise as Triton does: an integer 1 and None become constants, divisibility by 16 is told to the compiler."""
    if not isinstance(kernel, JITFunction):  # made in a process that interprets
        kernel = _compiled_forms.setdefault(kernel.fn, JITFunction(kernel.fn))
    signature, values, divisible = [], [], []
    for parameter in kernel.params:
        name, argument = parameter.name, bound[parameter.name]
        free = not parameter.do_not_specialize
        whole = isinstance(argument, int) and not isinstance(argument, bool)
        if name in constants or argument is None or (whole and argument == 1 and free):
            signature.append((name, "constexpr"))
            values.append((name, argument))
            continue
        signature.append((name, parameter.annotation_type or mangle_type(argument)))
        if isinstance(argument, torch.Tensor) or (whole and free):
            number = argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
            aligned = number % ALIGNMENT == 0 and not parameter.do_not_specialize_on_alignment
            if free and aligned:
                divisible.append(name)
    return Variant(kernel, tuple(signature), tuple(values), tuple(divisible), tuple(sorted(options.items())))
