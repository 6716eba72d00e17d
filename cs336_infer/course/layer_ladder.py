"""The kernels of one decode step of one layer, on every rung of the ladder, at the shape of a real model.

Nothing is computed: eager ops run on meta tensors, which have a shape and no numbers, and launches of Triton kernels
are recorded in place of being made. So this counts what a GPU would be asked for, on a machine without one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from cs336_kernels.catalogue import OPS, Separate
from cs336_kernels.ops import rope_tables
from cs336_kernels.record import Launch, record
from cs336_kernels.shapes import Shape
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_infer.kv import ContiguousKV
from cs336_infer.kv.paged import PagedKV, Row
from cs336_infer.models.config import ModelConfig
from cs336_infer.models.llama import Block, inverse_frequencies
from cs336_infer.models.weights import expected_shapes

DTYPE = torch.bfloat16
RUNGS = ("eager", "compile", "triton", "fused", "graph")
VIEWS = {"view", "reshape", "split_with_sizes", "chunk", "transpose", "slice", "alias", "select", "expand", "unsqueeze"}
WALLS = {"linear", "scaled_dot_product_attention", "copy_"}
"""What a compiler is taken not to fuse with its neighbours: products, attention, and writes into KV memory."""


@dataclass(frozen=True)
class Kernel:
    """One launch. moved: bytes, each number that it needs read once and each that it makes written once."""

    name: str
    moved: int


@dataclass(frozen=True)
class Layer:
    """A decode step of one layer.

    Attributes:
        rungs: name -> its launches, in order. weights, cached: bytes of the matrices, and of the keys and values that
            attention reads; no rung can do without.
    """

    rungs: dict[str, tuple[Kernel, ...]]
    weights: int
    cached: int

    def launches(self, rung: str) -> int:
        return len(self.rungs[rung])

    def moved(self, rung: str) -> int:
        """Bytes of all launches."""
        return sum(kernel.moved for kernel in self.rungs[rung])

    def between(self, rung: str) -> int:
        """Bytes that are neither matrices nor cached keys and values: what passes between kernels, and gains."""
        return self.moved(rung) - self.weights - self.cached


@cache
def layer(shape: Shape, tokens: int) -> Layer:
    """Count the step of `tokens` sequences, each with `shape.context` positions when the step is done.

    "eager" is plain PyTorch over a contiguous cache, each op one kernel, as a CUDA build runs them at best; what the
    attention of torch moves inside is not seen, while the parts of the engine's attention are counted. "compile"
    follows from it by a rule: neighbours between `WALLS` become one kernel. "triton", "fused" and "graph" are the
    engine's; "graph" has the launches of "fused", which the host starts all at once.
    """
    eager = _eager(shape, tokens)
    separate, fused = (_triton(shape, tokens, path) for path in ("triton", "fused"))
    rungs = {
        "eager": tuple(Kernel(op.name, op.moved) for op in eager),
        "compile": tuple(_merged(eager)),
        "triton": separate,
        "fused": fused,
        "graph": fused,
    }
    width = shape.kv_heads * shape.head_dim
    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.heads * shape.head_dim + 3 * shape.ffn
    return Layer(rungs, rows * shape.hidden * DTYPE.itemsize, 2 * tokens * shape.context * width * DTYPE.itemsize)


def config_of(shape: Shape) -> ModelConfig:
    """One layer of a model of this shape."""
    family = "qwen3" if shape.qk_norm else "llama"
    sizes = (shape.vocab, shape.hidden, shape.ffn, 1, shape.heads, shape.kv_heads, shape.head_dim, shape.context)
    return ModelConfig(family, *sizes, qk_norm=shape.qk_norm)


def block_of(shape: Shape, path: str, device: str) -> Block:
    """A layer whose weights hold nothing."""
    config = config_of(shape)
    shapes = dict(expected_shapes(config))

    def get(*names: str) -> torch.Tensor:
        sizes = [shapes[f"model.layers.0.{name}.weight"] for name in names]
        return torch.empty(sum(s[0] for s in sizes), *sizes[0][1:], dtype=DTYPE, device=device)

    return Block(config, get, path)


# Eager


@dataclass(frozen=True)
class _Op:
    """One op of torch: where what it read and made begins, as (storage, offset), and the bytes of each."""

    name: str
    read: dict[tuple[int, int], int]
    made: dict[tuple[int, int], int]

    @property
    def moved(self) -> int:
        return sum(self.read.values()) + sum(self.made.values())


class _Ops(TorchDispatchMode):
    """Writes down every op that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        self._kept: list[torch.Tensor] = []  # storages of the dead get new owners, with the old numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            read = args[1:] if name == "copy_" else args  # which overwrites what it is given first
            made = result if isinstance(result, tuple) else (result,)
            inputs, outputs = ([t for t in some if isinstance(t, torch.Tensor)] for some in (read, made))
            self._kept += inputs + outputs
            self.ops.append(_Op(name, _sizes(inputs), _sizes(outputs)))
        return result


def _sizes(tensors: Sequence[torch.Tensor]) -> dict[tuple[int, int], int]:
    """Bytes of the elements, not of the whole storage."""
    return {(t.untyped_storage()._cdata, int(t.storage_offset())): t.numel() * t.element_size() for t in tensors}


