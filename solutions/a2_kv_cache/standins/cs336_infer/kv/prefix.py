"""Names of KV blocks: your `root_key` and `chain_keys`, once they are plugged in."""

from __future__ import annotations

from typing import Any

KEY_BYTES = 32


def root_key(**extras: str | int | None) -> bytes:
    """The root of a chain, by your function."""
    from cs336_infer.course import a2_sockets

    return a2_sockets.root_key(**extras)


def KeyChain(*args: Any, **kwargs: Any) -> Any:
    """The keys of one growing sequence, by your function."""
    from cs336_infer.course.a2_sockets import PluggedChain

    return PluggedChain(*args, **kwargs)
