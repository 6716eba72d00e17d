"""What touches the insides of Triton, with `arguments.py`: how its interpreter is entered, and its memory is replaced.

Triton interprets a kernel by running its Python body while `triton.language` is patched to compute with numpy. The
stock entry runs programs one after the other over real memory, only in processes started with TRITON_INTERPRET=1. This
file enters by another door: any `@triton.jit` function, in any process, with the memory operations going to an object
of ours. Written against triton 3.6.0, 3.7.1 and 3.9.0.

What differs from the stock interpreter: rounding of float32 to bfloat16 is to nearest even, as on a GPU (the stock one
truncates); integers that overflow wrap around, as on a GPU (the stock one raises); the language is patched once a
launch and not once a call of a helper, and everything is put back. With a memory of ours, `tl.device_assert` checks.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter as _ti
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from cs336_kernels.sanitizer.arguments import argument

LAUNCH_OPTIONS = {
    *("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_cooperative_grid", "launch_pdl", "enable_fp_fusion"),
    *("debug", "warmup", "extern_libs", "cluster_dims", "instrumentation_mode", "stream", "device"),
}
"""Keywords of a launch that say how to compile and start; to an interpreter they mean nothing."""

_SEMANTICS = {
    _ti._ir.MEM_SEMANTIC.ACQUIRE: "acquire",
    _ti._ir.MEM_SEMANTIC.RELEASE: "release",
    _ti._ir.MEM_SEMANTIC.RELAXED: "relaxed",
    _ti._ir.MEM_SEMANTIC.ACQUIRE_RELEASE: "acq_rel",
}
_SCOPES = {
    _ti._ir.MEM_SYNC_SCOPE.CTA: "cta",
    _ti._ir.MEM_SYNC_SCOPE.GPU: "gpu",
    _ti._ir.MEM_SYNC_SCOPE.SYSTEM: "sys",
}
_OPS = {getattr(_ti._ir.ATOMIC_OP, name.upper()): name for name in
        ("add", "fadd", "min", "umin", "max", "umax", "and", "or", "xor", "xchg")}  # fmt: skip


class Memory(Protocol):
    """What a kernel's memory operations act on. Addresses are uint64, all arrays of one shape."""

    def load(
        self, at: np.ndarray, mask: np.ndarray, other: np.ndarray | None, dtype: np.dtype, volatile: bool
    ) -> np.ndarray: ...
    def store(self, at: np.ndarray, mask: np.ndarray, values: np.ndarray) -> None: ...
    def rmw(
        self, op: str, at: np.ndarray, mask: np.ndarray, values: np.ndarray, sem: str, scope: str
    ) -> np.ndarray: ...
    def cas(self, at: np.ndarray, compare: np.ndarray, values: np.ndarray, sem: str, scope: str) -> np.ndarray: ...
    def poll(self, at: np.ndarray, wanted: np.ndarray, may_give_up: bool, sem: str, scope: str) -> np.ndarray: ...
    def barrier(self) -> None: ...


def is_kernel(thing: object) -> bool:
    """Whether this is a `@triton.jit` function, compiled or interpreted."""
    return isinstance(thing, JITFunction | _ti.InterpretedFunction)


def body(kernel: Any) -> Callable[..., Any]:
    """The Python function that computes what the kernel does, for use inside `language`."""
    interpreted = kernel if isinstance(kernel, _ti.InterpretedFunction) else _ti.InterpretedFunction(kernel.fn)
    return interpreted.rewrite()


def _call_helper(self: Any, *args: Any, **kwargs: Any) -> Any:
    return body(self)(*args, **kwargs)


def _cast(builder: Any, src: Any, dst_type: Any, stock: Callable[..., Any]) -> Any:
    """Conversions that the stock interpreter rounds differently from a GPU."""
    source, target = src.dtype.scalar, dst_type.scalar
    if source == tl.float32 and target == tl.bfloat16:
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
        return _ti.TensorHandle(np.where(np.isnan(src.data), np.uint16(0x7FC0), rounded), target)
    if source == tl.bfloat16 and target == tl.float32:
        return _ti.TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), target)
    return stock(builder, src, dst_type)


