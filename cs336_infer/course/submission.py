"""A student's file as code cells. Reads, never runs.

Notebooks come back renamed, without metadata, with cells duplicated, deleted or retyped. None of that matters: what
counts is the source of the code cells, in order, and of a text cell that is Python and defines a function (a code
cell whose type was changed by mistake).
"""

import ast
import hashlib
import json
import os
import re
import stat
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUFFIXES = (".ipynb", ".py")
MAX_BYTES = 20 * 10**6
MAX_PARSED = 10**6
"""Characters of a cell that are looked at as Python here; a longer one is handed on as it is."""

MAGIC = re.compile(r"\s*([%!?]|[\w, ]+=\s*[%!]|%*[\w.]+\?{1,2}\s*$)")
PYTHON_CELLS = frozenset(("time", "timeit", "capture", "prun", "python", "python3", "memray_flamegraph"))
MARKER = re.compile(r"#\s*%%(.*)$")
GRADE_ID = re.compile(r'"grade_id":\s*"([\w-]+)"')
CODE, TEXT = "code", "text"


@dataclass(frozen=True)
class Submission:
    """`cells` to run in order, or the `problem` (one line) that there are none. `notes` say what was left out."""

    path: Path
    cells: list[str] = field(default_factory=list)
    problem: str | None = None
    notes: list[str] = field(default_factory=list)


class _Unreadable(Exception):
    pass


def read(path: str | os.PathLike[str]) -> Submission:
    """The submission in a `.ipynb` (format 4) or a `.py` file (percent format or plain). Never raises for a bad
    file."""
    path = Path(path)
    name = printable(path.name)
    try:
        parts = _parts(path)
    except _Unreadable as error:
        return Submission(path, problem=f"{name}: {error}")
    cells: list[str] = []
    notes: list[str] = []
    for number, (kind, source, _) in enumerate(parts, 1):
        source = source.encode("utf-8", "replace").decode()
        if kind == TEXT and _defines_function(source):
            notes.append(f"cell {number} is marked as text but defines a function: taken as code")
        elif kind == TEXT:
            continue
        source, dropped = _without_magics(source)
        notes += [f"cell {number}: left out {line.strip()[:80]!r}" for line in dropped]
        if source.strip():
            cells.append(source)
    return Submission(path, cells, None if cells else f"{name}: there is no code in it", notes)


def texts(path: Path) -> list[tuple[str, str]]:
    """(grade_id, text) of every cell, code too, in order; the grade_id is empty where an editor removed it. Nothing
    of a file that `read` refuses."""
    try:
        return [(grade_id, source.encode("utf-8", "replace").decode()) for _, source, grade_id in _parts(path)]
    except _Unreadable:
        return []


def fingerprint(path: Path) -> str:
    """Changes with what would be graded: the content, or the reason that there is none. Reads nothing that `read`
    would not."""
    try:
        content = _data(path)
    except _Unreadable as error:
        content = str(error).encode("utf-8", "replace")
    return hashlib.sha256(content).hexdigest()


