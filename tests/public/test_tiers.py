"""Host and disk below the device: every block that is read is the one that was stored, whatever fails in between."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cs336_infer.kv import disk as disk_module
from cs336_infer.kv import host as host_module
from cs336_infer.kv import lease as lease_module
from cs336_infer.kv.block_file import file_bytes
from cs336_infer.kv.lease import Lease
from cs336_infer.kv.policy import LRU, Key, PolicyError
from cs336_infer.kv.prefix import root_key, token_bytes
from cs336_infer.kv.tiers import Tiers
from cs336_infer.types import InferError

BLOCK = 64  # bytes
MODEL = root_key(model="test")


def key(i: int) -> bytes:
    return hashlib.sha256(b"%d" % i).digest()


def content(i: int) -> bytes:
    return token_bytes([i, i, i, i])


FILE = file_bytes(len(content(0)), BLOCK)


def data(i: int) -> torch.Tensor:
    return torch.full((BLOCK,), 1 + i, dtype=torch.uint8)


def empty() -> torch.Tensor:
    return torch.full((BLOCK,), 255, dtype=torch.uint8)


def find(tiers: Tiers, *numbers: int) -> Lease:
    return tiers.find([key(i) for i in numbers], [content(i) for i in numbers])


def put(tiers: Tiers, *numbers: int, **options: Any) -> list[bool]:
    return [tiers.store(key(i), content(i), data(i), **options).wait(10) for i in numbers]


def read(tiers: Tiers, i: int) -> bool:
    """Read block i; fails when what was read is not what was stored."""
    into = empty()
    with find(tiers, i) as lease:
        ok = len(lease) == 1 and lease.read(0, into)
    assert not ok or torch.equal(into, data(i))
    return ok


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """Makes tiers of so many blocks, and closes them after the test."""
    made: list[Tiers] = []

    def open_(host: int = 0, disk: int = 0, **options: Any) -> Tiers:
        options = {"folder": tmp_path / "kv", **options}
        tiers = Tiers(block_bytes=BLOCK, fingerprint=MODEL, host_bytes=host * BLOCK, disk_bytes=disk * FILE, **options)
        made.append(tiers)
        return tiers

    yield open_
    for tiers in made:
        tiers.close()


class Gate:
    """A copier that waits, once it is told to, in the middle of each copy."""

    def __init__(self, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self.copy, self.open, self.entered = copy, threading.Event(), threading.Event()
        self.open.set()

    def __call__(self, into: torch.Tensor, source: torch.Tensor) -> None:
        half = len(into) // 2
        self.copy(into[:half], source[:half])
        self.entered.set()
        assert self.open.wait(10)
        self.copy(into[half:], source[half:])

    def shut(self) -> None:
        self.open.clear()
        self.entered.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    gate = Gate(host_module.copy_block)
    monkeypatch.setattr(host_module, "copy_block", gate)
    monkeypatch.setattr(lease_module, "copy_block", gate)
    yield gate
    gate.open.set()


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize(("host", "disk"), [(4, 0), (0, 9), (4, 9)])
def test_what_was_stored_is_read_back(opened: Any, write: str, host: int, disk: int) -> None:
    tiers = opened(host, disk, write=write)
    assert put(tiers, *range(8)) == [True] * 8
    tiers.flush()
    kept = [read(tiers, i) for i in range(8)]
    assert kept == ([True] * 8 if disk else [False] * 4 + [True] * 4)
    assert tiers.durable([key(i) for i in range(8)]) == (8 if disk else 0)
    stats = tiers.stats()
    assert stats["host"].hits + stats["disk"].hits == sum(kept)
    assert stats["host"].bytes <= host * BLOCK and stats["disk"].bytes <= disk * FILE
    assert stats["host"].errors == stats["disk"].errors == stats["disk"].refused == 0


def test_a_lease_is_the_leading_run(opened: Any) -> None:
    tiers = opened(4, 9)
    put(tiers, 0, 1, 3)
    tiers.flush()
    with find(tiers, 0, 1, 2, 3) as lease:
        assert len(lease) == 2
        assert [lease.where(i) for i in range(2)] == ["host", "host"]
    with tiers.find([key(0), key(1)], [content(0), content(7)]) as lease:
        assert len(lease) == 1, "a block with other tokens is no hit"
    lease.release()  # a second release is harmless


def test_the_run_goes_on_from_the_host_to_the_disk(opened: Any) -> None:
    tiers = opened(2, 9)
    put(tiers, 0, 1, 2, 3)
    tiers.flush()
    into = [empty() for _ in range(4)]
    with find(tiers, 0, 1, 2, 3) as lease:
        assert {lease.where(i) for i in range(4)} == {"host", "disk"}
        assert lease.read_all(into) == 4
    assert all(torch.equal(into[i], data(i)) for i in range(4))


def test_a_hit_on_the_disk_is_promoted(opened: Any) -> None:
    first = opened(0, 9)
    put(first, 0)
    first.close()
    tiers = opened(4, 9)
    assert read(tiers, 0)
    tiers.flush()
    with find(tiers, 0) as lease:
        assert lease.where(0) == "host"
    assert read(tiers, 0)
    assert tiers.stats()["host"].hits == tiers.stats()["disk"].hits == 1


def test_write_back_writes_to_the_disk_what_the_host_evicts(opened: Any) -> None:
    tiers = opened(2, 9, write="back")
    put(tiers, 0, 1)
    assert tiers.stats()["disk"].bytes_written == 0
    put(tiers, 2)
    assert tiers.stats()["disk"].entries == 1 and tiers.durable([key(0)]) == 1
    assert [read(tiers, i) for i in range(3)] == [True] * 3


def test_a_block_on_its_way_to_the_disk_is_still_found(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers, write, enter, go = opened(1, 9, write="back"), disk_module.write_block, threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        enter.set()
        assert go.wait(10)
        write(*args)

    monkeypatch.setattr(disk_module, "write_block", slow)
    put(tiers, 0)
    transfer = tiers.store(key(1), content(1), data(1))
    assert enter.wait(10)
    with find(tiers, 0) as lease:
        assert lease.where(0) == "host" and read(tiers, 0)
        go.set()
        assert transfer.wait(10), "the host keeps block 0 for its reader, so block 1 goes to the disk"
        assert tiers.stats()["host"].evictions == 0
    assert read(tiers, 0) and read(tiers, 1)


def test_closing_keeps_what_only_the_host_had(opened: Any) -> None:
    tiers = opened(4, 9, write="back")
    put(tiers, 0, 1)
    tiers.close()
    assert put(tiers, 2) == [False], "a store after the end is refused"
    again = opened(0, 9)
    assert read(again, 0) and read(again, 1)


def test_the_end_of_a_sequence_leaves_before_its_beginning(opened: Any) -> None:
    tiers = opened(4)
    put(tiers, 0, 1, 2, 3)
    tiers.touch([key(i) for i in range(4)])
    put(tiers, 9)
    with find(tiers, 0, 1, 2, 3) as lease:
        assert len(lease) == 3


def test_a_block_is_found_only_when_its_copy_is_complete(opened: Any, gate: Gate) -> None:
    """vllm-project/vllm#45704: a block was offered before its bytes were there."""
    tiers = opened(4, 9)
    gate.shut()
    transfer = tiers.store(key(0), content(0), data(0))
    assert gate.entered.wait(10) and not transfer.done()
    assert len(find(tiers, 0)) == 0
    assert tiers.store(key(0), content(0), data(0)) is transfer, "one copy of a key is under way at a time"
    gate.open.set()
    assert transfer.wait(10) and read(tiers, 0)


