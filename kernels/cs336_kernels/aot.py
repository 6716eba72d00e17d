"""Compile every kernel for GPUs that are not here, and read what came out.

    python -m cs336_kernels.aot              a table: registers, spills, shared memory, width of loads
    python -m cs336_kernels.aot --json       the same as a list of rows
    python -m cs336_kernels.aot --check      exit code 1 when a kernel does not compile, spills, or reads narrowly
    python -m cs336_kernels.aot --write kernels/aot_table.json        makes the committed table
    python -m cs336_kernels.aot --compare kernels/aot_table.json      exit code 1 when a row differs from it
    python -m cs336_kernels.aot --stale kernels/aot_table.json        the same by the kernels' sources: compiles nothing
    python -m cs336_kernels.aot --summary kernels/aot_table.json      one line a kernel, as in kernels/README.md

Nothing is written by hand about a kernel: each op of the catalogue is called at the shapes of real models on tensors
that hold nothing, its launches are recorded, and every distinct one is compiled. So the rows are of what a GPU gets.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

from cs336_kernels.catalogue import OPS
from cs336_kernels.compiled import TARGETS, Case, Row, cases, rows
from cs336_kernels.shapes import MODELS


def differences(have: Sequence[Row], committed: dict[str, Any]) -> list[str]:
    """Lines that say where the committed table and the rows of now differ, among the shapes and GPUs of these rows."""
    if committed["triton"] != triton.__version__:
        return [f"the table is of triton {committed['triton']}, this is {triton.__version__}"]
    then, now = (
        {place_of(fields): fields for fields in committed["rows"]},
        {place_of(asdict(r)): asdict(r) for r in have},
    )
    lines = []
    for place, fields in now.items():
        old = then.get(place)
        if old is None:
            lines.append(f"{' '.join(place)}: not in the table")
        elif old != fields:
            changed = [f"{k} {old.get(k)!r} in the table, {v!r} now" for k, v in fields.items() if old.get(k) != v]
            lines.append(f"{' '.join(place)}: {'; '.join(changed)}")
    return lines


def stale(found: Iterable[Case], committed: dict[str, Any]) -> list[str]:
    """Lines that say of which kernels the committed table is out of date; compiles nothing."""
    then = {place_of(fields): fields["source"] for fields in committed["rows"]}
    now = {case.place: case.variant.fingerprint for case in found}
    wrong: Counter[str] = Counter()
    for place in then.keys() | now.keys():
        if place not in then:
            wrong[f"{place[0]} {place[1]}: not in the table"] += 1
        elif place not in now:
            wrong[f"{place[0]} {place[1]}: only in the table"] += 1
        elif then[place] != now[place]:
            wrong[f"{place[0]} {place[1]}: the kernel has changed"] += 1
    return [f"{line} ({rows} rows)" for line, rows in sorted(wrong.items())]


def place_of(fields: dict[str, Any]) -> tuple[str, ...]:
    """What tells one row from another."""
    return tuple(str(fields[name]) for name in ("op", "kernel", "model", "dtype", "tokens", "target"))


def table(found: list[Row]) -> str:
    """Rows for reading, those that agree in everything but the shape in one line."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for r in found:
        fields = (r.op, r.kernel, r.target, r.num_warps, r.registers, r.spills, r.shared_bytes, r.load_bits, r.error)
        groups.setdefault(fields, []).append(r)
    lines = [f"{'op':18} {'kernel':26} {'target':7} warps regs spills shared loads  shapes"]
    for (op, kernel, target, warps, registers, spilled, shared, bits, error), members in sorted(groups.items()):
        shapes = ", ".join(dict.fromkeys(f"{r.model}/{r.tokens}" for r in members))
        rest = error or (shapes if len(shapes) < 60 else f"{shapes[:57]}...")
        figures = f"{warps:5} {registers:4} {spilled:6} {shared:6} {bits:5}"
        lines.append(f"{op:18} {kernel:26} {target:7} {figures}  {rest}")
    return "\n".join(lines)


def summary(committed: dict[str, Any]) -> str:
    """One line in Markdown for each kernel of the committed table, over all its shapes and GPUs."""
    kernels: dict[tuple[str, str], list[Row]] = {}
    for fields in committed["rows"]:
        kernels.setdefault((fields["op"], fields["kernel"]), []).append(Row(**fields))
    lines = [
        "| op | kernel | compiled | warps | registers | spills | shared bytes | bits of a load where memory bounds |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (op, kernel), members in kernels.items():
        bound = [r.load_bits for r in members if r.bandwidth_bound]
        cells = (
            *(f"`{op}`", f"`{kernel}`", str(len({(r.source, r.target) for r in members}))),
            *(
                _span(getattr(r, name) for r in members)
                for name in ("num_warps", "registers", "spills", "shared_bytes")
            ),
            _span(bound) if bound else "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _span(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    return f"{found[0]:,}" if found[0] == found[-1] else f"{found[0]:,} to {found[-1]:,}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cs336_kernels.aot", description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a kernel spills or loads narrowly")
    parser.add_argument("--op", action="append", choices=list(OPS), help="only this op; may be given again")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this GPU; may be given again")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the table of all rows")
    parser.add_argument("--compare", metavar="FILE", type=Path, help="exit code 1 when the table differs")
    parser.add_argument("--stale", metavar="FILE", type=Path, help="exit code 1 when the table is of other kernels")
    parser.add_argument("--summary", metavar="FILE", type=Path, help="print a table in short, in Markdown")
    options = parser.parse_args(argv)
    if options.summary:
        print(summary(json.loads(options.summary.read_text())))
        return 0
    if options.write and (options.op or options.target):
        parser.error("--write makes the table of all ops and GPUs: leave out --op and --target")
    recorded = list(cases([OPS[name] for name in options.op or OPS], list(MODELS.values())))
    if options.stale:
        return _complain(stale(recorded, json.loads(options.stale.read_text())))
    found = rows(recorded, options.target or list(TARGETS))
    bad = 0
    if options.write:
        options.write.write_text(as_file(found))
    if options.compare:
        bad |= _complain(differences(found, json.loads(options.compare.read_text())))
    if options.check:
        bad |= _complain([f"{' '.join(place_of(asdict(r)))}: {fault}" for r in found for fault in r.faults])
    print(json.dumps([asdict(r) for r in found], indent=1) if options.json else table(found))
    return bad


def as_file(found: Sequence[Row]) -> str:
    """The committed table: one row a line, so that a change is seen in a diff."""
    body = ",\n".join(json.dumps(asdict(r)) for r in found)
    return f'{{"triton": "{triton.__version__}", "rows": [\n{body}\n]}}\n'


def _complain(lines: Sequence[str]) -> int:
    for line in lines:
        print(line, file=sys.stderr)
    return int(bool(lines))


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader of our output may go, as in `| head`
    if os.environ.pop("TRITON_INTERPRET", None):  # Triton made its own functions for the interpreter when imported
        os.execv(sys.executable, [sys.executable, "-m", "cs336_kernels.aot", *sys.argv[1:]])
    sys.exit(main())
