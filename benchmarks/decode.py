"""Prefill and decode of the embedded model against transformers' `generate`, on the same weights.

    python benchmarks/decode.py --vs transformers --json

Both run in this process with the same dtype and thread count, in turn (A B, B A, ...), and both are timed the same way:
the clock at each new token. Prefill is the time to the first token of a prompt of `--prompt` random ids, decode the
time of the `--new` steps after it. Before the clock starts, both must give the same greedy ids in fp32.
Figures are medians over the rounds; a ratio is the median of the rounds' ratios, above 1 where ours is faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import torch

    from cs336_infer import InvalidRequest, SamplingParams, load_model, measure, stream
    from cs336_infer.devices import bf16_is_native
    from cs336_infer.measure.peer import load_peer
    from cs336_infer.measure.phases import decode_step, memory_traffic
    from cs336_infer.models.load import DTYPES, LoadedModel
except ModuleNotFoundError as e:
    sys.exit(f"decode.py: {e.name} is not installed: after make test, run .venv/bin/python benchmarks/decode.py")

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Clock:
    """Seconds from the start to the first token, and of each step after it."""

    first: float
    steps: list[float]
    token_ids: list[list[int]]

    @property
    def decode(self) -> float:
        return sum(self.steps)


def ours(model: LoadedModel, prompts: list[list[int]], new: int) -> Clock:
    """`stream` of this package; the clock stops once per step, when its last row has its token."""
    params = SamplingParams(max_tokens=new + 1, ignore_eos=True)
    ids: list[list[int]] = [[] for _ in prompts]
    start = time.perf_counter()
    times = []
    for event in stream(model, prompts, params):
        ids[event.index].append(event.token_id)
        if event.index == len(prompts) - 1:
            times.append(time.perf_counter() - start)
    return _clock(times, ids)


class Theirs:
    """transformers' model with the same weights, read by transformers' own GGUF loader."""

    def __init__(self) -> None:
        self.model = load_peer()

    def __call__(self, prompts: list[list[int]], new: int) -> Clock:
        from transformers import GenerationConfig, StoppingCriteria

        times: list[float] = []
        start = 0.0

        class Stamp(StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                times.append(time.perf_counter() - start)
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        settings = GenerationConfig(max_new_tokens=new + 1, do_sample=False, pad_token_id=0, eos_token_id=None)
        self.model.generation_config = settings
        tokens = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                tokens, attention_mask=torch.ones_like(tokens), generation_config=settings, stopping_criteria=[Stamp()]
            )
        return _clock(times, out[:, tokens.shape[1] :].tolist())


def _clock(times: list[float], ids: list[list[int]]) -> Clock:
    return Clock(times[0], [b - a for a, b in itertools.pairwise(times)], ids)


def compare(
    model: LoadedModel, theirs: Theirs | None, batch: int, prompt: int, new: int, rounds: int
) -> dict[str, Any]:
    """One row of the table: both runners in turn on the same prompts."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, model.config.vocab_size, (batch, prompt), generator=generator).tolist()
    runners: dict[str, Any] = {"ours": lambda n: ours(model, prompts, n)}
    if theirs is not None:
        runners["transformers"] = lambda n: theirs(prompts, n)
    for run in runners.values():
        run(2)
    clocks: dict[str, list[Clock]] = {name: [] for name in runners}
    bandwidth = []
    for r in range(rounds):
        bandwidth.append(measure.read_bandwidth(repeats=2).bytes_per_s)
        for name in list(runners)[:: 1 if r % 2 == 0 else -1]:
            clocks[name].append(runners[name](new))
    row: dict[str, Any] = {"batch": batch, "prompt": prompt, "new": new, "rounds": rounds}
    size = model.dtype.itemsize
    traffic = memory_traffic(measure.decode(model.config, batch, prompt + new // 2, dtype_bytes=size, kv_bytes=size))
    rate = statistics.median(bandwidth)
    for name, runs in clocks.items():
        step = statistics.median(statistics.median(c.steps) for c in runs)
        row[name] = {
            "prefill_tok_s": batch * prompt / statistics.median(c.first for c in runs),
            "decode_tok_s": batch * new / statistics.median(c.decode for c in runs),
            "step_ms": step * 1e3,
            "bytes_per_step": traffic,
            "gb_s": traffic / step / 1e9,
            "bandwidth_fraction": traffic / step / rate,
        }
    row["read_bandwidth_gb_s"] = rate / 1e9
    if theirs is not None:
        for phase, pick in (("prefill", lambda c: c.first), ("decode", lambda c: c.decode)):
            pairs = [pick(b) / pick(a) for a, b in zip(clocks["ours"], clocks["transformers"], strict=True)]
            row[f"{phase}_ratio"] = {"median": statistics.median(pairs), "min": min(pairs), "max": max(pairs)}
    return row


def same_ids(theirs: Theirs, threads: int) -> dict[str, Any]:
    """Greedy ids of both in fp32 on real prompts: the benchmark compares the same computation or nothing."""
    model = load_model(dtype="float32", device="cpu")
    texts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time,", "대한민국의 수도는"]
    for text in texts:
        ids = model.tokenizer.encode(text)
        a, b = ours(model, [ids], 15).token_ids, theirs([ids], 15).token_ids
        if a != b:
            raise SystemExit(f"decode.py: greedy ids differ in fp32 for {text!r}: {a} and {b}")
    return {"prompts": len(texts), "tokens": 16 * len(texts), "equal": True, "threads": threads}


def breakdown(model: LoadedModel, batch: int, context: int, steps: int = 12) -> dict[str, float]:
    """Where a decode step's time goes, as shares of the CPU time of its operators."""
    from torch.profiler import ProfilerActivity, profile

    step = decode_step(model, context, batch)
    step()
    with profile(activities=[ProfilerActivity.CPU]) as p:
        for _ in range(steps):
            step()
    shares: dict[str, float] = dict.fromkeys(("weights", "attention", "norms, rope, swiglu, copies", "dispatch"), 0.0)
    for event in p.key_averages():
        name = event.key
        if "linear" in name or name in ("aten::mm", "aten::addmm"):
            kind = "weights"
        elif "scaled_dot_product" in name:
            kind = "attention"
        elif name in (
            "aten::view",
            "aten::as_strided",
            "aten::slice",
            "aten::empty",
            "aten::reshape",
            "aten::transpose",
        ):
            kind = "dispatch"
        else:
            kind = "norms, rope, swiglu, copies"
        shares[kind] += event.self_cpu_time_total
    total = sum(shares.values())
    return {kind: round(t / total, 3) for kind, t in shares.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vs", choices=["transformers", "none"], default="none")
    native = "bfloat16" if bf16_is_native(torch.device("cpu")) else "float32"
    parser.add_argument("--dtype", choices=[*DTYPES], default=native, help="default: what this processor multiplies")
    parser.add_argument("--kernels", choices=["reference", "packed", "auto"], default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/decode.json")
    args = parser.parse_args()
    for name in ("threads", "prompt", "new", "rounds", "batch"):
        value = min(args.batch) if name == "batch" else getattr(args, name)
        if value < 1:
            raise InvalidRequest(f"--{name} must be >= 1, not {value}")
    torch.set_num_threads(args.threads)
    theirs = Theirs() if args.vs == "transformers" else None
    checked = same_ids(theirs, args.threads) if theirs else None
    if theirs:
        theirs.model.to(DTYPES[args.dtype])
    model = load_model(dtype=args.dtype, device="cpu", kernels=args.kernels)
    result = {
        "machine": measure.describe().to_dict(),
        "path": model.describe_path("contiguous"),
        "same_greedy_ids_in_fp32": checked,
        "rows": [compare(model, theirs, b, args.prompt, args.new, args.rounds) for b in args.batch],
        "decode_time_shares": {f"batch {b}": breakdown(model, b, args.prompt + args.new // 2) for b in args.batch},
    }
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "decode.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(result))
        return 0
    print(result["path"])
    for row in result["rows"]:
        for name in ("ours", "transformers"):
            if name in row:
                f = row[name]
                print(
                    f"batch {row['batch']} {name:13} prefill {f['prefill_tok_s']:7.0f} tok/s  decode "
                    f"{f['decode_tok_s']:6.1f} tok/s  {f['gb_s']:5.1f} of {row['read_bandwidth_gb_s']:.1f} GB/s"
                )
        for phase in ("prefill", "decode"):
            if f"{phase}_ratio" in row:
                r = row[f"{phase}_ratio"]
                print(f"batch {row['batch']} {phase}: ours is {r['median']:.2f}x ({r['min']:.2f} to {r['max']:.2f})")
        shares = result["decode_time_shares"][f"batch {row['batch']}"]
        print(f"batch {row['batch']} decode time: {', '.join(f'{k} {v:.0%}' for k, v in shares.items())}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InvalidRequest as error:
        print(f"decode.py: {error}", file=sys.stderr)
        sys.exit(2)
