"""Who runs next: every choice a sanitizer makes between two memory operations.

A policy sees the programs that can run and names one. All of them are deterministic functions of a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol


class Policy(Protocol):
    """Chooses before every memory operation."""

    def choose(self, runnable: Sequence[int]) -> int:
        """runnable: ids in ascending order, at least one. Returns one of them."""
        ...

    def waits(self, program: int) -> None:
        """This program read the same thing again: it waits for somebody else."""


class Random:
    """Each program is as likely as any other, at each step."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def choose(self, runnable: Sequence[int]) -> int:
        return runnable[self._draw.randrange(len(runnable))]

    def waits(self, program: int) -> None:
        """Chance lets the others run as well."""


class RoundRobin:
    """One operation of each in turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, runnable: Sequence[int]) -> int:
        self._last = next((p for p in runnable if p > self._last), runnable[0])
        return self._last

    def waits(self, program: int) -> None:
        """The turn goes on by itself."""


class Ordered:
    """The first of all that can run, until it ends or waits: `reverse` takes the last."""

    def __init__(self, reverse: bool = False) -> None:
        self._end = -1 if reverse else 0

    def choose(self, runnable: Sequence[int]) -> int:
        return runnable[self._end]

    def waits(self, program: int) -> None:
        """Who waits is not among those that can run."""


class Pct:
    """Priorities drawn at random, lowered at a few random steps (Burckhardt et al. 2010, probabilistic concurrency
    testing): a bug that needs d orderings is found with a probability that does not fall exponentially in d.

    The steps are spread over all orders of magnitude, because how long a run takes is not known before it.
    """

    def __init__(self, seed: int, programs: int, changes: int = 3) -> None:
        draw = random.Random(seed)
        order = list(range(programs))
        draw.shuffle(order)
        self._priority = {p: programs - i for i, p in enumerate(order)}
        self._changes = {int(2 ** draw.uniform(0, 14)) for _ in range(changes)}
        self._step, self._lowest = 0, 0

    def choose(self, runnable: Sequence[int]) -> int:
        self._step += 1
        best = max(runnable, key=self._priority.__getitem__)
        if self._step in self._changes:
            self.waits(best)
            best = max(runnable, key=self._priority.__getitem__)
        return best

    def waits(self, program: int) -> None:
        self._lowest -= 1
        self._priority[program] = self._lowest


class Exhaustive:
    """Every schedule, one after the other: depth first over all choices. For programs of a few operations.

    Use one object for all schedules and call `next` between them.
    """

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []  # which of how many was taken
        self._depth = 0

    def choose(self, runnable: Sequence[int]) -> int:
        if self._depth == len(self._path):
            self._path.append((0, len(runnable)))
        taken, _ = self._path[self._depth]
        self._depth += 1
        return runnable[taken]

    def waits(self, program: int) -> None:
        """Who waits is not among those that can run."""

    def next(self) -> bool:
        """Go on to the next schedule; False when all were seen."""
        self._depth = 0
        while self._path:
            taken, of = self._path.pop()
            if taken + 1 < of:
                self._path.append((taken + 1, of))
                return True
        return False


POLICIES = ("mixed", "random", "round-robin", "reverse", "in-order", "pct", "exhaustive")


def policy_of(name: str, seed: int, programs: int) -> Policy:
    """The policy for one schedule. "mixed" is by the seed: in 8 seeds 4 random, 2 PCT, 1 round robin, 1 reverse."""
    if name == "mixed":
        name = ("round-robin", "random", "pct", "random", "reverse", "random", "pct", "random")[seed % 8]
    if name == "random":
        return Random(seed)
    if name == "pct":
        return Pct(seed, programs)
    if name == "round-robin":
        return RoundRobin()
    return Ordered(reverse=name == "reverse")
