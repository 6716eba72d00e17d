"""The programs of a grid as coroutines: each runs until its next memory operation, then a policy says who goes on.

As on a GPU only `resident` programs exist at once, and a program stays until it ends: one that waits for a program
that has not started waits for ever. A program that reads the same things again and again in a `while` loop is left out
until memory changes. When nobody else is left, the waiting ones may look again a number of times; then they are stuck.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import greenlet

from cs336_kernels.sanitizer.schedule import Policy

PATIENCE = 1000  # looks of every waiting program at unchanged memory before they count as stuck
WAITING = 2  # repetitions after which a program is taken to wait


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
        self._hub = greenlet.getcurrent()
        self._waiting_to_start = list(range(resident, n))
        self._live = {p: greenlet.greenlet(body) for p in range(min(n, resident))}
        self._repeats = dict.fromkeys(range(n), 0)
        self.current = 0

    def pause(self) -> None:
        """Called by a program: somebody else may run now."""
        self._hub.switch()

    def looked(self, *, again: bool, changed: bool) -> None:
        """Called by a program after an operation: it saw nothing new in a loop; it changed memory."""
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
                self.current = self._policy.choose(able) if len(able) > 1 else able[0]
                self._live[self.current].switch(self.current)
                steps += 1
                if self._live[self.current].dead:
                    del self._live[self.current]
                    self._repeats = dict.fromkeys(self._repeats, 0)
                    if self._waiting_to_start:
                        p = self._waiting_to_start.pop(0)
                        self._live[p] = greenlet.greenlet(self._body)
            return Ending(steps, [], [])
        finally:
            for program in self._live.values():
                program.throw()
