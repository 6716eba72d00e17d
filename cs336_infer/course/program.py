"""Running a list of tensor operations that anybody may have written.

`tracing` makes such lists. Here they are only data: ops come from `ALLOWED`, arguments are numbers, lists, names of
types and numbers of earlier values. Before anything is computed the whole program runs on tensors without memory, where
torch only works out shapes; a program that would move, hold or compute more than its limits ends there. Memory that a
program sets aside without writing to it is NaN.

Left out of `ALLOWED` on purpose: what takes sizes and strides as they come (`as_strided`, `set_`, `resize_`), what ends
a process on bad numbers (whole-number division), what looks at values to find a shape (`nonzero`), fused attention, and
everything random.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from cs336_infer.measure.traffic import SETS_ASIDE, Traffic, name_of
from cs336_infer.types import InferError

_VIEWS = """alias.default detach.default expand.default permute.default reshape.default select.int slice.Tensor
    split.Tensor split_with_sizes.default squeeze.default squeeze.dim squeeze.dims t.default transpose.int unbind.int
    unsqueeze.default view.default _unsafe_view.default lift_fresh.default movedim.int"""
_MOVES = """cat.default clone.default contiguous.default copy_.default fill_.Scalar fill_.Tensor zero_.default
    _to_copy.default gather.default index.Tensor index_select.default index_copy.default index_copy_.default
    index_put.default index_put_.default masked_fill.Scalar masked_fill_.Scalar masked_fill.Tensor masked_fill_.Tensor
    where.self where.ScalarSelf where.ScalarOther scatter.src scatter_.src stack.default repeat.default flip.default
    tril.default triu.default tril_.default triu_.default roll.default constant_pad_nd.default"""
_MAKES = """arange.default arange.start arange.start_step empty.memory_format empty_like.default new_empty.default
    new_zeros.default new_ones.default new_full.default zeros.default ones.default full.default zeros_like.default
    ones_like.default full_like.default scalar_tensor.default"""
_COMPUTES = """add.Tensor add_.Tensor add.Scalar sub.Tensor sub_.Tensor sub.Scalar rsub.Scalar rsub.Tensor mul.Tensor
    mul_.Tensor mul.Scalar mul_.Scalar div.Tensor div_.Tensor div.Scalar div_.Scalar neg.default neg_.default
    exp.default exp_.default exp2.default log.default sqrt.default rsqrt.default reciprocal.default abs.default
    sigmoid.default tanh.default pow.Tensor_Scalar square.default maximum.default minimum.default clamp.default
    clamp_min.default clamp_max.default eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar
    le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_not.default
    logical_and.default logical_or.default logical_not.default sum.default sum.dim_IntList mean.dim amax.default
    amin.default max.dim max.default logsumexp.default cumsum.default _softmax.default _log_softmax.default
    addcmul.default addcdiv.default"""
_MULTIPLIES = "mm.default bmm.default baddbmm.default addmm.default mv.default dot.default"
ALLOWED = frozenset(f"aten.{op}" for group in (_VIEWS, _MOVES, _MAKES, _COMPUTES, _MULTIPLIES) for op in group.split())
DTYPES = ("bool", "int32", "int64", "float16", "bfloat16", "float32", "float64")
MEMORY_FORMATS = ("contiguous_format", "preserve_format")
MAX_LIST, MAX_INT = 64, 2**40


class ProgramError(InferError):
    """A program that is not run, or whose answer does not count. One line that names the operation."""


@dataclass(frozen=True)
class Limits:
    """What one program may do. All are known before it runs."""

    ops: int = 5000
    bytes: int = 128 * 2**20
    """Read and written; and, by themselves, set aside."""
    flops: int = 2**31
    elements: int = 2**28
    """Of all operands, as often as they are used: the bound of its time."""
    constants: int = 2**20
    """Bytes of all its constants."""


def run(program: Any, inputs: Sequence[torch.Tensor], limits: Limits = Limits()) -> tuple[torch.Tensor, Traffic]:
    """The program's answer for `inputs`, which it may write to, and what it moved.

    Raises:
        ProgramError: it is no program, uses an op that is not allowed, passes a limit, or torch refuses an op.
    """
    checked = _checked(program, len(inputs), limits)
    _execute(checked, [t.to("meta") for t in inputs], limits, dry=True)
    return _execute(checked, list(inputs), limits, dry=False)


def _checked(program: Any, inputs: int, limits: Limits) -> dict[str, Any]:
    """The program, if it has the form of one: nothing in it is run or looked up yet."""
    if type(program) is not dict or set(program) != {"inputs", "ops", "output"} or type(program["ops"]) is not list:
        raise ProgramError("this is not a traced program")
    if program["inputs"] != inputs or type(program["inputs"]) is not int:
        raise ProgramError(f"the program takes {str(program['inputs'])[:20]} inputs, not {inputs}")
    if len(program["ops"]) > limits.ops:
        raise ProgramError(f"the program has {len(program['ops'])} operations, at most {limits.ops} are run")
    left = limits.constants
    for number, entry in enumerate(program["ops"], 1):
        if type(entry) is not dict or set(entry) != {"op", "args", "kwargs"}:
            raise ProgramError(f"operation {number} is not one")
        if type(entry["op"]) is not str or entry["op"] not in ALLOWED:
            raise ProgramError(f"operation {number}, {str(entry['op'])[:60]!r}, is not one this task allows")
        if type(entry["args"]) is not list or type(entry["kwargs"]) is not dict:
            raise ProgramError(f"operation {number}, {entry['op']}, has no list of arguments")
        left -= sum(_constant_bytes(a) for a in (*entry["args"], *entry["kwargs"].values()))
        if left < 0:
            raise ProgramError(f"the program's constants hold more than {limits.constants} bytes")
    return program


def _constant_bytes(value: Any) -> int:
    if type(value) is dict and type(value.get("constant")) is torch.Tensor:
        return value["constant"].nbytes
    return sum(map(_constant_bytes, value)) if type(value) is list else 0


def _execute(program: dict[str, Any], values: list[Any], limits: Limits, *, dry: bool) -> tuple[torch.Tensor, Traffic]:
    """One pass. `dry` passes have no memory: every limit is checked there, after each op."""
    budget = _Budget(limits)
    with torch.no_grad(), Traffic() as traffic:
        for number, entry in enumerate(program["ops"], 1):
            where = f"operation {number}, {entry['op']}"
            packet, overload = entry["op"].removeprefix("aten.").split(".")
            function = getattr(getattr(torch.ops.aten, packet), overload)
            args = [_value(a, values, where, dry) for a in entry["args"]]
            kwargs = {k: _value(v, values, where, dry) for k, v in entry["kwargs"].items()}
            schema = {a.name: str(a.type) for a in function._schema.arguments}
            if len(args) > len(schema) or set(kwargs) - set(schema):
                raise ProgramError(f"{where}: an argument that it does not have")
            if "device" in schema and next(iter(schema.values())) != "Tensor":
                kwargs["device"] = "meta" if dry else "cpu"
            try:
                out = function(*args, **kwargs)
            except Exception as error:
                said = next(iter(str(error).strip().splitlines()), "")[:160]
                raise ProgramError(f"{where}: {type(error).__name__}: {said}") from None
            outs = list(out) if isinstance(out, tuple | list) else [out]
            if dry:
                budget.spend(function, [*args, *kwargs.values()], outs, traffic, where)
            elif name_of(function) in SETS_ASIDE:
                _poison(outs)
            values += outs
    answer = _value(program["output"], values, "the output", dry)
    if not isinstance(answer, torch.Tensor):
        raise ProgramError("the program's output is not a tensor")
    return answer, traffic


class _Budget:
    """What a dry pass has spent of its limits."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.elements = self.aside = 0

    def spend(self, function: Any, args: list[Any], outs: list[Any], traffic: Traffic, where: str) -> None:
        """Sizes are multiplied here: torch's own count of elements can overflow."""
        sizes = [math.prod(t.shape) * t.element_size() for t in outs if isinstance(t, torch.Tensor)]
        if not function.is_view:
            self.elements += sum(math.prod(t.shape) for t in tree_leaves([args, outs]) if isinstance(t, torch.Tensor))
        if name_of(function) in SETS_ASIDE:
            self.aside += sum(sizes)
        if max([traffic.bytes, self.aside, *sizes]) > self.limits.bytes:
            raise ProgramError(f"{where}: more than {self.limits.bytes:,} bytes")
        if traffic.flops > self.limits.flops:
            raise ProgramError(f"{where}: more than {self.limits.flops:,} FLOP")
        if self.elements > self.limits.elements:
            raise ProgramError(f"{where}: more than {self.limits.elements:,} elements in all")


def _poison(outs: Iterable[Any]) -> None:
    """Memory that nobody wrote to. Outside of the count."""
    with _disable_current_modes():
        for t in outs:
            t.fill_(torch.nan if t.is_floating_point() else -(2**30) if t.dtype != torch.bool else True)


def _value(value: Any, values: Sequence[Any], where: str, dry: bool) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float):
        return value
    if kind is int:
        if abs(value) >= MAX_INT and value != 2**63 - 1:  # torch's "to the end" of a slice
            raise ProgramError(f"{where}: the number {value} is out of range")
        return value
    if kind is list and len(value) <= MAX_LIST:
        return [_value(v, values, where, dry) for v in value]
    if kind is dict and len(value) == 1:
        (name, inner), *_ = value.items()
        if name == "ref" and type(inner) is int and 0 <= inner < len(values):
            if isinstance(values[inner], torch.Tensor):
                return values[inner]
        elif type(inner) is str and inner in {"dtype": DTYPES, "memory_format": MEMORY_FORMATS}.get(name, ()):
            return getattr(torch, inner)
        elif name == "constant" and type(inner) is torch.Tensor:
            return inner.to("meta") if dry else inner
    raise ProgramError(f"{where}: an argument that is not one")
