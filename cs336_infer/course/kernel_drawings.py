"""Drawings of kernels: where memory is, what each program touches, and what a layer launches on every rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from cs336_infer.course.drawings import AMBER, BLUE, GREEN, ORANGE, PALE, PINK, SKY
from cs336_infer.course.kernel_trace import Access
from cs336_infer.course.pictures import subplots

PROGRAMS = (BLUE, ORANGE, GREEN, PINK, AMBER, SKY)
GREY, PALE_GREY = "#999999", "#F2F2F2"

Level = tuple[str, str, str]  # name, how large, whose it is
Span = tuple[int, int, str, int]  # first column, last column, name, how many launches


def levels(found: Sequence[Level]) -> Figure:
    """Kinds of memory from the smallest and nearest on top to the largest, each box wider than the one above."""
    fig, ax = subplots(figsize=(8.6, 0.3 + 0.6 * len(found)))
    for i, ((name, size, note), color) in enumerate(zip(found, PROGRAMS, strict=False)):
        width, y = 4.6 + 1.1 * i, len(found) - 1 - i
        style = {"boxstyle": "round,pad=0,rounding_size=0.08", "facecolor": PALE[color], "edgecolor": color, "lw": 1.6}
        ax.add_patch(FancyBboxPatch((0, y + 0.06), width, 0.82, **style))
        ax.text(0.2, y + 0.47, name, va="center", weight="bold")
        ax.text(width - 0.2, y + 0.47, size, va="center", ha="right")
        ax.text(width + 0.25, y + 0.47, note, va="center", fontsize=9, color="#444444")
    ax.set(xlim=(-0.1, 4.6 + 1.1 * len(found) + 3.2), ylim=(-0.1, len(found)))
    ax.axis("off")
    return fig


def offsets(rows: int, columns: int, block: int, *, title: str) -> Figure:
    """A matrix as it lies in memory, and above it the `block` places from the beginning of each program's row on: those
    within the row are filled, those that its mask must turn off are empty."""
    places = (rows - 1) * columns + block
    fig, ax = subplots(figsize=(0.52 * places + 1.5, 0.9 + 0.42 * rows))
    for at in range(places):
        inside = at < rows * columns
        color = PROGRAMS[at // columns % len(PROGRAMS)] if inside else GREY
        ax.add_patch(Rectangle((at + 0.04, 0.08), 0.92, 0.84, facecolor=PALE.get(color, "white"), edgecolor=color,
                               lw=1.2, linestyle="-" if inside else ":"))  # fmt: skip
        ax.text(at + 0.5, 0.5, str(at), ha="center", va="center", fontsize=9, color="black" if inside else GREY)
    for row in range(rows):
        color, y = PROGRAMS[row % len(PROGRAMS)], 1.15 + 0.75 * row
        for lane in range(block):
            on = lane < columns
            style: dict[str, Any] = {"facecolor": color if on else "white", "edgecolor": color, "lw": 1.0}
            style["hatch"] = None if on else "////"
            ax.add_patch(Rectangle((row * columns + lane + 0.1, y), 0.8, 0.5, **style))
        ax.text(row * columns - 0.15, y + 0.25, f"program {row}", ha="right", va="center", fontsize=9, color=color)
    ax.text(-0.15, 0.5, "memory", ha="right", va="center", fontsize=9)
    ax.set(xlim=(-2.3, places + 0.1), ylim=(-0.05, 1.2 + 0.75 * rows), title=title)
    ax.axis("off")
    return fig


def lanes(accesses: Sequence[Access], *, title: str) -> Figure:
    """A row for each load and store in their order, a cell for each lane: the element it touches, or nothing."""
    width = max(len(access.lanes) for access in accesses)
    fig, ax = subplots(figsize=(3.4 + 0.55 * width, 0.7 + 0.27 * len(accesses)))
    for i, access in enumerate(accesses):
        y, color = len(accesses) - 1 - i, PROGRAMS[access.program % len(PROGRAMS)]
        for lane, at in enumerate(access.lanes):
            face, edge = (PALE_GREY, "white") if at is None else (PALE[color], color)
            ax.add_patch(Rectangle((lane + 0.04, y + 0.08), 0.92, 0.84, facecolor=face, edgecolor=edge, lw=1.2))
            ax.text(lane + 0.5, y + 0.5, "" if at is None else str(at), ha="center", va="center", fontsize=9)
        if i and access.program != accesses[i - 1].program:
            ax.plot([-4.6, width], [y + 1, y + 1], color=GREY, lw=0.8)
    labels = [f"{i}. program {a.program} {a.what}s {a.tensor}" for i, a in enumerate(accesses, 1)]
    ax.set_yticks([len(labels) - 0.5 - i for i in range(len(labels))], labels, fontsize=9)
    ax.set(xlim=(-0.1, width + 0.1), ylim=(-0.1, len(accesses) + 0.1), title=title)
    ax.set_xticks([lane + 0.5 for lane in range(width)], [f"lane {lane}" for lane in range(width)], fontsize=8)
    _bare(ax)
    return fig


def chains(columns: Sequence[str], rungs: Mapping[str, Sequence[Span]], *, title: str) -> Figure:
    """What a layer computes, from left to right, and for each rung which parts share a kernel."""
    fig, ax = subplots(figsize=(0.83 * len(columns) + 1.6, 0.9 + 0.5 * len(rungs)))
    for y, (name, spans) in enumerate(reversed(list(rungs.items()))):
        for first, last, text, launches in spans:
            color = BLUE if first == last and launches == 1 else GREEN if first < last else ORANGE
            style: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.1", "edgecolor": color, "lw": 1.3}
            where = (first + 0.05, y + 0.12), last - first + 0.9, 0.76
            ax.add_patch(FancyBboxPatch(*where, facecolor=PALE[color], **style))
            text = text if launches == 1 else f"{text} ({launches})"
            ax.text((first + last + 1) / 2, y + 0.5, text, ha="center", va="center", fontsize=8)
        total = sum(launches for *_, launches in spans)
        ax.text(len(columns) + 0.15, y + 0.5, f"{total}", va="center", weight="bold")
        ax.text(-0.15, y + 0.5, name, ha="right", va="center", fontsize=9.5)
    for x, column in enumerate(columns):
        ax.text(x + 0.5, len(rungs) + 0.18, column, ha="center", va="bottom", fontsize=8.5)
    ax.set(xlim=(-1.5, len(columns) + 0.7), ylim=(0, len(rungs) + 0.75), title=title)
    ax.axis("off")
    return fig


def rungs(
    names: Sequence[str],
    launches: Sequence[int],
    fixed: Sequence[tuple[str, float]],
    between: Sequence[float],
    *,
    title: str,
) -> Figure:
    """Launches, bytes and the part of the bytes that fusion can change, for each rung.

    Args:
        fixed: (name, MB) of what every rung moves. between: MB of each rung besides.
    """
    fig, axes = subplots(1, 3, figsize=(10.5, 0.9 + 0.38 * len(names)), width_ratios=[3, 4, 3])
    places = np.arange(len(names))[::-1]
    drawn = axes[0].barh(places, launches, color=BLUE, height=0.66)
    axes[0].bar_label(drawn, padding=3, fontsize=9)
    start = np.zeros(len(names))
    for (label, size), color in zip(fixed, (SKY, GREEN), strict=False):
        axes[1].barh(places, [size] * len(names), left=start, color=color, height=0.66, label=label)
        start += size
    axes[1].barh(places, between, left=start, color=ORANGE, height=0.66, label="the rest")
    drawn = axes[2].barh(places, [1000 * size for size in between], color=ORANGE, height=0.66)
    axes[2].bar_label(drawn, fmt="{:,.0f}", padding=3, fontsize=9)
    for ax, text in zip(axes, ("launches", "MB moved", "kB of the rest"), strict=True):
        ax.set_yticks(places, names if ax is axes[0] else [])
        ax.set(xlabel=text)
        ax.grid(axis="y", visible=False)
    for ax in (axes[0], axes[2]):
        ax.set_xlim(0, 1.2 * ax.dataLim.x1)
    fig.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    axes[0].set_title(title)
    return fig


def step_times(
    names: Sequence[str], reading: float, gaps: Sequence[float], host: Sequence[float], *, title: str
) -> Figure:
    """Microseconds of a step that follow from counts: what the GPU needs as stacked bars, the host's time as a mark."""
    fig, ax = subplots(figsize=(8.2, 1.5 + 0.42 * len(names)))
    places = np.arange(len(names))[::-1]
    ax.barh(places, [reading] * len(names), color=SKY, height=0.62, label="GPU: bytes at its bandwidth")
    ax.barh(places, gaps, left=reading, color=ORANGE, height=0.62, label="GPU: between kernels")
    ax.plot(host, places, "D", color="black", markersize=7, label="host: starting them")
    for y, gap, started in zip(places, gaps, host, strict=True):
        most = max(reading + gap, started)
        ax.text(most, y, f"   {most:,.0f}", va="center", fontsize=9)
    ax.set_yticks(places, names)
    ax.set(xlabel="microseconds", title=title, xlim=(0, 1.12 * max(reading + max(gaps), *host)))
    ax.grid(axis="y", visible=False)
    fig.legend(loc="outside lower center", ncols=3, fontsize=9)
    return fig


def _bare(ax: Axes) -> None:
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
