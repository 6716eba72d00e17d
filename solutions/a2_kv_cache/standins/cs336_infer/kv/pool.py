"""The block pool: your `PrefixCache`, once it is plugged in."""

from __future__ import annotations

from typing import Any

from cs336_infer.types import InferError


class OutOfBlocks(InferError):
    """The pool has fewer free and evictable blocks than were asked for. Nothing was taken."""


def BlockPool(*args: Any, **kwargs: Any) -> Any:
    """A pool around a new cache of yours."""
    from cs336_infer.course.a2_sockets import PluggedPool

    return PluggedPool(*args, **kwargs)
