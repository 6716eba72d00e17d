"""A model of random weights, small enough for kernels that are interpreted: its answers mean nothing, and are exact."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from cs336_infer.models.config import ModelConfig
from cs336_infer.models.gguf_file import GGUFFile
from cs336_infer.models.llama import Llama
from cs336_infer.models.load import LoadedModel
from cs336_infer.models.tokenizer import Tokenizer
from cs336_infer.models.weights import expected_shapes
from cs336_infer.models.zoo import EMBEDDED, resolve

TINY = ModelConfig("llama", 320, 48, 80, 2, 6, 2, 8, 256)


class RandomWeights:
    """A `WeightSource` without a file. Each tensor depends on its name alone."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = dict(expected_shapes(config))

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Gains around 1, and matrices that keep the size of numbers."""
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if out.dim() == 1:
            out.copy_(torch.rand(out.shape, generator=draw) + 0.5)
        else:
            out.copy_(torch.randn(out.shape, generator=draw) * (1.5 * out.shape[1] ** -0.5))


def tiny_model(kernels: str = "reference") -> LoadedModel:
    """The model `TINY` in float32 on the CPU, the same for every `kernels`, with the embedded model's tokenizer.

    Ask it with lists of ids below `TINY.vocab_size`: the tokenizer makes larger ones.
    """
    net = Llama(TINY, RandomWeights(TINY), dtype=torch.float32, device=torch.device("cpu"), path=kernels)
    return LoadedModel("tiny", Path(__file__), TINY, net, _tokenizer())  # this file is all that decides its weights


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(resolve(EMBEDDED)).metadata)