def test_the_source_is_read_after_it_was_written(opened: Any) -> None:
    """vllm-project/vllm#45704: the copy began before the compute stream had written the block."""
    tiers = opened(4, 9)
    computed, source = threading.Event(), empty()
    transfer = tiers.store(key(0), content(0), source, after=lambda: computed.wait(10))
    assert not transfer.wait(0.05)
    source.copy_(data(0))
    computed.set()
    assert transfer.wait(10) and read(tiers, 0)


def test_a_block_that_is_being_read_is_not_evicted(opened: Any, gate: Gate) -> None:
    """sgl-project/sglang#31427: the host copy was evicted while it was loaded back."""
    tiers = opened(1)
    put(tiers, 0)
    gate.shut()
    into, lease = empty(), find(tiers, 0)
    reader = threading.Thread(target=lease.read, args=(0, into))
    reader.start()
    assert gate.entered.wait(10)
    transfer = tiers.store(key(1), content(1), data(1))
    assert not transfer.wait(10), "there is one slot, and it is in use"
    assert tiers.stats()["host"].refused == 1
    gate.open.set()
    reader.join(10)
    assert torch.equal(into, data(0))
    lease.release()
    assert put(tiers, 1) == [True]


def test_a_buffer_may_be_reused_as_soon_as_its_call_returns(opened: Any, gate: Gate) -> None:
    """NVIDIA/TensorRT-LLM#15546: a buffer was rewritten while a copy from it was pending. Here a promotion is."""
    first = opened(0, 9)
    put(first, 0)
    first.close()
    tiers, into = opened(4, 9), empty()
    gate.shut()
    with find(tiers, 0) as lease:
        assert lease.read(0, into) and torch.equal(into, data(0))
    assert gate.entered.wait(10)
    into.copy_(data(5))
    gate.open.set()
    tiers.flush()
    assert find(tiers, 0).where(0) == "host" and read(tiers, 0)


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_failed_backup_is_a_miss(opened: Any, monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    """sgl-project/sglang#27108: eviction went on although the backup had failed, and the block was still offered."""

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_module, "write_block", full)
    tiers = opened(1, 9, write=write)
    put(tiers, 0)
    tiers.flush()
    put(tiers, 1)
    tiers.flush()
    assert not read(tiers, 0) and read(tiers, 1)
    assert tiers.durable([key(0)]) == tiers.stats()["disk"].entries == tiers.stats()["disk"].bytes == 0
    assert tiers.stats()["disk"].errors > 0
    monkeypatch.undo()
    put(tiers, 2)
    tiers.flush()
    assert read(tiers, 1) and read(tiers, 2), "the tier recovers with the disk"


