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

# %% [markdown] slideshow={"slide_type": "slide"}
# # 03 · The KV cache
#
# **The question:** memory decides how many people an engine can serve at once. How do we put many growing sequences
# into one memory, and how do they share what they have in common?
#
# After this notebook you can
#
# - compute what a token costs in memory, and how many sequences fit with and without pages;
# - write an allocator of blocks with reference counts, a prefix cache and eviction in 30 lines;
# - say why the key of a block depends on everything before it, and what else must be in it;
# - show that a hit changes nothing in the answer, and catch three bugs that real engines had.
#
# Time: 60 minutes. Needs: a CPU.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What a token costs
#
# Every token that an attention layer may look at later leaves a key and a value in each KV head of each layer. A decode
# step at batch 1 uses a third of a percent of an H100's arithmetic (notebook 02). A batch is what fills it, and this
# memory is what limits the batch.

# %%
import torch

from cs336_infer import load_model, measure
from cs336_infer.models import ModelConfig

model = load_model(dtype="float32")
c = model.config
LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, rope_theta=500000.0)

ours = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 4  # K and V, layers, KV heads, numbers per head, bytes
print(f"SmolLM2-135M in fp32: {ours:,} bytes a token; the package says {measure.kv_bytes_per_token(c, 4):,.0f}")
per_token = measure.kv_bytes_per_token(LLAMA_8B, 2)
room = 80e9 - measure.weight_bytes(LLAMA_8B, 2)
print(f"Llama-3.1-8B in bf16: {per_token / 1024:.0f} KiB a token")
print(f"  on a GPU of 80 GB, behind its weights: {room / per_token:,.0f} tokens,")
print(f"  that is {room / per_token / 8192:.0f} conversations of 8,192 tokens")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The picture, at page size 4
#
# Nobody knows beforehand how long an answer will be. A contiguous cache must reserve the longest one that is allowed.
# Paged memory gives each sequence a page when it needs one.

# %%
from cs336_infer.course import drawings, kv_drawings, pictures

pictures.show(
    kv_drawings.reservations({"A": 6, "B": 3, "C": 9}, reserve=10, slots=28, page=4),
    "Memory of 28 slots, twice. Contiguous, with 10 slots for each: A uses 6 and B 3, the 8 slots left over are too "
    "few for C, which waits. In pages of 4, A, B and C take 2, 1 and 3 pages and one page is free.",
)

# %% [markdown]
# Above: A and B use 9 of the 20 slots reserved for them (*internal fragmentation*), and the 8 left over are too few for
# C (*external fragmentation*). Below: the same memory holds all three. Only the last page of each has empty slots, and
# any free page is good for anybody.
#
# Kwon et al. (2023, PagedAttention) found that the engines of that time used 20 to 38 % of their KV memory for tokens.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Block tables
#
# The pages (we say *blocks*) of a sequence lie anywhere. Its *block table* says where: token `i` is in slot `i % 4` of
# block `table[i // 4]`.

# %%
tables = {"A": ((0, 3), 6), "B": ((0, 1, 5), 9), "C": ((2,), 3)}
pictures.show(
    kv_drawings.tables_and_pool(tables, total=6, page=4, title="the pool of 6 blocks"),
    "Left, three sequences with their block tables: A has blocks 0 and 3, B has 0, 1 and 5, C has 2. Right, the pool: "
    "block 0 has two references, from A and B; block 4 is free.",
)

# %% [markdown]
# A and B begin with the same four tokens, so both tables start with block 0, which has two references. The numbers in
# the cells are positions. B has written one slot of its last block; nobody may read the other three.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Free, live, cached
#
# A block is *live* while somebody uses it. When its last user leaves, its content may still be wanted: then it is
# *cached*, can be found again, and can be taken away when memory runs out. Everything else is *free*.

# %%
states = [
    ("free", "no content", drawings.SKY),
    ("live", "1 or more users", drawings.GREEN),
    ("cached", "0 users, a key", drawings.AMBER),
]
pictures.show(
    drawings.flow(states, back=(2, 1, "hit: live again · evicted: live for another")),
    "Three states: free, live, cached, with arrows from left to right and one back from cached to live.",
)

# %% [markdown]
# free + live + cached is the size of the pool, after every operation. A block that was never completely filled has no
# key and becomes free again.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The idea in 30 lines


