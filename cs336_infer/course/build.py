"""Make the committed lecture notebooks: notebooks/src/NN_slug.py (jupytext percent) -> notebooks/NN_slug.ipynb.

    python -m cs336_infer.course.build notebooks/src/*.py            execute and write
    python -m cs336_infer.course.build --check notebooks/src/*.py    refuse what the sources would not give

The same source gives the same notebook apart from outputs: ids come from position and text, and nothing of the
machine is kept.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from tqdm import tqdm

from cs336_infer.course.outputs import clean_outputs, fault_of
from cs336_infer.files import replace_bytes
from cs336_infer.types import InferError

MAX_CELLS = 60
TIMEOUT_S = 180
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


class BuildError(InferError):
    """A notebook cannot be built or is not what its source gives. One line that names the notebook and the cell."""


def target_of(source: Path) -> Path:
    """notebooks/src/NN_slug.py -> notebooks/NN_slug.ipynb."""
    return source.resolve().parent.parent / f"{source.stem}.ipynb"


def from_source(source: Path, max_cells: int | None = MAX_CELLS) -> NotebookNode:
    """The notebook that `source` describes, without outputs.

    Args:
        max_cells: the most cells a notebook of this kind may have; None for no limit.

    Raises:
        BuildError: the source cannot be read, has an empty code cell or more than `max_cells` cells.
    """
    try:
        read = jupytext.read(source, fmt="py:percent")
    except (OSError, ValueError) as error:
        raise BuildError(f"{source}: cannot be read: {error}") from None
    if max_cells is not None and len(read.cells) > max_cells:
        raise BuildError(f"{source}: {len(read.cells)} cells, a lecture has at most {max_cells}; split it")
    for number, cell in enumerate(read.cells, 1):
        if cell.cell_type == "code" and not cell.source.strip():
            raise BuildError(f"{source}: cell {number} is empty")
    return assemble(read.cells)


def assemble(cells: Iterable[NotebookNode]) -> NotebookNode:
    """A notebook of these cells without outputs; ids come from position and text."""
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": dict(KERNELSPEC), "language_info": {"name": "python"}})
    for number, cell in enumerate(cells, 1):
        new: Any = getattr(nbformat.v4, f"new_{cell.cell_type}_cell")(cell.source)
        new.metadata = NotebookNode({k: v for k, v in cell.metadata.items() if k != "lines_to_next_cell"})
        text = f"{number}\n{cell.cell_type}\n{cell.source}"
        new.id = hashlib.sha256(text.encode()).hexdigest()[:12]
        notebook.cells.append(new)
    return notebook


def execute(notebook: NotebookNode, folder: Path, name: str, timeout_s: int = TIMEOUT_S) -> None:
    """Run all cells in `folder` and keep their outputs, cleaned of what differs from run to run.

    Raises:
        BuildError: a cell fails or takes too long; says which.
    """
    cells, started = len(notebook.cells), 0

    def start(cell: NotebookNode, cell_index: int) -> None:
        nonlocal started
        started = cell_index + 1

    client = NotebookClient(
        notebook,
        on_cell_execute=start,
        timeout=timeout_s,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    # Under this variable the kernel does not capture writes to file descriptors, as it will not when checked.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    os.environ.pop("JUPYTER_PATH", None)
    try:
        client.execute(env={**os.environ, "PYTEST_CURRENT_TEST": "build"})
    except CellExecutionError as error:
        value = next(iter(str(error.evalue).strip().splitlines()), "")
        raise BuildError(f"{name}: cell {started} of {cells}: {error.ename}: {value}") from None
    except CellTimeoutError:
        raise BuildError(f"{name}: cell {started} of {cells} ran longer than {timeout_s} s") from None
    except DeadKernelError:
        raise BuildError(f"{name}: cell {started} of {cells} ended the kernel (out of memory?)") from None
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = clean_outputs(cell.outputs)
    notebook.metadata = NotebookNode({"kernelspec": dict(KERNELSPEC), "language_info": {"name": "python"}})


def build(source: Path) -> Path:
    """Execute `source` and write its notebook beside the others, all or nothing.

    Raises:
        BuildError: see `from_source` and `execute`; or an output names a folder of this machine, or a figure of
            measurements and the tag `measured` do not go together.
    """
    target = target_of(source)
    write_executed(from_source(source), target, source.name)
    return target


def write_executed(notebook: NotebookNode, target: Path, name: str) -> None:
    """Execute `notebook` in the folder of `target` and write it there, all or nothing; `name` is its source.

    Raises:
        BuildError: see `build`.
    """
    execute(notebook, target.parent, name)
    _refuse_faults(notebook, target)
    nbformat.validate(notebook)
    replace_text(target, text_of(notebook))


def text_of(notebook: NotebookNode) -> str:
    """What a file holds for `notebook`: the same text for the same notebook."""
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def replace_text(target: Path, text: str) -> None:
    """Write `text` to `target`, all or nothing."""
    replace_bytes(target, text.encode())


def check(source: Path) -> None:
    """Refuse a notebook on disk that differs from its source in anything but outputs, or was not fully run.

    Raises:
        BuildError: names the notebook and the first difference.
    """
    compare(from_source(source), target_of(source), "make notebooks")


def compare(wanted: NotebookNode, target: Path, command: str) -> None:
    """Refuse the file `target` unless it is `wanted`, fully executed; `command` is what writes it anew.

    Raises:
        BuildError: names the notebook and the first difference.
    """
    if not target.is_file():
        raise BuildError(f"{target.name} does not exist: run `{command}`")
    try:
        have = nbformat.read(target, as_version=nbformat.NO_CONVERT)
    except Exception as error:
        raise BuildError(f"{target.name}: not a notebook: {error}") from None
    again = f"run `{command}`"
    if (have.nbformat, have.nbformat_minor) != (wanted.nbformat, wanted.nbformat_minor):
        raise BuildError(f"{target.name}: format {have.nbformat}.{have.nbformat_minor} is not the built one; {again}")
    if have.metadata != wanted.metadata:
        raise BuildError(f"{target.name}: its metadata is not what the build writes; {again}")
    if len(have.cells) != len(wanted.cells):
        raise BuildError(f"{target.name}: {len(have.cells)} cells, its source gives {len(wanted.cells)}; {again}")
    runs = 0
    for number, (cell, want) in enumerate(zip(have.cells, wanted.cells, strict=True), 1):
        for part in ("cell_type", "source", "metadata", "id"):
            if cell.get(part) != want.get(part):
                raise BuildError(f"{target.name}: the {part} of cell {number} is not that of its source; {again}")
        if cell.cell_type == "code":
            runs += 1
            if cell.execution_count != runs:
                raise BuildError(f"{target.name}: cell {number} was not executed in order; {again}")
    _refuse_faults(have, target)


def _refuse_faults(notebook: NotebookNode, target: Path) -> None:
    for number, cell in enumerate(notebook.cells, 1):
        fault = fault_of(cell, forbidden=_folders(target))
        if fault:
            raise BuildError(f"{target.name}: cell {number} {fault}")


def _folders(target: Path) -> list[str]:
    """Folders that must not show in outputs: the repository, where the package is, the home, the kernel's own."""
    found = [target.resolve().parent.parent, Path(__file__).resolve().parents[2], Path.home()]
    if sys.prefix != sys.base_prefix:
        found.append(Path(sys.prefix))
    kernel = Path(tempfile.gettempdir()) / "ipykernel_"
    return [str(p) for p in [*found, kernel] if len(p.parts) > 1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cs336_infer.course.build", description="Build lecture notebooks.")
    parser.add_argument("sources", nargs="*", type=Path, help="notebooks/src/NN_slug.py")
    parser.add_argument("--check", action="store_true", help="write nothing; refuse what is not as built")
    args = parser.parse_args(argv)
    sources = [s for s in args.sources if "*" not in s.name or s.is_file()]
    if not sources:
        print("build: no sources were given", file=sys.stderr)
        return 1
    bar = tqdm(sorted(sources), disable=args.check or None, unit="notebook")
    try:
        for source in bar:
            bar.set_postfix_str(source.stem)
            if args.check:
                check(source)
            else:
                build(source)
    except InferError as error:
        bar.close()
        print(f"build: {error}", file=sys.stderr)
        return 1
    print(f"build: {len(sources)} notebooks {'are what their sources give' if args.check else 'executed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
