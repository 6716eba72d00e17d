# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Assignment 2 · KV cache management
#
# You write the part of an engine that decides where keys and values live: blocks with several owners, keys that name a
# block's content, a cache that gives up the right block, and tiers below it. No tensor appears: all of it is
# bookkeeping, and most of the failures that production engines report here are mistakes in bookkeeping. At the end
# your cache and your eviction policy run inside the real engine.
#
# Read lecture 03 first. Public checks stand beside each exercise; hidden checks use other sizes, random histories, and
# histories that broke real engines. Invent small cases on paper: 4 tokens a block and 6 blocks show almost everything.

# %%
import copy
import hashlib
import json
from collections import OrderedDict, deque

from cs336_infer.course.a2_kv_cache import check_public

# %% [markdown]
# Exercises 1, 4 and 5 ask for classes. Checks talk to them in lists: operations in, results out. `drive` below is all of
# that. Where a method raises `OutOfBlocks`, the result says so, and the next operation finds things as they were before.


# %%
class OutOfBlocks(Exception):
    """There are too few blocks. Whoever raises it has changed nothing."""


def drive(machine, operations):
    """Call methods of `machine`: [["allocate", "a", 5], ...] -> what each of them returned."""
    results = []
    for name, *arguments in operations:
        try:
            results.append(copy.deepcopy(getattr(machine, name)(*arguments)))
        except OutOfBlocks:
            results.append("out of blocks")
    return results


# %% [markdown]
# ## 1. Blocks with several owners
#
# KV memory is cut into blocks of `block_size` tokens. A sequence has a *table*: its blocks, in order, the last of them
# perhaps unfinished. It takes a block only when it needs one (PagedAttention, Kwon et al. 2023), so at most
# `block_size - 1` slots of a sequence are unused.
#
# A fork (a second answer to one prompt, a branch of a search) shares all blocks of its parent: nothing is copied, each
# block only counts its users. As long as a shared block is full, nobody writes to it. The unfinished last block is
# different: the first sequence to write into it must get a copy of its own, and leaves the old one to the others
# (*copy-on-write*).
#
# With 4 tokens a block: `a` has 6 tokens in blocks [0, 1], `b` is its fork. `a` grows by 1. It gets block 2, the caller
# copies block 1 to 2, and the tables are a: [0, 2], b: [0, 1]. Now `b` grows by 1: block 1 is its alone, nothing is
# copied.
#
# Out of blocks means: nothing happened. A half-done `grow` that keeps the blocks it got before it failed is a leak that
# shows up hours later.