def printable(text: str) -> str:
    """`text` for a line of a report: a file's name may hold line breaks, commands for a terminal, or no text."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _data(path: Path) -> bytes:
    """The content of a regular file of at most `MAX_BYTES`. A link could lead to the work of somebody else."""
    if path.suffix.lower() not in SUFFIXES:
        raise _Unreadable("neither a .ipynb nor a .py file")
    try:
        if path.is_symlink() or path.parent.is_symlink():
            raise _Unreadable("a link or in a linked folder: only the file itself is graded")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise _Unreadable("not a file")
            if about.st_size > MAX_BYTES:
                raise _Unreadable(
                    f"{about.st_size / 1e6:.0f} MB, at most {MAX_BYTES // 10**6} are read (clear the outputs)"
                )
            return file.read(MAX_BYTES)
    except OSError as error:
        raise _Unreadable(f"cannot be read: {error.strerror}") from None


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _Unreadable(f"not UTF-8 text (byte {error.start})") from None


def _parts(path: Path) -> list[tuple[str, str, str]]:
    """(CODE or TEXT, source, grade_id) of each cell."""
    text = _text(_data(path))
    return _notebook(text) if path.suffix.lower() == ".ipynb" else _script(text)


def _notebook(text: str) -> list[tuple[str, str, str]]:
    try:
        book: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise _Unreadable(f"not valid JSON{where}, so not a notebook") from None
    if not isinstance(book, dict) or not isinstance(book.get("nbformat"), int):
        raise _Unreadable("JSON, but not a notebook")
    if book["nbformat"] != 4 or not isinstance(book.get("cells"), list):
        raise _Unreadable("not a notebook of format 4 with cells (save it with a current Jupyter)")
    parts = []
    for cell in book["cells"]:
        source = cell.get("source") if isinstance(cell, dict) else None
        if isinstance(source, list):
            source = "".join(line for line in source if isinstance(line, str))
        if isinstance(source, str):
            parts.append((CODE if cell.get("cell_type") == "code" else TEXT, source, _grade_id(cell)))
    return parts


def _grade_id(cell: dict[str, Any]) -> str:
    inner: Any = cell.get("metadata")
    for key in ("nbgrader", "grade_id"):
        inner = inner.get(key) if isinstance(inner, dict) else None
    return inner if isinstance(inner, str) else ""


def _script(text: str) -> list[tuple[str, str, str]]:
    """Cells of the percent format; one cell where there is no marker."""
    parts: list[tuple[str, list[str], str]] = [(CODE, [], "")]
    for line in text.splitlines():
        marker = MARKER.match(line)
        if marker:
            named = GRADE_ID.search(marker[1])
            kind = TEXT if re.search(r"\[(markdown|md|raw)\]", marker[1]) else CODE
            parts.append((kind, [], named[1] if named else ""))
        else:
            parts[-1][1].append(line)
    return [(kind, "\n".join(lines if kind == CODE else map(_uncommented, lines)), name) for kind, lines, name in parts]


def _uncommented(line: str) -> str:
    return re.sub(r"^# ?", "", line)


def _parsed(source: str) -> ast.Module | int | None:
    """The tree; else the line of the error, where Python can tell."""
    if len(source) > MAX_PARSED:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except SyntaxError as error:
        return error.lineno
    except (ValueError, RecursionError, MemoryError):
        return None


def _defines_function(source: str) -> bool:
    if "def " not in source:
        return False
    tree = _parsed(source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return isinstance(tree, ast.Module) and any(isinstance(statement, kinds) for statement in tree.body)


def _without_magics(source: str) -> tuple[str, list[str]]:
    """`source` as Python, and the lines that were not: magics, shell lines, questions to the help.

    A cell that is Python stays as it is, also where a line of a string or a formula begins like a magic. `pass`
    takes the place of a dropped line, so that blocks and line numbers stay.
    """
    lines = source.splitlines()
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    dropped: list[str] = []
    if lines and lines[first].startswith("%%"):
        dropped.append(lines[first])
        if lines[first][2:].split(" ")[0].strip() not in PYTHON_CELLS:
            return "", dropped
        lines[first] = "pass"
    candidates = {number for number, line in enumerate(lines) if MAGIC.match(line)}
    if not candidates:
        return ("\n".join(lines) if dropped else source), dropped
    while candidates:
        error = _parsed("\n".join(lines))
        if isinstance(error, ast.Module):
            break
        found = {error - 1} & candidates if error is not None else set()
        for number in sorted(found or candidates):
            dropped.append(lines[number])
            lines[number] = lines[number][: len(lines[number]) - len(lines[number].lstrip())] + "pass"
        candidates -= found or set(candidates)
    return ("\n".join(lines) if dropped else source), dropped
