"""The open task of assignment 4: the MLP half of a decode step, in as few bytes and launches as you can.

The number does not depend on a clock. A launch is charged what all its programs move, every request counted, or 16
times what its busiest program moves, whichever is more: as on a GPU with 16 multiprocessors, where one program alone
leaves 15 idle. Each launch costs `LAUNCH` bytes on top, about what such a memory moves between two.

When graded, the plan comes from the submission as plain values, the text of its kernels is taken unrun, and both are
looked at here (`kernel_text`); the launches run on fresh numbers in the sandbox of the sanitizer, which counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cs336_kernels.ops import rms_norm, swiglu

from cs336_infer.course import kernel_ask
from cs336_infer.course.ask import Ask, AskError, local_ask
from cs336_infer.course.expect import CheckFailed
from cs336_infer.course.kernel_cases import Case, normal, passed
from cs336_infer.types import InferError, short

TOKENS, HIDDEN, INNER, EPS = 4, 96, 192, 1e-5
LAUNCH, PROCESSORS = 8_192, 16
MOST_LAUNCHES, MOST_PROGRAMS, MOST_SCRATCH = 8, 256, 1 << 18
SCHEDULES = 4
START, TO_BEAT = 1_043_968, 349_696
"""Cost of the plan in the notebook, and of one with two launches, in which each weight is read once."""
GIVEN = ("x", "residual", "norm", "gate_up", "down", "out")


class PlanError(InferError):
    """A plan that is not run: one line."""


def layer_cost(layer_plan: Callable[[], Any]) -> str:
    """For the notebook: run and count a plan.

    Raises:
        InferError: it cannot be run, its result is wrong, or the sanitizer found something; one line.
    """

    def ask(name: str, /, *args: Any) -> Any:
        if name == "layer_plan":
            return local_ask({name: layer_plan})(name)
        from cs336_infer.course import kernel_runner

        text = kernel_ask.text_of(kernel_ask.launched(args[0]), layer_plan.__globals__)
        return kernel_runner.answer(text, args[0])

    result = score(ask, 0)
    if not result["ok"]:
        raise InferError(f"layer_plan: {result['message']}")
    return (
        f"cost {result['cost']:,}: {result['launches']} launches, {result['total_bytes']:,} bytes; "
        f"the start is {START:,}, to beat {TO_BEAT:,}, what every plan must move {bound():,}"
    )


def score(ask: Ask, seed: int) -> dict[str, Any]:
    """Take the plan by `ask("layer_plan")`, and launch it by `ask("layer_kernels", question)` on fresh numbers.

    Returns:
        {"ok", "cost", "launches", "total_bytes" (None unless ok), "start", "to_beat", "bound", "message" (one line,
        empty when ok)}.
    """
    known = {"start": START, "to_beat": TO_BEAT, "bound": bound()}
    nothing = {"ok": False, "cost": None, "launches": None, "total_bytes": None}
    try:
        case, question = _case(checked(ask("layer_plan")), np.random.default_rng(seed))
        answer = passed(ask, case, question)
    except (AskError, PlanError, CheckFailed) as error:
        return {**nothing, **known, "message": str(error)}
    moved = [sum(t["loaded"] + t["stored"] + 2 * t["atomic"] for t in each.values()) for each in answer["launches"]]
    cost = sum(LAUNCH + max(m, PROCESSORS * most) for m, most in zip(moved, answer["largest"], strict=True))
    counted = {"ok": True, "cost": cost, "launches": len(moved), "total_bytes": sum(moved)}
    return {**counted, **known, "message": ""}


def bound() -> int:
    """Bytes of weights, inputs and output, once each, and one launch."""
    return LAUNCH + 4 * (3 * INNER * HIDDEN + HIDDEN + 3 * TOKENS * HIDDEN)


def checked(plan: Any) -> dict[str, Any]:
    """The plan, if it has the form of one.

    Raises:
        PlanError: says what is wrong.
    """
    if not isinstance(plan, dict) or set(plan) != {"scratch", "launches"} or not isinstance(plan["scratch"], dict):
        raise PlanError('a plan is {"scratch": {name: [shape, dtype]}, "launches": [...]}')
    scratch, launches = plan["scratch"], plan["launches"]
    room = MOST_SCRATCH
    for name, about in scratch.items():
        if (
            name in GIVEN
            or not isinstance(about, list | tuple)
            or len(about) != 2
            or about[1] not in ("float32", "int32")
        ):
            raise PlanError(f'scratch {short(name)} is a new name with [shape, "float32" or "int32"]')
        if not isinstance(about[0], list | tuple) or not all(type(n) is int and 0 < n <= room for n in about[0]):
            raise PlanError(f"scratch {short(name)} has the shape {short(about[0])}")
        room -= int(np.prod(about[0], dtype=object))
        if room < 0:
            raise PlanError(f"more than {MOST_SCRATCH:,} numbers of scratch")
    if not isinstance(launches, list | tuple) or not 0 < len(launches) <= MOST_LAUNCHES:
        raise PlanError(f"launches is a list of 1 to {MOST_LAUNCHES}")
    for number, launch in enumerate(launches, 1):
        _check_launch(f"launch {number}", launch, {*GIVEN, *scratch})
    return plan


def _check_launch(where: str, launch: Any, buffers: set[str]) -> None:
    if not isinstance(launch, list | tuple) or len(launch) != 4:
        raise PlanError(f"{where} is not [kernel, grid, arguments, constants]")
    kernel, grid, arguments, constants = launch
    if not isinstance(kernel, str) or not kernel.isidentifier():
        raise PlanError(f"{where}: {short(kernel)} is no name of a kernel")
    if not isinstance(grid, list | tuple) or not 1 <= len(grid) <= 3 or not all(type(n) is int and n > 0 for n in grid):
        raise PlanError(f"{where}: the grid is {short(grid)}, not 1 to 3 sizes")
    if np.prod(grid, dtype=object) > MOST_PROGRAMS:
        raise PlanError(f"{where}: {short(grid)} is more than {MOST_PROGRAMS} programs")
    for values, kinds in ((arguments, (int, float, str)), (constants, (int, float, bool))):
        if not isinstance(values, dict) or any(type(v) not in kinds for v in values.values()):
            raise PlanError(f"{where}: arguments are names of buffers or numbers, and constants are numbers")
    if odd := [v for v in arguments.values() if isinstance(v, str) and v not in buffers]:
        raise PlanError(f"{where}: there is no buffer {short(odd[0])}; there are {', '.join(sorted(buffers))}")


def _case(plan: dict[str, Any], rng: np.random.Generator) -> tuple[Case, dict[str, Any]]:
    """The launches on fresh numbers, with what must come out of them."""
    x, residual = (normal(rng, (TOKENS, HIDDEN), "float32") for _ in range(2))
    norm = normal(rng, (HIDDEN,), "float32")
    gate_up = normal(rng, (2 * INNER, HIDDEN), "float32", HIDDEN**-0.5)
    down = normal(rng, (HIDDEN, INNER), "float32", INNER**-0.5)
    summed = x.double() + residual.double()
    hidden = swiglu(rms_norm(summed, norm.double(), EPS) @ gate_up.double().T)
    want = summed + hidden @ down.double().T
    tensors: dict[str, Any] = {"x": x, "residual": residual, "norm": norm, "gate_up": gate_up, "down": down}
    tensors["out"] = {"shape": [TOKENS, HIDDEN], "dtype": "float32"}
    for name, (shape, dtype) in plan["scratch"].items():
        zeros = dtype == "int32"
        tensors[name] = torch.zeros(*shape, dtype=torch.int32) if zeros else {"shape": list(shape), "dtype": dtype}
    case = Case("layer_kernels", (), tensors, {}, {}, {"out": (want, want.float())}, bound(), "the plan")
    launches = [[kernel, list(grid), arguments, constants] for kernel, grid, arguments, constants in plan["launches"]]
    question = {**case.question(SCHEDULES, int(rng.integers(1000))), "launches": launches, "resident": PROCESSORS}
    return case, question
