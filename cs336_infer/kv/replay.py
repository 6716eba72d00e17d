"""Replay of a trace's prompts through the block manager: how many of their tokens a prefix cache of a given size saves.

Requests come one after another in the order of the trace; of each, the leading blocks that are cached are hits, the
rest is allocated and published, and all are released. Only names of blocks move, no tensors. Nothing about a request
is kept after it, so that memory grows with the cache and not with the trace.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cs336_infer.kv.policies import Belady
from cs336_infer.kv.policy import EvictionPolicy, Key
from cs336_infer.kv.pool import BlockPool
from cs336_infer.types import InvalidRequest, check_integer

UNLIMITED = 1 << 40
"""Blocks of a cache that never evicts."""


class Prompt(Protocol):
    """What a replay needs to know of a request; `simulate.trace.TraceRequest` is one."""

    @property
    def input_tokens(self) -> int: ...
    @property
    def keys(self) -> Sequence[Key] | None:
        """Of the prompt's blocks, from its beginning."""
        ...

    @property
    def block_size(self) -> int: ...


@dataclass(frozen=True)
class Replayed:
    """Totals of one replay. Tokens are those of prompts; a hit in a partly filled block counts the tokens in it."""

    policy: str
    capacity_blocks: int
    block_size: int
    requests: int
    oversized: int  # requests of more blocks than the cache has: their hits count, and nothing of them is kept
    tokens: int
    hit_tokens: int
    blocks: int  # looked up
    hit_blocks: int
    evictions: int
    peak_blocks: int  # cached at most
    seconds: float  # all of it: reading, looking up, evicting
    cpu_seconds: float  # the same without waiting for other programs

    @property
    def token_hit_rate(self) -> float:
        """0 to 1."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def lookups_per_minute(self) -> float:
        return 60 * self.blocks / max(self.seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        unlimited = self.capacity_blocks == UNLIMITED
        return {
            "policy": self.policy,
            "capacity_tokens": None if unlimited else self.capacity_blocks * self.block_size,
            "block_size": self.block_size,
            "token_hit_rate": self.token_hit_rate,
            "requests": self.requests,
            "oversized": self.oversized,
            "tokens": self.tokens,
            "hit_tokens": self.hit_tokens,
            "blocks": self.blocks,
            "hit_blocks": self.hit_blocks,
            "evictions": self.evictions,
            "peak_blocks": self.peak_blocks,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "lookups_per_minute": self.lookups_per_minute,
        }


def replay(requests: Iterable[Prompt], blocks: int, policy: EvictionPolicy, *, debug: bool = False) -> Replayed:
    """Serve `requests` from a cache of `blocks` blocks.

    Args:
        requests: all with the same block size.
        blocks: capacity; `UNLIMITED` never evicts.
        policy: a new one; `Belady` must have been made from the same requests.
        debug: recount the pool after every operation.

    Raises:
        InvalidRequest: a request has lengths only, no block keys, or another block size.
        PolicyError: the policy chose a block that cannot be evicted.
    """
    check_integer("blocks", blocks, 1, UNLIMITED)
    pool = BlockPool(blocks, policy=policy, debug=debug)
    take, allocate, publish, release = pool.take, pool.allocate, pool.publish_all, pool.release
    serve = policy.serve if isinstance(policy, Belady) else None
    count = oversized = tokens = hit_tokens = looked_up = hit_blocks = block_size = 0
    start, cpu = time.perf_counter(), time.process_time()
    for request in requests:
        keys, size = request.keys, request.block_size
        if keys is None:
            raise InvalidRequest("this trace has lengths only, no block keys: a cache cannot be replayed from it")
        if size != block_size:
            if count:
                raise InvalidRequest(f"request {count + 1} has blocks of {size} tokens, those before it {block_size}")
            block_size = size
        held = take(keys)
        if serve is not None:
            serve(keys)
        hits, wanted = len(held), len(keys)
        if wanted > blocks:
            oversized += 1
        else:
            new = allocate(wanted - hits)
            publish(new, keys[hits:])
            held += new
        release(held)
        count += 1
        tokens += request.input_tokens
        hit_tokens += min(hits * size, request.input_tokens)
        looked_up += wanted
        hit_blocks += hits
    return Replayed(
        type(policy).__name__.lower(),
        blocks,
        block_size,
        count,
        oversized,
        tokens,
        hit_tokens,
        looked_up,
        hit_blocks,
        pool.evictions,
        pool.peak,
        time.perf_counter() - start,
        time.process_time() - cpu,
    )
