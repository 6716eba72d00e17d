"""How blocks travel between the tiers: threads that copy, and transfers that say when a source may change again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from cs336_infer.kv.disk import DiskTier
from cs336_infer.kv.host import HostTier, checksum, raw
from cs336_infer.kv.ledger import Entry

log = logging.getLogger(__name__)
COPIERS, WRITERS = 2, 4  # threads that copy to the host, and that write files


class Transfer:
    """A block on its way down. Its source must not change until it is done."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._stored = False
        self.error: Exception | None = None  # why the block was not taken, when something was wrong

    def done(self) -> bool:
        """The source is not needed any more."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, at most `timeout` seconds. True: it is, and the block is in a tier."""
        return self._done.wait(timeout) and self._stored

    def finish(self, stored: bool, error: Exception | None = None) -> None:
        """Called by the tiers; only the first call counts."""
        if not self._done.is_set():
            self._stored, self.error = stored, error
            self._done.set()


@dataclass(slots=True)
class Cargo:
    """A block to be stored; `Tiers.store` explains the fields."""

    key: bytes
    content: bytes
    data: torch.Tensor
    owner: str | None = None
    after: Callable[[], object] | None = None
    crc: int | None = None  # crc32 of the data, when it is known already


class Courier:
    """Moves blocks down. At most `max_pending` are under way at a time.

    Args:
        through: write to the disk what was written to the host.
    """

    def __init__(self, host: HostTier | None, disk: DiskTier | None, through: bool, max_pending: int) -> None:
        self.host, self.disk, self.through, self.max_pending = host, disk, through, max_pending
        self._copiers = ThreadPoolExecutor(COPIERS, "kv-copy")
        self._writers = ThreadPoolExecutor(WRITERS, "kv-write")
        self._flights: dict[bytes, Transfer] = {}
        self._landed = threading.Condition()
        self._closed = False
        if host is not None and disk is not None:
            host.on_evict = self._demote

    def send(self, cargo: Cargo) -> Transfer:
        """Start the journey of a block. A key that is under way already gives the transfer that is."""
        transfer = Transfer()
        with self._landed:
            if (flight := self._flights.get(cargo.key)) is not None:
                return flight
            first = self.host or self.disk
            if first is None or self._settled(cargo.key):
                transfer.finish(first is not None)
            elif self._closed or len(self._flights) >= self.max_pending:
                first.ledger.count(refused=1)
                transfer.finish(False)
            else:
                self._flights[cargo.key] = transfer
                self._copiers.submit(self._copy, cargo, transfer)
        return transfer

    def flush(self) -> None:
        """Wait until nothing is under way, and write to the disk what only the host has."""
        with self._landed:
            self._landed.wait_for(lambda: not self._flights)
        if self.host is None or self.disk is None:
            return
        saves = []
        for key in self.host.ledger.ready_keys():
            entry = None if key in self.disk.ledger else self.host.ledger.pin(key)
            if entry is not None:
                saves.append(self._writers.submit(self._save, key, entry))
        for save in saves:
            save.result()

    def close(self) -> None:
        """Flush, and refuse what comes after. A second call does nothing."""
        with self._landed:
            closed, self._closed = self._closed, True
        if not closed:
            self.flush()
            self._copiers.shutdown()
            self._writers.shutdown()

    def _settled(self, key: bytes) -> bool:
        """The block is already everywhere it would be brought to."""
        if self.host is not None and key not in self.host.ledger:
            return False
        return self.disk is None or key in self.disk.ledger or (self.host is not None and not self.through)

    def _copy(self, cargo: Cargo, transfer: Transfer) -> None:
        """Device to host. From there on to the disk; from the device, when the host has no room."""
        entry, error = None, None
        try:
            if cargo.after is not None:
                cargo.after()
            if self.host is not None:
                entry = self.host.put(cargo.key, cargo.content, cargo.data, cargo.owner, cargo.crc)
            if entry is not None:
                transfer.finish(True)
            if self.disk is not None and (entry is None or self.through):
                self._writers.submit(self._write, cargo, entry, transfer)
                return
            if entry is not None and self.host is not None:
                self.host.unpin(cargo.key, entry)
        except Exception as caught:
            error = caught
        self._land(cargo, transfer, entry is not None, error)

    def _write(self, cargo: Cargo, entry: Entry | None, transfer: Transfer) -> None:
        """Host to disk, or device to disk."""
        stored, error = False, None
        try:
            if entry is not None:
                self._save(cargo.key, entry)
            elif self.disk is not None:
                crc = checksum(cargo.data) if cargo.crc is None else cargo.crc
                stored = self.disk.put(cargo.key, cargo.content, raw(cargo.data), crc, cargo.owner)
        except Exception as caught:
            error = caught
        self._land(cargo, transfer, stored, error)

    def _land(self, cargo: Cargo, transfer: Transfer, stored: bool, error: Exception | None) -> None:
        if error is not None:
            log.warning("a KV block was not stored: %s: %s", type(error).__name__, error)
        transfer.finish(stored, error)
        with self._landed:
            del self._flights[cargo.key]
            self._landed.notify_all()

    def _save(self, key: bytes, entry: Entry) -> None:
        """Write a pinned block of the host to the disk, and unpin it."""
        assert self.host is not None
        try:
            self._demote(key, entry, self.host.view(entry))
        finally:
            self.host.unpin(key, entry)

    def _demote(self, key: bytes, entry: Entry, data: torch.Tensor) -> None:
        """Write a block of the host to the disk. When that fails, nobody is told that the block is there."""
        assert self.disk is not None and entry.content is not None
        try:
            self.disk.put(key, entry.content, raw(data), entry.crc, entry.owner)
        except Exception as error:
            log.warning("a KV block was not written to the disk: %s: %s", type(error).__name__, error)
