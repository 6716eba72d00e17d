"""Bytes of every op in the interpreter: each place once, and fewer than the ops that a fused one replaces."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from cs336_kernels import traffic
from cs336_kernels.catalogue import OPS
from cs336_kernels.shapes import TINY


@pytest.mark.parametrize("name", OPS)
def test_no_op_moves_more_than_it_must(name):
    for row in traffic.rows([name]):
        assert 0.95 <= row.ratio <= traffic.ALLOWED, f"{row.shape}, {row.tokens} tokens"
        assert row.total >= row.unique
        if row.separate_unique is not None:
            assert row.unique < row.separate_unique, "fusing saved nothing"


def test_a_second_reading_of_everything_is_noticed():
    """A norm in two launches, the first of which also reads x, is above the bound."""
    op = OPS["rms_norm"]

    def twice(**arguments):
        op.call(**arguments)
        return op.call(**arguments)

    wasteful = dataclasses.replace(op, call=twice)
    row = traffic.count(wasteful, TINY["tiny"], 5, torch.float32)
    assert row.ratio == pytest.approx(2.0) and row.launches == 2


def test_the_command_prints_rows(capsys):
    assert traffic.main(["--op", "swiglu", "--json", "--check"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(r["op"], r["unique_over_minimal"]) for r in rows} == {("swiglu", 1.0)}


def test_the_check_fails_above_the_bound(capsys, monkeypatch):
    monkeypatch.setattr(traffic, "ALLOWED", 0.99)
    assert traffic.main(["--op", "swiglu", "--check"]) == 1
    assert "4 rows above 0.99; the worst is swiglu" in capsys.readouterr().err
