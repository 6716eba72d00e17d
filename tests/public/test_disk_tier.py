"""The disk tier: a read gives the block that was stored or nothing, and strangers' files stay."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import resource
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cs336_infer.kv import block_file
from cs336_infer.kv import disk as disk_module
from cs336_infer.kv.block_file import MAGIC, file_bytes
from cs336_infer.kv.disk import RECOUNTS, DiskTier
from cs336_infer.kv.policy import LRU
from cs336_infer.kv.prefix import root_key, token_bytes
from cs336_infer.types import InferError

REPO = Path(__file__).resolve().parents[2]
BLOCK = 64
MODEL, OTHER = root_key(model="test"), root_key(model="other")


def key(i: int) -> bytes:
    return hashlib.sha256(b"%d" % i).digest()


def content(i: int) -> bytes:
    return token_bytes([i, i, i, i])


FILE = file_bytes(len(content(0)), BLOCK)


def data(i: int) -> bytes:
    return hashlib.sha512(b"%d" % i).digest()


def make(folder: Path, blocks: int = 99, model: bytes = MODEL) -> DiskTier:
    return DiskTier(folder, BLOCK, blocks * FILE, model, LRU())


def put(tier: DiskTier, *numbers: int) -> list[bool]:
    return [tier.put(key(i), content(i), memoryview(data(i)), zlib.crc32(data(i)), None) for i in numbers]


def read(tier: DiskTier, i: int) -> bool:
    """Read block i; fails when what was read is not what was stored."""
    into = bytearray(BLOCK)
    entry = tier.pin(key(i), content(i))
    if entry is None:
        return False
    crc = tier.read(key(i), entry, content(i), memoryview(into))
    tier.unpin(key(i), entry)
    assert crc is None or (into == data(i) and crc == zlib.crc32(data(i)))
    return crc is not None


def path(folder: Path, i: int) -> Path:
    return folder / key(i).hex()[:2] / f"{key(i).hex()}.kv"


def total(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*/*.kv"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_blocks_outlive_the_process_for_their_owner_only(folder: Path) -> None:
    umask = os.umask(0)
    try:
        assert put(make(folder), 0, 1) == [True, True]
    finally:
        os.umask(umask)
    tier = make(folder)
    assert read(tier, 0) and read(tier, 1) and not read(tier, 2)
    assert total(folder) == tier.ledger.stats().bytes == 2 * FILE
    for name in (folder, *folder.rglob("*")):
        assert name.stat().st_mode & 0o777 == (0o700 if name.is_dir() else 0o600)


def test_a_file_cut_anywhere_is_a_miss_and_goes(folder: Path) -> None:
    put(make(folder), 0)
    whole = path(folder, 0).read_bytes()
    for length in range(len(whole)):
        path(folder, 0).write_bytes(whole[:length])
        assert not read(make(folder), 0)
        assert not path(folder, 0).exists(), length
    path(folder, 0).write_bytes(whole + b"\0")
    assert not read(make(folder), 0)
    path(folder, 0).write_bytes(whole)
    assert read(make(folder), 0)


def test_a_bit_flipped_anywhere_is_a_miss(folder: Path) -> None:
    put(make(folder), 0)
    whole = path(folder, 0).read_bytes()
    for at in range(len(whole)):
        bad = bytearray(whole)
        bad[at] ^= 1 << at % 8
        path(folder, 0).write_bytes(bad)
        assert not read(make(folder), 0), at


def old_version(file: bytes) -> bytes:
    return MAGIC + struct.pack("<I", 0) + file[len(MAGIC) + 4 :]


@pytest.mark.parametrize("case", ["old version", "other model", "other key", "other tokens", "other size"])
def test_a_file_of_ours_that_is_not_the_block_is_deleted(
    folder: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    there, wanted = path(folder, 0), content(0)
    there.parent.mkdir(parents=True)
    fields = {
        "model": OTHER if case == "other model" else MODEL,
        "key": key(1) if case == "other key" else key(0),
        "content": content(1) if case == "other tokens" else wanted,
        "data": memoryview(data(0) * (2 if case == "other size" else 1)),
    }
    block_file.write_block(there, **fields, crc=zlib.crc32(fields["data"]))  # type: ignore[arg-type]
    if case == "old version":
        there.write_bytes(old_version(there.read_bytes()))
    tier = make(folder)
    with caplog.at_level(logging.WARNING):
        assert not read(tier, 0) and not read(tier, 0)
    assert len(caplog.records) == 1 and str(there) in caplog.text
    assert not there.exists() and tier.ledger.stats().bytes == 0
    assert put(tier, 0) == [True] and read(tier, 0)


def test_strangers_files_are_never_deleted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    letter = b"Dear diary, " * 20
    strangers = [folder / "notes.txt", folder / "zz" / "a.kv", path(folder, 0), path(folder, 1), path(folder, 2)]
    strangers += [path(folder, 0).with_name(".draft.tmp")]
    for name in strangers:
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(letter[:FILE])
    tier = make(folder, blocks=2)  # fewer than lie there: the books evict at once
    with caplog.at_level(logging.WARNING):
        assert not any(read(tier, i) for i in range(3))
        assert put(tier, 0, 7, 8, 9) == [False, True, True, True]
    assert read(tier, 9) and tier.ledger.stats().bytes <= 2 * FILE
    assert [name.read_bytes() for name in strangers] == [letter[:FILE]] * len(strangers)


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    put(make(folder), 0)
    elsewhere = tmp_path / "elsewhere"
    path(folder, 0).rename(elsewhere)
    path(folder, 0).symlink_to(elsewhere)
    tier = make(folder)
    assert not read(tier, 0) and put(tier, 0) == [False]
    assert elsewhere.exists()


def test_files_of_dead_writers_are_swept_and_of_living_ones_are_not(folder: Path) -> None:
    """A crash in the middle of a write leaves a temporary file (design case; no public report is known)."""
    make(folder)
    names = [path(folder, 0).with_name(f".{key(0).hex()}.kv.{n:016x}.tmp") for n in range(2)]
    names[0].parent.mkdir()
    for name in names:
        name.write_bytes(MAGIC)
    with open(names[1], "rb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        make(folder)
        assert [name.exists() for name in names] == [False, True]
    make(folder)
    assert not names[1].exists()


def test_a_file_swept_before_it_could_be_locked_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, lock, swept = make(folder), fcntl.flock, []

    def late(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not swept:  # the writer; the sweeper does not wait for a lock
            swept.extend(folder.glob("*/.*.tmp"))
            assert block_file.remove_if_stray(swept[0])
        lock(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        assert put(tier, 0) == [True]
    assert len(swept) == 1 and read(tier, 0)


def test_a_start_reads_names_and_no_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(make(folder), *range(20))
    monkeypatch.setattr(disk_module, "read_block", None)
    monkeypatch.setattr(disk_module, "is_ours", None)
    assert make(folder).ledger.stats().entries == 20


def test_the_order_of_use_outlives_the_process(folder: Path) -> None:
    tier = make(folder)
    put(tier, 0, 1, 2, 3)
    for i in range(4):
        os.utime(path(folder, i), ns=(10**9 * i, 10**9 * i))
    assert read(tier, 0)
    tier = make(folder, blocks=2)
    assert [path(folder, i).exists() for i in range(4)] == [True, False, False, True]


def test_two_processes_share_a_folder(folder: Path) -> None:
    mine, theirs = make(folder), make(folder)
    put(theirs, 0, 1)
    assert read(mine, 0) and put(mine, 1) == [True]
    assert theirs.ledger.stats().bytes_written == 2 * FILE and mine.ledger.stats().bytes_written == 0
    path(folder, 0).unlink()  # as the eviction of the one looks to the other
    assert not read(mine, 0) and not read(theirs, 0) and not mine.holds(key(0))
    assert mine.ledger.stats().errors == 0 and put(mine, 0) == [True] and read(theirs, 0)


def test_the_budget_holds_across_processes(folder: Path) -> None:
    blocks = 2 * RECOUNTS
    tiers = [make(folder, blocks) for _ in range(2)]

    def write(which: int) -> None:
        for i in range(100):
            put(tiers[which], 1000 * which + i)
            assert total_or_zero(folder) <= (blocks + 2 * (blocks // RECOUNTS + 2)) * FILE

    threads = [threading.Thread(target=write, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make(folder, blocks).ledger.stats().bytes == total(folder) <= blocks * FILE


def total_or_zero(folder: Path) -> int:
    try:
        return total(folder)
    except FileNotFoundError:  # evicted while it was counted
        return 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    there = tmp_path / "small"
    there.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "cs336", there], capture_output=True)
    if mount.returncode:
        pytest.skip("only root can mount a small file system; the limit on file sizes is tested")
    yield there
    subprocess.run(["umount", there], check=True)


def test_a_full_disk_costs_the_stores_that_do_not_fit(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = make(small_disk, blocks=200)
    with caplog.at_level(logging.WARNING):
        stored = put(tier, *range(100))
    assert any(stored) and not all(stored)
    assert [read(tier, i) for i in range(100)] == stored
    assert tier.ledger.stats().errors == stored.count(False)
    assert len(caplog.records) == 1, "said once"
    assert not list(small_disk.glob("*/.*.tmp"))
    path(small_disk, stored.index(True)).unlink()
    assert put(tier, 500) in ([True], [False]) and read(tier, stored.index(True, 1))


def test_a_folder_on_a_full_disk_is_named(small_disk: Path) -> None:
    with open(small_disk / "large", "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(InferError, match=r"folder '.*small/kv' cannot hold the disk tier: No space left"):
        make(small_disk / "kv", blocks=1)


def test_a_read_only_folder_is_named(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(InferError, match=r"folder '.*small/kv' cannot hold the disk tier: Read-only file system"):
        make(small_disk / "kv")


def test_a_write_that_fails_in_the_middle_leaves_nothing(folder: Path) -> None:
    """ENOSPC and EFBIG come to `write` alike; the second one needs no small disk."""
    tier = make(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE - 10, before[1]))
    try:
        assert put(tier, 0) == [False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert tier.ledger.stats().errors == 1 and tier.ledger.stats().bytes == 0
    assert not [file for file in folder.rglob("*") if file.is_file() and file.name != ".lock"]
    assert put(tier, 0) == [True] and read(tier, 0)


def test_a_folder_that_is_a_file_is_named_and_a_missing_one_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InferError) as error:
            make(name)
        assert str(name) in str(error.value) and "\n" not in str(error.value)
    assert put(make(tmp_path / "a" / "b"), 0) == [True]


def test_killed_writers_and_flipped_bits() -> None:
    """The reduced form of tests/e2e/crash_kv.py: nothing wrong is read and every start succeeds."""
    script = [sys.executable, str(REPO / "tests" / "e2e" / "crash_kv.py"), "--kills", "15", "--flips", "60"]
    run = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("\n") == 1 and " 0 wrong, 0 failed starts, 0 left over" in run.stdout