def test_what_vanishes_between_lookup_and_read_ends_the_run(opened: Any, tmp_path: Path) -> None:
    """sgl-project/sglang#31108: the lookup succeeded, a page was gone at the read, and the full prefix was used."""
    tiers = opened(0, 9)
    put(tiers, 0, 1, 2, 3)
    gone = tmp_path / "kv" / key(2).hex()[:2] / f"{key(2).hex()}.kv"
    into = [empty() for _ in range(4)]
    with find(tiers, 0, 1, 2, 3) as lease:
        assert len(lease) == 4
        gone.unlink()
        assert lease.read_all(into) == 2 == len(lease)
        assert not lease.read(3, into[3]), "a block after the gap is of no use"
    assert all(torch.equal(into[i], data(i)) for i in range(2))
    with find(tiers, 0, 1, 2, 3) as lease:
        assert len(lease) == 2


def damage(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source)
    into[7] ^= 1


@pytest.mark.parametrize("hop", ["device to host", "host to device", "host", "host to disk", "disk"])
def test_damage_on_any_hop_is_a_miss(opened: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hop: str) -> None:
    """sgl-project/sglang#27504, #30321, #38031: output was garbled only after a round trip through the tiers."""
    tiers = opened(4, 9 if "disk" in hop else 0, write="back")
    if hop == "device to host":
        monkeypatch.setattr(host_module, "copy_block", damage)
    put(tiers, 0)
    if hop == "host to device":
        monkeypatch.setattr(host_module, "copy_block", damage)
    if hop in ("host", "host to disk"):
        entry = tiers.host.ledger.pin(key(0))
        tiers.host.view(entry)[7] ^= 1
        tiers.host.unpin(key(0), entry)
    if hop == "disk":
        tiers.close()
        file = next((tmp_path / "kv").glob("*/*.kv"))
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
        tiers = opened(0, 9)
    tiers.flush()
    assert not read(tiers, 0)
    assert sum(stats.errors for stats in tiers.stats().values()) >= 1
    monkeypatch.undo()
    assert put(tiers, 0) == [True] and read(tiers, 0), "computed again, stored again"


