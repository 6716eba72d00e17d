"""Drawings of attention kernels: a running softmax, programs and the pages they read, and who sees what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from cs336_infer.course.drawings import AMBER, BLACK, BLUE, GREEN, ORANGE, PALE, PINK, SKY, cell
from cs336_infer.course.pictures import subplots

PROGRAMS = (BLUE, GREEN, AMBER, PINK, SKY)
NOBODY, EDGE = "#F2F2F2", "#BBBBBB"


def running_softmax(
    scores: Sequence[float], tops: Sequence[float], totals: Sequence[float], averages: Sequence[float], exact: float
) -> Figure:
    """What a one-pass softmax holds after each number: the maximum, the sum of weights, and the average so far.

    Args:
        tops, totals, averages: after each of `scores`. exact: the average by two passes.
    """
    fig, axes = subplots(3, 1, figsize=(7.5, 6.2), sharex=True)
    x = range(1, len(scores) + 1)
    grown = [i == 0 or tops[i] > tops[i - 1] for i in range(len(tops))]
    axes[0].bar(x, scores, width=0.6, color=PALE[BLUE], edgecolor=BLUE, label="score")
    axes[0].step(x, tops, where="mid", color=ORANGE, label="largest so far")
    axes[0].set(title="scores, and the largest so far", ylim=(0, max(scores) * 1.35))
    axes[0].legend(loc="upper left", ncols=2)
    colors = [ORANGE if new else GREEN for new in grown]
    axes[1].bar(x, totals, width=0.6, color=[PALE[c] for c in colors], edgecolor=colors)
    for i, total in enumerate(totals):
        axes[1].text(i + 1, total + 0.04, f"{total:.2f}", ha="center", va="bottom", fontsize=9)
    axes[1].set(title="sum of weights (orange: a new maximum, so the old sum shrinks)", ylim=(0, max(totals) * 1.25))
    axes[2].plot(x, averages, "o-", color=BLUE)
    axes[2].axhline(exact, color=BLACK, ls="--", lw=1.2)
    axes[2].text(len(scores) + 0.4, exact * 1.15, f"two passes: {exact:.3f}", ha="right", va="bottom", fontsize=9)
    axes[2].set(title="average of the values so far", xlabel="numbers read", ylim=(0, max(averages) * 1.15))
    axes[2].set_xticks(list(x))
    return fig


def programs_and_pages(table: Sequence[int], length: int, page: int, splits: int) -> Figure:
    """A row of pages in the order of its table, which program reads which, and what each leaves for the merge.

    Args:
        table: pages of the row, ceil(length / page) of them. splits: programs; each gets ceil(pages / splits) pages.
    """
    share = -(-len(table) // splits)
    step = page + 0.6
    width = len(table) * step
    fig, ax = subplots(figsize=(10.5, 4.3))
    ax.axis("off")
    for i, block in enumerate(table):
        color, x = PROGRAMS[i // share % len(PROGRAMS)], i * step
        ax.text(x + page / 2, 1.12, f"page {block}", ha="center", va="bottom", fontsize=9.5)
        for j in range(page):
            at = i * page + j
            cell(ax, x + j, 0, str(at) if at < length else "", color if at < length else None)
    ax.text(-0.4, 0.5, "positions", ha="right", va="center", fontsize=9.5)
    boxes = [(split + 0.5) * width / splits - 0.3 for split in range(splits)]
    for split, x in enumerate(boxes):
        mine = range(split * share, min((split + 1) * share, len(table)))
        color = PROGRAMS[split % len(PROGRAMS)]
        text = "average, lse" if mine else "no page: lse = -inf"
        _box(ax, x, -2.3, f"program {split}", text, color if mine else None)
        for i in mine:
            _arrow(ax, (i * step + page / 2, -0.05), (x, -1.75), color)
        _arrow(ax, (x, -2.85), (width / 2 - 0.3, -4.05), color if mine else EDGE)
    _box(ax, width / 2 - 0.3, -4.6, "merge", "one launch more", BLACK)
    ax.set(xlim=(-2.6, width), ylim=(-5.3, 1.75))
    return fig


def multiprocessors(panels: Mapping[str, int], sms: int = 132, columns: int = 22) -> Figure:
    """A square for each multiprocessor of a GPU with the programs it gets; one panel for each number of programs."""
    rows = -(-sms // columns)
    fig, axes = subplots(len(panels), 1, figsize=(8.5, (0.36 * rows + 0.55) * len(panels)), squeeze=False)
    for ax, (title, programs) in zip(axes[:, 0], panels.items(), strict=True):
        for i in range(sms):
            mine = programs // sms + (i < programs % sms)
            cell(ax, i % columns, -(i // columns), str(mine) if mine else "", GREEN if mine else None)
        ax.set(xlim=(-0.1, columns + 0.1), ylim=(0.9 - rows, 1.1), title=title)
        ax.axis("off")
    return fig


def verdicts(rows: Mapping[str, Sequence[bool]], columns: Sequence[str], *, xlabel: str, title: str) -> Figure:
    """A row of cells for each entry of `rows`, orange where it is False (wrong) and green where it is True."""
    fig, ax = subplots(figsize=(1.6 + 0.36 * len(columns), 1.0 + 0.4 * len(rows)))
    for y, right in enumerate(reversed(list(rows.values()))):
        for x, good in enumerate(right):
            cell(ax, x, y, "" if good else "×", GREEN if good else ORANGE)
    ax.set(xlim=(-0.1, len(columns) + 0.1), ylim=(-0.1, len(rows) + 0.1), xlabel=xlabel, title=title)
    ax.set_xticks([x + 0.5 for x in range(len(columns))], list(columns), fontsize=8.5)
    ax.set_yticks([y + 0.5 for y in range(len(rows))], list(reversed(list(rows))))
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    return fig


def orders(seen: Mapping[tuple[int, ...], bool], columns: int = 6, title: str = "") -> Figure:
    """Orders of a table's pages as strips, orange where a test sees that the order is wrong; the last page is bold."""
    pages = len(next(iter(seen)))
    rows = -(-len(seen) // columns)
    fig, ax = subplots(figsize=(1.65 * columns, 0.62 * rows + 0.5))
    for i, (order, caught) in enumerate(seen.items()):
        x, y = i % columns * (pages + 1), -1.5 * (i // columns)
        face, edge = (PALE[ORANGE], ORANGE) if caught else (NOBODY, EDGE)
        for j, page in enumerate(order):
            ax.add_patch(Rectangle((x + j, y), 0.94, 1, facecolor=face, edgecolor=edge, lw=1.2))
            weight = "bold" if page == pages - 1 else "normal"
            ax.text(x + j + 0.47, y + 0.48, str(page), ha="center", va="center", fontsize=9, weight=weight)
    ax.set(xlim=(-0.3, columns * (pages + 1) - 0.7), ylim=(-1.5 * (rows - 1) - 0.2, 1.2), title=title)
    ax.axis("off")
    return fig


def _box(ax: Axes, x: float, y: float, upper: str, lower: str, color: str | None) -> None:
    """A box of two lines centred at (x, y); grey without a colour."""
    face, edge = (PALE.get(color, NOBODY), color) if color else (NOBODY, EDGE)
    style = {"boxstyle": "round,pad=0,rounding_size=0.15", "facecolor": face, "edgecolor": edge, "lw": 1.4}
    ax.add_patch(FancyBboxPatch((x - 2.5, y - 0.5), 5.0, 1.0, **style))
    ax.text(x, y + 0.2, upper, ha="center", va="center", fontsize=10, weight="bold")
    ax.text(x, y - 0.22, lower, ha="center", va="center", fontsize=9)


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.5})
