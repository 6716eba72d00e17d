"""Counts bytes of a launch, per argument of the kernel."""

from __future__ import annotations

import numpy as np

from cs336_kernels.sanitizer.regions import Region, Regions
from cs336_kernels.sanitizer.report import Traffic


class Meter:
    """Adds up what programs move."""

    def __init__(self) -> None:
        self._touched: dict[tuple[int, str], np.ndarray] = {}

    def count(self, what: str, region: Region, cells: np.ndarray) -> None:
        """what: "loaded", "stored" or "atomic"; cells: with repetitions."""
        key = region.base, what
        if key not in self._touched:
            self._touched[key] = np.zeros(region.cells, np.int64)
        np.add.at(self._touched[key], cells, 1)

    def result(self, regions: Regions) -> dict[str, Traffic]:
        """By argument; views of one storage are told apart by where they lie, the first that holds a place counts."""
        table: dict[str, Traffic] = {}
        for region in regions.all:
            left = np.ones(region.cells, bool)
            for name in region.views:
                first, last = region.cells_of(name)
                mine = left[first:last].copy()
                left[first:last] = False
                traffic = Traffic()
                for what in ("loaded", "stored", "atomic"):
                    counts = self._touched.get((region.base, what))
                    if counts is not None:
                        part = counts[first:last][mine]
                        setattr(traffic, what, int(part.sum()) * region.unit)
                        setattr(traffic, f"unique_{what}", int((part > 0).sum()) * region.unit)
                table[name] = traffic
        return table
