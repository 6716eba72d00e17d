"""The host tier: blocks in DRAM, in a slab of slots of one block each.

On a machine with a GPU the slab is pinned memory, which the GPU's copy engine reads and writes without a detour. On a
CPU device memory and host DRAM are the same DRAM: what a copy costs here is a memcpy.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable

import torch

from cs336_infer.kv.ledger import Entry, Ledger
from cs336_infer.kv.policy import EvictionPolicy

log = logging.getLogger(__name__)
CHUNK_BYTES = 64 * 2**20  # the slab grows by so much, so that a large budget costs nothing before it is used


def copy_block(into: torch.Tensor, data: torch.Tensor) -> None:
    """Copy the bytes of a block between two memories; they have arrived when this returns."""
    into.copy_(data)


def check_block(block: torch.Tensor, block_bytes: int) -> None:
    """Raise `ValueError` unless it is [block_bytes] uint8 and contiguous."""
    if block.dtype != torch.uint8 or block.shape != (block_bytes,) or not block.is_contiguous():
        raise ValueError(f"a block is {block_bytes} contiguous bytes, not {list(block.shape)} {block.dtype}")


def raw(data: torch.Tensor) -> memoryview:
    """The bytes of a 1-D uint8 tensor: the tensor's own on a CPU, a copy from elsewhere."""
    return memoryview(data.cpu().numpy())  # type: ignore[arg-type]  # numpy's annotations are for Python 3.12


def checksum(data: torch.Tensor) -> int:
    """crc32 of a 1-D uint8 tensor. From a GPU the bytes come over in a copy of their own, so that this sum is not
    the sum of what another copy made of them."""
    return zlib.crc32(raw(data))


class HostTier:
    """`budget // block_bytes` slots.

    Args:
        quota: bytes per owner, see `Ledger`.

    Attributes:
        on_evict: called with (key, entry, the block's bytes) before a victim leaves; it must not fail.
    """

    def __init__(self, block_bytes: int, budget: int, policy: EvictionPolicy, quota: int | None = None) -> None:
        self.block_bytes = block_bytes
        self.ledger = Ledger(budget, policy, quota)
        self.on_evict: Callable[[bytes, Entry, torch.Tensor], None] | None = None
        self._chunk = max(1, min(CHUNK_BYTES, budget) // block_bytes)  # slots
        self._slab: list[torch.Tensor] = []
        self._free: list[int] = []
        self._lock = threading.Lock()

    def put(self, key: bytes, content: bytes, data: torch.Tensor, owner: str | None, crc: int | None) -> Entry | None:
        """Copy a block into a slot and pin it there; `unpin` is the caller's.

        Args:
            data: [block_bytes] uint8, on any device. crc: crc32 of the data where they came from; None takes it now.

        Returns:
            None when the block was not taken (no room, over the quota) or the copy failed; it was counted.

        Raises:
            PolicyError: see `Ledger.admit`.
        """
        if (entry := self.pin(key, content)) is not None:
            return entry
        begin = time.perf_counter()
        entry = Entry(self.block_bytes, owner, content, checksum(data) if crc is None else crc)
        save = None if self.on_evict is None else self._save
        if not self.ledger.admit(key, entry, self._leave, save):
            return None
        try:
            entry.slot = self._take()
            copy_block(self.view(entry), data)
            if checksum(self.view(entry)) != entry.crc:
                raise OSError("the copy differs from the original")
        except Exception as error:
            log.warning("a KV block was not copied to the host: %s", error)
            self.ledger.forget(key, entry)
            self._give_back(entry)
            self.ledger.count(errors=1)
            return None
        self.ledger.commit(key, entry, pinned=True)
        self.ledger.count(bytes_written=self.block_bytes, write_seconds=time.perf_counter() - begin)
        return entry

    def read(self, key: bytes, entry: Entry, into: torch.Tensor) -> bool:
        """Copy a pinned block to `into` [block_bytes] uint8. False: it was damaged, and is found no more."""
        begin = time.perf_counter()
        copy_block(into, self.view(entry))
        if checksum(into) != entry.crc:
            log.warning("a KV block was damaged in the host tier or on its way from there; it is computed again")
            self.ledger.forget(key, entry)
            self.ledger.count(errors=1, misses=1)
            return False
        self.ledger.count(hits=1, bytes_read=self.block_bytes, read_seconds=time.perf_counter() - begin)
        return True

    def pin(self, key: bytes, content: bytes) -> Entry | None:
        """Find a block and keep it from being evicted."""
        return self.ledger.pin(key, content)

    def unpin(self, key: bytes, entry: Entry) -> None:
        if self.ledger.unpin(key, entry):
            self._give_back(entry)

    def view(self, entry: Entry) -> torch.Tensor:
        """The slot of a pinned block, [block_bytes] uint8."""
        return self._slab[entry.slot // self._chunk][entry.slot % self._chunk]

    def _take(self) -> int:
        """A free slot: there is one for every block that the ledger admits."""
        with self._lock:
            if not self._free:
                shape, pinned = (self._chunk, self.block_bytes), torch.cuda.is_available()
                self._slab.append(torch.empty(shape, dtype=torch.uint8, pin_memory=pinned))
                end = len(self._slab) * self._chunk
                self._free = list(range(end - 1, end - self._chunk - 1, -1))
            return self._free.pop()

    def _save(self, key: bytes, entry: Entry) -> None:
        if self.on_evict is not None:
            self.on_evict(key, entry, self.view(entry))

    def _leave(self, key: bytes, entry: Entry) -> None:
        with self._lock:
            self._free.append(entry.slot)

    def _give_back(self, entry: Entry) -> None:
        if entry.slot >= 0:
            with self._lock:
                self._free.append(entry.slot)
        self.ledger.freed(entry)
