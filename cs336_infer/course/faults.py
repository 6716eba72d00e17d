"""Faults of the kind that production had, put into the engine on purpose: what a detector must catch.

    with faults.unwritten_element():
        llm.generate(...)

Each is a context manager; outside of it the engine is whole again. They patch the engine's modules, so one process must
not serve anybody else meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cs336_infer import answer, sampling
from cs336_infer.engine import sequence
from cs336_infer.kv import manager, paged
from cs336_infer.kv.prefix import KeyChain
from cs336_infer.models.attend import Attend
from cs336_infer.text.stop import StopStrings


@contextmanager
def _instead(module: Any, name: str, mutant: Any) -> Iterator[None]:
    right = getattr(module, name)
    setattr(module, name, mutant)
    try:
        yield
    finally:
        setattr(module, name, right)


@contextmanager
def unwritten_element() -> Iterator[None]:
    """A kernel that is one element off: of each key and value it leaves the last element of the last head as it was in
    memory (of the class of vllm-ascend#17003)."""

    class Short(paged.PagedStep):
        def extend(self, new: int) -> Attend:
            attend, memory = super().extend(new), self._memory
            width = memory.page // memory.block_size

            def short(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                fresh = [k.clone(), v.clone()]
                for old, t in zip(memory.layer(layer), fresh, strict=True):
                    t.view(-1, width)[:, -1] = old.view(-1, width)[self._slots, -1]
                return attend(layer, q, *fresh)

            return short

    with _instead(paged, "PagedStep", Short):
        yield


@contextmanager
def stuck_positions() -> Iterator[None]:
    """A captured step that keeps the positions of its first replay: the rotary embedding puts every later token of an
    answer at the same place."""
    first: dict[int, int] = {}

    class Stuck(paged.PagedStep):
        def __init__(self, memory: paged.PagedKV, rows: Any) -> None:
            super().__init__(memory, rows)
            end = 0
            for row in rows:
                end += row.new
                if row.new == 1:
                    position = first.setdefault(row.table[0], int(self.positions[0, end - 1]))
                    self.positions[0, end - 1] = position

    with _instead(paged, "PagedStep", Stuck):
        yield


@contextmanager
def colliding_keys() -> Iterator[None]:
    """Keys of KV blocks that say which block it is, but not of which tokens, and nobody compares the tokens (of the
    class of openvino.genai#3722): a prompt gets the memory of another one."""

    class Colliding(KeyChain):
        def extend(self, tokens: Any) -> None:
            before = len(self.keys)
            super().extend(tokens)
            for i in range(before, len(self.keys)):
                self.keys[i], self.contents[i] = i.to_bytes(32, "little"), b""

    with _instead(manager, "KeyChain", Colliding):
        yield


@contextmanager
def blind_sampler() -> Iterator[None]:
    """A sampler that does not look whether scores are numbers (vllm#22881): the largest of many NaNs is token 0."""

    class Blind(sampling.Sampler):
        def __call__(self, logits: torch.Tensor) -> list[int]:
            if self._plain:
                return logits.argmax(-1).tolist()
            return [row.next(x) for row, x in zip(self.rows, logits, strict=True)]

    with _instead(sequence, "Sampler", Blind):
        yield


@contextmanager
def shared_random_numbers() -> Iterator[None]:
    """One stream of random numbers for everybody: a seeded request depends on who else draws (vllm#51226)."""
    everybody = torch.Generator().manual_seed(0)

    class Shared(sampling.Sampler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            for row in self.rows:
                row.generator = everybody

    with _instead(sequence, "Sampler", Shared):
        yield


@contextmanager
def leaking_stop() -> Iterator[None]:
    """A stream that shows text before it is known not to begin a stop string (vllm#3574)."""

    class Leaking(StopStrings):
        def push(self, text: str) -> str:
            held = self.held
            shown = super().push(text)
            return (shown + self.held)[len(held) :]

        def flush(self) -> str:
            super().flush()
            return ""

    with _instead(answer, "StopStrings", Leaking):
        yield
