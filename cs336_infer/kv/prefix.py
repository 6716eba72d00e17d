"""Names of KV blocks: a block's content depends on all tokens up to its end, so its key is a chain of hashes.

    root    = SHA-256(everything else that the numbers depend on)
    key[i]  = SHA-256(key[i - 1] + tokens of block i)          key[-1] = root

Two sequences get the same key for block i exactly when their first (i + 1) * block_size tokens and their roots are the
same, in any process on any machine: every value is written out as bytes, and Python's `hash` plays no part. Keys of
this kind are those of vLLM's prefix cache (docs/design/prefix_caching.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from cs336_infer.types import check_integer

KEY_BYTES = 32


def root_key(**extras: str | int | None) -> bytes:
    """The root of a chain from named values, such as model=, dtype=, adapter=, salt=, block_size=.

    None, the empty string and a missing name are three different things.
    """
    parts = [b"cs336 kv root 1"]
    for name in sorted(extras):
        value = extras[name]
        text = "" if value is None else str(value)
        kind = "none" if value is None else type(value).__name__
        parts += [name.encode(), kind.encode(), text.encode("utf-8", "surrogatepass")]
    return hashlib.sha256(b"".join(len(p).to_bytes(8, "little") + p for p in parts)).digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as they are hashed and stored: little-endian, 4 bytes each."""
    return np.asarray(tokens, dtype="<u4").tobytes()


class KeyChain:
    """The keys of one growing sequence.

    Args:
        root: from `root_key`. block_size: tokens per block, >= 1.

    Attributes:
        keys: of the full blocks so far, 32 bytes each. contents: their tokens, as `token_bytes`.
    """

    def __init__(self, root: bytes, block_size: int, tokens: Sequence[int] = ()) -> None:
        check_integer("block_size", block_size, 1, 1 << 20)
        self.block_size = block_size
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []
        self._last = root
        self._rest = b""
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self.keys) * self.block_size + len(self._rest) // 4

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens; keys of blocks that became full are appended."""
        data = self._rest + token_bytes(tokens)
        step = 4 * self.block_size
        full = len(data) // step * step
        for begin in range(0, full, step):
            content = data[begin : begin + step]
            self._last = hashlib.sha256(self._last + content).digest()
            self.keys.append(self._last)
            self.contents.append(content)
        self._rest = data[full:]

    @property
    def tail(self) -> tuple[bytes, bytes] | None:
        """Key and content of the unfinished last block; None where there is none. The content is shorter than a full
        block's, so nobody who looks for full blocks takes it."""
        return (hashlib.sha256(self._last + self._rest).digest(), self._rest) if self._rest else None

    def fork(self) -> KeyChain:
        """An independent copy."""
        other = KeyChain(self._last, self.block_size)
        other.keys, other.contents, other._rest = list(self.keys), list(self.contents), self._rest
        return other
