"""The disk tier: a folder of block files that outlives the process, and that several processes may share.

    folder/.lock             held by the process that counts the folder
    folder/3f/3f…e1.kv       one block, named by its key in hexadecimal

At the start only names, sizes and times are read: 100,000 files take a second, or three on a busy machine. A header is
looked at when its block is read. The other processes' files are found by asking the file system for a name that the
books do not have, and are counted again after every sixteenth of the budget written: so far the budget can be exceeded
by each of the others.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cs336_infer.kv.block_file import (
    BadBlock,
    file_bytes,
    is_ours,
    read_block,
    remove_if_stray,
    sync_folder,
    write_block,
)
from cs336_infer.kv.ledger import Entry, Ledger
from cs336_infer.kv.policy import EvictionPolicy
from cs336_infer.types import InvalidRequest

log = logging.getLogger(__name__)
RECOUNTS = 16  # per budget written
_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_TEMP = re.compile(r"\.[0-9a-f]{64}\.kv\.[0-9a-f]{16}\.tmp")


class DiskTier:
    """Block files in `folder`, which is made if it is missing.

    Args:
        model: 32 bytes; files with others are no hits. quota: bytes per owner, see `Ledger`; owners are not
            written down, so blocks of an earlier run count for nobody.

    Raises:
        InvalidRequest: the folder cannot be used, or the disk is smaller than the budget.
    """

    def __init__(
        self,
        folder: Path,
        block_bytes: int,
        budget: int,
        model: bytes,
        policy: EvictionPolicy,
        quota: int | None = None,
    ) -> None:
        self.folder, self.block_bytes, self.model = Path(folder), block_bytes, model
        self.ledger = Ledger(budget, policy, quota)
        self._foreign: set[bytes] = set()  # names of ours that other people's files have
        self._said: set[str] = set()
        self._unseen = 0  # bytes written since the last count
        self._counting = threading.Lock()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._alone() as fd:
                os.pwrite(fd, bytes(4096), 0)  # a folder that can be listed is not yet one that can be written
            total = shutil.disk_usage(self.folder).total
        except OSError as error:
            reason = error.strerror or error
            raise InvalidRequest(f"folder {str(folder)!r} cannot hold the disk tier: {reason}; name another") from None
        if budget > total:
            raise InvalidRequest(
                f"disk_bytes must be at most {total}, the size of the disk of {str(folder)!r}, not {budget}"
            )
        self._recount()

    def pin(self, key: bytes, content: bytes) -> Entry | None:
        """Find a block and keep it from being evicted by this process; its header is checked by `read`."""
        if key not in self.ledger and not self._adopt(key, content):
            return None
        return self.ledger.pin(key, content)

    def unpin(self, key: bytes, entry: Entry) -> None:
        if self.ledger.unpin(key, entry):
            self.ledger.freed(entry)

    def holds(self, key: bytes) -> bool:
        """Whether the block's file is under its name now, whoever wrote it."""
        with suppress(OSError):
            return not self.ledger.arriving(key) and self._path(key).lstat().st_size > self.block_bytes
        return False

    def read(self, key: bytes, entry: Entry, content: bytes, into: memoryview) -> int | None:
        """Read a pinned block's bytes into `into` (block_bytes) and give their crc32.

        None: the file is damaged, vanished or something else. It is found no more, and deleted if it is one of ours.
        """
        begin = time.perf_counter()
        try:
            crc = read_block(self._path(key), self.model, key, content, into)
        except (BadBlock, OSError) as error:
            self._discard(key, entry, error)
            return None
        self.ledger.count(hits=1, bytes_read=self.block_bytes, read_seconds=time.perf_counter() - begin)
        return crc

    def put(self, key: bytes, content: bytes, data: memoryview, crc: int, owner: str | None) -> bool:
        """Write a block. True: it is on the disk, now or since earlier. False: it is not, which was counted.

        Raises:
            PolicyError: see `Ledger.admit`.
        """
        if key in self.ledger or self._adopt(key, content):
            return True
        begin = time.perf_counter()
        entry = Entry(file_bytes(len(content), len(data)), owner, content, crc)
        if self._unseen > self.ledger.budget // RECOUNTS:
            self._recount()
        if not self.ledger.admit(key, entry, self._leave):
            return key in self.ledger
        try:
            if zlib.crc32(data) != crc:
                raise OSError("it was damaged on its way to the disk")
            path = self._path(key)
            if os.path.lexists(path) and not is_ours(path):
                raise OSError(f"{path} is no file of ours")
            if not path.parent.is_dir():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                sync_folder(self.folder)
            write_block(path, self.model, key, content, data, crc)
        except OSError as error:
            self.ledger.forget(key, entry)
            self.ledger.freed(entry)
            self.ledger.count(errors=1)
            self._say(f"a KV block was not written to {self.folder}: {error.strerror or error}")
            return False
        self.ledger.commit(key, entry)
        self._unseen += entry.size
        self.ledger.count(bytes_written=entry.size, write_seconds=time.perf_counter() - begin)
        return True

    def drop_page_cache(self) -> None:
        """Ask the system to forget the files' pages, so that the next reads come from the disk (Linux only)."""
        for key in self.ledger.ready_keys():
            with suppress(OSError), open(self._path(key), "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / f"{name}.kv"

    def _adopt(self, key: bytes, content: bytes) -> bool:
        """Take another process's file into the books."""
        if key in self._foreign or self.ledger.arriving(key):
            return False
        size = file_bytes(len(content), self.block_bytes)
        with suppress(OSError):
            if self._path(key).lstat().st_size == size:
                self.ledger.adopt(key, size)
                return True
        return False

    def _discard(self, key: bytes, entry: Entry, error: BadBlock | OSError) -> None:
        self.ledger.forget(key, entry)
        self.ledger.count(misses=1)
        if isinstance(error, FileNotFoundError):
            return  # another process evicted it
        self.ledger.count(errors=1)
        path = self._path(key)
        if isinstance(error, OSError):
            self._say(f"a KV block was not read from {self.folder}: {error.strerror or error}")
        elif error.ours:
            log.warning("%s %s; it is deleted and its block is computed again", path, error)
            with suppress(OSError):
                path.unlink()
        else:
            self._foreign.add(key)
            log.warning("%s %s; it is left alone and its block is computed again", path, error)

    def _leave(self, key: bytes, entry: Entry) -> None:
        path = self._path(key)
        with suppress(FileNotFoundError):
            try:
                if is_ours(path):
                    path.unlink()
                else:
                    self._foreign.add(key)
            except OSError as error:
                self._say(f"a KV block was not deleted from {self.folder}: {error.strerror}")

    def _recount(self) -> None:
        """Bring the books in line with the folder, and the folder with the budget."""
        if not self._counting.acquire(blocking=False):
            return
        try:
            with self._alone():
                self._unseen = 0
                known = set(self.ledger.ready_keys())
                found = {key: (used, size) for key, size, used in self._scan()}
                for key in known - found.keys():
                    if (entry := self.ledger.pin(key)) is not None:
                        self.ledger.forget(key, entry)
                        self.unpin(key, entry)
                strange = found.keys() - known - self._foreign
                for key in sorted(strange, key=found.__getitem__):
                    self.ledger.adopt(key, found[key][1])
                self.ledger.shrink(self._leave)
        except OSError as error:
            self._say(f"{self.folder} was not counted: {error.strerror or error}")
        finally:
            self._counting.release()

    def _scan(self) -> Iterator[tuple[bytes, int, int]]:
        """(key, size in bytes, time of last use in ns) of every block file; files of dead writers are deleted."""
        for sub in os.scandir(self.folder):
            if len(sub.name) != 2 or not sub.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(sub.path):
                if _NAME.fullmatch(name := file.name) and name.startswith(sub.name):
                    try:
                        about = file.stat(follow_symlinks=False)
                    except OSError:  # evicted meanwhile
                        continue
                    if stat.S_ISREG(about.st_mode):
                        yield bytes.fromhex(name[:64]), about.st_size, about.st_mtime_ns
                elif _TEMP.fullmatch(name):
                    remove_if_stray(Path(file.path))

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Hold the folder's lock; other processes, and threads of this one, wait."""
        fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _say(self, text: str) -> None:
        """Log once."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)
