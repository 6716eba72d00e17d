"""Kill writers of the disk tier at random moments, damage its files bit by bit, and read everything back.

python tests/e2e/crash_kv.py --kills 200 --flips 1000 [--seed 0] [--folder DIR]

Prints one line; exit status 1 when a block was wrong, a start failed or something was left behind.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from cs336_infer.kv.prefix import root_key, token_bytes
from cs336_infer.kv.tiers import Tiers

MODEL = root_key(model="crash")
BLOCK = 48 * 1024  # bytes
BLOCKS = 60  # different ones; the disk holds fewer, so that eviction goes on all the time
DISK = 40 * (BLOCK + 512)


def key(i: int) -> bytes:
    return hashlib.sha256(b"%d" % i).digest()


def content(i: int) -> bytes:
    return token_bytes([i] * 16)


def data(i: int, size: int = BLOCK) -> torch.Tensor:
    """The bytes that block i must have, [size] uint8."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))


def open_tiers(folder: Path, size: int = BLOCK, host: int = 0, disk: int = DISK) -> Tiers:
    return Tiers(block_bytes=size, fingerprint=MODEL, host_bytes=host, disk_bytes=disk, folder=folder)


def write_for_ever(folder: Path, seed: int) -> None:
    """A writer: stores random blocks, and stops by itself only when it reads a wrong one."""
    logging.disable()
    draw, into = random.Random(seed), torch.empty(BLOCK, dtype=torch.uint8)
    tiers = open_tiers(folder, host=8 * BLOCK)
    while True:
        i, j = draw.randrange(BLOCKS), draw.randrange(BLOCKS)
        tiers.store(key(i), content(i), data(i))
        with tiers.find([key(j)], [content(j)]) as lease:
            if len(lease) and lease.read(0, into) and not torch.equal(into, data(j)):
                os._exit(3)
        time.sleep(0.0005)


def start(folder: Path, seed: int) -> BaseProcess:
    # A fork has everything imported already: a kill costs a fraction of a second, not the start of an interpreter.
    process = multiprocessing.get_context("fork").Process(target=write_for_ever, args=(folder, seed), daemon=True)
    process.start()
    return process


def kill_rounds(folder: Path, rounds: int, seed: int) -> dict[str, int]:
    """`rounds` times: start one writer, or two, kill them after up to 0.2 s, open the folder, read every block."""
    draw, into = random.Random(seed), torch.empty(BLOCK, dtype=torch.uint8)
    seen = dict.fromkeys(("kills", "read", "strays", "wrong", "failed", "left"), 0)
    for number in range(rounds):
        writers = [start(folder, draw.randrange(2**30)) for _ in range(1 + number % 2)]
        time.sleep(draw.uniform(0.0, 0.2))
        for writer in writers:
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
        for writer in writers:
            writer.join()
            seen["kills"] += 1
            seen["wrong"] += writer.exitcode == 3
            seen["failed"] += writer.exitcode not in (3, -signal.SIGKILL)
        seen["strays"] += len(list(folder.glob("*/.*.tmp")))
        try:
            with open_tiers(folder) as tiers:
                for i in range(BLOCKS):
                    with tiers.find([key(i)], [content(i)]) as lease:
                        if len(lease) and lease.read(0, into):
                            seen["read"] += 1
                            seen["wrong"] += not torch.equal(into, data(i))
                stats = tiers.stats()["disk"]
                seen["wrong"] += stats.errors  # after a kill no file may be damaged, only missing
                seen["left"] += stats.bytes > DISK
        except Exception as error:
            print(f"crash_kv: start after kill {seen['kills']} failed: {error!r}", file=sys.stderr)
            seen["failed"] += 1
        seen["left"] += len(list(folder.glob("*/.*.tmp")))
    return seen


def flip_bits(folder: Path, flips: int, seed: int) -> dict[str, int]:
    """`flips` times: invert one bit of a file, in the header or the data by turns, and read the block."""
    draw, size = random.Random(seed), 2048
    into = torch.empty(size, dtype=torch.uint8)
    with open_tiers(folder, size) as tiers:
        for i in range(4):
            tiers.store(key(i), content(i), data(i, size))
    seen = dict.fromkeys(("flips", "misses", "wrong"), 0)
    for number in range(flips):
        i = draw.randrange(4)
        path = folder / key(i).hex()[:2] / f"{key(i).hex()}.kv"
        good = path.read_bytes()
        header = len(good) - size
        at = draw.randrange(header) if number % 2 else draw.randrange(header, len(good))
        bad = bytearray(good)
        bad[at] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        with open_tiers(folder, size) as tiers, tiers.find([key(i)], [content(i)]) as lease:
            if not (len(lease) and lease.read(0, into)):
                seen["misses"] += 1
            elif not torch.equal(into, data(i, size)):
                seen["wrong"] += 1
        seen["flips"] += 1
        path.write_bytes(good)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=0, help="rounds of killing; every other one has two writers")
    parser.add_argument("--flips", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to make a temporary folder")
    args = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory(dir=args.folder) as top:
        kills = kill_rounds(Path(top) / "kills", args.kills, args.seed)
        flips = flip_bits(Path(top) / "flips", args.flips, args.seed)
    bad = kills["wrong"] + kills["failed"] + kills["left"] + flips["wrong"] + flips["flips"] - flips["misses"]
    print(
        f"crash_kv: {args.kills} rounds, {kills['kills']} writers killed, {kills['read']} blocks read back, "
        f"{kills['strays']} stray files swept, {kills['wrong']} wrong, {kills['failed']} failed starts, "
        f"{kills['left']} left over; {flips['flips']} bit flips, {flips['misses']} misses, "
        f"{flips['wrong']} wrong: {'FAILED' if bad else 'ok'}"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
