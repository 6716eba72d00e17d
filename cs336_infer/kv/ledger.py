"""The books of one tier: which blocks it holds, who is using them, and how many bytes that is.

A block is *arriving* (its bytes are on their way: it counts, but nobody finds it), *ready*, or *leaving* (its bytes are
still there, so it still counts). A ready block that somebody reads is pinned, and what is pinned does not leave. A
leaving block that is first saved elsewhere is still found: whoever finds it brings it back. Host and disk keep the
same books; where the bytes are is their own business.

    bytes of arriving + ready + leaving <= budget          at every moment
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from cs336_infer.kv.policy import EvictionPolicy, PolicyError
from cs336_infer.types import short


@dataclass(slots=True, eq=False)
class Entry:
    """One block of a tier."""

    size: int  # bytes it takes of the budget
    owner: str | None = None
    content: bytes | None = None  # its tokens; None for a file whose header was not read yet
    crc: int = 0  # crc32 of the data, taken where the block came from
    slot: int = -1  # place in the host's slab
    pins: int = 0
    ready: bool = False


@dataclass
class TierStats:
    """What one tier did since it was opened, and what it holds now."""

    hits: int = 0  # blocks read
    misses: int = 0  # blocks looked for and not found, or found and not readable
    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0  # summed over threads
    write_seconds: float = 0.0
    entries: int = 0
    bytes: int = 0
    evictions: int = 0
    errors: int = 0  # damaged blocks, and copies and writes that failed
    refused: int = 0  # blocks not taken: no room that could be made, over a quota, a wrong victim, too many under way

    @property
    def seconds(self) -> float:
        return self.read_seconds + self.write_seconds


class Ledger:
    """Entries within `budget` bytes. Every method may be called from any thread.

    Args:
        policy: chooses which ready and unpinned block leaves.
        quota: bytes that blocks of one owner may take; None is no limit. A block without an owner is not limited.
    """

    def __init__(self, budget: int, policy: EvictionPolicy, quota: int | None = None) -> None:
        self.budget, self.policy, self.quota = budget, policy, quota
        self._entries: dict[bytes, Entry] = {}
        self._saving: dict[bytes, Entry] = {}  # victims that are being saved
        self._bytes = 0
        self._idle = 0  # ready and not pinned
        self._owners: Counter[str] = Counter()
        self._stats = TierStats()
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.ready

    def arriving(self, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not entry.ready

    def ready_keys(self) -> list[bytes]:
        """Of the ready blocks, as they were added."""
        with self._lock:
            return [key for key, entry in self._entries.items() if entry.ready]

    def admit(
        self,
        key: bytes,
        entry: Entry,
        leave: Callable[[bytes, Entry], None],
        save: Callable[[bytes, Entry], None] | None = None,
    ) -> bool:
        """Count an arriving block, after making room for it.

        Args:
            leave: called, without the lock, with each victim; its bytes are gone when it returns.
            save: called before that, while the victim can still be found.

        Returns:
            False when the block is not taken: it is known already, or there is no room and nothing may leave.

        Raises:
            PolicyError: the policy chose a block that may not leave. The block is not taken.
        """
        while True:
            with self._lock:
                if key in self._entries or key in self._saving:
                    return False
                over = self.quota is not None and entry.owner and self._owners[entry.owner] + entry.size > self.quota
                fits = self._bytes + entry.size <= self.budget
                if over or (not fits and self._idle == 0):
                    self._stats.refused += 1
                    return False
                if fits:
                    self._add(key, entry)
                    return True
                victim, its = self._victim()
                if save is not None:
                    self._saving[victim] = its
            if save is None or self._save(victim, its, save):
                self._dismiss(victim, its, leave)

    def adopt(self, key: bytes, size: int) -> None:
        """Count a block that is there already, ready and without an owner; the budget is not asked."""
        with self._lock:
            if key not in self._entries:
                entry = Entry(size, ready=True)
                self._add(key, entry)
                self._idle += 1
                self.policy.released(key)

    def shrink(self, leave: Callable[[bytes, Entry], None]) -> None:
        """Let blocks leave until the rest is within the budget."""
        while True:
            with self._lock:
                if self._bytes <= self.budget or self._idle == 0:
                    return
                victim = self._victim()
            self._dismiss(*victim, leave)

    def commit(self, key: bytes, entry: Entry, *, pinned: bool = False) -> None:
        """An arriving block has arrived: it is found from now on. With `pinned`, the caller unpins it later."""
        with self._lock:
            entry.ready = True
            entry.pins = int(pinned)
            if not pinned:
                self._idle += 1
                self.policy.released(key)

    def pin(self, key: bytes, content: bytes | None = None) -> Entry | None:
        """Find a ready block and keep it from leaving; None when there is none, or it has other tokens."""
        with self._lock:
            entry = self._entries.get(key) or self._saving.get(key)
            if entry is None or not entry.ready or (content and entry.content and entry.content != content):
                return None
            if key in self._saving and key not in self._entries:
                self._entries[key] = self._saving.pop(key)  # the policy has forgotten it, and hears of it at `unpin`
                self._stats.evictions -= 1
            elif entry.pins == 0:
                self.policy.reused(key)
                self._idle -= 1
            entry.pins += 1
            return entry

    def unpin(self, key: bytes, entry: Entry) -> bool:
        """True when the block was forgotten meanwhile and this was its last user: its bytes can go, then `freed`."""
        with self._lock:
            entry.pins -= 1
            if entry.pins > 0:
                return False
            if self._entries.get(key) is not entry:
                return True
            self._idle += 1
            self.policy.released(key)
            return False

    def forget(self, key: bytes, entry: Entry | None = None) -> bool:
        """Find a block no more. True when nobody uses it: its bytes can go, then `freed`."""
        with self._lock:
            known = self._entries.get(key)
            if known is None or (entry is not None and known is not entry):
                return False
            del self._entries[key]
            if known.ready:
                self._idle -= known.pins == 0
                self.policy.evicted(key)
            return known.pins == 0

    def freed(self, entry: Entry) -> None:
        """The bytes of a block that left are gone."""
        with self._lock:
            self._bytes -= entry.size
            if entry.owner:
                self._owners[entry.owner] -= entry.size

    def count(self, **more: float) -> None:
        """Add to the statistics, by name."""
        with self._lock:
            for name, value in more.items():
                setattr(self._stats, name, getattr(self._stats, name) + value)

    def stats(self) -> TierStats:
        with self._lock:
            ready = sum(entry.ready for entry in self._entries.values())
            return replace(self._stats, entries=ready, bytes=self._bytes)

    def _add(self, key: bytes, entry: Entry) -> None:
        self._entries[key] = entry
        self._bytes += entry.size
        if entry.owner:
            self._owners[entry.owner] += entry.size

    def _victim(self) -> tuple[bytes, Entry]:
        name = type(self.policy).__name__
        try:
            key = self.policy.victim()
            entry = self._entries.get(key)  # type: ignore[arg-type]
        except Exception as error:
            self._stats.refused += 1
            raise PolicyError(
                f"{name} failed to choose a block: {type(error).__name__}: {short(str(error))}"
            ) from error
        if entry is None or not entry.ready or entry.pins:
            self._stats.refused += 1
            state = "not in the tier" if entry is None else "in use"
            raise PolicyError(f"{name} chose block {short(key)}, which is {state}")
        assert isinstance(key, bytes)
        del self._entries[key]
        self._idle -= 1
        self._stats.evictions += 1
        self.policy.evicted(key)
        return key, entry

    def _save(self, key: bytes, entry: Entry, save: Callable[[bytes, Entry], None]) -> bool:
        """False when somebody found the victim meanwhile, so that it stays."""
        save(key, entry)
        with self._lock:
            if self._saving.get(key) is not entry:
                return False
            del self._saving[key]
            return True

    def _dismiss(self, key: bytes, entry: Entry, leave: Callable[[bytes, Entry], None]) -> None:
        try:
            leave(key, entry)
        finally:
            self.freed(entry)