# %% nbgrader={"schema_version": 3, "grade_id": "run_allocator", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 2, "importance": 5, "minutes": 40, "gpu": false, "forbidden": ["BlockPool", "cs336_infer.kv"]}
class BlockAllocator:
    """Sequences, known by name, over one pool of blocks. You may keep other attributes than these."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free_blocks = deque(range(num_blocks))
        self.users = [0] * num_blocks  # of each block
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}  # tokens

    def state(self) -> dict:
        """What the checks look at."""
        return {"tables": self.tables, "users": self.users, "free": len(self.free_blocks)}

    def take(self, count: int) -> list[int]:
        """`count` free blocks, with one user each from now on.

        Raises:
            OutOfBlocks: so many are not free; nothing has changed.
        """
        # BEGIN SOLUTION
        if count > len(self.free_blocks):
            raise OutOfBlocks(f"{count} blocks are needed, {len(self.free_blocks)} are free")
        blocks = [self.free_blocks.popleft() for _ in range(count)]
        for block in blocks:
            self.users[block] = 1
        return blocks
        # END SOLUTION

    def allocate(self, name: str, tokens: int) -> list[int]:
        """A new sequence with room for exactly `tokens` tokens (>= 0), in blocks of its own. Returns its table."""
        # BEGIN SOLUTION
        self.tables[name] = self.take(-(-tokens // self.block_size))
        self.lengths[name] = tokens
        return self.tables[name]
        # END SOLUTION

    def grow(self, name: str, tokens: int) -> list[list[int]]:
        """Room for `tokens` (>= 0) more tokens behind those that are there.

        Returns:
            [[from, to]] when the sequence got a copy of its unfinished last block: what the caller copies before it
            writes. [] otherwise.
        """
        # Step: how many blocks? Does the first new token go into a block that somebody else uses too?
        # BEGIN SOLUTION
        table, length = self.tables[name], self.lengths[name]
        shared = tokens > 0 and length % self.block_size > 0 and self.users[table[-1]] > 1
        blocks = self.take(-(-(length + tokens) // self.block_size) - len(table) + shared)
        # Step: replace a shared last block, append the others
        copies = []
        if shared:
            copies.append([table[-1], blocks[0]])
            self.users[table[-1]] -= 1
            table[-1] = blocks.pop(0)
        table.extend(blocks)
        self.lengths[name] = length + tokens
        return copies
        # END SOLUTION

    def fork(self, name: str, child: str) -> list[int]:
        """A new sequence `child` with the past of `name`. Returns its table: the same blocks, and no new ones."""
        # BEGIN SOLUTION
        self.tables[child] = list(self.tables[name])
        self.lengths[child] = self.lengths[name]
        for block in self.tables[child]:
            self.users[block] += 1
        return self.tables[child]
        # END SOLUTION

    def free(self, name: str) -> None:
        """The sequence is over. A block is free when its last user is gone."""
        # BEGIN SOLUTION
        del self.lengths[name]
        for block in self.tables.pop(name):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free_blocks.append(block)
        # END SOLUTION


def run_allocator(num_blocks: int, block_size: int, operations: list[list]) -> list:
    """What the checks ask for: a new allocator, and what each operation returned."""
    # Step: make one, and `drive` it
    # BEGIN SOLUTION
    return drive(BlockAllocator(num_blocks, block_size), operations)
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "run_allocator_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 3}
check_public(run_allocator)

# %% [markdown]
# ## 2. Names of blocks
#
# Two requests share a prefix. To find that out, each *full* block gets a key that two sequences have in common exactly
# when everything that the block's numbers depend on is the same: its tokens, all tokens before them, and the model,
# the data type, the adapter, the customer's salt. A chain of hashes does it:
#
# $$k_{-1} = \mathrm{root}, \qquad k_i = \mathrm{SHA256}(k_{i-1} \,\Vert\, \text{tokens of block } i).$$
#
# Each token is written as 4 bytes, the lowest first. An unfinished block has no key: its content will change.
#
# The root holds what is not a token. It is the SHA-256 of the extras as JSON, with names in sorted order, no spaces,
# and other characters than ASCII as they are, in UTF-8: `{"adapter":null,"model":"SmolLM2"}`. JSON keeps apart what
# string gluing confuses: `None`, `""` and a missing name; `1` and `"1"`; `a="b,c"` and two names.
#
# Why not Python's `hash`? It differs between two processes (that of text does so by design, that of `None` did before
# Python 3.12), so a cache on disk or in another machine would never be found again, and collisions can be made on
# purpose.


# %% nbgrader={"schema_version": 3, "grade_id": "chain_keys", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 2, "importance": 5, "minutes": 25, "gpu": false, "forbidden": ["KeyChain", "token_bytes", "cs336_infer.kv"]}
def root_key(extras: dict) -> bytes:
    """The key that a chain begins with, 32 bytes. Values of `extras` are text, whole numbers or None."""
    # BEGIN SOLUTION
    text = json.dumps(extras, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).digest()
    # END SOLUTION


def chain_keys(root: bytes, tokens: list[int], block_size: int) -> list[bytes]:
    """The keys of the full blocks of `tokens` (0 <= token < 2**32), 32 bytes each, in order.

    With the last key of a sequence as `root` it goes on with the sequence's next blocks.
    """
    # Step: the bytes of each full block, and the key before it, into SHA-256
    # BEGIN SOLUTION
    keys, last = [], root
    for end in range(block_size, len(tokens) + 1, block_size):
        content = b"".join(token.to_bytes(4, "little") for token in tokens[end - block_size : end])
        last = hashlib.sha256(last + content).digest()
        keys.append(last)
    return keys
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "chain_keys_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 2}
check_public(root_key, chain_keys, exercise="chain_keys")

# %% [markdown]
# ## 3. What is a hit?
#
# A prompt comes in. Of its blocks, which need not be computed? Three rules, each of them a bug report somewhere:
#
# 1. **The leading run only.** Blocks 0 and 2 are cached, 1 was evicted: one hit, not two. Block 2 cannot be attended to
#    without what stands before it... and whoever counts hits as a set reports a hit rate that nobody gets.
# 2. **Compare what the key stands for.** Keys may collide: short ones do, and long ones are only as good as their hash.
#    An entry of the cache knows its block's tokens and its *parent*, the block that it continues (-1: none). A hit has
#    the same tokens behind the same parent. Wrong tokens silently reused are the worst kind of cache miss: another
#    customer's text.
# 3. **Leave something to compute.** The first new token is chosen from the logits of the prompt's *last* token, and
#    logits are not cached. Of a prompt of 8 tokens in 2 cached blocks of 4 only the first block counts.


# %% nbgrader={"schema_version": 3, "grade_id": "find_prefix", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 2, "importance": 5, "minutes": 20, "gpu": false, "forbidden": ["KVManager", "BlockPool", "cs336_infer.kv"]}
def find_prefix(tokens: list[int], block_size: int, keys: list[str], cached: dict[str, list]) -> list[int]:
    """The cached blocks that a prompt begins with, in order.

    Args:
        tokens: the prompt. keys: of its full blocks, from the first on; a weak hash may have made them.
        cached: key -> [block, parent, tokens of the block]; parent is the block that stands before it, -1 for a first one.
    """
    # Step: walk along the prompt until a rule ends the run
    # BEGIN SOLUTION
    found, parent = [], -1
    for i in range((len(tokens) - 1) // block_size):
        block, its_parent, content = cached.get(keys[i], [-1, -1, []])
        if content != tokens[i * block_size : (i + 1) * block_size] or its_parent != parent:
            break
        found.append(block)
        parent = block
    return found
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "find_prefix_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 2}
check_public(find_prefix)

# %% [markdown]
# ## 4. A cache that gives up the right block
#
# When a sequence ends, its published blocks stay in memory: *cached*, no longer *live*. Somebody may come with the same
# prefix. When a new block is needed, a free one is taken; if there is none, the eviction policy names a victim among
# the cached ones, and its key is forgotten *before* somebody writes to the block. At every moment
#
# $$\text{free} + \text{cached} + \text{live} = \text{total}.$$
#
# The policy is a class of its own that knows keys only. It is told what happens, and is asked for a victim:
#
# | call | means |
# |---|---|
# | `released(key)` | the last user is gone: the block may be chosen from now on |
# | `reused(key)` | a hit on a block nobody used: it must not be chosen until it is released again |
# | `evicted(key)` | the block is gone from the cache |
# | `victim()` | which one next? `evicted` follows |
#
# LRU chooses the one released longest ago. A sequence releases its blocks **from the last to the first**: the end of a
# prompt is less likely to be shared than its beginning, and a beginning without end is a hit, an end without beginning
# is none. Sequence `a` releases blocks 0, 1, 2 with the keys p, q, r: r goes first, then q, then p.
#
# Three cases to think through before you write: a block is hit twice at the same time; two sequences publish the same
# key (both computed the same prompt in one step); `allocate(3)` when 2 can be had.


# %% nbgrader={"schema_version": 3, "grade_id": "run_cache", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 4, "importance": 5, "minutes": 75, "gpu": false, "forbidden": ["BlockPool", "LRUCache", "lru_cache", "cs336_infer.kv"]}
class LRU:
    """Least recently used: the key that was released longest ago goes first."""

    def __init__(self) -> None:
        self.order: OrderedDict = OrderedDict()

    def released(self, key) -> None:
        """The block may be chosen from now on; it is the newest."""
        # BEGIN SOLUTION
        self.order[key] = None
        # END SOLUTION

    def reused(self, key) -> None:
        """The block is in use, and must not be chosen."""
        # BEGIN SOLUTION
        del self.order[key]
        # END SOLUTION

    def evicted(self, key) -> None:
        """The block has left the cache."""
        # BEGIN SOLUTION
        self.order.pop(key, None)
        # END SOLUTION

    def victim(self):
        """The key that goes next."""
        # BEGIN SOLUTION
        return next(iter(self.order))
        # END SOLUTION


class PrefixCache:
    """`num_blocks` blocks: free, cached or live. You may keep other attributes than these."""

    def __init__(self, num_blocks: int, policy) -> None:
        self.policy = policy
        self.free = deque(range(num_blocks))
        self.users = [0] * num_blocks  # of each block
        self.key_of: list = [None] * num_blocks  # None: not published
        self.block_of: dict = {}  # key -> block
        self.cached = 0  # how many blocks are cached: yours to keep, nobody wants to count them at every step

    def counts(self) -> list[int]:
        """[free, cached, live]"""
        return [len(self.free), self.cached, sum(n > 0 for n in self.users)]

    def take(self, keys: list) -> list[int]:
        """Find the blocks of the leading run of `keys`, with one more user each."""
        # Step: the run; whoever was cached is not any more
        # BEGIN SOLUTION
        found = []
        for key in keys:
            if key not in self.block_of:
                break
            block = self.block_of[key]
            if self.users[block] == 0:
                self.policy.reused(key)
                self.cached -= 1
            self.users[block] += 1
            found.append(block)
        return found
        # END SOLUTION

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one user each and unknown content: free ones first, then evicted ones.

        Raises:
            OutOfBlocks: there are not so many; nothing was taken, nothing was evicted.
        """
        # Step: are there enough, before anything changes?
        # BEGIN SOLUTION
        if count > len(self.free) + self.cached:
            raise OutOfBlocks(f"{count} blocks are needed, {len(self.free) + self.cached} can be had")
        # Step: a victim loses its key before the block gets another owner
        blocks = []
        for _ in range(count):
            if self.free:
                block = self.free.popleft()
            else:
                key = self.policy.victim()
                block = self.block_of.pop(key)
                self.key_of[block] = None
                self.cached -= 1
                self.policy.evicted(key)
            self.users[block] = 1
            blocks.append(block)
        return blocks
        # END SOLUTION

    def publish(self, block: int, key) -> bool:
        """The live `block` is full: from now on it is found by `key`.

        False, and nothing changes, when another block is found by this key already.
        """
        # BEGIN SOLUTION
        if key in self.block_of:
            return False
        self.block_of[key] = block
        self.key_of[block] = key
        return True
        # END SOLUTION

    def share(self, blocks: list[int]) -> None:
        """One more user of each of these live blocks (a fork)."""
        # BEGIN SOLUTION
        for block in blocks:
            self.users[block] += 1
        # END SOLUTION

    def release(self, blocks: list[int]) -> None:
        """One user less of each, from the last block to the first. Without users a block is cached or free."""
        # BEGIN SOLUTION
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0 and self.key_of[block] is None:
                self.free.append(block)
            elif self.users[block] == 0:
                self.cached += 1
                self.policy.released(self.key_of[block])
        # END SOLUTION


