"""Tiers below the device are not in this package: exercise 5 asks for their bookkeeping."""

from __future__ import annotations

from typing import Any

from cs336_infer.types import InvalidRequest


class Tiers:
    """Only its name."""

    def __init__(self, **options: Any) -> None:
        raise InvalidRequest(f"tiers are not in the students' package: leave out {', '.join(options)}")
