"""A whole script under the sanitizer: what `cs336-infer sanitize` does."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cs336_kernels.sanitizer import Report, sanitize


class ScriptEnded(Exception):
    """A script called `sys.exit` with something else than 0: what it would have launched after that was not seen."""


def run_script(path: Path, arguments: Sequence[str] = (), **options: Any) -> Report:
    """Run a Python script as `python path arguments` would; every Triton launch in it is sanitized.

    Launches inside a `sanitize` block of the script itself go to that block alone.

    Args:
        options: of `sanitize`.

    Raises:
        ValueError: an option of `sanitize` makes no sense.
        ScriptEnded: the script ended itself with an exit code that means failure.
        Exception: what the script raises.
    """
    with sanitize(**options) as report, _as_main(path, arguments):
        try:
            runpy.run_path(os.fspath(path), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ScriptEnded(f"it ended itself with exit code {end.code!r}") from end
    return report


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, search = sys.argv, list(sys.path)
    sys.argv = [os.fspath(path), *arguments]
    sys.path.insert(0, os.fspath(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, search
