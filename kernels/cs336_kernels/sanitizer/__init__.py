"""A sanitizer for Triton kernels that needs no GPU.

from cs336_kernels.sanitizer import sanitize

with sanitize(schedules=20, seed=0, resident=8) as report:
    kernel[grid](x, y, n, BLOCK=64)
print(report.findings)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cs336_kernels.sanitizer.report import Finding, Kind, Launch, Report, Traffic
    from cs336_kernels.sanitizer.sanitized import sanitize

__all__ = ["Finding", "Kind", "Launch", "Report", "Traffic", "sanitize"]


def __getattr__(name: str) -> Any:
    """Loaded on first use: from then on fresh memory of this process is filled with a pattern."""
    if name == "sanitize":
        from cs336_kernels.sanitizer import allocations
        from cs336_kernels.sanitizer.sanitized import sanitize

        allocations.watch()
        return sanitize
    if name in __all__:
        from cs336_kernels.sanitizer import report

        return getattr(report, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
