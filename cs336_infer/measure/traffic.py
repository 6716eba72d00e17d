"""Bytes that tensor operations move, counted and not timed: the same number on every machine.

The model: an operation reads each of its inputs from memory once and writes its outputs once. Nothing stays in a cache
from one operation to the next, and nothing is fused. So

* a view (reshape without a copy, slice, transpose, expand) moves nothing;
* an input costs its distinct elements: an expanded dimension counts once, and so does one tensor given twice;
* a new output costs its elements; memory that is only set aside (`empty`) costs nothing;
* an operation in place reads its target where it uses the old values (`add_`) and not where it overwrites them
  (`copy_`, `fill_`, `zero_`), and writes it;
* a gather (`index`, `index_select`, `gather`, `embedding`) reads the elements it picks and the indices, not the whole
  source; a scatter in place writes the elements it is given.

The unit of counting is the operation that torch's dispatcher sees (an aten op), below autograd and composite functions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
GATHERS = {"index", "index_select", "gather", "embedding", "take", "take_along_dim"}
SCATTERS = {"index_put_", "scatter_", "index_copy_", "index_fill_", "_index_put_impl_"}
SETS_ASIDE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
SAME_MEMORY = {"_unsafe_view", "_reshape_alias", "alias", "detach", "lift_fresh"}


class Traffic(TorchDispatchMode):
    """Counts while it is active.

        with Traffic() as t:
            y = x @ w
        t.bytes

    Attributes:
        by_op: bytes of each op, by its name such as "aten.bmm".
        flops: of matrix products, 2 a multiply-add.
        ops: operations that moved something.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_op: Counter[str] = Counter()
        self.flops = 0
        self.ops = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written so far."""
        return sum(self.by_op.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        moved = bytes_of(func, args, kwargs or {}, out)
        if moved:
            self.by_op[f"aten.{name_of(func)}"] += moved
            self.ops += 1
        self.flops += flops_of(func, args)
        return out


def count(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Traffic:
    """Run `function` once and count."""
    with Traffic() as traffic, torch.no_grad():
        function(*args, **kwargs)
    return traffic


def name_of(func: Any) -> str:
    """ "bmm" of aten.bmm.default."""
    return str(func.overloadpacket.__name__)


def bytes_of(func: Any, args: Iterable[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes that one op with these arguments, which gave `out`, read and wrote."""
    name = name_of(func)
    if func.is_view or name in SETS_ASIDE or name in SAME_MEMORY:
        return 0
    given = list(_arguments(func, args, kwargs))
    targets = [t for t, written in given if written]
    sources = [t for t, written in given if not written]
    fresh = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and not any(t is x for x, _ in given)]
    if name in GATHERS and sources:
        picked = sum(t.numel() for t in fresh) * sources[0].element_size()
        return min(picked, distinct_bytes(sources[:1])) + distinct_bytes(sources[1:]) + distinct_bytes(fresh)
    if name in SCATTERS and targets:
        values = distinct_bytes(sources)
        touched = max((t.numel() for t in sources), default=0) * targets[0].element_size()
        return values + min(touched, distinct_bytes(targets))
    read = sources if name in OVERWRITES else sources + targets
    return distinct_bytes(read) + distinct_bytes(targets) + distinct_bytes(fresh)


def _arguments(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """Every tensor that is given, and whether the op writes to it."""
    schema = func._schema.arguments
    named = {a.name: a for a in schema}
    for argument, value in [*zip(schema, args, strict=False), *((named[k], v) for k, v in kwargs.items())]:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf, written


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements, those of an expanded dimension or of a tensor given twice once."""
    found: dict[tuple[Any, ...], int] = {}
    for t in tensors:
        kept = [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if s != 0 and n != 1]
        empty = t.numel() == 0
        key = (t.untyped_storage()._cdata, t.storage_offset(), tuple(kept), t.dtype)
        found[key] = 0 if empty else math.prod(n for n, _ in kept) * t.element_size()
    return sum(found.values())


def flops_of(func: Any, args: Any) -> int:
    """2 a multiply-add, of the matrix products of aten; everything else is 0."""
    name = name_of(func)
    if name in ("bmm", "mm"):
        a, b = args[0], args[1]
    elif name in ("baddbmm", "addmm"):
        a, b = args[1], args[2]
    elif name in ("mv", "dot"):
        return 2 * args[0].numel()
    else:
        return 0
    return 2 * a.numel() * b.shape[-1]
