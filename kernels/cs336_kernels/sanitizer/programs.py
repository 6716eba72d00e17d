"""The programs of a grid as coroutines: each runs until its next memory operation, then a policy says who goes on.

As on a GPU only `resident` programs exist at once, and a program stays until it ends: one that waits for a program
that has not started waits for ever. A program that reads the same things again and again in a `while` loop is left out
until memory changes. When nobody else is left, the waiting ones may look again a number of times; then they are stuck.
A policy that lets one program go round a loop for ever while others could end it is overruled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import greenlet

from cs336_kernels.sanitizer.schedule import Policy

PATIENCE = 1000  # looks of every waiting program at unchanged memory before they count as stuck
WAITING = 2  # repetitions after which a program is taken to wait
STREAK = 1000  # operations of one program in a row, all in loops, after which the others get their turn


@dataclass
class Ending:
    """How a schedule ended: steps, and the programs that can never go on, with those that never started."""

    steps: int
    stuck: list[int]
    unstarted: list[int]
    endless: bool = False


class Programs:
    """Runs `body(program)` for programs 0 to n - 1, one operation at a time.

    The body calls `pause()` before each of its memory operations, and `looked(again, changed)` after it.
    """

    def __init__(
        self,
        n: int,
        body: Callable[[int], None],
        policy: Policy,
        *,
        resident: int,
        max_steps: int,
        patience: int = PATIENCE,
    ) -> None:
        self._body, self._policy, self._max_steps, self._patience = body, policy, max_steps, patience
        self._resident = resident
        self._hub = greenlet.getcurrent()
        self._waiting_to_start = list(range(n))
        self._live: dict[int, greenlet.greenlet] = {}
        self._repeats: dict[int, int] = {}  # of those that live
        self._streak = 0
        self.current = 0

    def pause(self) -> None:
        """Called by a program: somebody else may run now."""
        self._hub.switch()

    def looked(self, *, again: bool, changed: bool, in_loop: bool) -> None:
        """Called by a program after an operation: it saw nothing new, it changed memory, it is in a `while` loop."""
        self._streak = self._streak + 1 if in_loop else 0
        if changed:
            self._repeats = dict.fromkeys(self._repeats, 0)
        elif again:
            self._repeats[self.current] += 1
            if self._repeats[self.current] == WAITING:
                self._policy.waits(self.current)
        else:
            self._repeats[self.current] = 0

    def run(self) -> Ending:
        """Until all have ended or nobody can go on.

        Raises:
            Exception: whatever a program raised; the others are ended.
        """
        steps = looks = 0
        try:
            self._start()
            while self._live:
                able = [p for p in sorted(self._live) if self._repeats[p] < WAITING]
                if able:
                    looks = 0
                elif looks < self._patience * len(self._live):
                    able = sorted(self._live, key=lambda p: (self._repeats[p], p))[:1]
                    looks += 1
                else:
                    return Ending(steps, sorted(self._live), self._waiting_to_start)
                if steps >= self._max_steps:
                    return Ending(steps, sorted(self._live), self._waiting_to_start, endless=True)
                self._go_on(self._choose(able))
                steps += 1
                self._start()
            return Ending(steps, [], [])
        finally:
            for program in self._live.values():
                program.throw()

    def _choose(self, able: list[int]) -> int:
        before = self.current
        if self._streak >= STREAK:  # in turn, until somebody does an operation outside of loops
            return next((p for p in able if p > before), able[0])
        chosen = self._policy.choose(able) if len(able) > 1 else able[0]
        if chosen != before:
            self._streak = 0
        return chosen

    def _start(self) -> None:
        """Let programs begin while there is room, up to their first operation: what they do before it nobody can see,
        so it is not a choice between schedules."""
        while self._waiting_to_start and len(self._live) < self._resident:
            p = self._waiting_to_start.pop(0)
            self._live[p], self._repeats[p] = greenlet.greenlet(self._body), 0
            self._go_on(p)

    def _go_on(self, p: int) -> None:
        self.current = p
        self._live[p].switch(p)
        if self._live[p].dead:
            del self._live[p], self._repeats[p]
            self._repeats = dict.fromkeys(self._repeats, 0)
