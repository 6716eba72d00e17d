"""Where the kernels of assignment 4 sit in the engine: a layer of `kernels="triton"`, and decoding over its pages.

    plug_kernels(swiglu_kernel=swiglu_kernel, merge_kernel=merge_kernel)

Nothing here does what an exercise asks for: students have this file too. It launches what is plugged in, with the grids
and constants of the exercises; the products with the weights stay the package's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cs336_infer.course.kernel_ask import is_kernel
from cs336_infer.course.plug import PLUGGED, plug, plugged
from cs336_infer.course.sockets import SOCKETS, describe_path
from cs336_infer.models.attend import Attend
from cs336_infer.types import InferError

BLOCK_N = 16
"""Positions in a tile of attention."""


def plug_kernels(**kernels: Any) -> plug:
    """As `plug`; the names of assignment 4 have places too, in a model of `kernels="triton"`.

    Raises:
        InferError: what is given under the name of a kernel is no `@triton.jit` function.
    """
    for name, kernel in kernels.items():
        if name.endswith("_kernel") and not is_kernel(kernel):
            raise InferError(f"plug_kernels({name}=...) takes a @triton.jit function, not a {type(kernel).__name__}")
    return plug(**kernels)


def _launch(name: str, grid: Sequence[int], *tensors: torch.Tensor, **numbers: Any) -> None:
    from cs336_kernels.launch import launch

    launch(plugged(name), tuple(grid), *tensors, **numbers)


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cs336_kernels.ops.add_rms_norm`; x, residual: [rows, d] with contiguous rows."""
    outputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rows, d = x.shape
    if rows:
        steps = {"step_x": x.stride(0), "step_residual": residual.stride(0), "eps": eps}
        _launch("add_rms_norm_kernel", (rows,), *outputs, x, residual, weight, **steps, D=d, BLOCK=_power(d))
    return outputs[0], outputs[1]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm alone, of x: [rows, d]: nothing is added."""
    return add_rms_norm(x, torch.zeros_like(x), weight, eps)[0]


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """As `cs336_kernels.ops.swiglu`; gate_up: [rows, 2 * n] with contiguous rows."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    block = min(_power(n), 1024)
    if rows:
        _launch("swiglu_kernel", (rows, -(-n // block)), out, gate_up, step=gate_up.stride(0), N=n, BLOCK=block)
    return out


def rope_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    pages: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> torch.Tensor:
    """q: [tokens, heads, head_dim], k, v: [tokens, kv_heads, head_dim], heads contiguous. rope: the engine's tables, in
    which both halves of a head have an angle, and the sine of the first half is negated. pages: keys and values.
    Returns the rotated queries, [tokens, heads, head_dim]."""
    (tokens, heads, head_dim), (keys, values), half = q.shape, pages, q.shape[2] // 2
    cos, sin = (t.expand(-1, -1, 1, -1).reshape(-1, head_dim)[:, half:].contiguous() for t in rope)
    out = torch.empty(tokens, heads, head_dim, dtype=q.dtype, device=q.device)
    steps = {f"step_{name}": t.stride(0) for name, t in (("q", q), ("k", k), ("v", v))}
    steps |= {"step_keys": keys.stride(0), "step_values": values.stride(0)}
    sizes = {"HEADS": heads, "KV_HEADS": k.shape[1], "HEAD_DIM": head_dim, "BLOCK_SIZE": keys.shape[1]}
    grid = (tokens, heads + k.shape[1])
    _launch(
        "rope_write_kernel", grid, out, keys, values, q, k, v, cos, sin, slots, **steps, **sizes, BLOCK=_power(half)
    )
    return out


def decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, splits: int
) -> torch.Tensor:
    """As `cs336_kernels.ops.decode_attention`, whose checks are done."""
    from cs336_kernels.ops.triton import decode_attention

    (rows, heads, head_dim), kv_heads = q.shape, keys.shape[2]
    partials = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows, heads, splits, dtype=torch.float32, device=q.device)
    tables, lengths = tables.to(torch.int64), lengths.to(torch.int64)
    numbers = {f"step_{name}": t.stride(0) for name, t in (("q", q), ("keys", keys), ("values", values))}
    numbers |= {"step_table": tables.stride(0), "scale": head_dim**-0.5}
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": keys.shape[1]}
    blocks = {"BLOCK_G": _power(heads // kv_heads), "BLOCK_N": BLOCK_N, "BLOCK_D": _power(head_dim)}
    if rows:
        tensors = partials, lse, q, keys, values, tables, lengths
        _launch("split_attention_kernel", (rows, kv_heads, splits), *tensors, **numbers, **sizes, **blocks)
    return decode_attention.merge(partials, lse, q.dtype)


def merge(partials: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `cs336_kernels.ops.merge_attention`, whose checks are done."""
    rows, heads, splits, head_dim = partials.shape
    out = torch.empty(rows, heads, head_dim, dtype=dtype, device=partials.device)
    if rows:
        blocks = {"BLOCK_S": _power(splits), "BLOCK_D": _power(head_dim)}
        _launch("merge_kernel", (rows * heads,), out, partials, lse, splits=splits, HEAD_DIM=head_dim, **blocks)
    return out


def layer(block: Any, x: torch.Tensor, rope: Any, number: int, attend: Attend) -> torch.Tensor:
    """As `models.triton_block.separate`, over pages: sum and norm are one launch, and so are RoPE and KV write.

    Raises:
        InferError: the KV cache is not made of pages.
    """
    from cs336_kernels import ops

    from cs336_infer.models.triton_block import PagesAttend

    if not isinstance(attend, PagesAttend):
        raise InferError("your kernels write keys and values into pages: they need the engine, LLM(kv='paged')")
    c, flat = block.config, x.reshape(-1, x.shape[2])
    projected = ops.linear(ops.rms_norm(flat, block.attn_norm, c.rms_eps, "triton"), block.qkv.weight, "triton")
    heads = projected.view(len(flat), -1, c.head_dim)
    if block.q_norm is not None:
        qk = heads[None, :, : c.num_heads + c.num_kv_heads].contiguous()
        qk = ops.qk_norm(qk, block.q_norm, block.k_norm, c.num_heads, c.rms_eps, "triton")[0]
        heads = torch.cat([qk, heads[:, c.num_heads + c.num_kv_heads :]], 1)
    q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
    if "rope_write_kernel" in PLUGGED:
        q = rope_write(q, k, v, rope, attend.pages_of(number), attend.slots)
    else:
        turned = ops.apply_rope(torch.cat([q, k], 1)[None], *rope, path="triton")[0]
        q, k = turned.split([c.num_heads, c.num_kv_heads], 1)
        ops.write_kv(*attend.pages_of(number), k.contiguous(), v.contiguous(), attend.slots, path="triton")
    mixed = attend.attend(number, q.contiguous()).reshape(len(flat), -1)
    normed, flat = ops.add_rms_norm(
        ops.linear(mixed, block.o.weight, "triton"), flat, block.mlp_norm, c.rms_eps, "triton"
    )
    hidden = ops.swiglu(ops.linear(normed, block.gate_up.weight, "triton"), "triton")
    return (flat + ops.linear(hidden, block.down.weight, "triton")).view(x.shape)


_TRITON = "cs336_kernels.ops.triton"
_PATH: dict[str, Callable[..., Any]] = {"cs336_infer.models.load:LoadedModel.describe_path": describe_path}
_LAYER: dict[str, Callable[..., Any]] = {"cs336_infer.models.triton_block:separate": layer, **_PATH}
SOCKETS.update(
    {
        "add_rms_norm_kernel": {f"{_TRITON}.rmsnorm:add_rms_norm": add_rms_norm, **_LAYER},
        "rope_write_kernel": _LAYER,
        "swiglu_kernel": {f"{_TRITON}.swiglu:swiglu": swiglu, **_PATH},
        "split_attention_kernel": {f"{_TRITON}.decode_attention:decode": decode, **_PATH},
        "merge_kernel": {
            f"{_TRITON}.decode_attention:decode": decode,  # which merges always, and needs the other kernel too
            f"{_TRITON}.decode_attention:merge": merge,
            **_PATH,
        },
    }
)