def test_a_damaged_block_of_the_host_is_read_from_the_disk(opened: Any) -> None:
    tiers = opened(4, 9)
    put(tiers, 0)
    tiers.flush()
    entry = tiers.host.ledger.pin(key(0))
    tiers.host.view(entry)[7] ^= 1
    tiers.host.unpin(key(0), entry)
    assert read(tiers, 0)
    assert tiers.stats()["host"].errors == tiers.stats()["disk"].hits == 1


class Unknown(LRU):
    def victim(self) -> Key:
        return b"nobody"


class Failing(LRU):
    def victim(self) -> Key:
        raise ZeroDivisionError("division by zero")


class Stubborn(LRU):
    """Chooses the first block it ever saw, used or not."""

    first: Key = None

    def released(self, key: Key) -> None:
        self.first = self.first or key
        super().released(key)

    def victim(self) -> Key:
        return self.first


@pytest.mark.parametrize("policy", [Unknown, Failing, Stubborn])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_wrong_victim_costs_one_store(opened: Any, policy: type[LRU], tier: str) -> None:
    tiers = opened(policy=policy, **{tier: 2})
    assert put(tiers, 0, 1) == [True, True]
    with find(tiers, 0) as lease:  # pinned, which Stubborn does not mind
        assert len(lease) == 1
        transfer = tiers.store(key(2), content(2), data(2))
        assert not transfer.wait(10)
        assert isinstance(transfer.error, PolicyError) and policy.__name__ in str(transfer.error)
    stats = tiers.stats()[tier]
    assert (stats.refused, stats.entries, stats.evictions) == (1, 2, 0)
    assert read(tiers, 0) and read(tiers, 1)


def test_a_quota_limits_one_owner_only(opened: Any) -> None:
    tiers = opened(4, quota_bytes=2 * BLOCK)
    assert put(tiers, 0, 1, 2, owner="a") == [True, True, False]
    assert put(tiers, 3, owner="b") == put(tiers, 4) == [True]
    assert tiers.stats()["host"].refused == 1
    put(tiers, 5, 6)  # evict both blocks of a, which may come back then
    assert put(tiers, 0, owner="a") == [True]


def test_too_many_at_a_time_are_refused(opened: Any, gate: Gate) -> None:
    tiers = opened(9, max_pending=3)
    gate.shut()
    transfers = [tiers.store(key(i), content(i), data(i)) for i in range(5)]
    assert [t.done() for t in transfers] == [False, False, False, True, True]
    gate.open.set()
    assert [t.wait(10) for t in transfers] == [True, True, True, False, False]
    assert tiers.stats()["host"].refused == 2


def test_tiers_that_are_off_keep_nothing(opened: Any) -> None:
    tiers = opened(0, 0, folder=None)
    assert put(tiers, 0) == [False] and len(find(tiers, 0)) == 0 and tiers.durable([key(0)]) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host_bytes": -1}, "host_bytes must be an integer >= 0, not -1"),
        ({"host_bytes": 63}, "host_bytes=63 holds no block of 64 bytes"),
        ({"host_bytes": 2**60}, "host_bytes must be at most"),
        ({"disk_bytes": 1.5}, "disk_bytes must be an integer >= 0, not 1.5"),
        ({"disk_bytes": 10**6}, "disk_bytes=1000000 needs a folder"),
        ({"disk_bytes": 2**62, "folder": tempfile.gettempdir() + "/cs336-not-made"}, "disk_bytes must be at most"),
        ({"write": "around"}, "write must be 'through' or 'back', not 'around'"),
        ({"fingerprint": b"short"}, "fingerprint must be 32 bytes"),
        ({"block_bytes": 0}, "block_bytes must be"),
        ({"max_pending": 0}, "max_pending must be"),
        ({"quota_bytes": -1}, "quota_bytes must be"),
    ],
)
def test_options_that_cannot_be_obeyed_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InferError) as error:
        Tiers(**{"block_bytes": BLOCK, "fingerprint": MODEL, **options})
    assert says in str(error.value) and "\n" not in str(error.value)
    shutil.rmtree(tempfile.gettempdir() + "/cs336-not-made", ignore_errors=True)