# %%
class TinyPool:
    """Blocks with reference counts, found by key when they are full."""

    def __init__(self, total: int) -> None:
        self.free, self.refs = list(range(total)), [0] * total
        self.key_of, self.where = {}, {}  # block -> key, key -> block
        self.cached = {}  # blocks with a key and without users, the oldest first (a dict keeps its order)

    def take(self, keys: list) -> list[int]:
        """The blocks of the longest known prefix, with one more reference to each."""
        found = []
        for key in keys:
            if key not in self.where:
                break  # a hit is a leading run: what lies behind a gap is useless
            block = self.where[key]
            self.cached.pop(block, None)
            self.refs[block] += 1
            found.append(block)
        return found

    def allocate(self) -> int:
        """A block for one user: a free one, or the one that was cached longest ago."""
        block = self.free.pop(0) if self.free else self.evict()
        self.refs[block] = 1
        return block

    def evict(self) -> int:
        block = next(iter(self.cached))
        del self.cached[block], self.where[self.key_of.pop(block)]
        return block

    def publish(self, block: int, key: object) -> None:
        """The block is full: it can be found from now on."""
        if key not in self.where:
            self.key_of[block], self.where[key] = key, block

    def release(self, table: list[int]) -> None:
        for block in reversed(table):  # the end of a prompt first: see below
            self.refs[block] -= 1
            if self.refs[block] == 0 and block in self.key_of:
                self.cached[block] = None
            elif self.refs[block] == 0:
                self.free.append(block)


# %% [markdown] slideshow={"slide_type": "slide"}
# ## The package's version
#
# `BlockPool` does the same, with a socket for other eviction policies, checks and a lock. Here both serve the same
# 2,000 random prompts from a pool of 12 blocks. Do they hit the same blocks, evict at the same moments and count alike?

# %%
import random

from cs336_infer.kv import BlockPool, KeyChain, root_key

