"""`cs336-infer kv replay | waste | synth`: what a KV cache of a given size and policy saves on a trace."""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from cs336_infer.kv.policies import POLICY_NAMES, make_policy
from cs336_infer.kv.replay import UNLIMITED, Replayed, replay
from cs336_infer.kv.waste import measure_waste
from cs336_infer.simulate.sources import FOLDER_VARIABLE, GENERATED, NAMED, Source, open_source
from cs336_infer.simulate.synthetic import REQUESTS, generate, write
from cs336_infer.simulate.trace import TraceError
from cs336_infer.types import InvalidRequest, check_integer, short

T = TypeVar("T")
_UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}
_TRACE = f"a trace file; one of {', '.join(NAMED)} in the folder {FOLDER_VARIABLE}; or {GENERATED}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands below `kv`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=type(parser))

    replaying = commands.add_parser("replay", help="share of a trace's prompt tokens that a prefix cache saves")
    replaying.add_argument("trace", metavar="TRACE", help=_TRACE)
    replaying.add_argument(
        "--capacity", required=True, help="of the cache in tokens, such as 250000, 0.25M or inf; several with commas"
    )
    replaying.add_argument("--policy", choices=POLICY_NAMES, default="lru", help="who is evicted (default lru)")
    replaying.add_argument("--beside", choices=POLICY_NAMES, help="another policy to compare with, such as belady")
    replaying.add_argument("--block-size", type=int, help="tokens per block (default: as the trace has them)")
    replaying.set_defaults(run=_replay)

    wasting = commands.add_parser("waste", help="memory that a paged and a contiguous cache reserve and never fill")
    wasting.add_argument("trace", metavar="TRACE", help=_TRACE)
    wasting.add_argument("--block-size", type=int, default=16, help="tokens per block (default 16)")
    wasting.set_defaults(run=_waste)

    for command in (replaying, wasting):
        command.add_argument("--limit", type=int, help="only the first so many requests")
        command.add_argument("--json", action="store_true", help="print one JSON document instead of text")

    synthesis = commands.add_parser("synth", help="write made-up conversations in Mooncake's format")
    synthesis.add_argument("out", type=Path, metavar="OUT", help="file to write; - is standard output")
    synthesis.add_argument("--requests", type=int, default=REQUESTS, help=f"how many (default {REQUESTS})")
    synthesis.add_argument("--seed", type=int, default=0, help="makes it repeatable (default 0)")
    synthesis.set_defaults(run=_synth)


def capacities(text: str) -> list[float]:
    """Tokens from "250000", "0.25M", "1e6", "inf" or several of them with commas; inf is `math.inf`.

    Raises:
        InvalidRequest: one is not a positive number.
    """
    return [_capacity(part.strip()) for part in text.split(",")]


def _capacity(text: str) -> float:
    unit = _UNITS.get(text[-1:].upper(), 1)
    try:
        value = float(text if unit == 1 else text[:-1]) * unit
    except ValueError:
        value = math.nan
    if not value > 0:
        raise InvalidRequest(f"capacity must be tokens such as 250000, 0.25M or inf, not {short(text)}")
    return value


