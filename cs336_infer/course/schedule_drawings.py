"""What an engine did in every step, as a picture: who computed a prompt, who got a token, who waited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cs336_infer.course.drawings import AMBER, BLUE, GREEN, PALE, PINK, cell
from cs336_infer.course.pictures import subplots
from cs336_infer.engine.engine import Engine


@dataclass
class StepRecord:
    """One step of an engine, by the numbers of its sequences.

    Attributes:
        computed: tokens computed. chose: who had nothing left to compute after it, and got a token.
        waiting: who computed nothing. preempted: who had to leave the batch.
    """

    computed: dict[int, int] = field(default_factory=dict)
    chose: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    preempted: set[int] = field(default_factory=set)


def watch(engine: Engine) -> list[StepRecord]:
    """A list to which every later step of `engine` adds what it did."""
    records: list[StepRecord] = []
    decide = engine.scheduler.next

    def next_step() -> Any:
        before = {s.number for s in engine.scheduler.running}
        plan, failed = decide()
        waiting = {s.number for s in engine.scheduler.waiting}
        unserved = {s.number for s in engine.scheduler.running} - {s.number for s, _ in plan}
        chose = {s.number for s, new in plan if new == s.remaining}
        records.append(StepRecord({s.number: new for s, new in plan}, chose, waiting | unserved, before & waiting))
        return plan, failed

    engine.scheduler.next = next_step  # type: ignore[method-assign]
    return records


def timeline(
    records: Sequence[StepRecord], names: Mapping[int, str], *, title: str = "", idle: Mapping[int, range] | None = None
) -> Figure:
    """A row for each sequence and a column for each step; the number in a cell is how many tokens it computed.

    Args:
        names: of the sequences, by number; the first on top.
        idle: sequences that kept a place in the batch in these steps without using it.
    """
    rows = {number: len(names) - 1 - i for i, number in enumerate(names)}
    fig, ax = subplots(figsize=(min(11.0, 1.6 + 0.36 * len(records)), 1.3 + 0.36 * len(rows)))
    for step, record in enumerate(records):
        for number, y in rows.items():
            if number in record.computed:
                new = record.computed[number]
                decode = new == 1 and number in record.chose and _was_prefilled(records, step, number)
                cell(ax, step, y, str(new), BLUE if decode else GREEN)
            elif number in record.preempted:
                cell(ax, step, y, "out", PINK)
            elif number in record.waiting:
                cell(ax, step, y, "", None)
            elif idle and step in idle.get(number, ()):
                cell(ax, step, y, "", AMBER)
    ax.set(xlim=(-0.2, len(records) + 0.2), ylim=(-0.1, len(rows) + 0.1), xlabel="step", title=title)
    ax.set_xticks([s + 0.5 for s in range(0, len(records), 5)], [str(s) for s in range(0, len(records), 5)])
    ax.set_yticks([y + 0.5 for y in rows.values()], list(names.values()))
    ax.grid(False)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    kinds = {"prompt": GREEN, "answer": BLUE, "waits": None}
    kinds |= {"gives way": PINK} if any(r.preempted for r in records) else {}
    kinds |= {"place kept": AMBER} if idle else {}
    boxes = [Patch(facecolor=PALE[c] if c else "#F2F2F2", edgecolor=c or "#BBBBBB", label=k) for k, c in kinds.items()]
    fig.legend(handles=boxes, loc="outside lower center", ncols=len(boxes), fontsize=9)
    return fig


def _was_prefilled(records: Sequence[StepRecord], step: int, number: int) -> bool:
    """Whether it got a token before this step and has not lost its memory since."""
    for record in reversed(records[:step]):
        if number in record.preempted:
            return False
        if number in record.chose:
            return True
    return False
