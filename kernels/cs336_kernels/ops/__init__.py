"""The ops a transformer is made of, each with its torch reference."""

from cs336_kernels.ops.add_rmsnorm import add_rms_norm
from cs336_kernels.ops.attention import attention
from cs336_kernels.ops.decode_attention import choose_splits, decode_attention, merge_attention
from cs336_kernels.ops.gate_up import gate_up
from cs336_kernels.ops.linear import Linear, packing_available
from cs336_kernels.ops.linear_add import linear, linear_add
from cs336_kernels.ops.prefill_attention import prefill_attention
from cs336_kernels.ops.qk_norm import qk_norm
from cs336_kernels.ops.qkv import qkv
from cs336_kernels.ops.quant_linear import QuantWeight, quant_linear, quantise
from cs336_kernels.ops.rmsnorm import rms_norm
from cs336_kernels.ops.rope import apply_rope, rope_tables
from cs336_kernels.ops.sample import argmax, sample
from cs336_kernels.ops.swiglu import swiglu
from cs336_kernels.ops.write_kv import write_kv

__all__ = [
    "Linear",
    "QuantWeight",
    "add_rms_norm",
    "apply_rope",
    "argmax",
    "attention",
    "choose_splits",
    "decode_attention",
    "gate_up",
    "linear",
    "linear_add",
    "merge_attention",
    "packing_available",
    "prefill_attention",
    "qk_norm",
    "qkv",
    "quant_linear",
    "quantise",
    "rms_norm",
    "rope_tables",
    "sample",
    "swiglu",
    "write_kv",
]
