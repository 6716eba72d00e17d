"""Offline throughput of many requests: `LLM` against transformers, on the embedded model with the same weights.

    python benchmarks/throughput.py --vs transformers --dtype float32 --json

Requests: random ids; lengths of prompt and output uniform over mean * (1 - ratio) to mean * (1 + ratio), independent,
from one seed; greedy, past end-of-sequence tokens, so that everybody produces the same number of tokens. Output tokens
per second count what was asked for and nothing else.

transformers gets its best of these, found by one run of each: `generate` on left-padded batches of 8, 16, 32 and 64,
sorted by prompt length, which a user can do; and its continuous batching with at most 8, 16 and 64 requests at once.
Sorted by output length, which nobody knows beforehand, is a row of its own and counts too. Then ours and the best
run in turn. CPU seconds stand beside wall time: neighbours on a shared machine move them less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import torch
    from cs336_kernels import native

    from cs336_infer import LLM, InvalidRequest, LoadedModel, SamplingParams, load_model, measure
    from cs336_infer.devices import bf16_is_native
    from cs336_infer.kv import NoCache
    from cs336_infer.measure import peer
    from cs336_infer.measure.workload import Work, random_work, spread
    from cs336_infer.models.load import DTYPES
except ModuleNotFoundError as e:
    sys.exit(
        f"throughput.py: {e.name} is not installed: after make test, run .venv/bin/python benchmarks/throughput.py"
    )

RESULTS = Path(__file__).parent / "results"
Runner = Callable[[], list[list[int]]]


def params_of(work: list[Work]) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=w.output, ignore_eos=True) for w in work]


def ours(llm: LLM, work: list[Work]) -> list[list[int]]:
    return [done.token_ids for done in llm.generate([w.prompt for w in work], params_of(work))]


def ways_of(model: Any, work: list[Work], sizes: list[int]) -> dict[str, Runner]:
    """transformers' ways, by name."""
    ways: dict[str, Runner] = {}
    for size in sizes:
        ways[f"generate, batches of {size} by prompt length"] = lambda size=size: peer.generate_batches(
            model, work, size, lambda w: len(w.prompt)
        )
        ways[f"generate, batches of {size} by output length"] = lambda size=size: peer.generate_batches(
            model, work, size, lambda w: w.output
        )
        ways[f"continuous batching, {size} at once"] = lambda size=size: peer.generate_continuously(model, work, size)
    return ways


def timed(run: Runner, work: list[Work]) -> tuple[dict[str, float], list[list[int]]]:
    wall, cpu = time.perf_counter(), time.process_time()
    ids = run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = sum(map(len, ids))
    if [len(i) for i in ids] != [w.output for w in work]:
        raise SystemExit("throughput.py: a runner did not produce the tokens that were asked for")
    return {"tok_s": tokens / wall, "wall_s": wall, "cpu_s": cpu, "tok_per_cpu_s": tokens / cpu}, ids


def agreement(model: LoadedModel, work: list[Work], a: list[list[int]], b: list[list[int]]) -> dict[str, Any]:
    """Requests with equal ids; of the others, the gap of the two best logits where they part, without a cache."""
    gaps = []
    for w, x, y in zip(work, a, b, strict=True):
        at = next((i for i, (p, q) in enumerate(zip(x, y, strict=True)) if p != q), None)
        if at is not None:
            ids = torch.tensor([w.prompt + x[:at]])
            logits = model.net.forward(ids, torch.arange(ids.shape[1]).unsqueeze(0), NoCache(None))[0, -1]
            best = logits.topk(2).values
            gaps.append(float(best[0] - best[1]))
    return {"equal": len(work) - len(gaps), "of": len(work), "top2_gap_where_they_part": sorted(gaps)}


