"""The recurring drawings of the lectures, as functions that return a figure for `pictures.show`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from cs336_infer.course.pictures import COLORS, subplots
from cs336_infer.measure.roofline import Bound, Placed, Roofline

BLUE, ORANGE, GREEN, PINK, AMBER, SKY, BLACK = COLORS
PALE = {BLUE: "#DCEAF4", ORANGE: "#FBE5D6", GREEN: "#D9F0E7", PINK: "#F7E6F0", AMBER: "#FCF1D9", SKY: "#E3F2FB"}

Step = tuple[str, str, str]  # name, one line under it, colour


def flow(steps: Sequence[Step], *, back: tuple[int, int, str] | None = None) -> Figure:
    """Boxes in a row with arrows between them, and optionally one arrow back, as of a loop.

    Args:
        steps: from left to right.
        back: (from box, to box, label) of the returning arrow, drawn under the boxes.
    """
    fig, ax = subplots(figsize=(1.62 * len(steps), 2.1 if back else 1.3))
    ax.axis("off")
    ax.set(xlim=(-0.1, len(steps) - 0.02), ylim=(-0.75 if back else -0.06, 1.1))
    for i, (name, note, color) in enumerate(steps):
        _box(ax, i, name, note, color)
        if i:
            ax.annotate("", (i, 0.5), (i - 0.18, 0.5), arrowprops={"arrowstyle": "-|>", "color": BLACK, "lw": 1.4})
    if back is not None:
        start, end, label = back
        left, right = end + 0.41, start + 0.41
        ax.plot([right, right, left, left], [-0.04, -0.35, -0.35, -0.12], color=ORANGE, lw=1.8)
        ax.annotate("", (left, -0.02), (left, -0.2), arrowprops={"arrowstyle": "-|>", "color": ORANGE, "lw": 1.8})
        ax.text((left + right) / 2, -0.56, label, ha="center", va="center", color=ORANGE, fontsize=10)
    return fig


def _box(ax: Axes, x: float, name: str, note: str, color: str) -> None:
    style = {"boxstyle": "round,pad=0,rounding_size=0.06", "facecolor": PALE[color], "edgecolor": color, "lw": 1.6}
    ax.add_patch(FancyBboxPatch((x + 0.01, 0), 0.8, 1, **style))
    ax.text(x + 0.41, 0.7, name, ha="center", va="center", fontsize=10.5, weight="bold")
    ax.text(x + 0.41, 0.3, note, ha="center", va="center", fontsize=8.8)


def steps_and_pages(prompt: Sequence[str], output: Sequence[str], page: int = 4) -> Figure:
    """What runs at each step (left) and which page of the KV cache it fills (right), for one short request.

    Args:
        prompt: pieces of the prompt. output: pieces produced; the last one is never fed back.
    """
    pieces = [*prompt, *output]
    fig, (left, right) = subplots(1, 2, figsize=(10.5, 3.4), width_ratios=[3, 2])
    n = len(output)
    for step in range(n):
        first, last = (0, len(prompt)) if step == 0 else (len(prompt) + step - 1, len(prompt) + step)
        for i in range(last):
            fed = i >= first
            cell(left, i, n - 1 - step, pieces[i], GREEN if fed and step == 0 else BLUE if fed else None)
        cell(left, last, n - 1 - step, pieces[last], ORANGE)
    left.set(
        xlim=(-0.1, len(pieces) + 0.1), ylim=(-0.2, n + 0.1), xticks=[], title="fed (green, blue), cached, produced"
    )
    left.set_yticks([n - 0.5 - s for s in range(n)], ["prefill", *(f"decode {s}" for s in range(1, n))])
    kept = len(prompt) + n - 1
    for i in range(-(-kept // page) * page):
        color = None if i >= kept else GREEN if i < len(prompt) else BLUE
        cell(right, i % page, -(i // page), pieces[i] if i < kept else "", color)
    pages = -(-kept // page)
    right.set(xlim=(-0.1, page + 0.1), ylim=(0.8 - pages, 1.2), xticks=[], title=f"KV cache in pages of {page}")
    right.set_yticks([0.5 - p for p in range(pages)], [f"page {p}" for p in range(pages)])
    for ax in (left, right):
        ax.grid(False)
        ax.spines[["left", "bottom"]].set_visible(False)
        ax.tick_params(length=0)
    return fig


def cell(ax: Axes, x: float, y: float, text: str, color: str | None) -> None:
    """A square of side 1 with its lower left corner at (x, y); grey without a colour."""
    face, edge = (PALE[color], color) if color else ("#F2F2F2", "#BBBBBB")
    ax.add_patch(Rectangle((x + 0.04, y + 0.08), 0.92, 0.84, facecolor=face, edgecolor=edge, lw=1.2))
    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8.5)


def bars(values: Mapping[str, float], *, xlabel: str, title: str, color: str = BLUE, label: str = "") -> Figure:
    """Horizontal bars, the first on top; `label` is a format such as "{:.1f} %" for the number behind each bar."""
    fig, ax = subplots(figsize=(7.0, 0.6 + 0.42 * len(values)))
    places = np.arange(len(values))[::-1]
    drawn = ax.barh(places, list(values.values()), color=color, height=0.66)
    if label:
        ax.bar_label(drawn, labels=[label.format(v) for v in values.values()], padding=4, fontsize=9)
        ax.set_xlim(0, 1.12 * max(values.values()))
    ax.set_yticks(places, list(values))
    ax.set(xlabel=xlabel, title=title)
    ax.grid(axis="y", visible=False)
    return fig


def roofline(roof: Roofline, points: Sequence[Placed] = (), *, title: str = "Roofline of this machine") -> Figure:
    """Both ceilings on log axes, and measured work as labelled dots under them."""
    fig, ax = subplots(figsize=(7.5, 4.4))
    xs = [p.intensity for p in points] or [roof.ridge]
    x = np.geomspace(min(*xs, roof.ridge) / 4, max(*xs, roof.ridge) * 4, 200)
    ax.loglog(x, [roof.attainable(i) / 1e9 for i in x], color=BLACK, label="the roof")
    ax.axvline(roof.ridge, color="#888888", linestyle=":", lw=1.2, label="ridge")
    for bound, color, marker in ((Bound.MEMORY, BLUE, "o"), (Bound.COMPUTE, ORANGE, "s")):
        chosen = [p for p in points if p.bound is bound]  # drawn even when empty: the legend is the same everywhere
        where = [p.intensity for p in chosen], [p.flops_per_s / 1e9 for p in chosen]
        ax.plot(*where, marker, color=color, label=f"bound by {bound.value}")
    for p in points:
        at = {"xytext": (6, -11)} if p.bound is Bound.MEMORY else {"xytext": (-6, 8), "ha": "right"}
        ax.annotate(p.name, (p.intensity, p.flops_per_s / 1e9), textcoords="offset points", fontsize=8.5, **at)
    ax.set(xlabel="arithmetic intensity (FLOP per byte)", ylabel="GFLOP/s", title=title)
    ax.legend(loc="lower right")
    return fig


def matrix(table: Mapping[str, Mapping[str, bool]], columns: Sequence[str], *, title: str = "") -> Figure:
    """A row for each entry of `table` and a column for each of `columns`; a filled cell where it is true."""
    fig, ax = subplots(figsize=(1.8 + 1.15 * len(columns), 1.2 + 0.42 * len(table)))
    for y, row in enumerate(reversed(list(table.values()))):
        for x, name in enumerate(columns):
            cell(ax, x, y, "sees it" if row[name] else "", GREEN if row[name] else None)
    ax.set(xlim=(-0.1, len(columns) + 0.1), ylim=(-0.1, len(table) + 0.1), title=title)
    ax.set_xticks([x + 0.5 for x in range(len(columns))], [c.replace(" ", "\n", 1) for c in columns], fontsize=9)
    ax.set_yticks([y + 0.5 for y in range(len(table))], list(reversed(list(table))))
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    return fig
