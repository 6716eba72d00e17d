"""KV caches, from none to tiers. Each is the oracle of the next."""

from cs336_infer.kv.contiguous import ContiguousKV
from cs336_infer.kv.none import NoCache
from cs336_infer.kv.policy import LRU, EvictionPolicy, PolicyError
from cs336_infer.kv.pool import BlockPool, OutOfBlocks
from cs336_infer.kv.prefix import KeyChain, root_key
from cs336_infer.kv.tier_options import TierOptions
from cs336_infer.models.attend import Attend, KVCache

__all__ = [
    "LRU", "Attend", "BlockPool", "ContiguousKV", "EvictionPolicy", "KVCache", "KeyChain", "NoCache", "OutOfBlocks",
    "PolicyError", "TierOptions", "root_key",
]  # fmt: skip