@pytest.mark.parametrize("wrong", [torch.zeros(BLOCK), torch.zeros(BLOCK - 1, dtype=torch.uint8)])
def test_a_buffer_of_another_form_is_an_error(opened: Any, wrong: torch.Tensor) -> None:
    tiers = opened(0, 4)
    with pytest.raises(ValueError, match="contiguous bytes"):
        tiers.store(key(0), content(0), wrong)
    put(tiers, 0)
    with find(tiers, 0) as lease, pytest.raises(ValueError, match="contiguous bytes"):
        lease.read(0, wrong)
    assert read(tiers, 0), "the mistake cost nothing"


class TiersMachine(RuleBasedStateMachine):
    """Two tiers of three and five blocks against ten keys. A key's bytes never change, so the model is `data`; a lease
    must be readable to its end unless its blocks were damaged on purpose."""

    numbers = st.integers(0, 9)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.write = "through"
        self.tiers = self.make()
        self.leases: list[tuple[Lease, list[int]]] = []
        self.damaged: set[int] = set()

    def make(self) -> Tiers:
        return Tiers(
            block_bytes=BLOCK,
            fingerprint=MODEL,
            host_bytes=3 * BLOCK,
            disk_bytes=5 * FILE,
            folder=self.folder,
            write=self.write,
        )

    @rule(i=numbers, wait=st.booleans())
    def store(self, i: int, wait: bool) -> None:
        transfer = self.tiers.store(key(i), content(i), data(i))
        if wait:
            transfer.wait(10)

    @rule(run=st.lists(numbers, min_size=1, max_size=4, unique=True))
    def find(self, run: list[int]) -> None:
        lease = find(self.tiers, *run)
        self.leases.append((lease, run[: len(lease)]))

    @precondition(lambda self: self.leases)
    @rule(release=st.booleans(), together=st.booleans(), which=st.integers(0, 99))
    def read(self, release: bool, together: bool, which: int) -> None:
        which %= len(self.leases)
        lease, run = self.leases[which]
        run = run[: len(lease)]
        into = [empty() for _ in run]
        if together:
            count = lease.read_all(into)
        else:
            count = next((n for n, one in enumerate(into) if not lease.read(n, one)), len(into))
        assert all(torch.equal(one, data(i)) for one, i in zip(into[:count], run[:count], strict=True))
        assert count == len(run) or run[count] in self.damaged, "a pinned block was lost"
        if release:
            del self.leases[which]
            lease.release()

    @rule(i=numbers, at=st.integers(0, FILE - 1), cut=st.booleans())
    def damage_disk(self, i: int, at: int, cut: bool) -> None:
        self.tiers.flush()
        path = self.folder / key(i).hex()[:2] / f"{key(i).hex()}.kv"
        if path.exists() and len(raw := bytearray(path.read_bytes())) == FILE:
            raw[at] ^= 1
            path.write_bytes(raw[:at] if cut else raw)
            self.damaged.add(i)

    @rule(i=numbers, at=st.integers(0, BLOCK - 1))
    def damage_host(self, i: int, at: int) -> None:
        self.tiers.flush()
        assert self.tiers.host is not None
        entry = self.tiers.host.ledger.pin(key(i))
        if entry is not None:
            self.tiers.host.view(entry)[at] ^= 1
            self.tiers.host.unpin(key(i), entry)
            self.damaged.add(i)

    @rule()
    def flush(self) -> None:
        self.tiers.flush()

    @rule(write=st.sampled_from(["through", "back"]))
    def restart(self, write: str) -> None:
        self.teardown_leases()
        self.tiers.close()
        self.write = write
        self.tiers = self.make()

    @invariant()
    def budgets_hold(self) -> None:
        stats = self.tiers.stats()
        assert stats["host"].bytes <= 3 * BLOCK and stats["disk"].bytes <= 5 * FILE
        assert sum(1 for _ in self.folder.glob("*/*.kv")) <= 5 + len(self.damaged)

    def teardown_leases(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.leases.clear()

    def teardown(self) -> None:
        self.teardown_leases()
        self.tiers.close()
        shutil.rmtree(self.folder)


def test_any_order_of_events_gives_right_bytes_within_the_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # thousands of files, and no power cut is tested
    run_state_machine_as_test(
        TiersMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
