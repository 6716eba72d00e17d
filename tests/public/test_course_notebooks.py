"""The checks of committed notebooks notice what a person would: each seeded fault must fail, harmless changes pass."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from PIL import Image, ImageChops

from cs336_infer.course import build

REPO = Path(__file__).resolve().parents[2]

SOURCE = """\
# %%
import time

import ipywidgets as W
from tqdm import tqdm

from cs336_infer.course import pictures
from cs336_infer.course.predict import measured, predict
from cs336_infer.course.widgets import explorer

print("six times seven is", 6 * 7)
for _ in tqdm(range(5)):
    time.sleep(0.001)

# %%
fig, ax = pictures.subplots()
ax.plot([1, 2, 3], [1, 4, 9], label="square")
ax.set(xlabel="n", ylabel="n squared")
pictures.show(fig, "A square grows.")

# %%
predict("sleep", low=1, high=5, unit="ms")

# %% tags=["measured"]
start = time.perf_counter()
time.sleep(0.002)
measured("sleep", 1e3 * (time.perf_counter() - start), bound=2, bound_label="what was asked for")

# %% tags=["measured"]
fig, ax = pictures.subplots()
times = [time.perf_counter() for _ in range(4)]
ax.plot([1e6 * (t - times[0]) for t in times])
ax.set(xlabel="call", ylabel="time (us)")
pictures.show(fig, "The clock moves on.", measured=True)


# %%
def draw(n):
    fig, ax = pictures.subplots(figsize=(3, 2))
    ax.plot([0, n], [0, 2 * n])
    return fig


box = explorer({"n": W.IntSlider(value=4, max=10, description="n")}, draw, lambda n: f"{n} doubled is {2 * n}")
box

