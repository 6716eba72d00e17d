"""Make nbval honest about the committed notebooks.

Stock nbval compares no pictures and passes a notebook whose outputs were stripped. Here pictures are compared
block by block, whatever their encoding, a cell that was never executed fails, and so does a cell that asks not to
be checked. Figures of measurements (`pictures.show(measured=True)` in a cell
tagged `measured`) are compared by their description only.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cs336_infer.course.outputs import MEASURED_TAG, is_measurement

BLOCKS = 32  # a picture is compared as 32 x 32 blocks of mean colour
# Of 255, in any block and channel. The pinned matplotlib brings its font renderer: the same picture differs by 0.
# Measured on a line of three points: one point moved by 1 % differs by 12, by 11 % 64; other text hinting 13 to 17.
TOLERANCE = 6.0
PICTURES = ("image/png", "image/jpeg")

try:
    from nbval.plugin import IPyNbCell
except ImportError:
    IPyNbCell = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if IPyNbCell is not None and isinstance(item, IPyNbCell):
            _make_honest(item)


def _make_honest(item: Any) -> None:
    cell, notebook = item.cell, item.parent
    notebook.skip_compare = tuple(key for key in notebook.skip_compare if key not in PICTURES)
    if cell.source.strip() and cell.execution_count is None:
        _refuse(item, "the cell was never executed, so there is nothing to compare; run `make notebooks`")
    if item.options["skip"] or not item.options["check"]:
        _refuse(item, "the cell asks not to be checked; print what was measured behind the prefix `timing:` instead")
    compare = item.compare_outputs
    item.compare_outputs = lambda test, ref, **kw: compare(*_reconcile(test, ref, cell), **kw)


def _refuse(item: Any, why: str) -> None:
    item.runtest = lambda: item.raise_cell_error(why)


def _reconcile(test: Sequence[Any], ref: Sequence[Any], cell: Any) -> tuple[list[Any], list[Any]]:
    """Both lists of outputs with pictures replaced by text that is equal exactly when the pictures agree."""
    test, ref = [_copy(output) for output in test], [_copy(output) for output in ref]
    tagged = MEASURED_TAG in cell.metadata.get("tags", [])
    for kind in PICTURES:
        ours, theirs = ([o for o in outputs if kind in o.get("data", {})] for outputs in (test, ref))
        if len(ours) != len(theirs):
            continue
        for new, old in zip(ours, theirs, strict=True):
            if tagged and is_measurement(new) and is_measurement(old):
                verdict = None
            else:
                verdict = difference(new["data"][kind], old["data"][kind])
            old["data"][kind] = "the picture"
            new["data"][kind] = "the picture" if verdict is None else f"another picture: {verdict}"
    return test, ref


def _copy(output: Any) -> Any:
    fresh = type(output)(output)
    if "data" in output:
        fresh["data"] = type(output["data"])(output["data"])
    return fresh


def difference(new: str, old: str) -> str | None:
    """How two base64 pictures differ; None when no block of mean colour differs by more than `TOLERANCE`."""
    try:
        images = [Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB") for text in (new, old)]
    except (ValueError, OSError) as error:
        return f"cannot be read ({error})"
    if images[0].size != images[1].size:
        return f"{images[0].size} pixels, not {images[1].size}"
    a, b = (np.asarray(image.resize((BLOCKS, BLOCKS), Image.Resampling.BOX), dtype=np.float32) for image in images)
    worst = float(np.abs(a - b).max())
    return None if worst <= TOLERANCE else f"a block differs by {worst:.0f} of 255 (at most {TOLERANCE:.0f} passes)"
