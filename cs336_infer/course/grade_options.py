"""The options of `cs336-infer grade`, apart from the grader: what reads notebooks takes as long to import as torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="a notebook, a script, or a folder of them")
    parser.add_argument("--assignment", required=True, help="which one, such as a1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results and statistics over the class")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="one row a submission")
    parser.add_argument("--html", type=Path, metavar="DIR", help="one page a student, without hidden checks")
    parser.add_argument(
        "--questions", type=Path, metavar="CSV", help="written answers for a person to grade; a file or a folder for it"
    )
    parser.add_argument(
        "--merge-questions", type=Path, metavar="CSV", help="their points; without PATH, into the --json of before"
    )
    parser.add_argument("--jobs", type=int, default=1, help="submissions at a time (default 1)")
    parser.add_argument("--resume", action="store_true", help="go on where a killed run with the same --json stopped")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs (default: a fresh one)")
    parser.add_argument("--course", type=Path, default=Path("."), metavar="DIR", help="checkout of the course")
    parser.add_argument(
        "--unsafe-no-sandbox", action="store_true", help="run without walls: only for code that you wrote yourself"
    )


def run(args: argparse.Namespace) -> int:
    from cs336_infer.course.forks import Forks

    with Forks() as forks:
        if args.paths and not args.unsafe_no_sandbox:
            forks.prepare(torch=True)  # it imports torch while this process reads what it needs
        # What reads notebooks brings jsonschema, which builds a grammar of addresses at import, for seconds, to check
        # a format that no notebook has. It does without where this is not installed.
        sys.modules.setdefault("rfc3987_syntax", None)  # pyright: ignore[reportArgumentType]
        from cs336_infer.course.grade_cli import grade

        return grade(args, forks)
