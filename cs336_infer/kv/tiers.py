"""The tiers below the device: host DRAM and disk, and how a block travels between them.

    device --store--> host --evicted, or write="through"--> disk
    device <--read--- host <--promoted--------------------- disk

A block is found only when all its bytes have arrived and their checksum is that of the place they came from. From
`find` to `release` it is pinned: no tier gives it up. Copies run in threads of their own, a bounded number at a time.
What goes wrong below the device costs a recomputation: a failed copy, a full disk and a damaged file are misses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

from cs336_infer.kv.courier import Cargo, Courier, Transfer
from cs336_infer.kv.disk import DiskTier
from cs336_infer.kv.host import HostTier, check_block
from cs336_infer.kv.lease import Found, Lease
from cs336_infer.kv.ledger import TierStats
from cs336_infer.kv.policy import LRU, EvictionPolicy
from cs336_infer.kv.prefix import KEY_BYTES
from cs336_infer.types import InvalidRequest, check_integer, short

READERS = 4  # threads


class Tiers:
    """Host and disk under one device.

    Args:
        block_bytes: of every block. fingerprint: 32 bytes that stand for the model and everything else that the
            numbers depend on, such as `root_key(...)`; files with another one are misses.
        host_bytes, disk_bytes: budgets; 0 switches a tier off. folder: of the disk tier; made if missing.
        write: "through": `store` is called when a block is full, and writes to host and disk. "back": `store` is called
            when the device evicts a block, and writes to the host. What the host evicts goes to the disk in both.
        policy: makes one eviction policy per tier.
        quota_bytes: bytes of each tier that blocks of one owner may take.
        max_pending: blocks under way at a time. A store above it is refused: computing never waits for a disk.

    Raises:
        InvalidRequest: an option that cannot be obeyed, by name.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        fingerprint: bytes,
        host_bytes: int = 2**30,
        disk_bytes: int = 0,
        folder: str | Path | None = None,
        write: str = "through",
        policy: Callable[[], EvictionPolicy] = LRU,
        quota_bytes: int | None = None,
        max_pending: int = 256,
    ) -> None:
        check_integer("block_bytes", block_bytes, 1, 2**30)
        check_integer("max_pending", max_pending, 1, 2**20)
        if quota_bytes is not None:
            check_integer("quota_bytes", quota_bytes, 0, None)
        if not isinstance(fingerprint, bytes) or len(fingerprint) != KEY_BYTES:
            raise InvalidRequest(f"fingerprint must be {KEY_BYTES} bytes, not {short(fingerprint)}")
        if write not in ("through", "back"):
            raise InvalidRequest(f"write must be 'through' or 'back', not {short(write)}")
        _check_budget("host_bytes", host_bytes, block_bytes, psutil.virtual_memory().total, "this machine's memory")
        _check_budget("disk_bytes", disk_bytes, block_bytes, 2**63, "the largest file system")
        if disk_bytes and folder is None:
            raise InvalidRequest(f"disk_bytes={disk_bytes} needs a folder; name one, or set disk_bytes=0")
        self.block_bytes = block_bytes
        self.host = HostTier(block_bytes, host_bytes, policy(), quota_bytes) if host_bytes else None
        self.disk: DiskTier | None = None
        if disk_bytes and folder is not None:
            self.disk = DiskTier(Path(folder), block_bytes, disk_bytes, fingerprint, policy(), quota_bytes)
        self._courier = Courier(self.host, self.disk, write == "through", max_pending)
        self._readers = ThreadPoolExecutor(READERS, "kv-read")

    def find(self, keys: Sequence[bytes], contents: Sequence[bytes]) -> Lease:
        """Pin the leading run of blocks that are in a tier, without a gap.

        Args:
            keys: of consecutive full blocks, 32 bytes each. contents: their tokens; a block with others ends the run.
        """
        found: list[Found] = []
        for key, content in zip(keys, contents, strict=True):
            block = self._pin(key, content)
            if block is None:
                break
            found.append(block)
        return Lease(found, self.disk, self._readers, self._promote)

    def store(
        self,
        key: bytes,
        content: bytes,
        data: torch.Tensor,
        *,
        owner: str | None = None,
        after: Callable[[], object] | None = None,
    ) -> Transfer:
        """Start copying a block down. A key that is under way already gives the transfer that is.

        Args:
            data: [block_bytes] uint8, on any device; it must keep its content until the transfer is done.
            owner: whose quota the block counts for.
            after: called by the copying thread before it reads `data`. For a GPU the default waits for what has been
                launched on the current stream so far, so that a block is not read before it is written.
        """
        check_block(data, self.block_bytes)
        if after is None and data.is_cuda:
            event = torch.cuda.Event()
            event.record()
            after = event.synchronize
        return self._courier.send(Cargo(key, content, data, owner, after))

    def durable(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on and without a gap, have their file under its name on the disk.

        Call `flush` before, when the blocks of the host must be there too.
        """
        if self.disk is None:
            return 0
        return next((i for i, key in enumerate(keys) if not self.disk.holds(key)), len(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """A sequence was used: its blocks are the newest of their tiers, and its end is evicted first."""
        for tier in (self.host, self.disk):
            for key in reversed(keys):
                entry = None if tier is None else tier.ledger.pin(key)
                if tier is not None and entry is not None:
                    tier.unpin(key, entry)

    def flush(self) -> None:
        """Wait until nothing is under way, and write to the disk what only the host has, which may take long."""
        self._courier.flush()

    def close(self) -> None:
        """Flush, and refuse the stores that come after. A second call does nothing."""
        self._courier.close()
        self._readers.shutdown()

    def __enter__(self) -> Tiers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def stats(self) -> dict[str, TierStats]:
        """By tier, "host" and "disk"; all zeros for one that is off."""
        tiers = {"host": self.host, "disk": self.disk}
        return {name: tier.ledger.stats() if tier else TierStats() for name, tier in tiers.items()}

    def drop_page_cache(self) -> None:
        """See `DiskTier.drop_page_cache`."""
        if self.disk is not None:
            self.disk.drop_page_cache()

    def _pin(self, key: bytes, content: bytes) -> Found | None:
        for tier in (self.host, self.disk):
            if tier is None:
                continue
            if (entry := tier.pin(key, content)) is not None:
                return Found(tier, key, content, entry)
            tier.ledger.count(misses=1)
        return None

    def _promote(self, key: bytes, content: bytes, data: torch.Tensor, crc: int) -> None:
        """Bring a block that was read from the disk to the host; `data` is copied, for it is the caller's."""
        if self.host is not None and key not in self.host.ledger:
            self._courier.send(Cargo(key, content, data.clone(), crc=crc))


def _check_budget(name: str, budget: int, block_bytes: int, limit: int, what: str) -> None:
    check_integer(name, budget, 0, None)
    if 0 < budget < block_bytes:
        raise InvalidRequest(
            f"{name}={budget} holds no block of {block_bytes} bytes; give more, or 0 to switch the tier off"
        )
    if budget > limit:
        raise InvalidRequest(f"{name} must be at most {limit}, {what}, not {budget}")
