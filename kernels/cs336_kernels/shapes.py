"""Shapes of models, and tensors for one call of an op at such a shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

POISON = math.nan
"""What slots hold that no sequence owns: whoever reads one has it in the result."""


@dataclass(frozen=True)
class Shape:
    """What decides the sizes of a decoder-only transformer's tensors.

    Attributes:
        context: positions of the longest sequence when attention is called. page: positions in a page of KV memory.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    layers: int
    qk_norm: bool = False
    context: int = 1024
    page: int = 16


MODELS = {
    s.name: s
    for s in (
        Shape("SmolLM2-135M", 576, 9, 3, 64, 1536, 49152, 30),
        Shape("SmolLM2-1.7B", 2048, 32, 32, 64, 8192, 49152, 24),
        Shape("Llama-3.2-1B", 2048, 32, 8, 64, 8192, 128256, 16),
        Shape("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936, 28, qk_norm=True),
    )
}
"""Models whose kernels are compiled and timed."""

TINY = {
    s.name: s
    for s in (
        Shape("tiny", 96, 6, 3, 16, 160, 300, 2, context=40, page=4),
        Shape("tiny-qk", 96, 4, 2, 32, 160, 300, 2, qk_norm=True, context=40, page=4),
    )
}
"""Shapes for the interpreter, where a program costs milliseconds."""


class Values:
    """Makes the tensors of a call.

    Args:
        seed: of random numbers, all from one generator. None: float tensors hold nothing, which costs neither time nor
            memory, as long as nobody reads them. Whole numbers are right either way.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int | None) -> None:
        self.dtype, self.device = dtype, device
        self.seeded = seed is not None
        self._random = None if seed is None else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None):
        """Normal numbers of this shape."""
        numbers = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return numbers if self._random is None else numbers.normal_(mean, scale, generator=self._random)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 of [0, 1)."""
        numbers = torch.empty(shape, dtype=torch.float32, device=self.device)
        return numbers if self._random is None else numbers.uniform_(0, 1, generator=self._random)

    def weight(self, rows: int, columns: int) -> torch.Tensor:
        """A matrix that keeps the size of numbers."""
        return self.normal(rows, columns, scale=columns**-0.5)

    def gain(self, size: int) -> torch.Tensor:
        """Weight of a norm."""
        return self.normal(size, mean=1.0, scale=0.2)

    def angles(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [..., head_dim] of random angles, the first half of sin negated as in `rope_tables`."""
        half = self.normal(*shape[:-1], shape[-1] // 2, scale=3.0, dtype=torch.float32)
        cos, sin = half.cos(), half.sin()
        return torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)

    def full(self, size: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((size,), value, dtype=dtype, device=self.device)

    def integers(self, *numbers: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def slots(self, tokens: int, pages: int, page: int) -> torch.Tensor:
        """[tokens] int64, different slots all over the pages."""
        mixed = torch.randperm(pages * page, generator=torch.Generator().manual_seed(0))
        return mixed[:tokens].to(self.device)

    def pages(self, shape: Shape, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """keys and values [pages, page, kv_heads, head_dim] of sequences of these lengths; tables [rows, most] int32.

        Pages of a sequence lie anywhere. Slots without an owner and entries behind a table's end are poison.
        """
        needed = [math.ceil(n / shape.page) for n in lengths]
        total = sum(needed) + 2
        order = torch.randperm(total, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        tables = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
        owned = torch.zeros(total * shape.page, dtype=torch.bool)
        for row, (count, length) in enumerate(zip(needed, lengths, strict=True)):
            mine, order = order[:count], order[count:]
            tables[row, :count] = mine
            places = mine.to(torch.int64).unsqueeze(1) * shape.page + torch.arange(shape.page)
            owned[places.flatten()[:length]] = True
        keys, values = (self.normal(total, shape.page, shape.kv_heads, shape.head_dim) for _ in range(2))
        if self._random is not None:
            free = (~owned).view(total, shape.page).to(self.device)
            keys[free], values[free] = POISON, POISON
        return keys, values, tables.to(self.device)
