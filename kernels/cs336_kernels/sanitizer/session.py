"""Which sanitizer is watching this process's launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_watching: list[object] = []


def active() -> bool:
    """Whether launches go to a sanitizer now."""
    return bool(_watching)


@contextmanager
def watching(sanitizer: object) -> Iterator[None]:
    _watching.append(sanitizer)
    try:
        yield
    finally:
        _watching.remove(sanitizer)
