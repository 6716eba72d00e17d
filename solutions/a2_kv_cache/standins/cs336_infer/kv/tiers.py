"""Tiers below the device are not in this package: exercise 5 asks for their bookkeeping."""
# ruff: noqa: F821

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cs336_infer.kv.policy import LRU, EvictionPolicy
from cs336_infer.types import InvalidRequest


class Tiers:
    """Only its face."""

    def __new__(cls, **options: Any) -> Any:
        raise InvalidRequest(f"tiers are not in the students' package: leave out {', '.join(options)}")

    def __init__(
        self,
        *,
        block_bytes: int,
        fingerprint: bytes,
        host_bytes: int = 2**30,
        disk_bytes: int = 0,
        folder: str | Path | None = None,
        write: str = "through",
        policy: Callable[[], EvictionPolicy] = LRU,
        quota_bytes: int | None = None,
        max_pending: int = 256,
    ) -> None: ...
    def find(self, keys: Sequence[bytes], contents: Sequence[bytes]) -> Lease: ...
    def store(
        self,
        key: bytes,
        content: bytes,
        data: torch.Tensor,
        *,
        owner: str | None = None,
        after: Callable[[], object] | None = None,
    ) -> Transfer: ...
    def durable(self, keys: Sequence[bytes]) -> int: ...
    def touch(self, keys: Sequence[bytes]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, TierStats]: ...
    def drop_page_cache(self) -> None: ...
