"""A whole script under the sanitizer: what `cs336-infer sanitize` does."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cs336_kernels.sanitizer import Report, sanitize


def run_script(path: Path, arguments: Sequence[str] = (), **options: Any) -> Report:
    """Run a Python script as `python path arguments` would; every Triton launch in it is sanitized.

    Launches inside a `sanitize` block of the script itself go to that block alone.

    Args:
        options: of `sanitize`.

    Raises:
        ValueError: an option of `sanitize` makes no sense.
        Exception: what the script raises, except `SystemExit`, which ends it.
    """
    with sanitize(**options) as report, _as_main(path, arguments), suppress(SystemExit):
        runpy.run_path(os.fspath(path), run_name="__main__")
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
