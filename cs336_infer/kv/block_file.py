"""One KV block in one file: a header that says whose block it is, then the block's bytes.

    magic 8 | version 4 | model 32 | key 32 | length of the tokens 8 | length of the data 8 | crc32 of the data 4
    | tokens | crc32 of all this 4 | data

Integers are little-endian, lengths are in bytes. A file appears under its name complete or not at all: it is written
under another name in the same folder, brought to the disk (fsync) and then renamed. Whatever else may lie there (half a
file, another model's, another version's, no block at all) is a `BadBlock`: the reader computes again, it never gets
wrong numbers.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import zlib
from contextlib import suppress
from pathlib import Path

MAGIC = b"CS336KV\n"
VERSION = 1
_FIXED = struct.Struct("<8sI32s32sQQI")
_CRC = struct.Struct("<I")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # links lead elsewhere, and a pipe would keep us waiting


class BadBlock(Exception):
    """The file is not the block that was asked for. `ours`: it begins as our files do, so it may be deleted."""

    def __init__(self, reason: str, ours: bool = True) -> None:
        super().__init__(reason)
        self.ours = ours


def file_bytes(content_bytes: int, data_bytes: int) -> int:
    """Size of the file of a block whose tokens take `content_bytes`."""
    return _FIXED.size + content_bytes + _CRC.size + data_bytes


def is_ours(path: Path) -> bool:
    """Whether the file begins as ours do, or would have if it had been written to its end.

    Raises:
        OSError: it is gone, or cannot be read.
    """
    with open(os.open(path, _READ), "rb", buffering=0) as file:
        return MAGIC.startswith(file.read(len(MAGIC)) or b"")


def write_block(path: Path, model: bytes, key: bytes, content: bytes, data: memoryview, crc: int) -> None:
    """Write a block's file, on the disk and under its name when this returns.

    Args:
        model, key: 32 bytes each. content: the tokens' bytes. data: the block, bytes. crc: crc32 of data.

    Raises:
        OSError: the disk is full, the folder is gone; nothing is left behind.
    """
    fixed = _FIXED.pack(MAGIC, VERSION, model, key, len(content), len(data), crc) + content
    header = fixed + _CRC.pack(zlib.crc32(fixed))
    temp = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    fd = _create(temp)
    try:
        for part in (memoryview(header), data):
            while part:
                part = part[os.write(fd, part) :]
        os.fsync(fd)
        os.rename(temp, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temp)
        raise
    finally:
        os.close(fd)
    sync_folder(path.parent)


def _create(temp: Path) -> int:
    """A new file, open and locked: as long as this process lives, `remove_if_stray` lets it be."""
    while True:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # it was removed as a stray between the two lines above


def read_block(path: Path, model: bytes, key: bytes, content: bytes, into: memoryview) -> int:
    """Read a block's bytes into `into`, which must have the block's length, and give their crc32.

    `into` is not touched when the header is wrong, and has unknown content when the data are.

    Raises:
        BadBlock: the file is something else, or damaged. FileNotFoundError: there is none. OSError: it cannot be read.
    """
    header_bytes = file_bytes(len(content), 0)
    fd = os.open(path, _READ)
    with open(fd, "rb", buffering=0) as file:
        header = file.read(header_bytes) or b""
        if header[: len(MAGIC)] != MAGIC:
            raise BadBlock("is no KV block", ours=MAGIC.startswith(header))
        version = header[len(MAGIC) : len(MAGIC) + 4]
        if len(version) == 4 and version != VERSION.to_bytes(4, "little"):
            raise BadBlock(f"has version {int.from_bytes(version, 'little')}, not {VERSION}")
        if len(header) < header_bytes:
            raise BadBlock(f"ends within its header, at byte {len(header)}")
        fixed, (header_crc,) = header[: -_CRC.size], _CRC.unpack(header[-_CRC.size :])
        if zlib.crc32(fixed) != header_crc:  # also where tokens of another length follow
            raise BadBlock("has a damaged header")
        _, _, its_model, its_key, _, its_bytes, crc = _FIXED.unpack(fixed[: _FIXED.size])
        if its_model != model:
            raise BadBlock("belongs to another model")
        if its_key != key or fixed[_FIXED.size :] != content:
            raise BadBlock("holds other tokens")
        if its_bytes != len(into):
            raise BadBlock(f"holds a block of {its_bytes} bytes, not {len(into)}")
        if os.fstat(fd).st_size != header_bytes + len(into):
            raise BadBlock(f"has {os.fstat(fd).st_size} bytes, not {header_bytes + len(into)}")
        rest = into
        while rest and (count := file.readinto(rest)):
            rest = rest[count:]
        if rest or zlib.crc32(into) != crc:
            raise BadBlock("has damaged data")
        with suppress(OSError):
            os.utime(fd)  # the time of the last use, by which the next start orders what it finds
    return crc


def remove_if_stray(path: Path) -> bool:
    """Delete the temporary file of a process that died. A living writer holds a lock on its file.

    A lock, unlike a process number, ends with its process and is seen from another container on the same folder.
    """
    try:
        fd = os.open(path, _READ)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
