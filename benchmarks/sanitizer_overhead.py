"""What the sanitizer adds to interpreting a kernel: one schedule against Triton's own interpreter, decode attention.

    python benchmarks/sanitizer_overhead.py --json --save

Three ways run in turn, in one process in which `@triton.jit` makes interpreted kernels (TRITON_INTERPRET=1): Triton's
interpreter, ours without a sanitizer, and the sanitizer with one schedule and everything it checks. The kernels are the
op's two, attention of parts and their merger. Ratios are of medians; CPU seconds stand beside wall time, since
neighbours on a shared machine move them less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

try:
    import torch
    from cs336_kernels.ops.decode_attention import decode_attention
    from cs336_kernels.ops.triton import decode_attention as op
    from cs336_kernels.sanitizer import adapter, sanitize

    from cs336_infer import InferError, measure
    from cs336_infer.models.load import DTYPES
    from cs336_infer.types import check_integer
except ModuleNotFoundError as e:
    sys.exit(f"sanitizer_overhead.py: {e.name} is not installed: after make test, run .venv/bin/python {sys.argv[0]}")

RESULTS = Path(__file__).parent / "results"
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 64, 16  # of Llama-3.2-1B


def arguments(rows: int, length: int, dtype: torch.dtype) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    blocks = -(-length // BLOCK_SIZE)
    pages = torch.randn(2, rows * blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, generator=draw).to(dtype)
    return {
        "q": torch.randn(rows, HEADS, HEAD_DIM, generator=draw).to(dtype),
        "keys": pages[0],
        "values": pages[1],
        "tables": torch.randperm(rows * blocks, generator=draw, dtype=torch.int32).view(rows, blocks),
        "lengths": torch.tensor([length - row for row in range(rows)], dtype=torch.int32),
        "path": "triton",
    }


def stock(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
    kernel[grid](*args, **kwargs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=2, help="sequences")
    parser.add_argument("--length", type=int, default=300, help="positions of the longest one")
    parser.add_argument("--splits", type=int, default=2, help="programs that share a sequence")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/sanitizer_overhead.json")
    args = parser.parse_args()
    for name, least in (("rows", 1), ("length", 16), ("splits", 1), ("rounds", 1)):
        check_integer(f"--{name}", getattr(args, name), least, 4096)
    given = arguments(args.rows, args.length, DTYPES[args.dtype]) | {"splits": args.splits}
    steps = 0

    def run(launch: Callable[..., None]) -> torch.Tensor:
        op.launch = launch
        return decode_attention(**given)

    def sanitized() -> torch.Tensor:
        nonlocal steps
        with sanitize(schedules=1, resident=args.rows * KV_HEADS * args.splits) as report:
            result = run(stock)
        if report.findings:
            sys.exit(f"sanitizer_overhead.py: {report.findings[0]}")
        steps = sum(launch.steps for launch in report.launches)
        return result

    ways = {"triton": lambda: run(stock), "serial": lambda: run(adapter.run), "sanitizer": sanitized}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    expected = ways["triton"]()
    for _ in range(args.rounds):
        for name, way in ways.items():
            before = time.perf_counter(), time.process_time()
            result = way()
            wall[name].append(time.perf_counter() - before[0])
            cpu[name].append(time.process_time() - before[1])
            if args.dtype != "bfloat16" and not torch.equal(result, expected):  # Triton's rounds bfloat16 otherwise
                sys.exit(f"sanitizer_overhead.py: {name} computes something else")
    medians = {name: {"wall_s": statistics.median(wall[name]), "cpu_s": statistics.median(cpu[name])} for name in ways}
    ratios = {
        f"sanitizer/{name}": {kind: medians["sanitizer"][kind] / medians[name][kind] for kind in ("wall_s", "cpu_s")}
        for name in ("triton", "serial")
    }
    result = {
        "machine": measure.describe().to_dict(),
        "options": {k: v for k, v in vars(args).items() if k not in ("json", "save")},
        "operations": steps,
        "medians": medians,
        "ratios": ratios,
        "wall_s": wall,
        "cpu_s": cpu,
    }
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "sanitizer_overhead.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"decode attention, {args.rows} rows of {args.length} positions, {args.splits} splits, {steps} operations")
    for name, median in medians.items():
        print(f"timing: {name:10} {median['wall_s'] * 1e3:8.1f} ms, {median['cpu_s'] * 1e3:8.1f} ms of CPU")
    for name, ratio in ratios.items():
        print(f"timing: {name:16} {ratio['wall_s']:.2f} times the wall time, {ratio['cpu_s']:.2f} times the CPU time")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InferError as error:
        print(f"sanitizer_overhead.py: {error}", file=sys.stderr)
        sys.exit(2)
