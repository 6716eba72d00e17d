"""Names of KV blocks: your `root_key` and `chain_keys`, once they are plugged in."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

KEY_BYTES = 32


def root_key(**extras: str | int | None) -> bytes:
    """The root of a chain, by your function."""
    from cs336_infer.course import a2_sockets

    return a2_sockets.root_key(**extras)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as they are stored."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


class KeyChain:
    """The keys of one growing sequence, by your function."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        from cs336_infer.course.a2_sockets import PluggedChain

        return PluggedChain(*args, **kwargs)

    def __init__(self, root: bytes, block_size: int, tokens: Sequence[int] = ()) -> None: ...
    def extend(self, tokens: Sequence[int]) -> None: ...
    def fork(self) -> KeyChain: ...
    @property
    def tail(self) -> tuple[bytes, bytes] | None: ...
