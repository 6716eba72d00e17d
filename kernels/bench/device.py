"""Check and time every kernel of the catalogue on the GPU of this machine, within about five minutes.

    python kernels/bench/device.py                        JSON on stdout, progress on stderr
    python kernels/bench/device.py --out results.json --model Llama-3.2-1B --op gate_up

Right comes first: every op is compared with its reference in float64 at every shape, and one that is wrong is reported
and not timed. Then each is timed in a CUDA graph that holds many calls, each on tensors of its own, together larger
than the L2 cache: a kernel meets its weights as in decoding, in device memory. Next to it stand the bytes that it must
move, the bandwidth that follows, and the share of what a plain copy reached in the same run. Torch's own ops,
torch.compile and the separate kernels that a fused one replaces are timed in the same way.

Exit code: 0 all right, 1 some op is wrong, 2 no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from cs336_kernels.calls import Arguments
from cs336_kernels.catalogue import OPS, Op, Separate
from cs336_kernels.shapes import MODELS, Shape
from cs336_kernels.verify import copy, verify
from torch_forms import torch_form

TOKENS = (1, 8, 128)
COMPILED = "Llama-3.2-1B"  # torch.compile takes seconds a shape: one model, one token
MOST_COPIES = 64


class Clock(Protocol):
    """What `clock.Clock` is here; the tests bring one without a GPU."""

    device: torch.device
    capability: int
    l2_bytes: int
    bandwidth: float

    def compile(self, variants: Any) -> None: ...
    def microseconds(self, calls: Sequence[Callable[[], object]]) -> tuple[float, str]: ...
    def release(self) -> None: ...
    def hardware(self) -> dict[str, Any]: ...


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here, not to stdout")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="only this; may be given again")
    parser.add_argument("--op", action="append", choices=list(OPS), help="only this; may be given again")
    parser.add_argument("--seconds", type=float, default=280, help="begin nothing new after so long (default 280)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        say(f"device.py: torch {torch.__version__} sees no CUDA GPU here; nothing was checked or timed")
        return 2
    from clock import Clock as CudaClock

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    began = time.monotonic()
    models = [MODELS[name] for name in options.model or sorted(MODELS, key=lambda name: name != COMPILED)]
    ops = [OPS[name] for name in options.op or OPS]
    report = measure(ops, models, CudaClock(), lambda: began + options.seconds - time.monotonic())
    report["seconds"] = time.monotonic() - began
    text = json.dumps(report, indent=1)
    options.out.write_text(text + "\n") if options.out else print(text)
    return int(any(check["reason"] for check in report["checks"]))


def measure(ops: Sequence[Op], models: Sequence[Shape], clock: Clock, left: Callable[[], float]) -> dict[str, Any]:
    """Check, then time. What there is no time for is listed under "skipped".

    Args:
        left: seconds that remain.
    """
    from cs336_kernels.compiled import TARGETS, cases

    targets = [name for name, capability in TARGETS.items() if capability == clock.capability]
    clock.compile(dict.fromkeys(case.variant for case in cases(ops, models, TOKENS, targets)))
    say(f"a copy moves {clock.bandwidth / 1e9:.0f} GB/s; {left():.0f} s are left")
    todo = [(op, shape, tokens) for shape in models for tokens in TOKENS for op in ops if op.fits(shape)]
    skipped: list[str] = []
    checks: list[dict[str, Any]] = []
    for op, shape, tokens in todo:
        for dtype in op.dtypes if shape is models[0] else op.dtypes[:1]:
            if left() <= 0:
                skipped.append(f"check {op.name} {shape.name} {dtype} {tokens}: no time left")
                continue
            verdict = verify(op, shape, dtype, clock.device, tokens)
            checks.append(asdict(verdict))
            clock.release()
            if not verdict.right:
                say(f"WRONG {verdict}")
    wrong = {check["op"] for check in checks if check["reason"]}
    seen = {(check["op"], check["model"], check["tokens"]) for check in checks}

    timings: list[dict[str, Any]] = []
    for op, shape, tokens in todo:
        if op.name in wrong or left() <= 0 or (op.name, shape.name, tokens) not in seen:
            skipped.append(f"time {op.name} {shape.name} {tokens}: {'wrong' if op.name in wrong else 'no time left'}")
            continue
        timings.append(time_op(op, shape, tokens, clock))
        clock.release()
        say("{op} {model} {tokens}: {triton_us:.1f} us, {fraction:.0%} of a copy".format(**timings[-1]))
    for entry in timings:
        if entry["model"] != COMPILED or entry["tokens"] != 1:
            continue
        if left() <= 0:
            skipped.append(f"torch.compile {entry['op']} {entry['model']}: no time left")
            continue
        op, shape = next(pair[:2] for pair in todo if (pair[0].name, pair[1].name) == (entry["op"], entry["model"]))
        entry["torch_compile_us"], entry["torch_compile_timed_by"] = time_compiled(op, shape, clock)
        clock.release()
    copied = {"copy_gb_per_s": clock.bandwidth / 1e9}
    return {"hardware": clock.hardware(), **copied, "checks": checks, "timings": timings, "skipped": skipped}


def time_op(op: Op, shape: Shape, tokens: int, clock: Clock) -> dict[str, Any]:
    """Microseconds of the kernel, of torch, and of the separate kernels; bytes over time."""
    sets = copies(op, shape, tokens, clock)
    least = op.minimal_bytes(**sets[0])
    us, how = clock.microseconds([partial(op.call, **a, path="triton") for a in sets])
    entry: dict[str, Any] = {
        "op": op.name,
        "model": shape.name,
        "dtype": str(op.dtypes[0]).removeprefix("torch."),
        "tokens": tokens,
        "minimal_bytes": least,
        "bandwidth_bound": op.bandwidth_bound(tokens),
        "copies": len(sets),
        "from_device_memory": least * len(sets) >= 2 * clock.l2_bytes,
        "triton_us": us,
        "triton_timed_by": how,
        "gb_per_s": least / us / 1e3,
        "fraction": least / us * 1e6 / clock.bandwidth,
    }
    entry["torch_eager_us"], entry["torch_eager_timed_by"] = clock.microseconds([torch_form(op, a) for a in sets])
    if op.separate is not None:
        apart = [partial(op.separate, Separate("triton"), **a) for a in sets]
        entry["separate_us"], entry["separate_timed_by"] = clock.microseconds(apart)
    return entry


def time_compiled(op: Op, shape: Shape, clock: Clock) -> tuple[float | None, str]:
    """The same of torch.compile; None and the reason where it does not compile."""
    sets = copies(op, shape, 1, clock)
    try:
        torch.compiler.reset()
        compiled = torch.compile(torch_form(op, sets[0]).func, dynamic=False)
        return clock.microseconds([partial(compiled, **torch_form(op, a).keywords) for a in sets])
    except Exception as e:  # whatever the compiler raises
        return None, f"{type(e).__name__}: {e}"[:200]


def copies(op: Op, shape: Shape, tokens: int, clock: Clock) -> list[Arguments]:
    """Arguments in several places, together at least twice the L2 cache if `MOST_COPIES` are enough for that."""
    one = op.make(shape, op.dtypes[0], clock.device, tokens, seed=1)
    wanted = -(-2 * clock.l2_bytes // op.minimal_bytes(**one)) + 1
    return [one, *(copy(one) for _ in range(min(MOST_COPIES, wanted) - 1))]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
