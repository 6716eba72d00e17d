"""Where the functions and classes of assignment 2 sit in the engine: keys, hits, the cache of blocks and its policy.

    plug_cache(root_key=root_key, chain_keys=chain_keys, find_prefix=find_prefix, LRU=LRU, PrefixCache=PrefixCache)

Nothing here does what an exercise asks for: students have this file too. What comes back from a student's code is
looked at before the engine uses it, and a fault is named.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from cs336_infer.course.plug import plug, plugged
from cs336_infer.course.sockets import SOCKETS, describe_path
from cs336_infer.kv.manager import SequenceKV
from cs336_infer.kv.policy import EvictionPolicy, Key, PolicyError
from cs336_infer.types import InferError, short

KEY_LENGTH = 32


def plug_cache(**functions: Callable[..., Any]) -> plug:
    """As `plug`; the names of assignment 2 have places too."""
    return plug(**functions)


# Keys -----------------------------------------------------------------------------------------------------------------


def checked_key(name: str, key: Any) -> bytes:
    """`key` where it is one; otherwise an error that names the exercise."""
    if not isinstance(key, bytes) or len(key) != KEY_LENGTH:
        raise InferError(f"{name} returned {short(key)} to the engine, which expects {KEY_LENGTH} bytes")
    return key


def root_key(**extras: str | int | None) -> bytes:
    """As the package's, by the student's `root_key`."""
    return checked_key("root_key", plugged("root_key")(dict(extras)))


class PluggedChain:
    """As the package's `KeyChain`, by the student's `chain_keys`."""

    def __init__(self, root: bytes, block_size: int, tokens: Sequence[int] = ()) -> None:
        self.block_size, self.keys, self.contents = block_size, [], []
        self._newest, self._unfinished = root, []
        self.extend(tokens)

    def __len__(self) -> int:
        return self.block_size * len(self.keys) + len(self._unfinished)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens; blocks that became full get their keys from the student's function."""
        size, all_new = self.block_size, [*self._unfinished, *map(int, tokens)]
        count = len(all_new) // size
        if count:
            keys = list(plugged("chain_keys")(self._newest, all_new[: count * size], size))
            if len(keys) != count:
                raise InferError(f"chain_keys returned {len(keys)} keys to the engine for {count} full blocks")
            self.keys += [checked_key("chain_keys", key) for key in keys]
            self.contents += [struct.pack(f"<{size}I", *all_new[i * size : i * size + size]) for i in range(count)]
            self._newest = self.keys[-1]
        self._unfinished = all_new[count * size :]

    def fork(self) -> PluggedChain:
        """An independent copy."""
        other = PluggedChain(self._newest, self.block_size)
        other.keys, other.contents, other._unfinished = [*self.keys], [*self.contents], [*self._unfinished]
        return other


# Hits -----------------------------------------------------------------------------------------------------------------


def begin(self: Any, tokens: Sequence[int], root: bytes) -> SequenceKV:
    """`KVManager.begin`, with hits by the student's `find_prefix`."""
    from cs336_infer.kv.prefix import KeyChain

    if self.tiers is not None:
        raise InferError("find_prefix knows no tiers: plug it into an engine without them")
    size, prompt = self.memory.block_size, list(map(int, tokens))
    chain = KeyChain(root, size, prompt)
    here = self.pool.take(chain.keys, chain.contents) if self.pool.caching else []
    names = [key.hex() for key in chain.keys]
    cached = {
        name: [block, here[i - 1] if i else -1, prompt[i * size : (i + 1) * size]]
        for i, (name, block) in enumerate(zip(names, here, strict=False))
    }
    try:
        found = plugged("find_prefix")(prompt, size, names, cached)
        if not isinstance(found, list) or found != here[: len(found)] or len(found) * size >= max(len(prompt), 1):
            raise InferError(f"find_prefix returned {short(found)} to the engine, where the cached blocks are {here}")
    except BaseException:
        self.pool.release(here)
        raise
    self.pool.release(here[len(found) :])
    length = len(found) * size
    return SequenceKV(here[: len(found)], KeyChain(root, size, prompt[:length]), length)


# Blocks ---------------------------------------------------------------------------------------------------------------


class _Watched:
    """A policy, and the pool that looks at what is said to it."""

    def __init__(self, policy: EvictionPolicy, pool: PluggedPool) -> None:
        self.policy, self.pool = policy, pool

    def released(self, key: Key) -> None:
        self.policy.released(key)

    def reused(self, key: Key) -> None:
        self.policy.reused(key)

    def victim(self) -> Key:
        key = self.policy.victim()
        block = self.pool.found_at.get(key)
        if block is None or self.pool.refs(block):
            state = "not in the cache" if block is None else "in use"
            who = type(self.policy).__name__
            raise PolicyError(f"{who} chose block {short(key)}, which is {state}")
        if self.pool.on_evict is not None:
            self.pool.on_evict(block, key)
        return key

    def evicted(self, key: Key) -> None:
        block = self.pool.found_at.pop(key, None)
        if block is not None:
            self.pool.contents.pop(block, None)
        self.pool.evictions += 1
        self.policy.evicted(key)


