"""Drawings of KV memory for the lectures on caching: reservations, blocks and tables, key chains, and tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from cs336_infer.course.drawings import AMBER, BLACK, BLUE, GREEN, ORANGE, PALE, PINK, cell
from cs336_infer.course.pictures import subplots

OWNERS = (BLUE, ORANGE, GREEN, AMBER)
SHARED = PINK
RESERVED = "#F2F2F2"

Tables = Mapping[str, tuple[Sequence[int], int]]  # name of a sequence -> its block table and its length in tokens


def reservations(lengths: Mapping[str, int], reserve: int, slots: int, page: int) -> Figure:
    """The same sequences in the same memory, once contiguous and once in pages.

    Args:
        lengths: tokens of each sequence, in order of arrival. reserve: slots that each gets when contiguous.
        slots: of the memory. page: slots per page, a divisor of `slots`.
    """
    fig, axes = subplots(2, 1, figsize=(10.5, 3.9))
    colors = dict(zip(lengths, OWNERS, strict=False))
    contiguous: list[str | None] = [None] * slots
    paged: list[str | None] = [None] * slots
    begin, page_begin, left_out = 0, 0, []
    for name, length in lengths.items():
        if begin + reserve <= slots:
            _mark(axes[0], begin, reserve, colors[name], f"{name}: {length} of {reserve}")
            contiguous[begin : begin + length] = [name] * length
            begin += reserve
        else:
            left_out.append(name)
        taken = -(-length // page) * page
        for first in range(page_begin, page_begin + taken, page):
            last = min(page, length - (first - page_begin))
            _mark(axes[1], first, page, colors[name], f"{name}: {last} of {page}")
        paged[page_begin : page_begin + length] = [name] * length
        page_begin += taken
    for ax, cells in zip(axes, (contiguous, paged), strict=True):
        for x, owner in enumerate(cells):
            cell(ax, x, 0, owner or "", colors[owner] if owner else None)
    if begin < slots:
        text = f"free, but too short for {reserve}" + "".join(f": {n} waits" for n in left_out)
        axes[0].text((begin + slots) / 2, 1.28, text, ha="center", va="bottom", fontsize=9)
    if page_begin < slots:
        axes[1].text((page_begin + slots) / 2, 1.28, "free for anybody", ha="center", va="bottom", fontsize=9)
    for ax, title in zip(axes, (f"contiguous, {reserve} slots each", f"pages of {page}"), strict=True):
        _bare(ax, slots, (-0.15, 1.75))
        ax.set_title(title, pad=2)
    return fig


def tables_and_pool(tables: Tables, total: int, page: int, title: str = "one pool") -> Figure:
    """Left what each sequence sees, its tokens in order; right where they are."""
    fig, (left, right) = subplots(1, 2, figsize=(10.5, 0.55 * total + 0.6), width_ratios=[6, 5])
    colors = dict(zip(tables, OWNERS, strict=False))
    users = _users(tables)
    widest = max(len(table) for table, _ in tables.values()) * (page + 0.5)
    for row, (name, (table, length)) in enumerate(tables.items()):
        y = -2.0 * row
        left.text(-0.3, y + 0.5, name, ha="right", va="center", weight="bold")
        for i, block in enumerate(table):
            x = i * (page + 0.5)
            left.text(x + page / 2, y + 1.05, f"block {block}", ha="center", va="bottom", fontsize=8.5)
            for j in range(page):
                at = i * page + j
                color = SHARED if len(users[block]) > 1 else colors[name]
                cell(left, x + j, y, str(at) if at < length else "", color if at < length else None)
    left.set(
        xlim=(-1.2, widest), ylim=(-2.0 * len(tables) + 1.6, 1.9), title="block tables: positions of each sequence"
    )
    _pool(right, tables, total, page, title)
    left.axis("off")
    return fig


def pool_frames(frames: Sequence[tuple[str, Tables]], total: int, page: int) -> Figure:
    """The pool at several moments, side by side, each with a title."""
    fig, axes = subplots(1, len(frames), figsize=(3.6 * len(frames), 0.55 * total + 1.3))
    for ax, (title, tables) in zip(axes, frames, strict=True):
        _pool(ax, tables, total, page, title)
        lines = [f"{name}: {' '.join(map(str, table))}" for name, (table, _) in tables.items()]
        ax.text(0, -total - 0.15, "tables   " + "     ".join(lines), ha="left", va="top", fontsize=9)
        ax.set_ylim(-total - 0.9, 0.3)
    return fig


def key_chain(rows: Sequence[tuple[str, str, Sequence[tuple[str, str]]]], equal: Sequence[int]) -> Figure:
    """Chains of block keys, one row each: (name, root, [(tokens, key), ...]). Of row i, `equal[i]` keys are shared."""
    longest = max(len(blocks) for _, _, blocks in rows)
    fig, ax = subplots(figsize=(2.2 * (longest + 1), 1.35 * len(rows)))
    ax.axis("off")
    ax.set(xlim=(-0.65, longest + 0.8), ylim=(-1.0 * len(rows) + 0.88, 0.95))
    for row, (name, root, blocks) in enumerate(rows):
        y = -row
        ax.text(-0.08, y + 0.38, name, ha="right", va="center", weight="bold")
        _card(ax, 0, y, "root", root, BLACK)
        for i, (tokens, key) in enumerate(blocks, 1):
            _card(ax, i, y, tokens, key, SHARED if i <= equal[row] else OWNERS[row])
            ax.annotate("", (i, y + 0.38), (i - 0.25, y + 0.38), arrowprops={"arrowstyle": "-|>", "lw": 1.3})
    return fig


def eviction_order(rows: Mapping[str, Sequence[int]], order: Sequence[int]) -> Figure:
    """Cached prompts as rows of blocks; in each block its number, and below when it is evicted (1 is first)."""
    fig, ax = subplots(figsize=(8.0, 1.15 * len(rows) + 0.4))
    ax.axis("off")
    for row, (name, blocks) in enumerate(rows.items()):
        y = -1.3 * row
        ax.text(-0.2, y + 0.5, name, ha="right", va="center", weight="bold")
        for x, block in enumerate(blocks):
            shared = sum(block in other for other in rows.values()) > 1
            color = SHARED if shared else OWNERS[row]
            when = f"goes {order.index(block) + 1}." if block in order else "stays"
            ax.add_patch(Rectangle((1.9 * x, y), 1.7, 1, facecolor=PALE[color], edgecolor=color, lw=1.4))
            ax.text(1.9 * x + 0.85, y + 0.66, f"block {block}", ha="center", va="center", fontsize=9.5)
            ax.text(1.9 * x + 0.85, y + 0.28, when, ha="center", va="center", fontsize=9.5, weight="bold")
    longest = max(map(len, rows.values()))
    ax.set(xlim=(-2.2, 1.9 * longest + 0.1), ylim=(-1.3 * len(rows) + 1.2, 1.1))
    return fig


def tiers(ax: Axes, levels: Mapping[str, tuple[int, Sequence[str]]], title: str, mark: str = "") -> None:
    """One moment: each tier as a row of places, the blocks in them by name. `mark` is drawn bold.

    Args:
        levels: tier -> (places, names of the blocks in it).
    """
    for row, (tier, (places, names)) in enumerate(levels.items()):
        y, color = -1.35 * row, OWNERS[row]
        ax.text(-0.25, y + 0.5, tier, ha="right", va="center", fontsize=9)
        for x in range(places):
            name = names[x] if x < len(names) else ""
            face, edge = (PALE[color], color) if name else (RESERVED, "#BBBBBB")
            ax.add_patch(
                Rectangle((x + 0.05, y), 0.9, 1, facecolor=face, edgecolor=edge, lw=2.6 if name == mark else 1.2)
            )
            weight = "bold" if name and name == mark else "normal"
            ax.text(x + 0.5, y + 0.5, name, ha="center", va="center", fontsize=9, weight=weight)
    widest = max(places for places, _ in levels.values())
    ax.set(xlim=(-2.0, widest + 0.1), ylim=(-1.35 * len(levels) + 1.15, 1.2))
    ax.set_title(title, fontsize=9.5)
    ax.axis("off")


def tier_strip(frames: Sequence[tuple[str, str, Mapping[str, tuple[int, Sequence[str]]]]], columns: int = 3) -> Figure:
    """Moments in the life of blocks, from left to right and then down: (title, block to mark, levels)."""
    rows = -(-len(frames) // columns)
    fig, axes = subplots(rows, columns, figsize=(3.6 * columns, 1.75 * rows), squeeze=False)
    for ax in axes.flat:
        ax.axis("off")
    for number, (ax, (title, mark, levels)) in enumerate(zip(axes.flat, frames, strict=False), 1):
        tiers(ax, levels, f"{number}. {title}", mark)
    return fig


def _pool(ax: Axes, tables: Tables, total: int, page: int, title: str) -> None:
    colors, users = dict(zip(tables, OWNERS, strict=False)), _users(tables)
    for block in range(total):
        y, names = -block - 1, users.get(block, [])
        ax.text(-0.2, y + 0.5, f"block {block}", ha="right", va="center", fontsize=8.5)
        filled, first = 0, 0
        for name in names:
            table, length = tables[name]
            first = list(table).index(block) * page
            filled = max(filled, min(page, length - first))
        for j in range(page):
            color = SHARED if len(names) > 1 else colors[names[0]] if names else None
            cell(ax, j, y, str(first + j) if j < filled else "", color if j < filled else None)
        note = f"{', '.join(names)}: {len(names)} reference{'s' * (len(names) > 1)}" if names else "free"
        ax.text(page + 0.2, y + 0.5, note, ha="left", va="center", fontsize=8.5)
    ax.set(xlim=(-1.7, page + 3.4), ylim=(-total - 0.2, 0.3), title=title)
    ax.axis("off")


def _users(tables: Tables) -> dict[int, list[str]]:
    users: dict[int, list[str]] = {}
    for name, (table, _) in tables.items():
        for block in table:
            users.setdefault(block, []).append(name)
    return users


def _mark(ax: Axes, x: float, width: int, color: str, text: str) -> None:
    """A bracket over `width` slots from x."""
    ax.plot([x + 0.1, x + 0.1, x + width - 0.1, x + width - 0.1], [1.05, 1.2, 1.2, 1.05], color=color, lw=1.4)
    ax.text(x + width / 2, 1.28, text, ha="center", va="bottom", fontsize=9, color=BLACK)


def _card(ax: Axes, x: float, y: float, upper: str, lower: str, color: str) -> None:
    face = PALE.get(color, RESERVED)
    style = {"boxstyle": "round,pad=0,rounding_size=0.05", "facecolor": face, "edgecolor": color, "lw": 1.4}
    ax.add_patch(FancyBboxPatch((x, y), 0.74, 0.76, **style))
    ax.text(x + 0.37, y + 0.52, upper, ha="center", va="center", fontsize=8.8)
    ax.text(x + 0.37, y + 0.22, lower, ha="center", va="center", fontsize=8.8, family="DejaVu Sans Mono")


def _bare(ax: Axes, width: float, ylim: tuple[float, float]) -> None:
    ax.axis("off")
    ax.set(xlim=(-0.1, width + 0.1), ylim=ylim)
