"""Doom loops: an answer that repeats the same tokens for ever, noticed while it is produced.

A text has period p where each token equals the one p places before. The *primitive* period of a loop is its smallest
one: twelve equal dashes also repeat a group of four, but what repeats is the dash. A loop is reported when its repeated
stretch is long enough, in tokens and in copies, and is not made of separators alone, which tables and rules repeat
legitimately.

Cost: one comparison of `max_period` numbers a token, whatever the length of the answer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from cs336_infer.types import LoopRule


@dataclass(frozen=True)
class Loop:
    """The last `covered` tokens repeat their last `period` ones."""

    period: int
    covered: int

    @property
    def copies(self) -> float:
        return self.covered / self.period


class LoopDetector:
    """Watches one answer.

    Args:
        rule: what counts as a loop. separators: token ids that may repeat alone.
    """

    def __init__(self, rule: LoopRule, separators: Collection[int] = ()) -> None:
        self.rule, self.separators = rule, frozenset(separators)
        self._periods = np.arange(1, rule.max_period + 1)
        self._recent = np.full(rule.max_period, -1, dtype=np.int64)  # the newest first
        self._runs = np.zeros(rule.max_period, dtype=np.int64)  # tokens in a row that equal the one p before
        self._enough = np.maximum(rule.min_tokens, rule.min_copies * self._periods)

    def push(self, token: int) -> Loop | None:
        """Take the next token. The loop that it completes, or continues; None when there is none."""
        self._runs = (self._runs + 1) * (self._recent == token)
        self._recent[1:] = self._recent[:-1].copy()
        self._recent[0] = token
        covered = self._runs + self._periods
        found = np.flatnonzero((self._runs > 0) & (covered >= self._enough))
        if not len(found):
            return None
        # The same stretch may have smaller periods, too short to count by the rule: they are what really repeats.
        length = int(covered[found[0]])
        period = int(np.flatnonzero((self._runs > 0) & (covered >= length))[0]) + 1
        if period < self.rule.min_period or self.separators.issuperset(self._recent[:period].tolist()):
            return None
        return Loop(period, length)
