"""What a user says about the tiers below the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cs336_infer.kv.policy import LRU, EvictionPolicy
from cs336_infer.types import InvalidRequest, short

if TYPE_CHECKING:
    from cs336_infer.kv.tiers import Tiers

WRITES = ("through", "back")


@dataclass(frozen=True)
class TierOptions:
    """Host memory and disk for KV blocks that leave the device.

    Args:
        host_bytes, disk_bytes: budgets; 0 is no such tier.
        folder: of the disk tier; it is made if need be, for its owner only.
        write: "through" copies a block down as soon as it is full, "back" when it is evicted from above.
        policy: makes the eviction policy of a tier, each has its own.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    folder: Path | str | None = None
    write: str = "through"
    policy: Callable[[], EvictionPolicy] = LRU

    def __post_init__(self) -> None:
        if self.write not in WRITES:
            raise InvalidRequest(f"unknown write {short(self.write)} ({' or '.join(WRITES)})")

    def open(self, *, block_bytes: int, fingerprint: bytes) -> Tiers:
        """The tiers themselves, for blocks of `block_bytes` that belong to what `fingerprint` names.

        Raises:
            InvalidRequest: a budget or the folder cannot be used.
        """
        from cs336_infer.kv.tiers import Tiers

        return Tiers(
            block_bytes=block_bytes,
            fingerprint=fingerprint,
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
            folder=None if self.folder is None else Path(self.folder),
            write=self.write,
            policy=self.policy,
        )