def _replay(args: argparse.Namespace) -> int:
    """One result for each capacity: an object, or a list of them under `results` where there are several."""
    wanted = capacities(args.capacity)
    source = open_source(args.trace, limit=args.limit, block_size=args.block_size)
    policies = [args.policy] + [args.beside] * (args.beside is not None)
    _must_be_a_file(source)
    results = []
    for tokens in wanted:
        first, *others = [_replay_once(source, tokens, policy) for policy in policies]
        found = {"trace": source.name, **first.to_dict()}
        if others:
            found["beside"] = {"policy": others[0].policy, "token_hit_rate": others[0].token_hit_rate}
        found["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        results.append(found)
        if not args.json:
            if len(results) == 1:
                print(_heading(found))
            print(_line(found), flush=True)
    if args.json:
        _print_json(results[0] if len(results) == 1 else {"results": results})
    return 0


def _replay_once(source: Source, tokens: float, policy: str) -> Replayed:
    blocks = UNLIMITED
    if tokens < math.inf:
        size = next(source.requests()).block_size if source.block_size is None else source.block_size
        blocks = min(int(tokens // max(size, 1)), UNLIMITED - 1)
        if not blocks:
            raise InvalidRequest(f"capacity {tokens:g} tokens is less than one block of {size} tokens")
    if policy == "belady":
        chosen = make_policy(policy, blocks, lambda: (r.keys or () for r in _bar(source.requests(), "the future")))
    else:
        chosen = make_policy(policy, blocks)
    return replay(_bar(source.requests(), policy), blocks, chosen)


def _must_be_a_file(source: Source) -> None:
    if source.path and not source.path.is_file() and not source.path.is_dir():
        raise TraceError(f"{source.path} is a pipe or a device, and a trace is read several times: save it to a file")


def _heading(found: dict[str, Any]) -> str:
    beside = f"{found['beside']['policy']:>8}" if "beside" in found else ""
    policy = found["policy"]
    return (
        f"{found['trace']}, blocks of {found['block_size']} tokens: share of prompt tokens found in the cache\n"
        f"{'capacity':>12} {policy:>8}{beside} {'evictions':>10} {'requests':>9} {'M lookups/min':>14}"
    )


def _line(found: dict[str, Any]) -> str:
    tokens = found["capacity_tokens"]
    capacity = "inf" if tokens is None else f"{tokens / 1e6:.2f}M" if tokens >= 10_000 else str(tokens)
    beside = f"{found['beside']['token_hit_rate']:8.2%}" if "beside" in found else ""
    note = f"  {found['oversized']} too large to be kept" if found["oversized"] else ""
    return (
        f"{capacity:>12} {found['token_hit_rate']:8.2%}{beside} {found['evictions']:10} {found['requests']:9} "
        f"{found['lookups_per_minute'] / 1e6:14.1f}{note}"
    )


def _waste(args: argparse.Namespace) -> int:
    source = open_source(args.trace, limit=args.limit)
    found = measure_waste(_bar(source.requests(), "waste"), args.block_size)
    if args.json:
        _print_json({"trace": source.name, **found.to_dict()})
        return 0
    print(
        f"{source.name}: {found.sequences} sequences, {found.tokens / found.sequences:.0f} tokens on average\n"
        f"reserved and never filled:\n"
        f"  {found.paged:8.3%}  blocks of {found.block_size} tokens, from the block pool\n"
        f"  {found.formula:8.3%}  the same from lengths: sum((-n) mod b) / sum(ceil(n / b) * b)\n"
        f"  {found.contiguous_power_of_two:8.3%}  contiguous, each in the next power of two\n"
        f"  {found.contiguous_longest:8.3%}  contiguous, each as long as the longest, {found.longest} tokens"
    )
    return 0


def _synth(args: argparse.Namespace) -> int:
    requests = generate(args.requests, args.seed)
    if str(args.out) == "-":
        write(requests, sys.stdout)
        return 0
    check_integer("requests", args.requests, 1, None)
    try:
        with args.out.open("w", encoding="utf-8") as file:
            count = write(_bar(requests, "requests", args.requests), file)
    except IsADirectoryError:
        raise InvalidRequest(f"{args.out} is a folder: name a file to write") from None
    except OSError as e:
        raise InvalidRequest(f"cannot write {args.out}: {e.strerror}") from None
    print(f"{args.out}: {count} requests, {os.path.getsize(args.out) / 1e6:.1f} MB")
    return 0


def _bar(items: Iterable[T], name: str, total: int | None = None) -> Iterator[T]:
    """`items`, with a bar on standard error where that is a terminal."""
    yield from tqdm(items, desc=name, total=total, unit=" requests", file=sys.stderr, disable=None, leave=False)


def _print_json(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))
