"""The script for a GPU, without one: what it checks, times and leaves out, with a clock that counts calls."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from cs336_kernels.catalogue import OPS, Op
from cs336_kernels.shapes import TINY, Shape

BENCH = Path(__file__).resolve().parents[2] / "kernels" / "bench"
TOKENS = (1, 6)


class Counter:
    """A clock for the CPU: runs each call once, and takes one microsecond for it."""

    device, capability, l2_bytes, bandwidth = torch.device("cpu"), 90, 1 << 14, 1e9

    def __init__(self) -> None:
        self.compiled, self.timed = 0, 0

    def compile(self, variants: Any) -> None:
        self.compiled = len(list(variants))

    def microseconds(self, calls: Sequence[Callable[[], object]]) -> tuple[float, str]:
        for call in calls[:1]:
            call()
        self.timed += 1
        return 1.0, "graph"

    def release(self) -> None: ...
    def hardware(self) -> dict[str, Any]:
        return {"gpu": "none"}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import device as script  # type: ignore[import-not-found]

    monkeypatch.setattr(script, "TOKENS", TOKENS)
    return script


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: run kernels/bench/device.py")
    script = [sys.executable, str(BENCH / "device.py")]
    run = subprocess.run(script, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 2
    assert run.stdout == ""
    assert len(run.stderr.strip().splitlines()) == 1 and "no CUDA GPU" in run.stderr


def test_everything_is_checked_then_timed(device: Any) -> None:
    ops = [OPS[name] for name in ("add_rms_norm", "qk_norm", "write_kv", "decode_attention", "prefill_attention")]
    clock = Counter()
    report = device.measure(ops, list(TINY.values()), clock, lambda: 100.0)
    json.dumps(report)
    assert clock.compiled > len(ops)
    expected = {(op.name, s.name, n) for op in ops for s in TINY.values() if op.fits(s) for n in TOKENS}
    assert {(c["op"], c["model"], c["tokens"]) for c in report["checks"]} == expected
    assert {(t["op"], t["model"], t["tokens"]) for t in report["timings"]} == expected
    assert not report["skipped"] and not any(c["reason"] for c in report["checks"])
    assert {c["dtype"] for c in report["checks"] if c["model"] == "tiny"} == {"bfloat16", "float16", "float32"}
    for t in report["timings"]:
        op, shape = OPS[t["op"]], TINY[t["model"]]
        least = op.minimal_bytes(**op.make(shape, op.dtypes[0], torch.device("cpu"), t["tokens"]))
        assert t["minimal_bytes"] == least
        assert t["fraction"] == pytest.approx(least / 1e-6 / clock.bandwidth)
        assert t["from_device_memory"] == (t["copies"] * least >= 2 * clock.l2_bytes)
        assert t["copies"] == device.MOST_COPIES or t["from_device_memory"]
        assert ("separate_us" in t) == (t["op"] == "add_rms_norm")


def test_a_wrong_op_is_reported_and_not_timed(device: Any) -> None:
    def call(path: str, **arguments: Any) -> torch.Tensor:
        return OPS["swiglu"].call(**arguments, path="reference") + (0.1 if path == "triton" else 0)

    wrong = replace(OPS["swiglu"], call=call)
    report = device.measure([wrong, OPS["rms_norm"]], [TINY["tiny"]], Counter(), lambda: 100.0)
    assert {c["op"] for c in report["checks"] if c["reason"]} == {"swiglu"}
    assert {t["op"] for t in report["timings"]} == {"rms_norm"}
    assert [line for line in report["skipped"] if line.endswith("wrong")] == report["skipped"] != []


def test_what_there_is_no_time_for_is_listed(device: Any) -> None:
    """Seven moments are asked for; whatever was not done has its line."""
    moments = iter([9.0] * 7)
    report = device.measure([OPS["rms_norm"]], [TINY["tiny"]], Counter(), lambda: next(moments, 0.0))
    done = len(report["checks"]) + len(report["timings"])
    assert len(report["checks"]) == 6
    assert done + len(report["skipped"]) == 6 + len(TOKENS)
    assert all(line.endswith("no time left") for line in report["skipped"])


def test_torch_compile_is_timed_for_one_model(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile itself stands aside: what it is given must be what the eager form is."""
    monkeypatch.setattr(device, "COMPILED", "tiny")
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    ops = [OPS[name] for name in ("decode_attention", "prefill_attention", "linear_add")]
    report = device.measure(ops, [TINY["tiny"]], Counter(), lambda: 100.0)
    compiled = {(t["op"], t["tokens"]) for t in report["timings"] if t.get("torch_compile_us") is not None}
    assert compiled == {(op.name, 1) for op in ops}


@pytest.mark.parametrize("name", ["decode_attention", "prefill_attention"])
@pytest.mark.parametrize("shape", TINY.values(), ids=lambda s: s.name)
def test_the_form_of_torch_computes_the_same(device: Any, name: str, shape: Shape) -> None:
    op: Op = OPS[name]
    for tokens in (1, 7):
        arguments = op.make(shape, torch.float32, torch.device("cpu"), tokens, seed=5)
        expected = op.call(**arguments, path="reference")
        torch.testing.assert_close(device.torch_form(op, arguments)(), expected, rtol=1e-5, atol=1e-6)
