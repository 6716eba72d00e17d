"""Hit rates of every eviction policy on the published Mooncake traces, through the engine's block pool.

    CS336_TRACES=folder python benchmarks/kv_replay.py --json

Every (trace, capacity, policy) is one replay. `belady` knows the future: it is the bound of the others. Lookups per
minute count every block of every prompt, over all that a replay does: read a line, look up, allocate, evict, publish,
release. They are readings of this machine, taken once, by the clock and by the processor's time; hit rates are exact.
Without the traces, `--traces generated` uses the generator.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

try:
    from tqdm import tqdm

    from cs336_infer import measure
    from cs336_infer.kv.policies import POLICY_NAMES, make_policy
    from cs336_infer.kv.replay import UNLIMITED, replay
    from cs336_infer.kv.waste import measure_waste
    from cs336_infer.simulate.sources import Source, open_source
    from cs336_infer.types import InferError
except ModuleNotFoundError as e:
    sys.exit(f"kv_replay.py: {e.name} is not installed: after make test, run .venv/bin/python benchmarks/kv_replay.py")

RESULTS = Path(__file__).parent / "results"
CAPACITIES = (250_000, 1_000_000, 3_000_000, 10_000_000, 50_000_000, None)


def row(source: Source, tokens: int | None, name: str, block_size: int) -> dict[str, Any]:
    """One replay. `tokens` None never evicts."""
    blocks = UNLIMITED if tokens is None else tokens // block_size
    policy = make_policy(name, blocks, lambda: (request.keys or () for request in source.requests()))
    found = replay(source.requests(), blocks, policy)
    return {
        "trace": source.name,
        "capacity_tokens": tokens,
        "policy": name,
        "token_hit_rate": found.token_hit_rate,
        "requests": found.requests,
        "blocks": found.blocks,
        "evictions": found.evictions,
        "peak_blocks": found.peak_blocks,
        "lookups_per_minute": found.lookups_per_minute,
        "lookups_per_cpu_minute": 60 * found.blocks / max(found.cpu_seconds, 1e-9),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--traces", nargs="+", default=["conversation", "synthetic"])
    parser.add_argument("--policies", nargs="+", choices=POLICY_NAMES, default=list(POLICY_NAMES))
    parser.add_argument("--block-size", type=int, default=16, help="of the waste; a replay has the trace's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/kv_replay.json")
    args = parser.parse_args()
    rows, waste = [], []
    sources = [open_source(name) for name in args.traces]
    todo = [(s, tokens, name) for s in sources for tokens in CAPACITIES for name in args.policies]
    sizes = {s.name: next(s.requests()).block_size for s in sources}
    for source, tokens, name in tqdm(todo, unit="replay", disable=None):
        rows.append(row(source, tokens, name, sizes[source.name]))
    for source in sources:
        waste.append({"trace": source.name, **measure_waste(source.requests(), args.block_size).to_dict()})
    result = {"machine": measure.describe().to_dict(), "rows": rows, "waste": waste}
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "kv_replay.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(result))
        return 0
    for source in sources:
        print(f"{source.name:14}" + "".join(f"{name:>9}" for name in args.policies))
        for tokens in CAPACITIES:
            mine = [r for r in rows if r["trace"] == source.name and r["capacity_tokens"] == tokens]
            label = "inf" if tokens is None else f"{tokens / 1e6:g}M"
            print(f"{label:>14}" + "".join(f"{r['token_hit_rate']:9.2%}" for r in mine))
    for name in args.policies:
        rates = sorted(r["lookups_per_minute"] / 1e6 for r in rows if r["policy"] == name)
        print(f"{name}: {rates[0]:.1f} to {rates[-1]:.1f} M lookups per minute")
    for w in waste:
        print(f"{w['trace']}: {w['paged_waste']:.3%} of the pool is wasted at block {w['block_size']}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InferError as error:
        print(f"kv_replay.py: {error}", file=sys.stderr)
        sys.exit(2)