def paged_and_contiguous(model: LoadedModel, batch: int, rounds: int) -> dict[str, Any]:
    """Decode speed of both rungs of the KV cache on the same prompts, in turn: 256 tokens of context, 64 steps."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, model.config.vocab_size, (batch, 256), generator=generator).tolist()
    params = SamplingParams(max_tokens=65, ignore_eos=True)
    rungs = {kind: LLM(model, kv=kind, prefix_cache=False) for kind in ("contiguous", "paged")}
    speeds: dict[str, list[float]] = {kind: [] for kind in rungs}
    ids = {}
    for r in range(rounds + 1):
        for kind in list(rungs)[:: 1 if r % 2 else -1]:
            done = rungs[kind].generate(prompts, params)
            ids[kind] = [d.token_ids for d in done]
            if r:
                speeds[kind].append(batch / statistics.mean(d.tpot_s for d in done))
    ratios = [p / c for p, c in zip(speeds["paged"], speeds["contiguous"], strict=True)]
    medians = {kind: statistics.median(s) for kind, s in speeds.items()}
    row = {"batch": batch, **medians, "ratio": {"median": statistics.median(ratios), "all": ratios}}
    return row | {"equal_ids": ids["paged"] == ids["contiguous"]}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    model = load_model(dtype=args.dtype, device="cpu", kernels=args.kernels)
    given = {"input_len": args.input_len, "output_len": args.output_len, "ratio": args.range_ratio, "seed": args.seed}
    work = random_work(args.requests, model.config.vocab_size, **given)
    need = sum(len(w.prompt) + w.output + 16 for w in work)
    llm = LLM(model, kv_tokens=need, prefix_cache=False, max_batch=args.requests)
    result: dict[str, Any] = {
        "machine": measure.describe().to_dict(),
        "path": llm.engine.path,
        "requests": args.requests,
        **given,
        "prompt_lengths": spread(args.input_len, args.range_ratio),
        "output_lengths": spread(args.output_len, args.range_ratio),
        "prompt_tokens": sum(len(w.prompt) for w in work),
        "output_tokens": sum(w.output for w in work),
    }
    runners: dict[str, Runner] = {"ours": lambda: ours(llm, work)}
    if args.vs == "transformers":
        ways = ways_of(peer.load_peer(DTYPES[args.dtype]), work, args.sizes)
        trials = {}
        for name, run in ways.items():
            trials[name] = timed(run, work)[0]
            print(f"trial: {name}: {trials[name]['tok_s']:.1f} tok/s", file=sys.stderr)
        best = max(trials, key=lambda name: trials[name]["tok_s"])
        result |= {"trials": trials, "best_of_transformers": best}
        runners["transformers"] = ways[best]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    ids: dict[str, list[list[int]]] = {}
    for r in range(args.rounds):
        for name in list(runners)[:: 1 if r % 2 == 0 else -1]:
            figures, ids[name] = timed(runners[name], work)
            rows[name].append(figures)
            print(f"round {r + 1}: {name}: {figures['tok_s']:.1f} tok/s", file=sys.stderr)
    for name, rounds in rows.items():
        result[name] = {key: statistics.median(f[key] for f in rounds) for key in rounds[0]}
    if "transformers" in rows:
        for key in ("tok_s", "tok_per_cpu_s"):
            ratios = [a[key] / b[key] for a, b in zip(rows["ours"], rows["transformers"], strict=True)]
            result[f"{key}_ratio"] = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
        result["same_greedy_ids"] = agreement(model, work, ids["ours"], ids["transformers"])
    result["kv_rungs"] = [paged_and_contiguous(model, batch, args.rounds) for batch in (1, 8)]
    return result


def lines(result: dict[str, Any]) -> list[str]:
    out = [result["path"], f"{result['requests']} requests, {result['output_tokens']} output tokens"]
    out += [f"transformers, {name}: {f['tok_s']:.1f} tok/s" for name, f in result.get("trials", {}).items()]
    out += [f"{n}: {result[n]['tok_s']:.1f} tok/s" for n in ("ours", "transformers") if n in result]
    if "tok_s_ratio" in result:
        r, c, s = result["tok_s_ratio"], result["tok_per_cpu_s_ratio"], result["same_greedy_ids"]
        out.append(f"ours is {r['median']:.2f}x ({r['min']:.2f} to {r['max']:.2f}) the best of transformers")
        out.append(f"by CPU seconds {c['median']:.2f}x; {s['equal']} of {s['of']} requests have the same ids")
    for row in result["kv_rungs"]:
        out.append(
            f"decode at batch {row['batch']}: paged {row['paged']:.1f}, contiguous {row['contiguous']:.1f} tok/s"
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vs", choices=["transformers", "none"], default="none")
    fastest = "auto" if native.unavailable("attention") else "cpu"
    native_dtype = "bfloat16" if bf16_is_native(torch.device("cpu")) else "float32"
    parser.add_argument(
        "--dtype", choices=[*DTYPES], default=native_dtype, help="default: what this processor multiplies"
    )
    parser.add_argument("--kernels", choices=["reference", "packed", "cpu", "auto"], default=fastest)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128, help="mean tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="mean tokens to produce")
    parser.add_argument("--range-ratio", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64], help="batch sizes that are tried")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/throughput.json")
    args = parser.parse_args()
    for name in ("threads", "rounds", "sizes"):
        value = min(args.sizes) if name == "sizes" else getattr(args, name)
        if value < 1:
            raise InvalidRequest(f"--{name} must be >= 1, not {value}")
    torch.set_num_threads(args.threads)
    result = compare(args)
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "throughput.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result) if args.json else "\n".join(lines(result)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InvalidRequest as error:
        print(f"throughput.py: {error}", file=sys.stderr)
        sys.exit(2)