# %%
box["n"].value = 5
print(box.text)
print(object())
"""

Change = Callable[[NotebookNode], None]


@dataclass(frozen=True)
class Fault:
    """A change of one code cell of the built notebook, which that cell must not survive."""

    cell: int
    change: Change


def replace(cell: int, old: str, new: str) -> Fault:
    """Other code with the old outputs: what a stale notebook looks like."""

    def change(code: NotebookNode) -> None:
        assert old in code.source, old
        code.source = code.source.replace(old, new)

    return Fault(cell, change)


def strip(code: NotebookNode) -> None:
    code.update(outputs=[], execution_count=None)


def hide_behind_tag(code: NotebookNode) -> None:
    code.metadata["tags"] = ["measured"]
    code.source = code.source.replace("[1, 4, 9]", "[9, 4, 1]")


def reencode(notebook: NotebookNode) -> None:
    """Other bytes of the same pictures, each pixel off by one level."""
    for cell in notebook.cells:
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                image = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
                buffer = io.BytesIO()
                ImageChops.subtract(image, Image.new("RGB", image.size, (1, 1, 1))).save(
                    buffer, format="png", compress_level=1
                )
                output.data["image/png"] = base64.b64encode(buffer.getvalue()).decode()


def other_clock(notebook: NotebookNode) -> None:
    """The readings of a slower machine, and of another address in memory."""
    for cell in notebook.cells:
        for output in cell.outputs:
            if "text" in output:
                output.text = re.sub(r"timing: sleep [\d.]+ ms", "timing: sleep 99.9 ms", output.text)
                output.text = re.sub(r"\[00:00<00:00, .*it/s\]", "[00:07<00:00,  1.40s/it]", output.text)
                output.text = re.sub(r"0x[0-9a-f]+", "0x7f0123456789", output.text)


FAULTS = {
    "other text": replace(0, "6 * 7", "6 * 8"),
    "a longer progress bar": replace(0, "range(5)", "range(6)"),
    "stripped outputs": Fault(0, strip),
    "other data in a figure": replace(1, "[1, 4, 9]", "[1, 4, 8]"),
    "another colour": replace(1, 'label="square"', 'label="square", color="C1"'),
    "another alt text": replace(1, "A square grows.", "A square shrinks."),
    "a figure that is gone": replace(1, 'pictures.show(fig, "A square', 'pictures.png(fig); ("A square'),
    "a fixed figure hidden behind the tag": Fault(1, hide_behind_tag),
    "another reason for a guess": replace(2, 'unit="ms"', 'unit="ms", why="a hunch"'),
    "a measurement without its tag": Fault(3, lambda code: code.metadata.pop("tags")),
    "another bound": replace(3, "what was asked for", "what was hoped for"),
    "another label on a measurement": replace(4, "time (us)", "time (ms)"),
    "one more series in a measurement": replace(4, 'ax.set(xlabel="call"', 'ax.plot([1]); ax.set(xlabel="call"'),
    "a measurement that became a fixed figure": replace(4, ", measured=True", ""),
    "another formula behind a knob": replace(5, "{2 * n}", "{3 * n}"),
    "another picture behind a knob": replace(5, "[0, 2 * n]", "[2 * n, 0]"),
    "an exception instead of an output": replace(6, "print(box.text)", "raise RuntimeError"),
    "a knob that was not turned": replace(6, 'box["n"].value = 5', ""),
    "a cell that asks not to be checked": replace(6, "print(box.text)", "# NBVAL_IGNORE_OUTPUT\nprint(box.text)"),
    "a cell that asks to be skipped": replace(6, "print(box.text)", "# NBVAL_SKIP\nprint(box.text)"),
}
HARMLESS: dict[str, Change] = {
    "nothing": lambda notebook: None,
    "re-encoded pictures": reencode,
    "another clock": other_clock,
}


def layers() -> list[dict[str, Fault]]:
    """The faults spread over as few notebooks as possible, at most one to a cell."""
    found: list[dict[str, Fault]] = []
    for name, fault in FAULTS.items():
        free = [layer for layer in found if fault.cell not in {f.cell for f in layer.values()}]
        if not free:
            free = [{}]
            found += free
        free[0][name] = fault
    return found


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of a fault -> what nbval says of its cell; name of a harmless change -> what it says of the notebook."""
    folder = tmp_path_factory.mktemp("repo") / "notebooks"
    (folder / "src").mkdir(parents=True)
    source = folder / "src" / "00_built.py"
    source.write_text(SOURCE)
    built = build.build(source).read_text()
    build.target_of(source).unlink()
    shutil.copy(REPO / "notebooks" / "conftest.py", folder)
    where: dict[tuple[str, str], str] = {}
    for number, layer in enumerate(layers()):
        notebook = nbformat.reads(built, as_version=4)
        for name, fault in layer.items():
            fault.change(notebook.cells[fault.cell])
            where[f"fault{number}", str(fault.cell)] = name
        nbformat.write(notebook, folder / f"fault{number}.ipynb")
    for number, (name, change) in enumerate(HARMLESS.items()):
        notebook = nbformat.reads(built, as_version=4)
        change(notebook)
        nbformat.write(notebook, folder / f"harmless{number}.ipynb")
        where.update({(f"harmless{number}", str(cell)): name for cell in range(len(notebook.cells))})
    command = [sys.executable, "-m", "pytest", str(folder), "--nbval", "--nbval-current-env", "-q", "-rA", "--color=no"]
    command += [f"--nbval-sanitize-with={REPO / 'tests' / 'nbval_sanitize.cfg'}", f"--rootdir={folder.parent}"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    seen: dict[str, str] = {}
    for outcome, file, cell in re.findall(r"^([A-Z]+) \S*?(\w+)\.ipynb::Cell (\d+)", run.stdout, re.MULTILINE):
        name = where.get((file, cell))
        if name is not None and seen.get(name, "PASSED") == "PASSED":
            seen[name] = outcome
    assert set(seen) == {*FAULTS, *HARMLESS}, run.stdout[-3000:] + run.stderr[-1000:]
    return seen


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(verdicts: dict[str, str], name: str) -> None:
    assert verdicts[name] == "FAILED"


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_passes(verdicts: dict[str, str], name: str) -> None:
    assert verdicts[name] == "PASSED"
