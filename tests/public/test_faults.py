"""The faults of the lecture on production: each is seen by its own detector, and a healthy engine by none."""

from __future__ import annotations

import math

import pytest

from cs336_infer import LoadedModel, load_model
from cs336_infer.course import detectors, faults
from cs336_infer.course.poison import poisoned
from cs336_infer.kv import manager, paged

OWN = {
    "stuck positions": detectors.loops,
    "unwritten element": detectors.fills,
    "colliding keys": detectors.drift,
    "NaN, blind sampler": detectors.oracle,
    "NaN": detectors.finite,
    "shared random numbers": detectors.company,
    "leaking stop": detectors.stream,
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(dtype="float32")


def test_every_fault_has_a_detector_of_its_own() -> None:
    assert {*OWN} == {*detectors.FAULTS} - {"healthy"}
    assert {*OWN.values()} == {*detectors.DETECTORS.values()}


@pytest.mark.parametrize("name", OWN)
def test_a_fault_is_seen_and_its_absence_too(model: LoadedModel, name: str) -> None:
    sees, (broken, fill) = OWN[name], detectors.FAULTS[name]
    whole = manager.KeyChain, paged.PagedStep
    assert not sees(model, 0.0)
    assert not sees(model, math.nan)  # a healthy engine does not care what memory holds
    for fault in broken[:1]:
        with fault():
            if len(broken) == 2:
                with broken[1]():
                    assert sees(model, fill)
            else:
                assert sees(model, fill)
    assert (manager.KeyChain, paged.PagedStep) == whole, "the fault stayed"


def test_finite_fills_alone_see_an_unwritten_element(model: LoadedModel) -> None:
    prompts = [model.tokenizer.encode(text) for text in (detectors.OPENING, detectors.CALM)]
    with faults.unwritten_element():
        assert "differ" in poisoned(model, prompts, (1e4, -7.0), tokens=2)
    assert poisoned(model, prompts, (1e4, -7.0), tokens=2) == "clean"


def test_a_fault_ends_with_its_block_even_when_that_raises(model: LoadedModel) -> None:
    right = paged.PagedStep
    with pytest.raises(RuntimeError), faults.stuck_positions():
        assert paged.PagedStep is not right
        raise RuntimeError
    assert paged.PagedStep is right