class Sequences:
    """Given: sequences with names over a cache, so that operations can say whose blocks they mean."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache, self.held, self.counts = cache, {}, cache.counts

    def take(self, name: str, keys: list) -> list[int]:
        self.held[name] = self.cache.take(keys)
        return self.held[name]

    def allocate(self, name: str, count: int) -> list[int]:
        new = self.cache.allocate(count)
        self.held[name] = self.held.get(name, []) + new
        return new

    def publish(self, name: str, index: int, key) -> bool:
        return self.cache.publish(self.held[name][index], key)

    def share(self, name: str, child: str) -> None:
        self.cache.share(self.held[name])
        self.held[child] = list(self.held[name])

    def release(self, name: str) -> None:
        self.cache.release(self.held.pop(name))


def run_cache(num_blocks: int, operations: list[list]) -> list:
    """What the checks ask for: `Sequences` over a new cache with a new LRU, and what each operation returned."""
    # Step: make them, and `drive` the sequences
    # BEGIN SOLUTION
    return drive(Sequences(PrefixCache(num_blocks, LRU())), operations)
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "run_cache_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 4}
check_public(run_cache)

# %% [markdown]
# ## 5. Tiers below the device
#
# What the device evicts need not be lost: host memory is ten times larger, a disk a hundred times. In this exercise a
# block is in **one tier at a time**. (Engines often leave a copy below when a block goes up; that saves writing it
# again, and costs room.)
#
# `serve(keys)` is one prompt. The leading run of its keys that are in some tier are hits; all others are computed. Then
# the prompt's blocks are brought to the device: hits from wherever they are, computed ones as new. That needs room:
#
# - A full tier gives up its **oldest** block that is not one of this prompt's. It is written to the tier below, where it
#   is the newest; that tier may have to give up one in turn. Below the lowest tier is nothing.
# - A tier in which nothing may leave does not take the block that comes. It is gone.
# - A write may fail (`write` returns False). Then the tier it was meant for stays as it is, and the block is gone: **a
#   failed backup is a miss later, never a claim that the block is there.**
# - A tier of 0 blocks does not exist: what comes to it goes to the next one below.
# - A prompt longer than the device keeps only its first `budget` blocks there; the others stay where they are, and those
#   that were computed are not kept.
#
# Bring the blocks up from the last to the first, so that the beginning of the prompt is the newest; take each out of
# its old tier before you make room. A block behind a gap was computed again; its old copy goes, for it is on the device
# now.
#
# Device 2, host 2. `serve([p, q])`, `serve([r])`: device has p, r (q is the end of the older prompt), host q. Now
# `serve([p, q])`: p comes from the device, q from the host; r goes to the host.


# %% nbgrader={"schema_version": 3, "grade_id": "run_tiers", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 4, "importance": 4, "minutes": 60, "gpu": false, "forbidden": ["Tiers", "LRUCache", "cs336_infer.kv"]}
class TieredCache:
    """Device, host and disk, each with a budget in blocks. Keys stand for blocks."""

    NAMES = ("device", "host", "disk")

    def __init__(self, device: int, host: int, disk: int) -> None:
        self.budgets = dict(zip(self.NAMES, (device, host, disk), strict=True))
        self.tiers = {name: OrderedDict() for name in self.NAMES}  # the oldest key first
        self.broken: set[str] = set()

    def fail(self, tier: str) -> None:
        """Given: from now on all writes to `tier` fail."""
        self.broken.add(tier)

    def repair(self, tier: str) -> None:
        """Given: they do not fail any more."""
        self.broken.discard(tier)

    def write(self, tier: str, key) -> bool:
        """Given: copy the block's bytes to `tier`. False when that failed."""
        return tier not in self.broken

    def where(self) -> dict[str, list]:
        """What the checks look at."""
        return {name: sorted(tier) for name, tier in self.tiers.items()}

    def put(self, number: int, key, pinned: set) -> None:
        """Bring a block that is in no tier to tier `number` (0 is the device); `pinned` may not leave theirs."""
        # Step: no such tier? A failed write? Nothing that may leave?
        # BEGIN SOLUTION
        if number == len(self.NAMES):
            return
        name = self.NAMES[number]
        tier, budget = self.tiers[name], self.budgets[name]
        if budget == 0:
            self.put(number + 1, key, pinned)
            return
        victim = next((old for old in tier if old not in pinned), None)
        full = len(tier) >= budget
        if (full and victim is None) or not self.write(name, key):
            return
        # Step: the oldest goes one tier down, the new one is the newest
        if full:
            del tier[victim]
            self.put(number + 1, victim, pinned)
        tier[key] = None
        # END SOLUTION

    def serve(self, keys: list) -> list[str]:
        """Serve a prompt. For each key, which tier it came from, or "computed"."""
        # Step: the leading run, before anything moves
        # BEGIN SOLUTION
        found = []
        for key in keys:
            tier = next((name for name in self.NAMES if key in self.tiers[name]), None)
            if tier is None:
                break
            found.append(tier)
        # Step: from the last to the first: out of its old tier, then onto the device
        for key in reversed(keys[: self.budgets["device"]]):
            for tier in self.tiers.values():
                tier.pop(key, None)
            self.put(0, key, set(keys))
        return found + ["computed"] * (len(keys) - len(found))
        # END SOLUTION