@contextmanager
def language(memory: Memory | None = None) -> Iterator[None]:
    """Inside, bodies of kernels can be called; their memory operations go to `memory`, or with None to real memory."""
    scope = _ti._LangPatchScope()
    builder = _ti.InterpreterBuilder
    everything = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    patched = _ti._patch_lang(everything)
    try:
        for kind in (JITFunction, _ti.InterpretedFunction):
            scope.set_attr(kind, "__call__", _call_helper)
        options = dataclasses.replace(
            _ti.interpreter_builder.options, sanitize_overflow=False, debug=memory is not None
        )
        scope.set_attr(_ti.interpreter_builder, "options", options)
        scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())  # 3.6's fails with numpy 2.4
        stock = builder.cast_impl
        scope.set_attr(builder, "cast_impl", lambda self, src, dst: _cast(self, src, dst, stock))
        if memory is not None:
            for name, method in _methods(memory).items():
                scope.set_attr(builder, name, method)
        with np.errstate(all="ignore"):
            yield
    finally:
        scope.restore()
        patched.restore()


def _methods(memory: Memory) -> dict[str, Callable[..., Any]]:
    """Methods of Triton's builder that hand memory operations to `memory`."""

    def wide(value: np.ndarray, like: np.ndarray) -> np.ndarray:
        return value if value.shape == like.shape else np.broadcast_to(value, like.shape)

    def load(self: Any, ptrs: Any, mask: Any, other: Any, *cache_and_volatile: Any, **options: Any) -> Any:
        kind = ptrs.get_element_ty()
        given = None if other is None else wide(other.data, ptrs.data)
        volatile = options["is_volatile"] if "is_volatile" in options else cache_and_volatile[-1]
        dtype = _ti._get_np_dtype(kind)
        return _ti.TensorHandle(memory.load(ptrs.data, _bits(mask), given, dtype, bool(volatile)), kind)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *_: Any, **__: Any) -> None:
        kind = _ti._get_np_dtype(ptrs.get_element_ty())
        values = wide(value.data, ptrs.data)
        memory.store(ptrs.data, _bits(mask), values if values.dtype == kind else values.astype(kind))

    def rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        values = wide(val.data, ptr.data)
        old = memory.rmw(_OPS[op], ptr.data, wide(_bits(mask), ptr.data), values, _SEMANTICS[sem], _SCOPES[scope])
        return _ti.TensorHandle(old, val.dtype.scalar)

    def cas(self: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        values, compare = wide(val.data, ptr.data), wide(cmp.data, ptr.data)
        old = memory.cas(ptr.data, compare, values, _SEMANTICS[sem], _SCOPES[scope])
        return _ti.TensorHandle(old, cmp.dtype.scalar)

    def barrier(self: Any, *_: Any, **__: Any) -> None:
        memory.barrier()

    def atomic_load(self: Any, ptr: Any, mask: Any, sem: Any, scope: Any) -> Any:
        kind = ptr.get_element_ty()
        nothing = np.zeros(ptr.data.shape, _ti._get_np_dtype(kind))
        where = wide(_bits(mask), ptr.data)
        return _ti.TensorHandle(memory.rmw("load", ptr.data, where, nothing, _SEMANTICS[sem], _SCOPES[scope]), kind)

    def atomic_store(self: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> None:
        values, where = wide(val.data, ptr.data), wide(_bits(mask), ptr.data)
        memory.rmw("store", ptr.data, where, values, _SEMANTICS[sem], _SCOPES[scope])

    def atomic_poll(self: Any, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any) -> Any:
        wanted, may_give_up = wide(expected.data, ptr.data), isinstance(timeout_ns, _ti.TensorHandle)
        met = memory.poll(ptr.data, wanted, may_give_up, _SEMANTICS[sem], _SCOPES[scope])
        return _ti.TensorHandle(met, tl.int1)

    methods = {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": rmw,
        "create_atomic_cas": cas,
        "create_barrier": barrier,
        "create_atomic_load": atomic_load,
        "create_atomic_store": atomic_store,
        "create_atomic_poll": atomic_poll,
    }
    return {name: method for name, method in methods.items() if hasattr(_ti.InterpreterBuilder, name)}


def _bits(mask: Any) -> np.ndarray:
    return mask if isinstance(mask, np.ndarray) else mask.data  # block pointers make bare arrays


def bind(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Arguments of a launch by name, and which of them are constants of compilation.

    Raises:
        TypeError: an argument is missing, given twice, or neither a parameter nor a launch option.
    """
    signature = inspect.signature(kernel.fn)
    given = {k: v for k, v in kwargs.items() if k in signature.parameters or k not in LAUNCH_OPTIONS}
    bound = signature.bind(*args, **given)
    bound.apply_defaults()
    constants = {name for name, p in signature.parameters.items() if "constexpr" in str(p.annotation)}
    return dict(bound.arguments), constants


def grid_of(grid: Any, bound: Mapping[str, Any]) -> tuple[int, int, int]:
    """The three sizes of a grid that is given as a tuple or as a function of the arguments."""
    given: Any = grid(bound) if callable(grid) else grid
    sizes = tuple(int(n) for n in given)
    if not 1 <= len(sizes) <= 3:
        raise TypeError(f"a grid has 1 to 3 sizes, not {sizes}")
    return sizes + (1,) * (3 - len(sizes))  # type: ignore[return-value]


def enter(program: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
    """From now on `tl.program_id` and `tl.num_programs` answer for this program."""
    _ti.interpreter_builder.set_grid_dim(*grid)
    _ti.interpreter_builder.grid_idx = program  # type: ignore[assignment]


def programs_of(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """All programs, x slowest, as the stock interpreter runs them."""
    return [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]


def run(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    """One program after the other over the real memory of CPU tensors: what the stock interpreter does, anywhere."""
    if not is_kernel(kernel):  # decorated further
        with launches_go_to(run):
            kernel[grid](*args, **kwargs)
        return
    bound, constants = bind(kernel, args, kwargs)
    sizes = grid_of(grid, bound)
    function = body(kernel)
    with language():
        converted = {
            name: arg if name in constants else argument(arg, name, lambda _, tensor: tensor.data_ptr())
            for name, arg in bound.items()
        }
        for program in programs_of(sizes):
            enter(program, sizes)
            function(**converted)


@contextmanager
def launches_go_to(handler: Callable[..., None]) -> Iterator[None]:
    """Inside, `kernel[grid](...)` of every `@triton.jit` function calls `handler(kernel, grid, *args, **kwargs)`.

    Of several configurations for `triton.autotune` the first that its pruning leaves is taken: nothing is measured.
    """
    scope = _ti._LangPatchScope()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        if not warmup:
            for hook in self.pre_run_hooks:
                hook(*args, **kwargs)
            handler(self, grid, *args, **kwargs)

    def tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self.arg_names, args, strict=False))
        prune = self.early_config_prune
        config = (prune(self.configs, named, **kwargs) if prune else self.configs)[0]
        options = {k: v for k, v in config.all_kwargs().items() if k in config.kwargs or k in self.arg_names}
        if config.pre_hook is not None:
            config.pre_hook({**named, **kwargs, **options})
        return self.fn.run(*args, **kwargs, **options)

    try:
        for kind in (JITFunction, _ti.InterpretedFunction):
            scope.set_attr(kind, "run", launch)
        scope.set_attr(Autotuner, "run", tuned)
        yield
    finally:
        scope.restore()


def version() -> str:
    return triton.__version__
