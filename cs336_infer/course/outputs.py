"""What a committed output may hold: cleaning after a run, and the faults that keep a notebook out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from nbformat import NotebookNode

from cs336_infer.course.pictures import MEASURED

WIDGET = "application/vnd.jupyter.widget-view+json"
MEASURED_TAG = "measured"
_OVERWRITTEN = re.compile(r"^.*\r(?=[^\n])", re.MULTILINE)


def clean_outputs(outputs: Iterable[NotebookNode]) -> list[NotebookNode]:
    """Outputs as they are committed.

    Pieces of one stream are joined and overwritten progress bars reduced to their last state. The view of a widget
    is dropped: its model lives in a kernel that is gone, and the still picture beside it shows everywhere.
    """
    kept: list[NotebookNode] = []
    streams: dict[str, NotebookNode] = {}
    for output in outputs:
        if output.output_type == "stream":
            if output.name in streams:
                streams[output.name].text += output.text
                continue
            streams[output.name] = output
        elif "data" in output:
            output.data.pop(WIDGET, None)
        kept.append(output)
    for stream in streams.values():
        stream.text = _OVERWRITTEN.sub("", stream.text)
    return kept


def fault_of(cell: NotebookNode, forbidden: Iterable[str]) -> str | None:
    """Why this executed cell cannot be committed, as the end of a sentence; None when it can."""
    if cell.cell_type != "code":
        return None
    tags = cell.metadata.get("tags", [])
    measurements = False
    for output in cell.outputs:
        if output.output_type == "error" and "raises-exception" not in tags:
            return f"holds an error: {output.ename}"
        text = "\n".join(_texts(output))
        for folder in forbidden:
            if re.search(re.escape(folder) + (r"(?![\w.-])" if folder[-1] not in "_/" else ""), text):
                return "names a folder of this machine in its output; print a path relative to the notebook"
        measurements |= is_measurement(output)
    if measurements != (MEASURED_TAG in tags):
        wrong = "shows a figure of measurements without" if measurements else "shows no figure of measurements but has"
        return f"{wrong} the tag `{MEASURED_TAG}`"
    return None


def is_measurement(output: Any) -> bool:
    """Whether this output is a figure whose pixels differ from run to run (`pictures.show(measured=True)`)."""
    return str(output.get("data", {}).get("text/plain", "")).startswith(MEASURED)


def _texts(output: NotebookNode) -> Iterable[str]:
    for key in ("text", "evalue"):
        if key in output:
            yield str(output[key])
    yield from (str(line) for line in output.get("traceback", []))
    for kind, value in output.get("data", {}).items():
        if not kind.startswith("image/") or kind == "image/svg+xml":
            yield str(value)
