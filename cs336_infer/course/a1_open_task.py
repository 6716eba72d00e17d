"""The open task of assignment 1: one decode step of attention with as few bytes moved as you can.

The number does not depend on a clock: `traffic` counts what every operation reads and writes. A submission is never run
here. It is traced where it lives, and its operations, as data, run on fresh inputs (`program`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from cs336_infer.course import tracing
from cs336_infer.course.ask import AskError
from cs336_infer.course.program import ProgramError, run
from cs336_infer.types import InferError

NAME = "decode_attention"
HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 9, 3, 64, 160  # the attention of SmolLM2-135M
CASES = ((120, 31, 64), (159, 0), (7,))
"""Tokens stored in each row before the step."""
TOKENS = sum(map(len, CASES))
START = 725_674
"""Bytes per token of exercise 3, called for one row after the other."""
TOLERANCE = 2e-5
CELL = f"""
def _trace_{NAME}(inputs, lengths):
    from tracing import trace
    return trace({NAME}, inputs, lengths)
"""
"""What a grader adds to the cells of a submission."""
FILES = {"tracing.py": Path(tracing.__file__)}
"""What a grader adds to the import path of its sandbox."""


def bytes_moved(decode_attention: Callable[..., Any], seed: int = 0) -> str:
    """For the notebook: trace and score `decode_attention`.

    Raises:
        InferError: it cannot be traced, or its answer is wrong; one line.
    """

    def ask(name: str, inputs: list[torch.Tensor], lengths: list[int]) -> Any:
        return tracing.trace(decode_attention, inputs, lengths)

    try:
        result = score(ask, seed)
    except tracing.TraceError as error:
        raise InferError(f"{NAME}: {error}") from None
    if not result["ok"]:
        raise InferError(f"{NAME}: {result['message']}")
    return (
        f"{result['bytes_per_token']:,} bytes per token; exercise 3, row by row, moves {START:,}; "
        f"what every solution must read and write is {result['bound']:,}"
    )


def score(ask: Callable[..., Any], seed: int) -> dict[str, Any]:
    """Trace by `ask("_trace_decode_attention", inputs, lengths)`, run here on other inputs, compare and count.

    Returns:
        {"ok", "bytes_per_token" (None unless ok), "reference" (START), "bound", "message" (one line, empty when ok)}.
    """
    total, message = 0, ""
    rng = np.random.default_rng(seed)
    try:
        for lengths in CASES:
            program = ask(f"_trace_{NAME}", make_inputs(np.random.default_rng(1), lengths), list(lengths))
            total += moved(program, make_inputs(rng, lengths), lengths)
    except (ProgramError, AskError) as error:
        message = str(error)
    return {
        "ok": not message,
        "bytes_per_token": None if message else round(total / TOKENS),
        "reference": START,
        "bound": round(sum(map(bound, CASES)) / TOKENS),
        "message": message,
    }


def make_inputs(rng: np.random.Generator, lengths: Sequence[int]) -> list[torch.Tensor]:
    """q, k, v and the two caches, whose unwritten positions are NaN."""
    rows = len(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    caches = [normal(rows, KV_HEADS, CAPACITY, HEAD_DIM) for _ in range(2)]
    for cache in caches:
        for row, n in enumerate(lengths):
            cache[row, :, n:] = torch.nan
    return [normal(rows, HEADS, HEAD_DIM), *(normal(rows, KV_HEADS, HEAD_DIM) for _ in range(2)), *caches]


def moved(program: Any, inputs: list[torch.Tensor], lengths: Sequence[int]) -> int:
    """Bytes that `program` moves for `inputs`, which it may change as the exercise says.

    Raises:
        ProgramError: it is refused, or its answer or what it left in the caches is wrong.
    """
    before = [t.clone() for t in inputs]
    answer, traffic = run(program, inputs)
    want = expected(before, lengths)
    if tuple(answer.shape) != tuple(want.shape) or answer.dtype != torch.float32:
        raise ProgramError(f"returned {answer.dtype} {list(answer.shape)}, not torch.float32 {list(want.shape)}")
    if not bool(torch.isfinite(answer).all()):
        raise ProgramError("the answer is not finite: unwritten memory was read")
    if (worst := float((answer.double() - want).abs().max())) > TOLERANCE:
        raise ProgramError(f"the answer is off by {worst:.2g}, allowed {TOLERANCE:g}")
    for name, old, new, fresh in zip(
        ["q", "k", "v", "k_cache", "v_cache"], before, inputs, [None] * 3 + before[1:3], strict=True
    ):
        if fresh is not None:
            for row, n in enumerate(lengths):
                old[row, :, n] = fresh[row]
        if not torch.equal(old.view(torch.int32), new.view(torch.int32)):
            raise ProgramError(f"{name} is not what it must be afterwards: only the new position of a cache changes")
    return traffic.bytes


def expected(inputs: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """The answer in float64, row by row, by torch's own attention."""
    q, k, v, k_cache, v_cache = (t.double() for t in inputs)
    rows = []
    for row, n in enumerate(lengths):
        keys = torch.cat((k_cache[row, :, :n], k[row, :, None]), 1)
        values = torch.cat((v_cache[row, :, :n], v[row, :, None]), 1)
        rows.append(scaled_dot_product_attention(q[row, :, None], keys, values, enable_gqa=True)[:, 0])
    return torch.stack(rows)


def bound(lengths: Sequence[int]) -> int:
    """Bytes that no solution can do without: read q, k, v and what is cached, write the new position and the answer."""
    new, cached = 2 * KV_HEADS * HEAD_DIM, sum(lengths) * 2 * KV_HEADS * HEAD_DIM
    return 4 * (cached + len(lengths) * (2 * HEADS * HEAD_DIM + 2 * new))
