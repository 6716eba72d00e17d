"""The catalogue: every op is right at its shapes, moves the bytes that it states, and agrees with its separate form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from cs336_kernels import catalogue_table
from cs336_kernels.catalogue import OPS, Op, Separate
from cs336_kernels.shapes import MODELS, TINY, Shape
from cs336_kernels.verify import verify

CPU = torch.device("cpu")
CASES = [
    pytest.param(op, shape, id=f"{op.name}-{shape.name}")
    for op in OPS.values()
    for shape in TINY.values()
    if op.fits(shape)
]


@pytest.mark.parametrize(("op", "shape"), CASES)
def test_every_op_is_right_at_a_tiny_shape(op: Op, shape: Shape) -> None:
    """As on a GPU, in the interpreter: float64 reference, random numbers, slots without an owner hold NaN."""
    for dtype in op.dtypes:
        for tokens in (1, 5):
            verdict = verify(op, shape, dtype, CPU, tokens)
            assert verdict.right, verdict


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.separate], ids=lambda op: op.name)
def test_the_separate_form_computes_the_same(op: Op) -> None:
    def call(path: str, **arguments: Any) -> Any:
        assert op.separate is not None
        if path == "triton":
            return op.separate(Separate("reference"), **arguments)
        return op.call(**arguments, path=path)

    for shape in TINY.values():
        verdict = verify(replace(op, call=call), shape, torch.float32, CPU, 5)
        assert verdict.right, verdict
    for shape in MODELS.values():
        for tokens in (1, 128):
            least = catalogue_table.least_bytes(op, shape, tokens)
            assert catalogue_table.separately(op, shape, tokens).minimal_bytes > least
            assert catalogue_table.launches(op, shape, tokens) == 1


def broken(op: Op, change: Any) -> Op:
    """The op with a fault on the path "triton" only."""

    def call(path: str, **arguments: Any) -> Any:
        result = op.call(**arguments, path="reference")
        return change(result, arguments) if path == "triton" else result

    return replace(op, call=call)


def last_number_off(result: torch.Tensor, _: Any) -> torch.Tensor:
    changed = result.clone()
    changed.view(-1)[-1] += 0.1
    return changed


def newest_token_dropped(_: Any, arguments: dict[str, Any]) -> torch.Tensor:
    shorter = arguments | {"lengths": arguments["lengths"] - 1}
    return OPS["decode_attention"].call(**shorter, path="reference")


def one_token_too_many(_: Any, arguments: dict[str, Any]) -> torch.Tensor:
    longer = arguments | {"lengths": arguments["lengths"] + 1}
    return OPS["decode_attention"].call(**longer, path="reference")


def neighbour_overwritten(result: Any, arguments: dict[str, Any]) -> Any:
    free = set(range(arguments["keys"][..., 0, 0].numel())) - set(arguments["slots"].tolist())
    arguments["keys"].flatten(0, 1)[min(free)] = 0
    return result


def refuses(*_: Any) -> Any:
    raise RuntimeError("illegal memory access")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("swiglu", last_number_off),
        ("argmax", lambda result, _: result + 1),
        ("decode_attention", newest_token_dropped),
        ("decode_attention", one_token_too_many),
        ("write_kv", neighbour_overwritten),
        ("qkv", neighbour_overwritten),
        ("linear", refuses),
    ],
)
def test_a_wrong_op_is_found(name: str, change: Any) -> None:
    op = broken(OPS[name], change)
    assert verify(broken(OPS[name], lambda result, _: result), TINY["tiny"], op.dtypes[0], CPU, 5).right
    for dtype in op.dtypes:
        verdict = verify(op, TINY["tiny"], dtype, CPU, 5)
        assert not verdict.right and verdict.reason


def test_empty_arguments_have_the_shapes_of_filled_ones() -> None:
    """What is recorded and counted is what would run."""
    for op in OPS.values():
        for shape in TINY.values():
            if op.fits(shape):
                kinds = [
                    {name: _kind(value) for name, value in op.make(shape, op.dtypes[0], CPU, 5, seed=s).items()}
                    for s in (None, 0)
                ]
                assert kinds[0] == kinds[1], op.name


def _kind(value: Any) -> Any:
    if hasattr(value, "packed"):
        return _kind(value.packed), _kind(value.scales), value.bits, value.group
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


def test_the_page_has_the_table() -> None:
    page = Path(__file__).resolve().parents[2] / "kernels" / "README.md"
    assert catalogue_table.table() in page.read_text(), "run: python -m cs336_kernels.catalogue --table"
