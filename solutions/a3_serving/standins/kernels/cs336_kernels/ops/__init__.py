"""The ops a transformer is made of, each with its torch reference."""

from cs336_kernels.ops.attention import attention
from cs336_kernels.ops.linear import Linear, packing_available
from cs336_kernels.ops.rmsnorm import rms_norm
from cs336_kernels.ops.rope import apply_rope, rope_tables
from cs336_kernels.ops.swiglu import swiglu

__all__ = ["Linear", "apply_rope", "attention", "packing_available", "rms_norm", "rope_tables", "swiglu"]