class PluggedPool:
    """As the package's `BlockPool`, by the student's `PrefixCache` and, where no policy is given, `LRU`."""

    def __init__(
        self,
        num_blocks: int,
        *,
        policy: EvictionPolicy | None = None,
        caching: bool = True,
        on_evict: Callable[[int, Key], None] | None = None,
        fold: Callable[[Key], Key] | None = None,
        debug: bool = False,
    ) -> None:
        if fold is not None:
            raise InferError("PrefixCache has no fold: collisions are for find_prefix")
        self.total, self.caching, self.on_evict, self.debug = num_blocks, caching, on_evict, debug
        self.policy: EvictionPolicy = plugged("LRU")() if policy is None else policy
        self.evictions = self.peak = 0
        self.found_at: dict[Key, int] = {}
        self.contents: dict[int, bytes | None] = {}
        self._users: dict[int, int] = {}
        self._cache = plugged("PrefixCache")(num_blocks, _Watched(self.policy, self))

    @property
    def free(self) -> int:
        return self._cache.counts()[0]

    @property
    def cached(self) -> int:
        return self._cache.counts()[1]

    @property
    def live(self) -> int:
        return self._cache.counts()[2]

    @property
    def available(self) -> int:
        """How many blocks could be had now."""
        free, cached, _ = self._cache.counts()
        return free + cached

    def refs(self, block: int) -> int:
        """How many use the block, counted here."""
        return self._users.get(block, 0)

    def content(self, block: int) -> bytes | None:
        """The tokens that the block was published with."""
        return self.contents.get(block)

    def take(self, keys: Sequence[Key], contents: Sequence[bytes] | None = None) -> list[int]:
        """The blocks of the leading run, pinned. A block with other tokens ends it."""
        asked = list(keys)
        if contents is not None:
            same = (self.contents.get(self.found_at.get(k, -1)) == c for k, c in zip(keys, contents, strict=True))
            asked = asked[: next((i for i, is_same in enumerate(same) if not is_same), len(asked))]
        found = list(self._cache.take(asked))
        if found != [self.found_at.get(key) for key in asked[: len(found)]]:
            raise InferError(f"PrefixCache.take gave blocks {short(found)}, which are not those of the keys")
        for block in found:
            self._users[block] = self.refs(block) + 1
        return found

    def allocate(self, count: int) -> list[int]:
        """`count` blocks that nobody uses, one user each."""
        from cs336_infer.kv import pool

        try:
            got = list(self._cache.allocate(count))
        except Exception as error:
            if type(error).__name__ == "OutOfBlocks":  # the class of the notebook
                raise pool.OutOfBlocks(str(error)) from None
            raise
        if len(got) != count or len(set(got)) != count:
            raise InferError(f"PrefixCache.allocate({count}) gave {short(got)}")
        if owned := [block for block in got if self.refs(block) or block in self.contents]:
            raise InferError(f"PrefixCache.allocate gave block {owned[0]}, which has an owner or a key")
        self._users.update(dict.fromkeys(got, 1))
        self.peak = max(self.peak, len(self._users))
        return got

    def publish(self, block: int, key: Key, content: bytes | None = None) -> bool:
        """Find the block by `key` from now on, unless another one is."""
        if not self.caching or not self._cache.publish(block, key):
            return False
        self.found_at[key], self.contents[block] = block, content
        return True

    def publish_all(self, blocks: Sequence[int], keys: Sequence[Key], contents: Sequence[bytes] | None = None) -> None:
        """`publish` each of `blocks`."""
        for i, (block, key) in enumerate(zip(blocks, keys, strict=True)):
            self.publish(block, key, contents[i] if contents is not None else None)

    def share(self, blocks: Sequence[int]) -> None:
        """One more user of each."""
        self._cache.share(list(blocks))
        for block in blocks:
            self._users[block] = self.refs(block) + 1

    def release(self, blocks: Sequence[int]) -> None:
        """One user less of each."""
        for block in blocks:
            self._users[block] = self.refs(block) - 1
        self._cache.release(list(blocks))
        if self.debug:
            self.check()

    def check(self) -> None:
        """The books of the student's cache against those kept here."""
        counts = [self.free, self.cached, self.live]
        live = sum(n > 0 for n in self._users.values())
        idle = sum(not self.refs(block) for block in self.contents)
        if counts != (want := [self.total - live - idle, idle, live]):
            raise InferError(f"PrefixCache counts [free, cached, live] = {counts}, not {want}")


_PATH: dict[str, Callable[..., Any]] = {"cs336_infer.models.load:LoadedModel.describe_path": describe_path}
SOCKETS.update(
    {
        "root_key": {"cs336_infer.kv.prefix:root_key": root_key, **_PATH},
        "chain_keys": {"cs336_infer.kv.prefix:KeyChain": PluggedChain, **_PATH},
        "find_prefix": {"cs336_infer.kv.manager:KVManager.begin": begin, **_PATH},
        "LRU": _PATH,
        "PrefixCache": {"cs336_infer.kv.pool:BlockPool": PluggedPool, **_PATH},
    }
)