def run_tiers(device: int, host: int, disk: int, operations: list[list]) -> list:
    """What the checks ask for: new tiers, and what each operation returned."""
    # Step: make them, and `drive` them
    # BEGIN SOLUTION
    return drive(TieredCache(device, host, disk), operations)
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "run_tiers_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 3}
check_public(run_tiers)

# %% [markdown] nbgrader={"schema_version": 3, "grade_id": "worth_reading", "grade": true, "solution": true, "locked": false, "task": false, "points": 3}
# **6. In your own words.** A block of 16 tokens of SmolLM2-135M holds 30 layers of keys and values, 3 heads of 64
# numbers, 2 bytes each. A laptop reads 500 MB/s from its disk and prefills 1,500 tokens/s. Is a hit on the disk worth
# reading? And for an 8B model (32 layers, 8 KV heads of 128) on a GPU that prefills 15,000 tokens/s, with a network
# disk of 1 GB/s? Then: why is the block size a trade-off? Five or six sentences with numbers.
#
# # BEGIN SOLUTION
# SmolLM2 has 2 * 30 * 3 * 64 * 2 = 23,040 bytes a token. Computing 1,500 tokens/s is worth 35 MB/s, the disk gives 500:
# reading is 14 times faster. The 8B model has 131,072 bytes a token; 15,000 tokens/s are worth 2 GB/s, and the network
# disk gives 1: reading takes twice as long as computing, so that hit is better ignored, or read only when the GPU has
# something else to do. The rule: read when bandwidth > bytes per token * prefill tokens per second. Large blocks: fewer
# keys, table entries and requests to the disk, longer copies nearer to full bandwidth. Small blocks: the unfinished last
# block wastes (block_size - 1) / 2 slots on average, and only full blocks are shared, so a prefix is found to within
# block_size - 1 tokens.
# # END SOLUTION

