"""Compiles the C++ kernels on first use, for the processor they will run on, and keeps the result.

The files use no header of torch, so that a build takes seconds; they share torch's OpenMP threads, because torch's copy
of the OpenMP library is loaded already and has the same name.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

ARITHMETIC = ["-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros", "-freciprocal-math"]
"""What lets loops of sums become vectors. Not -ffast-math: a library linked with it turns subnormal numbers to zero in
every computation of the process that loads it."""
FLAGS = ["-O3", "-march=native", *ARITHMETIC, "-fopenmp", "-std=c++17", "-fPIC", "-shared"]
HOME = Path(__file__).parent


class Unavailable(RuntimeError):
    """The kernels cannot be built here; the message is one line."""


@cache
def library(name: str) -> ctypes.CDLL:
    """The compiled `name`.cpp of this folder.

    Raises:
        Unavailable: there is no C++ compiler, or it failed.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None or not shutil.which(compiler):
        raise Unavailable(f"no C++ compiler ({compiler or 'g++'} is not installed)")
    source = HOME / f"{name}.cpp"
    key = hashlib.sha256(source.read_bytes() + repr((compiler, FLAGS, _processor())).encode()).hexdigest()[:16]
    target = _folder() / f"{name}-{key}.so"
    if not target.exists():
        _compile(compiler, source, target)
    try:
        return ctypes.CDLL(os.fspath(target))
    except OSError as error:
        raise Unavailable(f"{target} cannot be loaded: {error}") from None


def _compile(compiler: str, source: Path, target: Path) -> None:
    """Builds beside the target and renames: two processes may do so at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        done = subprocess.run(
            [compiler, *FLAGS, os.fspath(source), "-o", os.fspath(made)], capture_output=True, text=True
        )
        if done.returncode:
            first = next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")
            raise Unavailable(f"{compiler} could not build {source.name}: {first}")
        os.replace(made, target)


def _folder() -> Path:
    """Where builds are kept. Raises Unavailable when nothing can be written there."""
    cache_home = os.environ.get("CS336_NATIVE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "cs336"
    folder = Path(cache_home).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"the folder for builds, {folder}, cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise Unavailable(f"the folder for builds, {folder}, is not writable; CS336_NATIVE_CACHE names another")
    return folder


def _processor() -> str:
    """What `-march=native` depends on: a cache may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    except OSError:
        return platform.processor()


@cache
def unavailable(name: str) -> str | None:
    """Why the kernels of this file cannot be used here; None when they can."""
    try:
        library(name)
    except Unavailable as error:
        return str(error)
    return None
