"""Which files of a class are graded: those named, and the notebooks and scripts below the folders named."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cs336_infer.course.submission import SUFFIXES
from cs336_infer.types import InferError

NOT_HANDED_IN = ("__MACOSX", "__pycache__", "node_modules", "site-packages")
DEEPEST = 20


class GradeError(InferError):
    """Grading cannot start: no such assignment, no submissions, or a file that cannot be written."""


def find_submissions(paths: Iterable[Path]) -> list[Path]:
    """Files named, and every notebook or script below folders named, in order, once each.

    Left out below a folder: hidden names, what archives and tools leave behind, environments of Python, and
    everything deeper than 20 folders. No link to a folder is followed; a link to a file is listed, and refused when it
    is read.

    Raises:
        GradeError: a path does not exist, or there is nothing to grade.
    """
    paths = list(paths)
    found: dict[str, Path] = {}
    for path in paths:
        if not os.path.lexists(path):
            raise GradeError(f"{path}: no such file or folder")
        whole_folder = path.is_dir() and not path.is_symlink()
        for each in sorted(_below(path)) if whole_folder else [path]:
            found.setdefault(os.path.abspath(each), each)
    if len(paths) == 1 and paths[0].is_symlink() and paths[0].is_dir():
        raise GradeError(f"{paths[0]}: a link: name the folder that it leads to, {paths[0].resolve()}")
    if not found:
        raise GradeError(f"no {' or '.join(SUFFIXES)} file below {', '.join(map(str, paths))}")
    return list(found.values())


def _below(folder: Path) -> Iterator[Path]:
    """In no order. Without recursion: an archive can hold a thousand folders, one in the other."""
    todo = [(folder, 0)]
    while todo:
        folder, depth = todo.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        if depth and any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in NOT_HANDED_IN:
                continue
            if Path(entry.name).suffix.lower() in SUFFIXES:
                yield Path(entry.path)
            elif entry.is_dir(follow_symlinks=False) and depth < DEEPEST:
                todo.append((Path(entry.path), depth + 1))