# %% [markdown]
# ## Your cache in the real engine
#
# `plug_cache` puts your keys, your rule of hits and your cache into the engine; the model, attention over tables and the
# loop are the package's. Three prompts begin alike; memory is too small to keep everything, so your cache evicts.

# %%
from cs336_infer import LLM, SamplingParams, generate, load_model
from cs336_infer.course.a2_sockets import plug_cache

plug_cache(root_key=root_key, chain_keys=chain_keys, find_prefix=find_prefix, LRU=LRU, PrefixCache=PrefixCache)
model = load_model(dtype="float32")
story = "Once upon a time, in a small village by the sea, there lived an old man who repaired clocks. One day"
prompts = [story + end for end in (" a girl brought him", " the largest clock", " a girl brought him a clock")]
params = SamplingParams(max_tokens=10)
llm = LLM(model, block_size=4, kv_tokens=44)
mine = [llm.generate(prompt, params)[0] for prompt in prompts]
for answer in mine:
    print(f"{answer.cached_tokens:3} of {len(answer.prompt_token_ids)} tokens from the cache: {answer.text!r}")
print("evictions:", int(llm.stats()["device"]["evictions"]))

# %% [markdown]
# A cache may change how long an answer takes, never the answer. The oracle has no blocks at all:

# %%
oracle = generate(model, prompts, params)
print("same tokens as without a cache:", [a.token_ids for a in mine] == [a.token_ids for a in oracle])

