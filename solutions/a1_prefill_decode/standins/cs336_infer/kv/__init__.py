"""KV caches: none, and one tensor per layer. Each is the oracle of the next."""

from cs336_infer.kv.contiguous import ContiguousKV
from cs336_infer.kv.none import NoCache
from cs336_infer.models.attend import Attend, KVCache

__all__ = ["Attend", "ContiguousKV", "KVCache", "NoCache"]
