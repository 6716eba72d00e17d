"""Random arguments of the ops that multiply by a weight, in memory whose padding is filled."""

from __future__ import annotations

import pytest
import torch
from cs336_kernels.ops.triton import products
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SETTINGS = settings(
    derandomize=True, deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TOKENS = st.one_of(st.integers(1, 8), st.integers(9, 70))
"""For both kernels of each op, and for more than one tile of tokens."""

EPS = 1e-5


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0, fill: float = 0.0) -> torch.Tensor:
    """Random rows with room between them that holds `fill`. The numbers do not depend on `fill`."""
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.randn(shape, generator=generator) * scale).to(dtype)
    if len(shape) == 1:
        return numbers
    roomy = torch.full((shape[0] + 1, shape[1] + 5), fill, dtype=dtype)
    roomy[: shape[0], : shape[1]] = numbers
    return roomy[: shape[0], : shape[1]]


@pytest.fixture(params=["interpreter", "gpu"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The blocks of rows that the interpreter gets, which are larger, and those that a GPU gets."""
    if request.param == "gpu":
        stock = products.block_of_rows
        for module in ("products", "quant_linear"):
            monkeypatch.setattr(
                f"cs336_kernels.ops.triton.{module}.block_of_rows",
                lambda tokens, rows, interpreted, least=1: stock(tokens, rows, False, least),
            )
    return request.param


def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """RMSNorm in the dtype of the arguments."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain


def double(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.double() for t in tensors]
