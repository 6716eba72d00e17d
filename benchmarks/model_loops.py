"""The embedded model's own doom loops: how often greedy answers repeat themselves, and how soon the detector sees it.

    python benchmarks/model_loops.py --json --save

Beginnings of texts of every kind (`measure/texts.py`) are continued greedily in float32, all in one run of `LLM`. The
answers are not ended: the detector is run over their tokens afterwards, so that what follows its verdict can be seen.
An answer that goes on to repeat until its last token was rightly ended; one that leaves the loop was not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

try:
    import torch

    from cs336_infer import LLM, FinishReason, InferError, LoadedModel, LoopRule, SamplingParams, load_model, measure
    from cs336_infer.measure.texts import PARTS, texts
    from cs336_infer.text.loops import LoopDetector
    from cs336_infer.types import check_integer
except ModuleNotFoundError as e:
    sys.exit(f"model_loops.py: {e.name} is not installed: after make test, run .venv/bin/python {sys.argv[0]}")

RESULTS = Path(__file__).parent / "results"


def beginnings(model: LoadedModel, count: int, prompt: int) -> list[tuple[str, list[int]]]:
    """(kind, ids) of the first `prompt` tokens of `count` texts, of all kinds in their proportions."""
    scale = count / sum(PARTS.values())
    found = [(t.kind, model.tokenizer.encode(t.content)[:prompt]) for t in texts(scale=scale)]
    return [(kind, ids) for kind, ids in found if len(ids) == prompt]


def label(ids: list[int], rule: LoopRule) -> dict[str, Any] | None:
    """Where the detector would have ended this answer, and what came after."""
    detector = LoopDetector(rule)
    for at, token in enumerate(ids, start=1):
        loop = detector.push(token)
        if loop is not None:
            goes_on = all(a == b for a, b in zip(ids[at:], ids[at - loop.period :], strict=False))
            return {"at": at, "period": loop.period, "goes_on": goes_on}
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=60, help="answers, about")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a beginning")
    parser.add_argument("--new", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/model_loops.json")
    args = parser.parse_args()
    for name, least in (("count", 18), ("prompt", 1), ("new", 1), ("threads", 1)):
        check_integer(f"--{name}", getattr(args, name), least, 4096)
    torch.set_num_threads(args.threads)
    model, rule = load_model(dtype="float32", device="cpu"), LoopRule()
    asked = beginnings(model, args.count, args.prompt)
    llm = LLM(model, kv_tokens=len(asked) * (args.prompt + args.new + 16), max_batch=len(asked))
    start = time.perf_counter()
    answers = llm.generate([ids for _, ids in asked], SamplingParams(max_tokens=args.new))
    seconds = time.perf_counter() - start
    rows = [
        {"kind": kind, "tokens": len(a.token_ids), "reason": str(a.finish_reason), "loop": label(a.token_ids, rule)}
        for (kind, _), a in zip(asked, answers, strict=True)
    ]
    loops = [row["loop"] for row in rows if row["loop"] is not None]
    result = {
        "machine": measure.describe().to_dict(),
        "path": answers[0].path,
        "rule": vars(rule),
        "answers": len(rows),
        "ended_by_themselves": sum(a.finish_reason is FinishReason.EOS for a in answers),
        "loops": len(loops),
        "share": len(loops) / len(rows),
        "loops_that_go_on_to_the_end": sum(loop["goes_on"] for loop in loops),
        "periods": dict(sorted(Counter(loop["period"] for loop in loops).items())),
        "median_tokens_before": statistics.median(loop["at"] for loop in loops) if loops else None,
        "tokens": sum(row["tokens"] for row in rows),
        "tokens_after_the_verdict": sum(row["tokens"] - row["loop"]["at"] for row in rows if row["loop"]),
        "drifted": sum(a.drifted_at is not None for a in answers),
        "seconds": seconds,
        "rows": rows,
    }
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "model_loops.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{result['path']}; {len(rows)} greedy answers of up to {args.new} tokens, {seconds:.0f} s")
    print(f"{len(loops)} loops ({result['share']:.0%}), {result['loops_that_go_on_to_the_end']} of them to the end")
    print(f"periods in tokens, and how often: {result['periods']}")
    print(f"{result['tokens_after_the_verdict']} of {result['tokens']} tokens come after the verdict")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InferError as error:
        print(f"model_loops.py: {error}", file=sys.stderr)
        sys.exit(2)