# %% [markdown]
# ## Open task: a better policy
#
# LRU is not the last word. Below is a start: your LRU under another name. Make the number larger: the share of prompt
# tokens that a cache of 2,000 blocks saves on 3,000 requests of made-up chat with the statistics of a real service.
# Belady's rule, which knows the future, is the bound that nobody can pass.
#
# Look at the traffic before you write: how long does a user think, how much other traffic comes meanwhile, and how much
# of it can your cache hold? Which blocks never come back? The policy sees only the four calls; there is no clock, but
# calls can be counted. A victim that is in use, or not in the cache, ends the run.
#
# When graded, your policy never touches the cache: it stays here, and is asked through `answer` by messages, on traffic
# that it has not seen.


# %%
class MyPolicy(LRU):
    """The one to beat."""

    def __init__(self, blocks: int) -> None:
        """`blocks`: how many the cache has."""
        super().__init__()


_mine = {}


def answer(events: list[list], count: int) -> list:
    """Given: tell `MyPolicy` what happened, ask it for `count` victims. ["begin", blocks] starts a new cache."""
    for name, value in events:
        if name == "begin":
            _mine["policy"] = MyPolicy(value)
        else:
            getattr(_mine["policy"], name)(value)
    victims = []
    for _ in range(count):
        victims.append(_mine["policy"].victim())
        _mine["policy"].evicted(victims[-1])
    return victims


# %%
from cs336_infer.course.a2_open_task import hit_rate

print(hit_rate(MyPolicy))
print("timing:", hit_rate(MyPolicy, trace="conversation"))

# %% [markdown]
# The second line is a real trace, when the folder `CS336_TRACES` has it. And the same policy in the engine, with your
# cache around it:

# %%
llm = LLM(model, block_size=4, kv_tokens=44, policy=MyPolicy(11))
mine = [llm.generate(prompt, params)[0] for prompt in prompts]
print("same tokens as without a cache:", [a.token_ids for a in mine] == [a.token_ids for a in oracle])
print("tokens from the cache:", [a.cached_tokens for a in mine], "evictions:", int(llm.stats()["device"]["evictions"]))
