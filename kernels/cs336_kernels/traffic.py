"""Bytes that the kernels move, counted by the sanitizer: against what cannot be avoided, and against separate ops.

python -m cs336_kernels.traffic            a table
python -m cs336_kernels.traffic --json     rows
python -m cs336_kernels.traffic --check    exit 1 when a fused op moves more than 1.05 times its minimum

Unique bytes count each place once a launch, as with a perfect cache; all bytes count every request of every program,
so that a norm which each program computes again shows. No clock is read.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cs336_kernels.catalogue import OPS, Op, Separate
from cs336_kernels.sanitizer import sanitize
from cs336_kernels.shapes import TINY, Shape

ALLOWED = 1.05
TOKENS = (1, 5)


@dataclass(frozen=True)
class Row:
    """One op at one shape.

    Attributes:
        minimal: bytes that cannot be avoided. unique, total: of the op's launches. separate_*: of the ops that a fused
            one replaces, with what passes between them; None for an op that replaces none.
    """

    op: str
    shape: str
    tokens: int
    dtype: str
    minimal: int
    unique: int
    total: int
    launches: int
    separate_unique: int | None = None
    separate_total: int | None = None
    separate_launches: int | None = None

    @property
    def ratio(self) -> float:
        return self.unique / self.minimal


class Counted(Separate):
    """The separate ops, with the bytes of torch's among them counted by their tensors."""

    def __init__(self) -> None:
        super().__init__("triton")
        self.by_torch = 0

    def torch(self, name: str, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        before = self.minimal_bytes
        result = super().torch(name, result, *inputs)
        self.by_torch += self.minimal_bytes - before
        return result


def count(op: Op, shape: Shape, tokens: int, dtype: torch.dtype) -> Row:
    """Run an op, and what it replaces, in the interpreter.

    Raises:
        RuntimeError: the sanitizer found something in a kernel.
    """

    def arguments() -> dict[str, Any]:
        return op.make(shape, dtype, torch.device("cpu"), tokens, seed=0)

    minimal = op.minimal_bytes(**arguments())
    unique, total, launches = _bytes(op, lambda: op.call(**arguments(), path="triton"))
    name = str(dtype).removeprefix("torch.")
    row = Row(op.name, shape.name, tokens, name, minimal, unique, total, launches)
    if op.separate is None:
        return row
    apart, separate = Counted(), op.separate
    unique, total, launches = _bytes(op, lambda: separate(apart, **arguments()))
    return Row(
        **{k: v for k, v in asdict(row).items() if not k.startswith("separate")},
        separate_unique=unique + apart.by_torch,
        separate_total=total + apart.by_torch,
        separate_launches=launches,
    )


def _bytes(op: Op, run: Callable[[], Any]) -> tuple[int, int, int]:
    with sanitize(schedules=1) as report:
        run()
    if report.findings:
        raise RuntimeError(f"{op.name}: {report.findings[0]}")
    return report.unique_bytes, report.total_bytes, len(report.launches)


def rows(names: Iterable[str] = OPS, tokens: Sequence[int] = TOKENS) -> list[Row]:
    """Every op at every tiny shape that has it."""
    return [
        count(OPS[name], shape, n, OPS[name].dtypes[0])
        for name in names
        for shape in TINY.values()
        if OPS[name].fits(shape)
        for n in tokens
    ]


def table(found: Sequence[Row]) -> str:
    lines = [
        f"{'op':18} {'shape':8} {'tokens':>6} {'minimum':>10} {'unique':>7} {'all':>7} {'launches':>8}   "
        f"{'separately: unique':>18} {'all':>7} {'launches':>8}"
    ]
    for r in found:
        line = (
            f"{r.op:18} {r.shape:8} {r.tokens:6} {r.minimal:10,} {r.ratio:7.3f} {r.total / r.minimal:7.2f} "
            f"{r.launches:8}"
        )
        if r.separate_unique is not None and r.separate_total is not None:
            apart = r.separate_unique / r.minimal, r.separate_total / r.minimal
            line += f"   {apart[0]:18.3f} {apart[1]:7.2f} {r.separate_launches:8}"
        lines.append(line)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cs336_kernels.traffic", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", action="append", choices=list(OPS), help="only this op; repeatable")
    parser.add_argument("--json", action="store_true", help="print a list of rows")
    parser.add_argument("--check", action="store_true", help=f"exit 1 when an op is above {ALLOWED} times its minimum")
    args = parser.parse_args(argv)
    found = rows(args.op or OPS)
    if args.json:
        print(json.dumps([asdict(r) | {"unique_over_minimal": r.ratio} for r in found]))
    else:
        print(table(found))
    wasteful = [r for r in found if r.ratio > ALLOWED]
    if args.check and wasteful:
        worst = max(wasteful, key=lambda r: r.ratio)
        print(f"{len(wasteful)} rows above {ALLOWED}; the worst is {worst.op} with {worst.ratio:.3f}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader of our output may go, as in `| head`
    sys.exit(main())
