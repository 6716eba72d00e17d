"""Counting and timing: what the work costs, what the machine can do, and how near the engine comes.

`cost` counts FLOPs and bytes, `bandwidth` measures the machine's ceilings, `roofline` compares the two with a measured
time, `bench` takes the time, and `machine` says what it was taken on.
"""

from cs336_infer.measure.bandwidth import Bandwidth, Compute, matmul_rate, read_bandwidth
from cs336_infer.measure.bench import Ratio, Timing, interleave, measure, ratio
from cs336_infer.measure.cost import Cost, attention_flops, decode, kv_bytes_per_token, prefill, weight_bytes
from cs336_infer.measure.machine import Check, Gpu, Machine, Status, describe, doctor
from cs336_infer.measure.roofline import Bound, Placed, Roofline

__all__ = [
    "Bandwidth",
    "Bound",
    "Check",
    "Compute",
    "Cost",
    "Gpu",
    "Machine",
    "Placed",
    "Ratio",
    "Roofline",
    "Status",
    "Timing",
    "attention_flops",
    "decode",
    "describe",
    "doctor",
    "interleave",
    "kv_bytes_per_token",
    "matmul_rate",
    "measure",
    "prefill",
    "ratio",
    "read_bandwidth",
    "weight_bytes",
]
