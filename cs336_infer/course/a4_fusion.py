"""Public checks of assignment 4.

Students read this file, so no kernel is in it: what must come out is computed by the package's torch references in
float64 (`a4_cases`), or was worked out on paper.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cs336_infer.course import a4_attention_cases as attention
from cs336_infer.course import a4_cases as cases
from cs336_infer.course import kernel_ask  # noqa: F401  with it `ask` takes kernels
from cs336_infer.course.a4_broken import BROKEN
from cs336_infer.course.checks import Ask, check, expect_equal, fail, make_check
from cs336_infer.course.kernel_cases import Case, expect_bytes, launched, next_power, run_case

KERNELS = (
    "add_rms_norm_kernel",
    "rope_write_kernel",
    "swiglu_kernel",
    "split_attention_kernel",
    "merge_kernel",
    "repaired_kernel",
    "layer_kernels",
)
"""Questions that are for kernels; the last one is that of the open task."""

KINDS = ("race", "deadlock", "out-of-bounds", "uninitialised-read", "plain-load-poll", "nondeterminism")

check_public = make_check(__name__)

# 1. Residual sum and RMSNorm ------------------------------------------------------------------------------------------


@check("add_rms_norm_kernel", points=1, title="four rows in float32: the sum and its norm")
def sum_and_norm(ask: Ask, rng: np.random.Generator) -> None:
    run_case(ask, cases.add_rms_norm(rng, 4, 16))
    run_case(ask, cases.add_rms_norm(rng, 2, 11))


@check("add_rms_norm_kernel", points=1, title="bfloat16: computed in float32, rounded once")
def half_norm(ask: Ask, rng: np.random.Generator) -> None:
    run_case(ask, cases.add_rms_norm(rng, 3, 24, "bfloat16"))


@check("add_rms_norm_kernel", points=1, title="sum and norm: four passes over memory, not five")
def norm_bytes(ask: Ask, rng: np.random.Generator) -> None:
    case = cases.add_rms_norm(rng, 4, 40)
    expect_bytes(run_case(ask, case), case)


# 2. RoPE, and keys and values into their pages ------------------------------------------------------------------------


@check("rope_write_kernel", points=1, title="queries are turned, keys and values are in their slots")
def turned_and_stored(ask: Ask, rng: np.random.Generator) -> None:
    run_case(ask, cases.rope_write(rng, 3, 2, 1, 8))


@check("rope_write_kernel", points=1, title="angle 0 changes nothing, a right angle swaps the halves")
def right_angle(ask: Ask, rng: np.random.Generator) -> None:
    case = cases.rope_write(rng, 2, 1, 1, 8)
    case.tensors["cos"], case.tensors["sin"] = torch.eye(2)[:, :1].repeat(1, 4), torch.eye(2)[:, 1:].repeat(1, 4)
    out, q = launched(ask, case)["tensors"]["q_out"], case.tensors["q"]
    expect_equal(out[0], q[0, :8], what="q_out of a token at angle 0")
    expect_equal(out[1], torch.cat([-q[1, 4:8], q[1, :4]]), what="q_out of a token at a right angle")


@check("rope_write_kernel", points=1, title="rotated keys are written once and never read")
def rope_bytes(ask: Ask, rng: np.random.Generator) -> None:
    case = cases.rope_write(rng, 4, 3, 1, 12)
    expect_bytes(run_case(ask, case), case)


# 3. SwiGLU ------------------------------------------------------------------------------------------------------------


@check("swiglu_kernel", points=1, title="silu(gate) times up, of rows of odd sizes")
def gated(ask: Ask, rng: np.random.Generator) -> None:
    run_case(ask, cases.swiglu_case(rng, 3, 21))


@check("swiglu_kernel", points=1, title="SwiGLU in bfloat16, each number moved once")
def gated_half(ask: Ask, rng: np.random.Generator) -> None:
    case = cases.swiglu_case(rng, 2, 32, "bfloat16")
    expect_bytes(run_case(ask, case), case)


# 4. Attention of a decode step ----------------------------------------------------------------------------------------


@check("split_attention_kernel", points=1, title="one row, one split: plain attention over pages")
def one_split(ask: Ask, rng: np.random.Generator) -> None:
    run_case(ask, attention.split_attention(rng, [8], 1, 1, 8, 1))


@check("split_attention_kernel", points=1, title="two splits of rows with a ragged last page")
def two_splits(ask: Ask, rng: np.random.Generator) -> None:
    run_case(ask, attention.split_attention(rng, [13, 9], 2, 1, 8, 2))


@check("split_attention_kernel", points=1, title="each key and value is loaded once for its group of heads")
def loaded_once(ask: Ask, rng: np.random.Generator) -> None:
    case = attention.split_attention(rng, [16], 4, 2, 8, 2)
    answer = run_case(ask, case)
    expect_bytes(answer, case)
    once(answer, case)


def once(answer: dict[str, Any], case: Case) -> None:
    """No program loads a key or value that another one loads too."""
    for name in ("keys", "values"):
        moved = answer["launches"][0].get(name, {"loaded": 0, "unique_loaded": 0})
        if moved["loaded"] > moved["unique_loaded"]:
            fail(
                f"{case.what}: {name}: {moved['loaded']:,} bytes are loaded, {moved['unique_loaded']:,} of them unique"
            )


@check("split_attention_kernel", points=1, title="two parts are merged by their weights")
def merged(ask: Ask, rng: np.random.Generator) -> None:
    run_case(ask, attention.merge(rng, 3, 2, 8, empty=0.0))


@check("split_attention_kernel", points=1, title="a part without positions does not count")
def empty_part(ask: Ask, rng: np.random.Generator) -> None:
    run_case(ask, attention.merge(rng, 3, 5, 8))


# 5. and 6. Find what is wrong, and repair one -------------------------------------------------------------------------


def named(ask: Ask) -> dict[str, Any]:
    """What `name_bugs` returned, if it has the form that was asked for."""
    answer = ask("name_bugs")
    if not isinstance(answer, dict) or set(answer) != set(BROKEN):
        fail(f"name_bugs must return a dict with the keys {', '.join(BROKEN)}")
    for name, found in answer.items():
        if not isinstance(found, list | tuple) or [type(part) for part in found] != [str, int]:
            fail(f"{name}: a bug is [kind, line], not {found!r:.60}")
        if found[0] not in KINDS:
            fail(f"{name}: a kind is one of {', '.join(KINDS)}, not {found[0]!r:.40}")
    return answer


@check("name_bugs", points=1, title="a kind and a line for each kernel; the first is the example")
def form(ask: Ask, rng: np.random.Generator) -> None:
    expect_equal(list(named(ask)["double"]), ["out-of-bounds", 8], what="double")


@check("name_bugs", points=1, title="each line is one that reads, writes or waits")
def lines(ask: Ask, rng: np.random.Generator) -> None:
    for name, (_, line) in named(ask).items():
        text = BROKEN[name].text.splitlines()
        if not 0 < line <= len(text) or not any(
            word in text[line - 1] for word in ("load", "store", "atomic", "while")
        ):
            fail(f"{name}: nothing is read, written or waited for in line {line}")


def repaired_case(rng: np.random.Generator, n: int, block: int = 8) -> Case:
    programs = -(-n // block)
    x = torch.from_numpy(rng.uniform(1, 2, size=n)).float()
    x = torch.cat([x, torch.full((3,), torch.nan)])
    total = x[:n].double().sum()[None]
    zero = torch.zeros(1, dtype=torch.int32)
    empty = {name: {"shape": [size], "dtype": "float32"} for name, size in (("out", 1), ("parts", programs))}
    return Case(
        "repaired_kernel",
        (programs,),
        {**empty, "count": zero, "x": x},
        {"n": n},
        {"BLOCK": block, "PROGRAMS": next_power(programs)},
        {"out": (total, total.float())},
        4 * (n + 2 * programs + 1) + 8,
        f"{n} numbers, {programs} programs",
    )


@check("repaired_kernel", points=1, title="the sum, in every order of the programs")
def repaired_sum(ask: Ask, rng: np.random.Generator) -> None:
    run_case(ask, repaired_case(rng, 20), schedules=8)


@check("repaired_kernel", points=1, title="one program alone, and the counter is 0 again")
def repaired_alone(ask: Ask, rng: np.random.Generator) -> None:
    case = repaired_case(rng, 5)
    case.expected["count"] = (torch.zeros(1).double(), torch.zeros(1, dtype=torch.int32))
    run_case(ask, case)
