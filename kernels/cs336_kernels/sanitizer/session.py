"""Which sanitizer is watching this process's launches."""

from __future__ import annotations

_watching: list[object] = []


def active() -> bool:
    """Whether launches go to a sanitizer now."""
    return bool(_watching)