draw = random.Random(0)
tiny, pool, same, hits, lookups = TinyPool(12), BlockPool(12, debug=True), True, 0, 0
for _ in range(2000):
    ids = [draw.randrange(2) for _ in range(draw.randrange(1, 25))]  # two tokens only: many prompts begin alike
    keys = KeyChain(root_key(), 4, ids).keys
    blocks = -(-len(ids) // 4)
    one, two = tiny.take(keys), pool.take(keys)
    same &= len(one) == len(two)
    hits, lookups = hits + len(one), lookups + len(keys)
    one += [tiny.allocate() for _ in range(blocks - len(one))]
    two += pool.allocate(blocks - len(two))
    for i, key in enumerate(keys):
        if tiny.where.get(key) is None:
            tiny.publish(one[i], key)
            pool.publish(two[i], key)
    tiny.release(one)
    pool.release(two)
    same &= (len(tiny.free), len(tiny.cached)) == (pool.free, pool.cached)
print(f"{hits} of {lookups} full blocks hit, {pool.evictions} evictions; the same in both: {same}")
print(f"now free {pool.free}, cached {pool.cached}, live {pool.live}, together {pool.total}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Why keys are chained
#
# Two prompts hold the same four tokens at the same place, behind different beginnings. May they share that block? Look
# at the keys that a middle layer computes for these four tokens:

# %%
from cs336_infer.kv import ContiguousKV

tok = model.tokenizer
middle = tok.encode(" of the old town")[:4]
prefixes = [tok.encode(text)[:4] for text in ("The mayor and council", "A map and picture")]


def keys_of(ids: list[int], layer: int) -> torch.Tensor:
    cache = ContiguousKV(c, batch=1, capacity=len(ids), dtype=torch.float32)
    model.net.forward(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0), cache)
    return cache.k[layer][0, :, -4:]


for layer in (0, 15):
    a, b = (keys_of(prefix + middle, layer) for prefix in prefixes)
    print(f"layer {layer:2}: the two differ by {float((a - b).norm() / a.norm()):.0%} of their size")

# %% [markdown]
# Layer 0 sees a token and its position, so its keys are the same. Every later layer has seen the beginning through
# attention. A block's content is a function of *all tokens up to its end*, and so must be its key: the hash of its
# tokens and of the key before it.

# %%
salt_free, salted = root_key(model="SmolLM2", dtype="float32"), root_key(model="SmolLM2", dtype="float32", salt="ann")
prompts = {
    "first": (salt_free, [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23]),
    "second": (salt_free, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]),
    "other start": (salt_free, [7, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23]),
    "other salt": (salted, [1, 2, 3, 4, 5, 6, 7, 8, 20, 21, 22, 23]),
}
chains = []
for name, (root, ids) in prompts.items():
    keys = KeyChain(root, 4, ids).keys
    cards = [(" ".join(map(str, ids[i : i + 4])), keys[i // 4].hex()[:6]) for i in range(0, 12, 4)]
    chains.append((name, root.hex()[:6], cards))
pictures.show(
    kv_drawings.key_chain(chains, equal=[2, 2, 0, 0]),
    "Four chains of a root and three keys. The first two share the root and two keys. A prompt with another first "
    "token shares the root only, and one with another salt shares nothing.",
)

# %% [markdown]
# Pink keys are shared. One other token at the start changes every key behind it. The *root* stands for everything else
# the numbers depend on: model, dtype, kernels, block size, adapter, and a salt that keeps customers apart (who can
# measure a hit can learn what others have asked). Python's own `hash` is no such key: it differs from process to
# process (LMCache#2136), and short or predictable hashes can be made to collide (vllm#12621).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Who is evicted first
#
# Two prompts of 5 and 4 blocks share their first two. Both are cached. Another request now takes block after block.

# %%
gone: list[int] = []
pool = BlockPool(7, on_evict=lambda block, key: gone.append(block))
held = {}
for name, ids in {"first": [0, 1, 2, 3, 4], "second": [0, 1, 12, 13]}.items():
    keys = KeyChain(root_key(), 1, ids).keys
    held[name] = pool.take(keys)
    held[name] += pool.allocate(len(keys) - len(held[name]))
    pool.publish_all(held[name][pool.match(keys) :], keys[pool.match(keys) :])
for table in held.values():
    pool.release(table)
pool.allocate(7)
pictures.show(
    kv_drawings.eviction_order(held, gone),
    "Two rows of blocks with the order of eviction: the ends of both prompts go first, the shared beginning last.",
)
print("evicted in this order:", gone)

# %% [markdown]
# The end of a prompt goes before its beginning, because `release` lets the last block go first. It matters: a hit is a
# *leading* run, so a block whose predecessor is gone can never be hit again. And beginnings are what others share.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The real engine
#
# `LLM` puts a model on top: paged memory, prefix cache, and steps in which sequences come and go. It has to give what
# the run without any cache gives.

# %%
from cs336_infer import LLM, SamplingParams, generate

llm = LLM(model, block_size=16, kv_tokens=4096, fill=float("nan"), debug=True)
questions = ["The capital of France is", "Once upon a time, in a small village by the sea,", "Two and two is"]
greedy = SamplingParams(max_tokens=12)
oracle = generate(model, questions, greedy, kv="none")
for answer, wanted in zip(llm.generate(questions, greedy), oracle, strict=True):
    print(f"same as without a cache: {answer.token_ids == wanted.token_ids}  {answer.text!r}")
print("path:", answer.path.split(" threads")[0])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Watch the accounting
#
# A pool of 16 blocks. Three requests come one after another, in overlapping turns; the third begins like the first.
# After each step we write down how many blocks are live, cached and free.

# %%
small = LLM(model, block_size=4, kv_tokens=64, debug=True)
story = tok.encode("Once upon a time, in a small village by the sea, there lived a girl")
other = tok.encode("Light travels through empty space at a constant speed, whatever")
arrivals = {0: story, 6: other, 26: [*story, *tok.encode(" who")]}
counts, found = [], {}
for step in range(46):
    if step in arrivals:
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        found[step] = small.engine.add(arrivals[step], params, small.root())[0]
    small.engine.step()
    counts.append((small.kv.pool.live, small.kv.pool.cached, small.kv.pool.free))
fig, ax = pictures.subplots(figsize=(8.5, 3.3))
live, cached, free = zip(*counts, strict=True)
ax.stackplot(range(46), live, cached, free, step="post", colors=["#009E73", "#E69F00", "#E3F2FB"])
for x, y, text in ((3, 2.5, "live"), (23.5, 5, "cached"), (3, 12, "free")):
    ax.text(x, y, text, ha="center", va="center", weight="bold")
for step in arrivals:
    ax.axvline(step, color="black", lw=1, ls=":")
ax.set(xlabel="step", ylabel="blocks", title="a pool of 16 blocks; dotted lines: a request arrives", ylim=(0, 16))
ax.set(xlim=(0, 45), yticks=range(0, 17, 4))
pictures.show(fig, "Stacked areas of live, cached and free blocks over 46 steps; together always 16.")
print("found in the cache at arrival:", {step: s.completion.cached_tokens for step, s in found.items()}, "tokens")
print("evictions:", small.kv.pool.evictions)

# %% [markdown]
# Live blocks (green) turn into cached ones (orange) when an answer ends. The third request finds 16 tokens, so their
# blocks are live again at once; when nothing is free, cached blocks are evicted. The sum is always 16. If live blocks
# alone fill a pool, the youngest sequence gives up its own and starts again later from its tokens (*recompute
# preemption*), with the same result.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: how many sequences fit into 64 MiB?
#
# Now 64 MiB of KV memory, or 1,456 tokens of our model. Answers may have up to 512 tokens with their prompt, so a
# contiguous cache holds two sequences. The prompts that wait have 10 to 69 tokens, 40 on average. **How many are
# running after the first step, in blocks of 16?**

# %%
from cs336_infer.course.predict import explain, measured, predict

predict("sequences running in 64 MiB", low=20, high=36, unit="sequences", why="1,456 tokens, 40 tokens each")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
slots = 64 * 2**20 // ours
crowd = LLM(model, block_size=16, kv_tokens=slots, max_batch=100, step_tokens=2048)
text = tok.encode("Tell me, please, how a small boat finds its way home through the fog when nobody on board has " * 4)
waiting = [text[i % 7 : i % 7 + 10 + 37 * i % 60] for i in range(60)]
for prompt in waiting:
    crowd.engine.add(prompt, SamplingParams(max_tokens=512 - len(prompt)), crowd.root())
crowd.engine.step()
running = crowd.engine.running
used = sum(s.kv.length for s in running)
print(f"{slots} slots: {slots // 512} sequences contiguous, {len(running)} in {crowd.kv.pool.total} blocks of 16")
print(f"{used} of {crowd.kv.pool.live * 16} slots in live blocks hold a token: {used / crowd.kv.pool.live / 16:.0%}")
measured(
    "sequences running in 64 MiB",
    len(running),
    bound=slots / (sum(map(len, waiting)) / len(waiting)),
    bound_label="all slots filled, at the average prompt",
)

# %%
explain(
    "sequences running in 64 MiB",
    "Nothing is reserved for the 512 tokens that may come: a prompt of 40 tokens takes 3 blocks, and only the end of "
    "its last block is empty.",
    must_mention=512,
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The waste of a page, by formula
#
# A sequence of `n` tokens in blocks of `b` leaves `-n mod b` slots empty, `(b - 1) / 2` on average. As a share of the
# whole: the sum of `-n mod b` over the sum of `ceil(n / b) * b`. **Predict** it for blocks of 16 and sequences of 203
# tokens on average.

# %%
predict("empty slots at b = 16", low=2, high=5, unit="%", why="7.5 slots behind 203 tokens")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from cs336_infer.kv.waste import measure_waste
from cs336_infer.simulate.trace import TraceRequest


def chats(mean: int, count: int = 400) -> list[TraceRequest]:
    """Prompts and answers with exponentially distributed lengths; together `mean` tokens on average, about."""
    draw = random.Random(1)
    return [
        TraceRequest(0.0, 1 + int(draw.expovariate(1.5 / mean)), 1 + int(draw.expovariate(3 / mean)))
        for _ in range(count)
    ]


real = measure_waste(chats(200), 16)
print(f"{real.sequences} sequences of {real.tokens / real.sequences:.0f} tokens on average, grown in a block pool:")
print(f"  empty in the pool      {real.paged:7.2%}")
print(f"  by the closed formula  {real.formula:7.2%}   equal: {real.paged == real.formula}")
print(f"  contiguous, each as long as the longest ({real.longest}): {real.contiguous_longest:.0%}")
expected = 7.5 / (7.5 + real.tokens / real.sequences)
measured("empty slots at b = 16", 100 * real.paged, bound=100 * expected, bound_label="7.5 slots a sequence")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Turn the knob: the block size
#
# Small blocks waste little. But each block needs an entry in a table, a hash, a lookup, and, when it moves to another
# tier, a copy of its own. And a prefix hit ends at a block border.

# %%
import ipywidgets as widgets

from cs336_infer.course.widgets import explorer

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
LENGTHS = {mean: [r.input_tokens + r.output_tokens for r in chats(mean)] for mean in (50, 200, 1000, 8000)}


def by_formula(block: int, mean: int) -> tuple[float, float]:
    """Share of empty slots, and entries of a block table on average."""
    blocks = [-(-n // block) for n in LENGTHS[mean]]
    return sum(-n % block for n in LENGTHS[mean]) / sum(blocks) / block, sum(blocks) / len(blocks)


def draw_sizes(block: int, mean: int):
    empty, entries = zip(*(by_formula(b, mean) for b in SIZES), strict=True)
    at = SIZES.index(block)
    fig, (left, right) = pictures.subplots(1, 2, figsize=(10, 3.4))
    left.plot(SIZES, [100 * share for share in empty], "o-", color=drawings.BLUE)
    left.plot([block], [100 * empty[at]], "o", ms=12, color=drawings.ORANGE)
    left.set(xlabel="tokens per block", ylabel="% of live slots", title="empty slots", ylim=(0, 80))
    right.loglog(SIZES, entries, "o-", color=drawings.GREEN)
    right.plot([block], [entries[at]], "o", ms=12, color=drawings.ORANGE)
    right.set(xlabel="tokens per block", ylabel="entries per sequence", title="block table", ylim=(0.5, 20000))
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(SIZES, map(str, SIZES))
    return fig


def describe_sizes(block: int, mean: int) -> str:
    empty, entries = by_formula(block, mean)
    return (
        f"Blocks of {block} and sequences of {sum(LENGTHS[mean]) / len(LENGTHS[mean]):.0f} tokens on average: "
        f"{empty:.1%} of the live slots are empty, a table has {entries:.1f} entries, a block is "
        f"{block * ours / 1024:,.0f} KiB, and a prefix hit loses up to {block - 1} tokens at its end."
    )


knobs = explorer(
    {
        "block": widgets.SelectionSlider(options=SIZES, value=16, description="tokens per block"),
        "mean": widgets.SelectionSlider(options=list(LENGTHS), value=200, description="tokens per sequence, about"),
    },
    draw_sizes,
    describe_sizes,
)
knobs

# %% [markdown]
# Left: the share of empty slots grows with the block. Right: the table shrinks. (Without a running kernel you see
# blocks of 16.) The same from code, and what follows for long prompts:

# %%
for block, mean in ((16, 50), (256, 50), (16, 8000), (256, 8000)):
    print(describe_sizes(block, mean))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: a prompt that is known already
#
# A system prompt of 640 tokens is computed once. Then others ask, with the same prompt in front: at most 20 tokens each
# are new. A hit moves no memory, the block table points to it: it saves arithmetic, and what it costs is that 29.5 MB
# stay occupied. **How many times sooner comes the first token?**

# %%
rules = " ".join(
    f"Rule {i}: when somebody asks about item {i}, look at shelf {i * 7 % 50} first." for i in range(1, 60)
)
system = tok.encode(rules)[:640]
asks = [tok.encode(f"\nQuestion: where is item {i}?\nAnswer:") for i in range(3, 9)]
predict("cold TTFT over hit TTFT", low=10, high=60, unit="times", why="640 tokens less to compute, 15 are left")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from statistics import median

llm = LLM(model, block_size=16, kv_tokens=8192)
one = SamplingParams(max_tokens=1)
cold = [llm.generate([*system, *asks[0]], one, salt=f"nobody else {i}")[0] for i in range(2)]
llm.generate(system, one)
warm = [llm.generate([*system, *ask], one)[0] for ask in asks]
new = len(system) + len(asks[0]) - warm[0].cached_tokens
print(f"cold: {cold[0].cached_tokens} tokens found, {len(system) + len(asks[0])} computed")
print(f"hit:  {warm[0].cached_tokens} tokens found, {new} computed; {warm[0].cached_tokens * ours / 1e6:.1f} MB reused")
slow, fast = (median(a.ttft_s for a in answers) for answers in (cold, warm))
print(f"timing: TTFT cold {slow * 1e3:.0f} ms, hit {fast * 1e3:.0f} ms")
limit = (len(system) + len(asks[0])) / new
measured("cold TTFT over hit TTFT", slow / fast, bound=limit, bound_label="tokens to compute, cold over hit")

# %%
asked, short = [*system, *asks[0]], SamplingParams(max_tokens=6)
hit, plain = llm.generate(asked, short)[0], generate(model, [asked], short)[0]
print(f"{hit.cached_tokens} tokens found; same answer as without a prefix cache: {hit.token_ids == plain.token_ids}")
explain(
    "cold TTFT over hit TTFT",
    "The hit skips 640 tokens of arithmetic, but the few that are left still read all 538 MB of weights, so the gain "
    "is smaller than the ratio of the tokens.",
    must_mention=[640, 538],
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Many answers to one prompt: copy on write
#
# `n` answers share the blocks of their prompt. The last, partly filled one is shared too, until somebody writes to it:
# then the writer gets a copy first.

# %%
frames = [
    ("prompt of 6 tokens", {"A": ((0, 1), 6)}),
    ("forked: A and B", {"A": ((0, 1), 6), "B": ((0, 1), 6)}),
    ("both wrote a token", {"A": ((0, 2), 7), "B": ((0, 1), 7)}),
]
pictures.show(
    kv_drawings.pool_frames(frames, total=4, page=4),
    "Three moments of a pool of four blocks: one sequence with blocks 0 and 1; a fork that shares both; after each "
    "wrote, A has its own copy of the last block in block 2 and only block 0 is shared.",
)

# %% [markdown]
# The first one to write copies (here A, to block 2) and gives its reference to the old block back; the other is then
# alone in block 1 and writes in place. The engine does the same with four answers:

# %%
many = LLM(model, block_size=16, kv_tokens=2048, debug=True)
prompt = tok.encode("The three best reasons to walk to school on a rainy day are:\n\n1. You")  # 1 block and a bit
params = SamplingParams(max_tokens=6, temperature=0.9, seed=5, ignore_eos=True)
answers = many.engine.add(prompt, params, many.root(), n=4)
print(f"the prompt has {len(prompt)} tokens: {-(-len(prompt) // 16)} blocks")
for step in range(2):
    many.engine.step()
    print(f"after step {step + 1}: live blocks {many.kv.pool.live}, tables {[a.kv.table for a in answers]}")
while many.engine.busy:
    many.engine.step()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What lies behind the end of a page
#
# Slots that were never written hold whatever was in memory: zeros today, another user's numbers tomorrow, perhaps a
# NaN. The results must not depend on it, not in a single bit. So we fill the pool with NaN and with two finite values,
# and compare the scores of two sequences of different length in one batch, bitwise.

# %%
from cs336_infer.kv.manager import KVManager
from cs336_infer.kv.paged import PagedKV


def decode_scores(fill: float) -> torch.Tensor:
    """Logits of one decode step of two sequences, of 8 and 6 tokens, in blocks of 4."""
    kv = KVManager(PagedKV(c, num_blocks=8, block_size=4, dtype=torch.float32, fill=fill))
    both = [(ids, kv.begin(ids, root_key())) for ids in (story[:7], other[:5])]
    for news in ([ids for ids, _ in both], [[story[7]], [other[5]]]):  # prefill, then one token each
        for (_, sequence), new in zip(both, news, strict=True):
            kv.reserve(sequence, len(new))
        step = kv.step([(s, len(new)) for (_, s), new in zip(both, news, strict=True)])
        flat = torch.tensor([[token for new in news for token in new]])
        logits = model.net.forward(flat, step.positions, step, at=step.last)[0]
        for (_, sequence), new in zip(both, news, strict=True):
            kv.stored(sequence, new)
    return logits


zeros, ones, nans = (decode_scores(fill) for fill in (0.0, 12345.0, float("nan")))
print("filled with 12345, bitwise the same as with 0:", torch.equal(ones, zeros))
print("filled with NaN,   bitwise the same as with 0:", torch.equal(nans, zeros))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (1): a mask that is not enough
#
# In this mutant the tail of a page is masked, as it should be, but not set to zero. Attention gives masked positions
# the weight 0. **Say what breaks**, and for which of the three fills, before you read the output.

# %%
from cs336_infer.kv import singles


class MaskOnly(singles.Gathered):
    def gather(self, pages, scratch):
        self._hidden = None  # the places that would be set to zero
        return super().gather(pages, scratch)


right, singles.Gathered = singles.Gathered, MaskOnly
for fill in (0.0, 12345.0, float("nan")):
    scores = decode_scores(fill)
    print(f"filled with {fill:7}: as it should be {torch.equal(scores, zeros)}, finite {bool(scores.isfinite().all())}")
singles.Gathered = right

# %% [markdown]
# With zeros and with other finite numbers the mutant passes. `0 * NaN` is NaN, so one NaN behind the end of one
# sequence spoils its scores; the best of 49,152 NaNs is token 0, which many engines printed as "!!!!" (vllm#641, #936,
# #22881). Fill unused memory with NaN *and* with two finite values: each finds what the other misses.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (2): a map that remembers too long
#
# This mutant of our allocator takes a cached block for somebody else but leaves its old key in the map (nano-vllm#163
# was of this kind). **What will the third request read?**


# %%
class Forgetless(TinyPool):
    def evict(self) -> int:
        block = next(iter(self.cached))
        del self.cached[block]
        return block


def third_request(pool: TinyPool) -> str:
    written = {}  # what a block really holds
    for name in ("X", "Y", "X"):
        keys = [f"{name}{i}" for i in range(3)]
        table = pool.take(keys)
        hits = len(table)
        table += [pool.allocate() for _ in range(3 - hits)]
        for block, key in list(zip(table, keys, strict=True))[hits:]:
            pool.publish(block, key)
            written[block] = key
        pool.release(table)
    return f"{hits} hits, reads {[written[block] for block in table]}"


print("right: ", third_request(TinyPool(3)))
print("mutant:", third_request(Forgetless(3)))

# %% [markdown]
# The mutant reports a perfect hit rate and gives X the memory of Y: one user's text in another user's answer, without
# an error. The package drops the key with the block, and compares the tokens of a block on every hit besides.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (3): a fork that does not copy
#
# Four sampled answers share the unfinished last block of their prompt. In this mutant nobody copies it. **How many of
# the four answers are still right?** Each must be what the same seed gives alone and without a cache.

# %%
from dataclasses import replace

from cs336_infer.engine import Engine


class NeverCopy(KVManager):
    def _shared_tail(self, sequence) -> bool:
        return False


alone = [generate(model, [prompt], replace(params, seed=5 + i), kv="none")[0].token_ids for i in range(4)]
for manager in (KVManager, NeverCopy):
    engine = Engine(model, manager(PagedKV(c, num_blocks=64, block_size=16, dtype=torch.float32)))
    answers = engine.add(prompt, params, root_key(), n=4)
    while engine.busy:
        engine.step()
    print(f"{manager.__name__}: right {[a.completion.token_ids == w for a, w in zip(answers, alone, strict=True)]}")

# %% [markdown]
# The last one to write wins: it alone reads its own tokens, the others attend to words that they never said. All four
# texts are fluent. "As alone, with the same seed" finds it.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Takeaways
#
# - KV memory per token is fixed by the model (45 KiB here, 128 KiB for an 8B model). It limits the batch.
# - Blocks and tables: nothing is reserved, only the last block of a sequence has empty slots, `(b - 1) / 2` on average.
# - References let sequences share blocks; a writer copies a block that somebody else reads.
# - A key is a chain of hashes from a root. A hit is a leading run, so the end of a prompt is evicted first.
# - free + live + cached = total, and a hit changes nothing: two properties that a test can check after every step.
#
# ## Where real engines differ
#
# - vLLM keeps one queue of all blocks without users, with or without a key, linked through the blocks themselves; a
#   block that never got a key waits in it like the others. Ours gives free blocks away before it evicts anything.
# - vLLM leaves the last token of a full hit to be computed, or the last block, as we do: its scores are needed.
# - SGLang keeps a radix tree over tokens instead of keys of blocks (Zheng et al. 2024, RadixAttention). A hit can end
#   anywhere, eviction takes leaves, and the scheduler may run requests with the longest shared prefix first. The paper
#   reports hit rates of 50 to 99 %.
# - On a GPU the attention kernel reads through the block table. Ours first copies a sequence's blocks together: simple,
#   and twice the traffic. The stage on kernels removes it.
#
# ## Read next
#
# - Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP).
# - vLLM's design note on prefix caching; Zheng et al. 2024, "SGLang".
# - `cs336_infer/kv/pool.py`, `prefix.py`, `paged.py`: the three files of this lecture.
# - Next: `04_kv_tiers`, for what no longer fits.
