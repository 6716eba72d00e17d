"""One model on one machine: its ceilings, and how near prefill and decode come to them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cs336_infer.measure.bandwidth import matmul_rate, read_bandwidth
from cs336_infer.measure.cost import decode, prefill
from cs336_infer.measure.machine import describe
from cs336_infer.measure.phases import decode_step, time_decode, time_prefill
from cs336_infer.measure.roofline import Roofline
from cs336_infer.models.load import LoadedModel


def report(model: LoadedModel, prompt_tokens: int, batch: int) -> dict[str, Any]:
    """Measure the machine and both phases in one run, as plain values.

    Raises:
        InvalidRequest: the prompt and one token do not fit the context, or the batch does not fit the memory; before
            anything is measured.
    """
    decode_step(model, prompt_tokens, batch)
    size = model.dtype.itemsize
    bandwidth = read_bandwidth(model.device)
    compute = matmul_rate(model.dtype, model.device)
    roof = Roofline(bandwidth.bytes_per_s, compute.flops_per_s)
    costs = {
        "prefill": prefill(model.config, prompt_tokens, batch, dtype_bytes=size, kv_bytes=size),
        "decode": decode(model.config, batch, prompt_tokens, dtype_bytes=size, kv_bytes=size),
    }
    times = {
        "prefill": time_prefill(model, prompt_tokens, batch).median_s,
        "decode": time_decode(model, prompt_tokens, batch).median_s,
    }
    tokens = {"prefill": prompt_tokens * batch, "decode": batch}
    placed = roof.place({name: (costs[name], times[name]) for name in costs})
    return {
        "machine": describe().to_dict(),
        "model": model.name,
        "path": model.describe_path("contiguous"),
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "read_bandwidth": {"bytes_per_s": bandwidth.bytes_per_s, "method": bandwidth.method},
        "matmul": {"flops_per_s": compute.flops_per_s, "method": compute.method},
        "ridge_flop_per_byte": roof.ridge,
        "phases": [
            {
                **asdict(p),
                "bound": p.bound.value,
                "flops": costs[p.name].flops,
                "bytes": costs[p.name].bytes,
                "median_s": times[p.name],
                "tokens_per_s": tokens[p.name] / times[p.name],
            }
            for p in placed
        ],
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """The report for a terminal."""
    bandwidth, matmul = facts["read_bandwidth"], facts["matmul"]
    head = [
        f"{facts['model']}: {facts['path']}",
        f"read bandwidth {bandwidth['bytes_per_s'] / 1e9:.1f} GB/s ({bandwidth['method']})",
        f"matrix product {matmul['flops_per_s'] / 1e9:.0f} GFLOP/s ({matmul['method']})",
        f"ridge {facts['ridge_flop_per_byte']:.1f} FLOP/byte",
    ]
    return head + [
        f"{p['name']:8} {p['median_s'] * 1e3:8.1f} ms  {p['tokens_per_s']:8.1f} tok/s  "
        f"{p['intensity']:7.1f} FLOP/byte  bound by {p['bound']}  {p['fraction']:.0%} of the roofline"
        for p in facts["phases"]
    ]
