"""The kernels with a planted bug: the sanitizer finds it, and only it, whatever the seed; the hidden check knows it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from cs336_kernels.sanitizer import sanitize

from cs336_infer.course import a4_broken, kernel_runner
from cs336_infer.course.a4_broken import BROKEN, RESIDENT, SCHEDULES
from cs336_infer.course.a4_fusion import KINDS
from cs336_infer.types import InferError

REPO = Path(__file__).resolve().parents[2]


def known_bugs() -> dict[str, tuple[str, tuple[int, ...]]]:
    spec = importlib.util.spec_from_file_location("hidden_a4", REPO / "tests" / "hidden" / "a4_fusion.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BUGS


@pytest.mark.parametrize("name", BROKEN)
def test_one_finding_of_the_known_kind_and_line(name: str) -> None:
    kind, lines = known_bugs()[name]
    for seed in (0, 100, 10_000):
        with sanitize(schedules=SCHEDULES, seed=seed, resident=RESIDENT) as report:
            a4_broken.launch(name)
        found = [(str(f.kind), f.line in lines) for f in report.findings]
        assert found == [(kind, True)], (seed, report.findings)


def test_every_kind_is_there_and_every_kernel_is_known() -> None:
    bugs = known_bugs()
    assert list(bugs) == list(BROKEN) and {kind for kind, _ in bugs.values()} == set(KINDS)


def test_each_compiles_so_that_a_gpu_would_run_it() -> None:
    for name, one in BROKEN.items():
        _, arguments, constants = one.launch()
        kernel_runner.compile_for_gpu(one.text, name, arguments, constants)


def test_a_listing_counts_the_lines_of_the_sanitizer() -> None:
    head, *lines = a4_broken.listing("double").splitlines()
    assert head == "double: out = 2 x, of n numbers" and lines[7].strip().startswith("8 ") and "at <= n" in lines[7]
    with pytest.raises(InferError, match="no broken kernel is called 'x'; there are double, column_sums"):
        a4_broken.listing("x")


def test_what_a_kernel_moved_is_counted_for_each_program() -> None:
    one = BROKEN["last_adds"]
    _, arguments, constants = one.launch()
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in arguments.items() if name not in tensors}
    launch = ["last_adds", [3], {**{name: name for name in tensors}, **numbers}, constants]
    options = {"schedules": 1, "seed": 0, "resident": 4}
    got = kernel_runner.answer(one.text, {"tensors": tensors, "launches": [launch], "out": ["out"], **options})
    # 8 numbers of x, a part and the counter read and written; the last one also reads 3 parts and writes the sum
    each = 8 * 4 + 4 + 2 * 4
    assert got["largest"] in ([each], [each + 16])
    assert got["total_bytes"] == (20 + 3 + 3 + 1) * 4 + 3 * 8
    assert got["launches"][0]["x"]["loaded"] == got["launches"][0]["x"]["unique_loaded"] == 80
