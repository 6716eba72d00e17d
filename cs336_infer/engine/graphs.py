"""Decode steps as CUDA graphs: the launches of a step are recorded once and started by one call from then on.

A graph replays launches with the arguments they had, so everything that changes from step to step lies in tensors that
stay where they are: token ids, positions, slots, block tables, lengths. A number that the host reads, such as how many
programs share a row, is fixed when the graph is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cs336_kernels.ops.decode_attention import choose_splits

from cs336_infer.kv.paged import PagedKV
from cs336_infer.kv.triton_step import TritonStep

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], Run]
"""Makes of a function, which always works on the same tensors, one that does the same in one launch."""


def cuda_graph(run: Run) -> Run:
    """Record `run`, after two runs that compile its kernels and find its memory."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


class StaticStep(TritonStep):
    """A decode step of a number of rows whose tensors stay where they are; `load` fills in another step's numbers."""

    def __init__(self, memory: PagedKV, rows: int, blocks: int) -> None:
        device = memory.data.device
        self._memory, self.decoding = memory, True
        self.tokens = torch.zeros((1, rows), dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device)
        self.totals = torch.zeros_like(self.slots)
        self.tables = torch.zeros((rows, blocks), dtype=torch.int64, device=device)
        self.last = torch.arange(rows, device=device)
        self.splits = choose_splits(blocks * memory.block_size, rows, memory.data.shape[4])

    def load(self, tokens: torch.Tensor, step: TritonStep) -> None:
        for mine, other in (
            (self.tokens, tokens),
            (self.positions, step.positions),
            (self.slots, step.slots),
            (self.totals, step.totals),
        ):
            mine.copy_(other)
        self.tables[:, : step.tables.shape[1]].copy_(step.tables)


class Graphs:
    """The model's `forward` for an engine, with a graph for each number of rows that decode together.

    Args:
        net: `models.llama.Llama`. context: tokens of the longest sequence, which decides how wide block tables are.
        capture: how a step becomes a graph.
    """

    def __init__(self, net: Any, context: int, capture: Capture = cuda_graph) -> None:
        self._net, self._context, self._capture = net, context, capture
        self._made: dict[int, tuple[StaticStep, Run]] = {}

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, step: Any, *, at: torch.Tensor) -> torch.Tensor:
        """As `Llama.forward`. A step with a piece of a prompt, or in which not every row chooses, runs as it is.

        Returns:
            float32 logits [1, n, vocab]; those of a graph are overwritten by its next step.
        """
        rows = tokens.shape[1]
        if not step.decoding or len(at) != rows:
            return self._net.forward(tokens, positions, step, at=at)
        if rows not in self._made:
            self._made[rows] = self._make(tokens, step)
        static, replay = self._made[rows]
        static.load(tokens, step)
        return replay()

    def _make(self, tokens: torch.Tensor, step: TritonStep) -> tuple[StaticStep, Run]:
        memory = step._memory
        blocks = min(-(-self._context // memory.block_size), len(memory.data))
        static = StaticStep(memory, tokens.shape[1], blocks)
        static.load(tokens, step)  # what runs while it is recorded stores the same numbers in the same slots
        with torch.inference_mode():
            replay = self._capture(lambda: self._net.forward(static.tokens, static.positions, static, at=static.last))
        return static, replay
