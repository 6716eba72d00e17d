"""Time to first token of a prompt whose prefix is computed, or comes from the device, from host memory or from disk.

    python benchmarks/kv_tiers.py --json

The real model, a shared prefix of `--prefix` tokens and a new end of `--suffix` tokens, one answer token. In each
round, in turn: cold (nothing is known), device hit, host hit, disk hit with the file's pages in memory ("disk warm")
and disk hit after the kernel was told to drop them ("disk", posix_fadvise). Before the clock starts, every hit must
give the token of the cold run in fp32. Beside each: bytes moved, the rate, and what part it is of a plain copy of as
many bytes (memcpy) or of a sequential read of one file of that size, measured in the same round. On a CPU device and
host memory are the same DRAM: a device hit reuses it in place, a host hit copies it once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import torch
    from tqdm import tqdm

    from cs336_infer import LLM, InvalidRequest, LoadedModel, SamplingParams, TierOptions, load_model, measure
    from cs336_infer.models.load import DTYPES
    from cs336_infer.types import check_integer
except ModuleNotFoundError as e:
    sys.exit(f"kv_tiers.py: {e.name} is not installed: after make test, run .venv/bin/python benchmarks/kv_tiers.py")

RESULTS = Path(__file__).parent / "results"
CASES = ("cold", "device", "host", "disk warm", "disk")
FIRST = SamplingParams(max_tokens=1, ignore_eos=True)


class Bench:
    """One model and an engine for each tier, so that a hit can come from nowhere else."""

    def __init__(self, model: LoadedModel, folder: Path, prefix: int, suffix: int, block_size: int) -> None:
        self.model, self.prefix, self.suffix = model, prefix, suffix
        tokens = 2 * (prefix + suffix + block_size)
        config = model.config
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * model.dtype.itemsize
        self.reused = prefix // block_size * block_size
        self.bytes = self.reused * per_token
        room = 4 * self.bytes + (64 << 20)
        options = {
            "device": None,
            "host": TierOptions(host_bytes=room),
            "disk": TierOptions(disk_bytes=room, folder=folder / "kv"),
        }
        self.engines = {
            name: LLM(model, block_size=block_size, kv_tokens=tokens, tiers=tiers) for name, tiers in options.items()
        }
        folder.mkdir(exist_ok=True)
        self.file = folder / "plain"
        self.generator = torch.Generator().manual_seed(0)

    def ids(self, count: int) -> list[int]:
        return torch.randint(3, self.model.config.vocab_size, (count,), generator=self.generator).tolist()

    def round(self, *, compare: bool = False) -> dict[str, dict[str, float]]:
        """Seconds to the first token of every case with a new prefix, and of the plain copies beside them."""
        prefix = self.ids(self.prefix)
        seconds: dict[str, dict[str, float]] = {}
        for llm in self.engines.values():
            llm.kv.pool.forget()
            llm.generate(prefix + self.ids(self.suffix), FIRST)
            llm.kv.flush()
        cold = self.engines["device"]
        _, seconds["cold"] = self.first_token(cold, prefix + self.ids(self.suffix), 0, salt="nobody else")
        for case in CASES[1:]:
            llm, prompt = self.engines[case.split()[0]], prefix + self.ids(self.suffix)
            if case != "device":
                llm.kv.pool.forget()
            if case == "disk" and llm.tiers is not None:
                llm.tiers.drop_page_cache()
            got, seconds[case] = self.first_token(llm, prompt, self.reused)
            if compare:
                want, _ = self.first_token(cold, prompt, 0, salt=f"oracle of {case}")
                if got != want:
                    raise SystemExit(f"kv_tiers.py: the {case} hit gives token {got}, the cold run {want}")
        seconds["memcpy"] = {"s": self.memcpy()}
        seconds["file warm"], seconds["file"] = ({"s": self.read_file(drop=drop)} for drop in (False, True))
        return seconds

    def first_token(self, llm: LLM, prompt: list[int], cached: int, **options: Any) -> tuple[int, dict[str, float]]:
        before = llm.kv.promote_s
        start = time.perf_counter()
        answer = llm.generate(prompt, FIRST, **options)[0]
        elapsed = time.perf_counter() - start
        if answer.cached_tokens != cached:
            raise SystemExit(f"kv_tiers.py: {answer.cached_tokens} tokens were reused, not {cached}")
        return answer.token_ids[0], {"s": elapsed, "tier_s": llm.kv.promote_s - before}

    def memcpy(self) -> float:
        source = torch.ones(self.bytes, dtype=torch.uint8)
        target = torch.zeros_like(source)
        return _seconds(lambda: target.copy_(source))

    def read_file(self, *, drop: bool) -> float:
        """A sequential read of one file as large as the prefix's blocks."""
        if not self.file.exists():
            with self.file.open("wb") as f:
                f.write(os.urandom(self.bytes))
                f.flush()
                os.fsync(f.fileno())
        into = bytearray(self.bytes)
        with self.file.open("rb", buffering=0) as f:
            if drop:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return _seconds(lambda: f.readinto(into))

    def close(self) -> None:
        for llm in self.engines.values():
            llm.close()


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def summary(bench: Bench, rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    def middle(pick: Callable[[dict[str, dict[str, float]]], float]) -> float:
        return statistics.median(map(pick, rounds))

    beside = {"host": "memcpy", "disk warm": "file warm", "disk": "file"}
    rows = {}
    for case in CASES:
        row: dict[str, float] = {"ttft_ms": 1e3 * middle(lambda r, c=case: r[c]["s"])}
        if case != "cold":
            ratios = [r["cold"]["s"] / r[case]["s"] for r in rounds]
            row |= {"faster_than_cold": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        if case in beside:
            moved = [r[case]["tier_s"] for r in rounds]  # finding, reading, checking and copying into place
            plain = [r[beside[case]]["s"] for r in rounds]
            row["bytes"] = bench.bytes
            row["gb_s"] = bench.bytes / statistics.median(moved) / 1e9
            row["plain_gb_s"] = bench.bytes / statistics.median(plain) / 1e9
            row["fraction_of_plain"] = statistics.median(p / m for p, m in zip(plain, moved, strict=True))
        rows[case] = row
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prefix", type=int, default=1000, help="tokens of the shared prefix")
    parser.add_argument("--suffix", type=int, default=16, help="tokens after it")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the disk tier is (default: a temporary folder)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/kv_tiers.json")
    args = parser.parse_args()
    for name in ("prefix", "suffix", "block_size", "threads", "rounds"):
        check_integer(f"--{name.replace('_', '-')}", getattr(args, name), 1, None)
    torch.set_num_threads(args.threads)
    sizes = args.prefix, args.suffix, args.block_size
    model = load_model(dtype=args.dtype, device="cpu")
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="kv-tiers-") as folder:
        exact = Bench(load_model(dtype="float32", device="cpu"), Path(folder, "fp32"), *sizes)
        exact.round(compare=True)
        exact.close()
        bench = Bench(model, Path(folder, args.dtype), *sizes)
        bench.round()  # warm up
        bar = tqdm(range(args.rounds), unit="round", file=sys.stderr, disable=None)
        rows = summary(bench, [bench.round() for _ in bar])
        bench.close()
    result = {
        "machine": measure.describe().to_dict(),
        "path": model.describe_path(f"paged/{args.block_size}"),
        "prefix": args.prefix,
        "suffix": args.suffix,
        "rounds": args.rounds,
        "same_tokens_in_fp32": True,
        "rows": rows,
    }
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "kv_tiers.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(result))
        return 0
    print(
        f"{result['path']}; prefix {args.prefix} tokens, {bench.bytes / 1e6:.1f} MB; device and host are one DRAM here"
    )
    for case, row in rows.items():
        text = f"{case:10} first token {row['ttft_ms']:8.1f} ms"
        if "faster_than_cold" in row:
            text += f"  {row['faster_than_cold']:5.1f}x faster than cold ({row['min']:.1f} to {row['max']:.1f})"
        if "gb_s" in row:
            text += (
                f"  {row['gb_s']:5.2f} GB/s, {row['fraction_of_plain']:.0%} of a plain read's {row['plain_gb_s']:.2f}"
            )
        print(text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InvalidRequest as error:
        print(f"kv_tiers.py: {error}", file=sys.stderr)
        sys.exit(2)
