"""What students of one assignment get: an installable zip without the answers.

    python -m cs336_infer.course.bundle            dist/student-aN.zip of every assignment, and dist/student.zip
    python -m cs336_infer.course.bundle a2         the same, and dist/student.zip is that of a2
    python -m cs336_infer.course.bundle --check    make them all, write nothing

`bundle.toml` beside the source of an assignment says which files are in its zip; the modules that its notebooks
import, and what those import, come with them. `standins/<path>` beside it takes the place of `<path>`. The stand-in of
a module that the assignment asks for keeps the public names and calls what the student plugged in (`plug`). Every line
of a solution, a hidden check, a mutant or a withheld module is looked for in every file before anything is written.
The same tree gives the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from cs336_infer.course import build
from cs336_infer.course.assignment import Assignment, read_assignment
from cs336_infer.course.regions import region_lines
from cs336_infer.course.release import SHORTEST_SECRET, sources_in, student_notebook
from cs336_infer.files import replace_bytes
from cs336_infer.types import InferError

PACKAGES = {"cs336_infer": "cs336_infer", "cs336_kernels": "kernels/cs336_kernels"}
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the first moment a zip can hold


class BundleError(InferError):
    """A bundle must not or cannot be made. One line that names the file."""


@dataclass(frozen=True)
class Plan:
    """A `bundle.toml`. All paths are relative to `root`, the checkout."""

    assignment: Assignment
    root: Path
    files: tuple[str, ...]
    may: tuple[str, ...]
    """Patterns of the modules that can come with them."""
    withheld: tuple[str, ...]
    """Modules that the assignment asks for."""
    later: tuple[str, ...]
    """Patterns of modules left out: rungs of later stages, which functions import when they are chosen."""
    allowed: Mapping[str, str]
    """A line of a withheld module that may stand elsewhere -> why."""

    @property
    def standins(self) -> dict[str, Path]:
        folder = self.assignment.path.parent / "standins"
        found = (p for p in sorted(folder.rglob("*")) if p.is_file() and "__pycache__" not in p.parts)
        return {p.relative_to(folder).as_posix(): p for p in found}


def read_plan(source: Path) -> Plan | None:
    """The plan beside the source of an assignment; None where it has none."""
    file = source.resolve().parent / "bundle.toml"
    if not file.is_file():
        return None
    try:
        read = {"later": []} | tomllib.loads(file.read_text(encoding="utf-8"))
        allowed = {a["line"]: a["because"] for a in read.get("allowed", [])}
        files, may, withheld, later = (tuple(read[key]) for key in ("files", "may", "withheld", "later"))
        return Plan(read_assignment(source), file.parents[2], files, may, withheld, later, allowed)
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{file.parent.name}/bundle.toml: {type(error).__name__}: {error}") from None


def contents(plan: Plan) -> dict[str, bytes]:
    """Path in the zip -> content, in order.

    Raises:
        BundleError: a file is missing, must not be in the zip, or holds an answer.
        InferError: the student's notebook cannot be made.
    """
    standins = plan.standins
    if bare := [path for path in plan.withheld if path not in standins]:
        raise BundleError(f"{plan.assignment.name}: {bare[0]} is withheld and has no stand-in")
    found: dict[str, bytes] = {}

    def add(path: str) -> bytes:
        try:
            found[path] = standins.get(path, plan.root / path).read_bytes()
        except OSError as error:
            raise BundleError(f"{plan.assignment.name}: {path} cannot be read: {error.strerror}") from None
        return found[path]

    for path in plan.files:
        add(path)
    notebook = f"assignments/{plan.assignment.name}/{plan.assignment.name}.ipynb"
    found[notebook] = build.text_of(student_notebook(plan.assignment)).encode()
    todo = [m for p in found if p.endswith(".ipynb") for code in _code(found[p]) for m in _imports(code)]
    while todo:
        name = todo.pop()
        path = _path_of(name, plan.root, standins)
        if path is None or path in found or _matches(path, plan.later):
            continue
        if not _matches(path, plan.may):
            raise BundleError(f"{plan.assignment.name}: {path} would be in the zip, which bundle.toml does not allow")
        code = add(path).decode()
        for left in (_path_of(needed, plan.root, standins) for needed in _imports(code, at_once=True)):
            if left is not None and _matches(left, plan.later):
                raise BundleError(f"{plan.assignment.name}: {path} needs {left} to be imported, which is left out")
        todo += [name.rpartition(".")[0], *_imports(code)]
    found["pyproject.toml"] = _with_packages(found["pyproject.toml"].decode(), found).encode()
    refuse_leaks(plan, found)
    return dict(sorted(found.items()))


def _path_of(module: str, root: Path, standins: Mapping[str, Path]) -> str | None:
    """The file of a module of ours; None for other modules and for names inside modules."""
    head, *rest = module.split(".")
    if head not in PACKAGES:
        return None
    base = "/".join((PACKAGES[head], *rest))
    for path in (f"{base}.py", f"{base}/__init__.py"):
        if path in standins or (root / path).is_file():
            return path
    return None


def _code(notebook: bytes) -> list[str]:
    return ["".join(c["source"]) for c in json.loads(notebook)["cells"] if c["cell_type"] == "code"]


def _matches(path: str, patterns: Iterable[str]) -> bool:
    return any(PurePosixPath(path).match(pattern) for pattern in patterns)


def _imports(code: str, at_once: bool = False) -> Iterator[str]:
    """Modules that `code` imports, and names that may be modules: all, or those needed `at_once`, not by a function."""
    for node in ast.parse(code).body if at_once else ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def _with_packages(pyproject: str, found: Mapping[str, bytes]) -> str:
    """`pyproject.toml` whose list of packages, and whose command, are what the bundle has."""
    if "cs336_infer/cli.py" not in found:
        pyproject = re.sub(r"^\[project\.scripts\]\n.*?\n\n", "", pyproject, flags=re.M | re.S)
    inits = [p.removeprefix("kernels/").removesuffix("/__init__.py") for p in found if p.endswith("/__init__.py")]
    lines = "".join(f'    "{p.replace("/", ".")}",\n' for p in sorted(inits))
    changed, count = re.subn(r"^packages = \[\n.*?^\]$", f"packages = [\n{lines}]", pyproject, flags=re.M | re.S)
    if count != 1:
        raise BundleError("pyproject.toml: its list `packages = [...]` is not where the bundle looks for it")
    return changed


def secrets(plan: Plan) -> dict[str, str]:
    """Lines that must not be in the bundle -> where they are from. Short lines say nothing.

    Of the source of the assignment: lines inside regions that are not outside too. Of hidden checks and mutants: all
    that is not an import. Of withheld modules: what is neither an import nor the public face of the module
    (signatures, docstrings, fields), which its stand-in keeps, nor `allowed`.
    """
    source = plan.assignment.path
    lines: dict[str, str] = {}
    outside = {*plan.allowed, *(f'"{e.name}",' for e in plan.assignment.exercises)}
    for cell in plan.assignment.cells:
        inner, outer = region_lines(cell.source, cell.kind)
        lines |= dict.fromkeys(inner, f"a region of {source.name}")
        outside.update(outer)
    grading = [p for folder in ("hidden", "mutants") for p in sorted((plan.root / "tests" / folder).glob("*.py"))]
    for path in [*grading, *(plan.root / p for p in plan.withheld)]:
        text = path.read_text(encoding="utf-8")
        face = _face(text, imports_only=path in grading)
        rest = (line.strip() for number, line in enumerate(text.split("\n"), 1) if number not in face)
        lines |= dict.fromkeys(rest, path.relative_to(plan.root).as_posix())
    return {line: where for line, where in lines.items() if len(line) >= SHORTEST_SECRET and line not in outside}


def _face(text: str, *, imports_only: bool) -> set[int]:
    """Numbers of the lines of a module that give nothing away: imports, and its public face."""
    found: set[int] = set()

    def add(node: ast.stmt, last: int | None = None) -> None:
        found.update(range(node.lineno, (last or node.end_lineno or node.lineno) + 1))

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            add(node)
        elif not imports_only and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                add(node.body[0])
            if isinstance(node, ast.FunctionDef):
                add(node, node.body[0].lineno - 1)
            elif isinstance(node, ast.ClassDef):
                add(node, node.lineno)
                for field in node.body:
                    if isinstance(field, ast.AnnAssign):
                        add(field)
    return found


def refuse_leaks(plan: Plan, found: Mapping[str, bytes]) -> None:
    """Refuse a bundle with a secret in it, in a file or in any text of a notebook, or with a file it must not have.

    Raises:
        BundleError: names the file and the line.
    """
    for path in found:
        if path.split("/")[0] in ("solutions", "tests") or path.endswith((".pyc", ".whl", ".so")):
            raise BundleError(f"{plan.assignment.name}: {path} must not be in the bundle")
    hidden = secrets(plan)
    for path, content in found.items():
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise BundleError(f"{plan.assignment.name}: {path} is not text, so it cannot be searched") from None
        for part in _texts(json.loads(text)) if path.endswith(".ipynb") else [text]:
            for line in hidden:
                if line in part and re.search(rf"(?<!\w){re.escape(line)}(?!\w)", part):
                    raise BundleError(f"{plan.assignment.name}: {path} would hold {line!r}, which is in {hidden[line]}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def zipped(plan: Plan, found: Mapping[str, bytes]) -> bytes:
    """One folder with all files, in order, none of them with a date or an owner."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path, content in found.items():
            about = zipfile.ZipInfo(f"cs336-{plan.assignment.short}/{path}", LONG_AGO)
            about.compress_type = zipfile.ZIP_DEFLATED
            about.create_system = 3  # permissions are those of Unix
            about.external_attr = (0o755 if path.endswith(".sh") else 0o644) << 16
            archive.writestr(about, content)
    return out.getvalue()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cs336_infer.course.bundle", description="Zips for students.")
    parser.add_argument("assignment", nargs="?", help="whose zip is dist/student.zip (default: the first)")
    parser.add_argument("--check", action="store_true", help="make them all, write nothing")
    args = parser.parse_args(argv)
    try:
        made: dict[str, bytes] = {}
        for plan in filter(None, map(read_plan, sources_in(Path("solutions")))):
            made[plan.assignment.short] = zipped(plan, contents(plan))
        first = args.assignment or next(iter(made), None)
        if args.assignment and first not in made:
            raise BundleError(f"no bundle.toml for {first!r}; there is one for {', '.join(made) or 'nothing'}")
    except InferError as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    for name, content in made.items():
        for target in [f"student-{name}.zip"] + ["student.zip"] * (name == first):
            if not args.check:
                Path("dist").mkdir(exist_ok=True)
                replace_bytes(Path("dist", target), content)
            print(f"bundle: dist/{target} {'can be made' if args.check else 'written'}, {len(content) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