def _eager(shape: Shape, tokens: int) -> list[_Op]:
    config, block = config_of(shape), block_of(shape, "reference", "meta")
    cache = ContiguousKV(config, batch=tokens, capacity=shape.context, dtype=DTYPE, device="meta")
    cache.length = shape.context - 1
    positions = torch.full((tokens, 1), cache.length)
    cos, sin = (table.to("meta") for table in rope_tables(positions, inverse_frequencies(config), DTYPE))
    x = torch.empty(tokens, 1, shape.hidden, dtype=DTYPE, device="meta")
    attend = cache.extend(1)
    with torch.inference_mode(), _Ops() as seen:  # without autograd an op arrives whole, not in parts
        block(x, (cos, sin), 0, attend)
    return seen.ops


def _merged(ops: Sequence[_Op]) -> list[Kernel]:
    """Runs of ops between walls as one kernel each. What only the run itself needs is not moved."""
    runs: list[list[_Op]] = []
    for i, op in enumerate(ops):
        if i and op.name not in WALLS and ops[i - 1].name not in WALLS:
            runs[-1].append(op)
        else:
            runs.append([op])
    kernels, done = [], 0
    for run in runs:
        done += len(run)
        read: dict[tuple[int, int], int] = {}
        made: dict[tuple[int, int], int] = {}
        for op in run:
            inside = {storage for storage, _ in made}
            read |= {place: size for place, size in op.read.items() if place[0] not in inside}
            made |= op.made
        later = {storage for op in ops[done:] for storage, _ in op.read}
        wanted = [size for (storage, _), size in made.items() if storage in later or done == len(ops)]
        kernels.append(Kernel(" + ".join(op.name for op in run), sum(read.values()) + sum(wanted)))
    return kernels


# Triton


def _triton(shape: Shape, tokens: int, path: str) -> tuple[Kernel, ...]:
    launches, adds = launched(shape, tokens, path)
    sizes = _bytes(shape, tokens, fused=path == "fused")
    decode = next(i for i, (name, _) in enumerate(sizes) if name == "decode_attention")
    merge = [k for k in launches if k.variant.name == "merge_kernel"]
    if merge:  # the parts and their sums go to memory and come back
        parts = sum(size for name, size in merge[0].tensor_bytes.items() if name in ("partials", "lse"))
        (name, moved), out = sizes[decode], tokens * shape.heads * shape.head_dim * DTYPE.itemsize
        sizes[decode : decode + 1] = [(name, moved - out + parts), ("merge_attention", parts + out)]
    if len(sizes) != len(launches) + adds:
        raise RuntimeError(f"{len(launches)} launches and {adds} sums do not go with {[name for name, _ in sizes]}")
    return tuple(Kernel(*size) for size in sizes)


def launched(shape: Shape, tokens: int, path: str) -> tuple[list[Launch], int]:
    """What the engine's layer launches with kernels "triton" or "fused", and how many sums it leaves to torch."""
    config, block = config_of(shape), block_of(shape, path, "cpu")
    pages = math.ceil(shape.context / shape.page)
    kv = PagedKV(config, num_blocks=pages, block_size=shape.page, dtype=DTYPE, attention="triton")
    step = kv.step([Row(range(pages), shape.context - 1, 1)] * tokens)  # nobody writes: they may share their pages
    rope = rope_tables(step.positions, inverse_frequencies(config), DTYPE)
    x = torch.empty(1, tokens, shape.hidden, dtype=DTYPE)
    attend = step.extend(tokens)
    with torch.inference_mode(), _Ops() as seen:
        launches = record(lambda: block(x, rope, 0, attend))
    return launches, sum(op.name == "add" for op in seen.ops)


def _bytes(shape: Shape, tokens: int, *, fused: bool) -> list[tuple[str, int]]:
    """Each op with the bytes that it cannot avoid, by the catalogue."""
    pages = math.ceil(shape.context / shape.page)
    room = torch.empty(pages, shape.page, shape.kv_heads, shape.head_dim, dtype=DTYPE, device="meta")
    heads = torch.empty(tokens, shape.heads, shape.head_dim, dtype=DTYPE, device="meta")
    cached: dict[str, Any] = {
        "q": heads,
        "keys": room,
        "values": room,
        "tables": torch.zeros(tokens, pages, dtype=torch.int64),
        "lengths": torch.full((tokens,), shape.context),
    }
    wide = torch.empty(shape.hidden, shape.heads * shape.head_dim, dtype=DTYPE, device="meta")
    x = torch.empty(tokens, shape.hidden, dtype=DTYPE, device="meta")
    output: dict[str, Any] = {"x": heads.view(tokens, -1), "weight": wide, "residual": x}
    parts = [
        ("qkv", OPS["qkv"].make(shape, DTYPE, torch.device("meta"), tokens)),
        ("decode_attention", cached),
        ("linear_add", output),
        *((name, OPS[name].make(shape, DTYPE, torch.device("meta"), tokens)) for name in ("gate_up", "linear_add")),
    ]
    sizes: list[tuple[str, int]] = []
    for name, arguments in parts:
        op = OPS[name]
        if fused or op.separate is None:
            sizes.append((name, op.minimal_bytes(**arguments)))
        else:
            op.separate(_Listed(sizes), **arguments)
    return sizes


class _Listed(Separate):
    """The separate ops, each with its bytes."""

    def __init__(self, sizes: list[tuple[str, int]]) -> None:
        super().__init__("reference")
        self._sizes = sizes

    def __call__(self, name: str, **arguments: Any) -> Any:
        self._sizes.append((name, OPS[name].minimal_bytes(**arguments)))
        return super().__call__(name, **arguments)

    def torch(self, name: str, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        before = self.minimal_bytes
        result = super().torch(name, result, *inputs)
        self._sizes.append((name, self.minimal_bytes - before))
        return result
