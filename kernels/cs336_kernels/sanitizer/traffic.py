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
        """By argument; of views of one storage the first that has an element at a place counts it."""
        table: dict[str, Traffic] = {}
        for region in regions.all:
            left = np.ones(region.cells, bool)
            for name in region.views:
                places = region.places(name)
                mine = np.zeros(region.cells, bool)
                mine[places] = left[places]
                left[places] = False
                traffic = Traffic()
                for what in ("loaded", "stored", "atomic"):
                    counts = self._touched.get((region.base, what))
                    if counts is not None:
                        setattr(traffic, what, int(counts[mine].sum()) * region.unit)
                        setattr(traffic, f"unique_{what}", int(np.count_nonzero(counts[mine])) * region.unit)
                table[name] = traffic
        return table
