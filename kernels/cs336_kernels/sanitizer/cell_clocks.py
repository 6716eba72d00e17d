"""A clock for each cell that has one, in little memory: cells that always changed together share it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class CellClocks:
    """Kernels touch memory in tiles, so there are about as many clocks as tiles. Clock 0 stands for none."""

    def __init__(self, cells: int, actors: int) -> None:
        self._of = np.zeros(cells, np.int32)
        self._table = np.zeros((1, actors), np.int32)
        self._members = np.zeros(1, np.int64)
        self._free: list[int] = []

    @property
    def used(self) -> bool:
        return len(self._table) > 1

    def have(self, cells: np.ndarray) -> np.ndarray:
        return self._of[cells] != 0

    def latest(self, cells: np.ndarray) -> np.ndarray:
        """[actors] of all the cells' clocks the latest moments."""
        numbers = self._of[cells] if len(cells) == 1 else np.unique(self._of[cells])
        return self._table[numbers].max(0)

    def different(self, cells: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The different clocks of the cells, with one cell of each."""
        numbers, first = np.unique(self._of[cells], return_index=True)
        for number, at in zip(numbers, first, strict=True):
            if number:
                yield int(cells[at]), self._table[number]

    def change(self, cells: np.ndarray, labels: np.ndarray | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """For cells that have the same clock and label: one of them, and the clock to be written to.

        Args:
            cells: distinct. labels: [len(cells)] below 2^40.
        """
        keys = self._of[cells].astype(np.int64)
        if labels is not None:
            keys = keys << 40 | labels
        if len(cells) == 1:
            groups = [cells]
        else:
            order = np.argsort(keys, kind="stable")
            groups = np.split(cells[order], np.flatnonzero(np.diff(keys[order])) + 1)
        for group in groups:
            number = int(self._of[group[0]])
            if number == 0 or self._members[number] != len(group):
                number = self._split(number, group)
            yield int(group[0]), self._table[number]

    def _split(self, number: int, group: np.ndarray) -> int:
        """Give some of a clock's cells a clock of their own, a copy."""
        if not self._free:
            size = len(self._table)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._members = np.concatenate([self._members, np.zeros_like(self._members)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        new = self._free.pop()
        self._table[new] = self._table[number]
        self._members[new], self._of[group] = len(group), new
        if number:
            self._members[number] -= len(group)
        return new

    def raise_to(self, cells: np.ndarray, row: np.ndarray) -> None:
        """cells: distinct; row: [actors]."""
        for _, clock in self.change(cells):
            np.maximum(clock, row, out=clock)

    def forget(self, cells: np.ndarray) -> None:
        if not self.used:
            return
        those = cells[self._of[cells] != 0]
        if len(those):
            those = np.unique(those)
            numbers, counts = np.unique(self._of[those], return_counts=True)
            self._of[those] = 0
            self._members[numbers] -= counts
            self._free += [int(n) for n in numbers[self._members[numbers] == 0]]
