"""What a lookup in the tiers gives: a run of blocks that stay where they are until they have been read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from cs336_infer.kv.disk import DiskTier
from cs336_infer.kv.host import HostTier, check_block, checksum, copy_block, raw
from cs336_infer.kv.ledger import Entry


@dataclass(slots=True)
class Found:
    """One pinned block."""

    tier: HostTier | DiskTier
    key: bytes
    content: bytes
    entry: Entry


class Lease:
    """A run of blocks, pinned until `release`. Use it by one thread, or as a context manager.

    Args:
        disk: where a block that proves damaged in the host is looked for.
        readers: threads that `read_all` reads in.
        promote: called with (key, content, data, crc) after a block was read from the disk.
    """

    def __init__(
        self,
        found: list[Found],
        disk: DiskTier | None,
        readers: ThreadPoolExecutor,
        promote: Callable[[bytes, bytes, torch.Tensor, int], None],
    ) -> None:
        self._found, self._disk, self._readers, self._promote = found, disk, readers, promote
        self._length = len(found)

    def __len__(self) -> int:
        """Blocks of the run. A block that cannot be read ends it."""
        return self._length

    def where(self, i: int) -> str:
        """ "host" or "disk"."""
        return "host" if isinstance(self._found[i].tier, HostTier) else "disk"

    def read(self, i: int, into: torch.Tensor) -> bool:
        """Copy block i to `into`, [block_bytes] uint8, contiguous, on any device. It has arrived when this returns.

        False: it was damaged or has vanished. `into` then has unknown content, and the run ends before i: this block
        and the later ones are misses.
        """
        if i < self._length and self._fetch(self._found[i], into):
            return True
        self._length = min(self._length, i)
        return False

    def read_all(self, into: Sequence[torch.Tensor]) -> int:
        """Read the first blocks of the run, several at a time, into as many tensors, and give the number of those that
        arrived without a gap: what may be used. The tensors after them have unknown content."""
        wanted = min(len(into), self._length)
        arrived = list(self._readers.map(self._fetch, self._found[:wanted], into[:wanted]))
        count = arrived.index(False) if False in arrived else wanted
        if count < wanted:
            self._length = count
        return count

    def release(self) -> None:
        """Unpin, the last block first, so that it is evicted first. A second call does nothing."""
        found, self._found, self._length = self._found, [], 0
        for block in reversed(found):
            block.tier.unpin(block.key, block.entry)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _fetch(self, block: Found, into: torch.Tensor) -> bool:
        check_block(into, block.tier.block_bytes)
        if isinstance(block.tier, HostTier):
            if block.tier.read(block.key, block.entry, into):
                return True
            entry = self._disk.pin(block.key, block.content) if self._disk else None
            if self._disk is None or entry is None:
                return False
            block.tier.unpin(block.key, block.entry)
            block.tier, block.entry = self._disk, entry
        landing = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
        crc = block.tier.read(block.key, block.entry, block.content, raw(landing))
        if crc is None:
            return False
        if landing is not into:
            copy_block(into, landing)
            if checksum(into) != crc:
                return False
        self._promote(block.key, block.content, landing, crc)
        return True
