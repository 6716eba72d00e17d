"""`cs336-infer sanitize`: Triton scripts in an interpreter that sees races, deadlocks and unwritten memory."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import traceback
from pathlib import Path

from cs336_infer.types import InferError, InvalidRequest, check_integer

FOUND, FAILED = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, nargs="+", help="Python script that launches Triton kernels")
    parser.add_argument("--schedules", type=int, default=20, help="interleavings of each launch (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule (default 0)")
    parser.add_argument("--resident", type=int, default=8, help="programs that exist at once (default 8)")
    parser.add_argument(
        "--policy",
        choices=["mixed", "random", "round-robin", "reverse", "in-order", "pct", "exhaustive"],
        default="mixed",
        help="who runs next (default: a mixture of random, PCT, round robin and reverse)",
    )
    parser.add_argument("--traffic", action="store_true", help="also print the bytes of every tensor")
    parser.add_argument("--json", action="store_true", help="print one JSON object; the scripts' output goes to stderr")


def run(args: argparse.Namespace) -> int:
    """Returns 0 when nothing was found, 1 when something was, 2 when a script failed; the others run all the same.

    Raises:
        InvalidRequest: a script is not there, or an option makes no sense.
        InferError: Triton is not installed.
    """
    try:
        from cs336_kernels.sanitizer.script import ScriptEnded, run_script
    except ModuleNotFoundError as error:
        raise InferError(f"{error.name} is not installed; Triton has wheels for Linux only") from None
    check_integer("--schedules", args.schedules, 1, None)
    check_integer("--resident", args.resident, 1, None)
    missing = next((path for path in args.script if not path.is_file()), None)
    if missing is not None:
        raise InvalidRequest(f"{missing} is a folder" if missing.is_dir() else f"no such script: {missing}")
    options = {name: getattr(args, name) for name in ("schedules", "seed", "resident", "policy")}
    findings, scripts, failed = [], [], False
    for path in args.script:
        output = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
        try:
            with output:
                report = run_script(path, **options)
        except Exception as error:
            if not isinstance(error, ScriptEnded):
                traceback.print_exception(error, file=sys.stderr)
            why = str(error) if isinstance(error, ScriptEnded) else f"{type(error).__name__}: {error}"
            print(f"cs336-infer: {path} failed: {why}", file=sys.stderr)
            scripts.append({"script": str(path), "error": why})
            failed = True
            continue
        findings += [{"script": str(path)} | f.to_dict() for f in report.findings]
        scripts.append({"script": str(path)} | {k: v for k, v in report.to_dict().items() if k != "findings"})
        if not args.json:
            for finding in report.findings:
                print(finding)
            found, launches = len(report.findings), len(report.launches)
            print(f"{path}: {found} finding{'s' * (found != 1)} in {launches} launch{'es' * (launches != 1)}")
            if not launches:
                print(f"cs336-infer: {path} launched no kernel: nothing was checked", file=sys.stderr)
            if args.traffic:
                print(report.table())
    if args.json:
        print(json.dumps({"findings": findings, "scripts": scripts}))
    return FAILED if failed else FOUND if findings else 0
