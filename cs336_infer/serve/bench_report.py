"""Figures of a run of `bench serve`, under the names that `vllm bench serve` gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cs336_infer.serve.bench import Outcome
from cs336_infer.types import InvalidRequest, short

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """{"ttft": 200.0} from ["ttft:200"], in milliseconds.

    Raises:
        InvalidRequest: a name is unknown, or a limit is not a number above 0.
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in OBJECTIVES or not limit > 0:
            raise InvalidRequest(
                f"--goodput takes {', '.join(OBJECTIVES)} with milliseconds, ttft:200, not {short(text)}"
            )
        limits[name] = limit
    return limits


def is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether a request succeeded within every limit. One token has no TPOT to be late with."""
    tpot = 0.0 if math.isnan(outcome.tpot) else outcome.tpot
    took = {"ttft": outcome.ttft, "tpot": tpot, "e2el": outcome.latency}
    return outcome.error is None and all(took[name] * 1e3 <= limit for name, limit in limits.items())


def figures(
    outcomes: Sequence[Outcome],
    seconds: float,
    *,
    metrics: Sequence[str] = tuple(METRICS),
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The result of a run that took `seconds`. Latencies are those of requests that succeeded; failed ones are counted,
    and are not good ones.

    Returns:
        Counts, rates per second, and mean, median, std and percentiles in ms of each metric; null where nothing was
        measured. `good_fraction` is the share of all requests, failed ones too, that kept the limits of `goodput`.
    """
    right = [o for o in outcomes if o.error is None]
    inputs, outputs = sum(o.prompt_tokens for o in right), sum(o.output_tokens for o in right)
    good = sum(is_good(o, goodput) for o in outcomes) if goodput else None
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(right),
        "failed": len(outcomes) - len(right),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": _rate(len(right), seconds),
        "request_goodput": None if good is None else _rate(good, seconds),
        "good_fraction": None if good is None else good / len(outcomes),
        "output_throughput": _rate(outputs, seconds),
        "total_token_throughput": _rate(inputs + outputs, seconds),
    }
    samples = {
        "ttft": [o.ttft for o in right],
        "tpot": [o.tpot for o in right if not math.isnan(o.tpot)],
        "itl": [gap for o in right for gap in o.gaps],
        "e2el": [o.latency for o in right],
    }
    for name in metrics:
        ms = np.array(samples[name]) * 1e3
        for stat, f in (("mean", np.mean), ("median", np.median), ("std", np.std)):
            result[f"{stat}_{name}_ms"] = float(f(ms)) if len(ms) else None
        for p in percentiles:
            result[f"p{p:g}_{name}_ms"] = float(np.percentile(ms, p)) if len(ms) else None
    result["errors"] = sorted({o.error for o in outcomes if o.error is not None})
    return result


def table(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> list[str]:
    """The figures for a terminal."""

    def row(name: str, value: Any) -> str:
        shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        return f"{name + ':':40} {shown:<10}".rstrip()

    out = [f"{' Serving Benchmark Result ':=^50}"]
    for text, key in (
        ("Successful requests", "completed"),
        ("Failed requests", "failed"),
        ("Benchmark duration (s)", "duration"),
        ("Total input tokens", "total_input_tokens"),
        ("Total generated tokens", "total_output_tokens"),
        ("Request throughput (req/s)", "request_throughput"),
        ("Request goodput (req/s)", "request_goodput"),
        ("Output token throughput (tok/s)", "output_throughput"),
        ("Total token throughput (tok/s)", "total_token_throughput"),
    ):
        if key != "request_goodput" or result[key] is not None:
            out.append(row(text, result[key]))
    for name in metrics:
        out.append(f"{METRICS[name]:-^50}")
        for stat in ("mean", "median", *(f"p{p:g}" for p in percentiles)):
            out.append(row(f"{stat.capitalize()} {name.upper()} (ms)", result[f"{stat}_{name}_ms"]))
    out.append("=" * 50)
    return out + [f"error: {error}" for error in result["errors"][:5]]


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
