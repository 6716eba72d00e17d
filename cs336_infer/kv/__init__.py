"""KV caches, from none to tiers. Each is the oracle of the next."""

from cs336_infer.kv.base import Attend, KVCache, NoCache
from cs336_infer.kv.contiguous import ContiguousKV

__all__ = ["Attend", "ContiguousKV", "KVCache", "NoCache"]
