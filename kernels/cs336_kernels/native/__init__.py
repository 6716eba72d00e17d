"""Kernels in C++ for a CPU, built on first use."""

from cs336_kernels.native.attention import paged_attention
from cs336_kernels.native.build import Unavailable, library, unavailable

__all__ = ["Unavailable", "library", "paged_attention", "unavailable"]
