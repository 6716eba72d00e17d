"""The ops a transformer is made of, each with its torch reference."""

from cs336_kernels.ops.add_rmsnorm import add_rms_norm
from cs336_kernels.ops.attention import attention
from cs336_kernels.ops.linear import Linear, packing_available
from cs336_kernels.ops.qk_norm import qk_norm
from cs336_kernels.ops.rmsnorm import rms_norm
from cs336_kernels.ops.rope import apply_rope, rope_tables
from cs336_kernels.ops.sample import argmax, sample
from cs336_kernels.ops.swiglu import swiglu
from cs336_kernels.ops.write_kv import write_kv

__all__ = [
    "Linear",
    "add_rms_norm",
    "apply_rope",
    "argmax",
    "attention",
    "packing_available",
    "qk_norm",
    "rms_norm",
    "rope_tables",
    "sample",
    "swiglu",
    "write_kv",
]
