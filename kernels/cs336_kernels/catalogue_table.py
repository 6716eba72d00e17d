"""The catalogue as a Markdown table: what each op does, its least bytes, and the bytes that its kernels move."""

from __future__ import annotations

import torch

from cs336_kernels import traffic
from cs336_kernels.catalogue import OPS, Op, Separate
from cs336_kernels.record import record
from cs336_kernels.shapes import MODELS, Shape

COUNTED = ("Llama-3.2-1B", "Qwen3-0.6B")
"""Models whose bytes are stated: the first that has the op."""

FEW, MANY = 1, 128  # tokens of a decode step, and of a chunk of prefill


def least_bytes(op: Op, shape: Shape, tokens: int) -> int:
    """Bytes that a call cannot avoid, at the usual dtype."""
    return op.minimal_bytes(**op.make(shape, op.dtypes[0], torch.device("cpu"), tokens))


def launches(op: Op, shape: Shape, tokens: int) -> int:
    """Kernels that a call starts."""
    arguments = op.make(shape, op.dtypes[0], torch.device("cpu"), tokens)
    return len(record(lambda: op.call(**arguments, path="triton")))


def separately(op: Op, shape: Shape, tokens: int) -> Separate:
    """What the ops that a fused one replaces are, and the bytes that they cannot avoid."""
    run = Separate("reference")
    if op.separate is not None:
        op.separate(run, **op.make(shape, op.dtypes[0], torch.device("meta"), tokens))
    return run


def table() -> str:
    """One line for each op."""
    lines = [
        f"| op | what it does | model | bytes at least, {FEW} token | moved / least | launches | in place of | "
        f"their bytes / least, {FEW} token | {MANY} tokens |",
        "|---|---|---|---:|---:|---:|---|---:|---:|",
    ]
    for op in OPS.values():
        shape = next(MODELS[name] for name in COUNTED if op.fits(MODELS[name]))
        apart = {n: separately(op, shape, n) for n in (FEW, MANY)}
        ratios = [f"{apart[n].minimal_bytes / least_bytes(op, shape, n):.3f}" if op.separate else "" for n in apart]
        worst = max(row.ratio for row in traffic.rows([op.name]))
        cells = (
            *(f"`{op.name}`", op.summary, shape.name, f"{least_bytes(op, shape, FEW):,}", f"{worst:.3f}"),
            *(str(launches(op, shape, FEW)), ", ".join(apart[FEW].names), *ratios),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
