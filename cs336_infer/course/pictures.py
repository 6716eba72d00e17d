"""Pictures for lectures: one style, alt text that cannot be forgotten, and a description nbval can compare.

A figure's `text/plain` says what the picture shows. For a figure of measurements it is all that can be compared
between two machines, so it holds what must not change (axes, labels, legend, number of series) and no data.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import matplotlib as mpl
from cycler import cycler
from IPython.display import display
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.legend import Legend

# Okabe and Ito (2008), "Color universal design": told apart with any common colour blindness, black kept for text.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

STYLE: dict[str, Any] = {
    "figure.figsize": (7.0, 3.8),
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "lines.markersize": 6.0,
    "legend.frameon": False,
    "image.cmap": "cividis",
}

MEASURED = "Figure of measurements"
FIXED = "Figure"


def style() -> None:
    """Give every later figure of this process the look of the course."""
    mpl.rcParams.update(STYLE)  # pyright: ignore[reportCallIssue, reportArgumentType]


def subplots(rows: int = 1, cols: int = 1, **kwargs: Any) -> tuple[Figure, Any]:
    """`matplotlib.pyplot.subplots` in the style of the course, laid out so that labels never overlap."""
    style()
    return plt.subplots(rows, cols, layout="constrained", **kwargs)


def show(fig: Figure, alt: str, measured: bool = False) -> None:
    """Display `fig` as a PNG with alt text and a plain-text description, then close it.

    Args:
        alt: what a reader who cannot see the picture needs, one or two sentences; without measured values when
            `measured` is set.
        measured: the figure holds times or other readings of this machine. Its cell must carry the tag
            `measured`, and checks compare its description; any other figure is compared by its pixels.

    Raises:
        ValueError: `alt` is empty.
    """
    data, metadata = bundle(fig, alt, measured)
    display(data, metadata=metadata, raw=True)


def bundle(fig: Figure, alt: str, measured: bool = False) -> tuple[dict[str, str], dict[str, Any]]:
    """The MIME bundle and its metadata that `show` displays. Closes `fig`."""
    text = describe(fig, alt, measured)
    data = {"image/png": base64.b64encode(png(fig)).decode(), "text/plain": text}
    return data, {"image/png": {"alt": " ".join(alt.split())}}


def png(fig: Figure) -> bytes:
    """The figure as PNG bytes, without the name of the program that wrote them. Closes `fig`."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", metadata={"Software": None})
    plt.close(fig)
    return buffer.getvalue()


def describe(fig: Figure, alt: str, measured: bool = False) -> str:
    """What the figure shows, in words that do not depend on the data.

    Raises:
        ValueError: `alt` is empty.
    """
    alt = " ".join(alt.split())
    if not alt:
        raise ValueError("every figure needs alt text: say in a sentence what the picture shows, show(fig, alt='...')")
    axes = [ax for ax in fig.axes if ax.get_label() != "<colorbar>"]
    title = _text_of(getattr(fig, "_suptitle", None))
    head = f"{MEASURED if measured else FIXED}: {alt}"
    lines = [head, *([f"title '{title}'"] if title else []), *map(_legend, fig.legends), f"axes: {len(axes)}"]
    return "\n".join(lines + [f"  {i}. {_describe_axes(ax)}" for i, ax in enumerate(axes, 1)])


def _describe_axes(ax: Axes) -> str:
    parts = [f"{name} '{text}'" for name, text in _labels(ax) if text]
    bars = [c for c in ax.containers if isinstance(c, BarContainer)]
    in_bars = {id(patch) for group in bars for patch in group.patches}
    loose = [patch for patch in ax.patches if id(patch) not in in_bars]
    counts = {
        "lines": len(ax.lines),
        "bar groups": len(bars),
        "marker or area collections": len(ax.collections),
        "images": len(ax.images),
        "patches": len(loose),
    }
    parts += [f"{what} {n}" for what, n in counts.items() if n]
    parts += [_legend(legend) for legend in [ax.get_legend()] if legend is not None]
    return "; ".join(parts) if parts else "empty"


def _legend(legend: Legend) -> str:
    return "legend " + ", ".join(f"'{text.get_text()}'" for text in legend.get_texts())


def _labels(ax: Axes) -> list[tuple[str, str]]:
    titles = (ax.get_title(loc=loc) for loc in ("left", "center", "right"))
    return [
        ("title", " ".join(t for t in titles if t)),
        ("x", ax.get_xlabel()),
        ("y", ax.get_ylabel()),
    ]


def _text_of(artist: Any) -> str:
    return "" if artist is None else artist.get_text()
