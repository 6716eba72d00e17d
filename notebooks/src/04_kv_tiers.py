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
# # 04 · KV tiers
#
# **The question:** device memory holds minutes of conversations. People come back after hours. Which blocks do we keep,
# where, and when is it better to compute them again?
#
# After this notebook you can
#
# - say what each tier holds, how fast it is, and how a block travels between them;
# - compare eviction policies with the best that is possible, on an hour of chat traffic;
# - compute the bandwidth below which a hit is slower than a recomputation, and measure it here;
# - say what can go wrong on the way (a crash, a reused slot, a flipped bit), and show that each becomes a miss.
#
# Time: 60 minutes. Needs: a CPU and 100 MB of disk.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The ladder
#
# A prompt of 8,192 tokens of Llama-3.1-8B is 1.07 GB of keys and values. How long until they are where the attention
# kernel can read them? Nominal figures of one H100 in a server: HBM 80 GB at 3.35 TB/s, DRAM behind PCIe 5 x16 at 64
# GB/s, one NVMe drive at 7 GB/s, a network file system at 1 GB/s. To compute them again takes the prefill, at best.

# %%
from cs336_infer import measure
from cs336_infer.course import drawings, kv_drawings, pictures
from cs336_infer.models import ModelConfig

LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, rope_theta=500000.0)
size = 8192 * measure.kv_bytes_per_token(LLAMA_8B, 2)
ways = {
    "read in HBM, 3.35 TB/s": size / 3.35e12,
    "from host DRAM, 64 GB/s": size / 64e9,
    "compute again, 989 TFLOP/s": measure.prefill(LLAMA_8B, 8192).flops / 989e12,
    "from NVMe, 7 GB/s": size / 7e9,
    "from a file system, 1 GB/s": size / 1e9,
}
fig, ax = pictures.subplots(figsize=(8.5, 2.9))
colors = [drawings.BLUE, drawings.ORANGE, "#888888", drawings.GREEN, drawings.AMBER]
bars = ax.barh(list(ways)[::-1], [1e3 * t for t in ways.values()][::-1], color=colors[::-1], height=0.66)
ax.bar_label(bars, labels=[f"{1e3 * t:,.{0 if t > 0.01 else 2}f} ms" for t in ways.values()][::-1], padding=4)
ax.set(xscale="log", xlim=(0.1, 10000), xlabel="ms for 8,192 tokens", title=f"{size / 1e9:.2f} GB of keys and values")
ax.grid(axis="y", visible=False)
pictures.show(
    fig,
    "Bars on a logarithmic axis: 0.32 ms from HBM, 17 ms from host DRAM, 133 ms to compute again, 153 ms from NVMe, "
    "1,074 ms from a file system of 1 GB/s.",
)

# %% [markdown]
# Host DRAM is eight times faster than computing again. One drive is about a draw, and the slow file system loses. That
# is all of this lecture: more memory, more hits, and a price for each hit that must stay below the price of a miss.
#
# On a CPU, *device* and *host* are the same DRAM. Where this notebook prints a figure for either, a copy between them
# is a memcpy; on a GPU it crosses PCIe.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## A block's journey
#
# Three places on the device, three in the host, six on disk, and prompts of one block each. Below is the package's KV
# manager with tiers, only with a model of 16 bytes a token. We serve prompts A to E, then A again, and after each note
# where every block is.

# %%
import logging
import tempfile
from pathlib import Path

import torch

from cs336_infer.kv import root_key
from cs336_infer.kv.block_file import file_bytes
from cs336_infer.kv.manager import KVManager
from cs336_infer.kv.paged import PagedKV
from cs336_infer.kv.prefix import KeyChain
from cs336_infer.kv.tiers import Tiers

logging.getLogger("cs336_infer").setLevel(logging.ERROR)
home = tempfile.TemporaryDirectory()
TOY = ModelConfig("llama", 64, 4, 8, 1, 1, 1, 2, 64)  # one layer, one head of two numbers
ROOT, BLOCK, TOKENS = root_key(model="toy"), 64, 4


def toy(name: str, host: int, disk: int, write: str, device: int = 3) -> KVManager:
    """KV memory for `device` finished blocks and one in the making, over tiers for `host` and `disk` blocks."""
    memory = PagedKV(TOY, num_blocks=device + 1, block_size=TOKENS, dtype=torch.float32)
    budget = disk * file_bytes(4 * TOKENS, BLOCK)
    folder = Path(home.name) / name
    tiers = Tiers(
        block_bytes=BLOCK, fingerprint=ROOT, host_bytes=host * BLOCK, disk_bytes=budget, folder=folder, write=write
    )
    return KVManager(memory, tiers=tiers, write=write)


def serve(kv: KVManager, prompt: str) -> int:
    """One prompt of a block and a token. Returns tokens found."""
    ids = [ord(prompt) % 64] * TOKENS + [0]
    sequence = kv.begin(ids, ROOT)
    kv.reserve(sequence, len(ids) - sequence.cached)
    kv.stored(sequence, ids[sequence.cached :])
    kv.end(sequence)
    return sequence.cached


def where(kv: KVManager, prompts: str) -> dict[str, tuple[int, list[str]]]:
    key = {p: KeyChain(ROOT, TOKENS, [ord(p) % 64] * TOKENS).keys[0] for p in prompts}
    return {
        "device": (3, [p for p in prompts if kv.pool.match([key[p]])]),
        "host": (3, [p for p in prompts if key[p] in kv.tiers.host.ledger]),
        "disk": (6, [p for p in prompts if key[p] in kv.tiers.disk.ledger]),
    }


journey = toy("journey", host=3, disk=6, write="through")
frames = []
for prompt in "ABCDEA":
    found = serve(journey, prompt)
    journey.flush()
    title = f"{prompt} again: found" if found else f"{prompt} is computed"
    frames.append((title, prompt, where(journey, "ABCDE")))
journey.tiers.close()
pictures.show(
    kv_drawings.tier_strip(frames),
    "Six moments. A, B and C are computed and are on device, host and disk. D and E push A and B out of device and "
    "host; both stay on disk. A comes again, is found on disk and is back on device and host, where C had to go.",
)

# %% [markdown]
# With *write-through* a block is copied down as soon as it is full, so that later it can leave a tier at once. In frame
# 6, A is found on disk: it travels up to the device, and to the host beside, because what was wanted once may be wanted
# again. The same, one frame at a time:

# %%
import ipywidgets as widgets

from cs336_infer.course.widgets import explorer


def draw_frame(step: int):
    title, mark, levels = frames[step - 1]
    fig, ax = pictures.subplots(figsize=(5.5, 2.6))
    kv_drawings.tiers(ax, levels, f"{step}. {title}", mark)
    return fig


def describe_frame(step: int) -> str:
    title, _, levels = frames[step - 1]
    return f"Step {step}, {title}: " + "; ".join(f"{t} {' '.join(names)}" for t, (_, names) in levels.items()) + "."


film = explorer({"step": widgets.IntSlider(value=6, min=1, max=6, description="step")}, draw_frame, describe_frame)
film

# %% [markdown]
# (Without a running kernel you see the last step.)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Traffic to measure with
#
# An hour of chat, 12,031 requests with 150 million prompt tokens, made by a generator with the statistics of the
# published Mooncake trace (Qin et al. 2025; blocks of 512 tokens). **Predict:** with a cache of 3 million tokens, which
# share of the prompt tokens is found? With an endless cache it is 38 %.

# %%
from cs336_infer.course.predict import explain, measured, predict

predict("hit rate with 3M tokens", low=10, high=30, unit="%", why="2 % of the hour's tokens, but people come back soon")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from tqdm import tqdm

from cs336_infer.kv.policies import make_policy
from cs336_infer.kv.replay import UNLIMITED, replay
from cs336_infer.simulate.synthetic import generate

hour = list(generate())
CAPACITIES = {"0.25M": 250_000, "1M": 1_000_000, "3M": 3_000_000, "10M": 10_000_000, "50M": 50_000_000}


def hit_rate(requests, policy: str, tokens: int) -> float:
    blocks = min(tokens // 512, UNLIMITED)
    return replay(requests, blocks, make_policy(policy, blocks, lambda: (r.keys for r in requests))).token_hit_rate


generated = {name: hit_rate(hour, "lru", tokens) for name, tokens in tqdm(CAPACITIES.items())}
measured(
    "hit rate with 3M tokens",
    100 * generated["3M"],
    bound=100 * generated["50M"],
    bound_label="50M tokens, nearly endless",
)

# %%
PUBLISHED = {"0.25M": 0.043, "1M": 0.054, "3M": 0.139, "10M": 0.291, "50M": 0.371}
print(f"{'capacity in tokens':22}" + "".join(f"{name:>8}" for name in CAPACITIES))
print(f"{'generated, LRU':22}" + "".join(f"{rate:8.1%}" for rate in generated.values()))
print(f"{'published trace, LRU':22}" + "".join(f"{rate:8.1%}" for rate in PUBLISHED.values()))
explain(
    "hit rate with 3M tokens",
    "Between two turns of a conversation everybody else's prompts arrive, and 3M tokens are 2 % of the hour's traffic.",
    must_mention=3,
)

# %% [markdown]
# The second row was computed with this package from the published trace (endless: 37.4 %). If you have it, name its
# folder in the variable `CS336_TRACES` and the cell below replays it; without it, it says so. What do 3 million tokens
# mean? About 1 TB of DRAM for the model that Mooncake serves (their paper), and 393 GB for Llama-3.1-8B.

# %%
import os

from cs336_infer.simulate.sources import FOLDER_VARIABLE, NAMED

path = Path(os.environ.get(FOLDER_VARIABLE, "")) / NAMED["conversation"]
if path.is_file():
    from cs336_infer.simulate.trace import read_trace

    trace = list(read_trace(path))
    rates = ", ".join(f"{name} {hit_rate(trace, 'lru', tokens):.1%}" for name, tokens in CAPACITIES.items())
    print(f"timing: the published trace, replayed here: {rates}")
else:
    print(f"timing: the published trace is not here ({FOLDER_VARIABLE} is not set)")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Which policy?
#
# - **LRU**: the block that was used longest ago goes. **FIFO**: the one that came first. **LFU**: the one with the
#   fewest uses. **ARC** balances recency and frequency by itself (Megiddo and Modha 2003).
# - **Belady** knows the future and evicts what is needed last. No policy has more hits (Belady 1966).
#
# To save time we replay the first 3,000 requests, a quarter of an hour.

# %%
quarter = hour[:3000]
GRID = {"0.25M": 250_000, "0.5M": 500_000, "1M": 1_000_000, "2M": 2_000_000, "4M": 4_000_000, "8M": 8_000_000}
POLICIES = ("lru", "fifo", "lfu", "arc", "belady")
rates = {p: [hit_rate(quarter, p, tokens) for tokens in GRID.values()] for p in tqdm(POLICIES)}
fig, ax = pictures.subplots(figsize=(8, 3.9))
styles = {"lru": "o-", "fifo": "s--", "lfu": "^:", "arc": "d-.", "belady": "k*-"}
for policy in POLICIES:
    ax.plot(range(len(GRID)), [100 * r for r in rates[policy]], styles[policy], label=policy)
ax.set_xticks(range(len(GRID)), list(GRID))
ax.set(xlabel="capacity in tokens", ylabel="% of prompt tokens found", title="3,000 generated requests", ylim=(0, None))
ax.legend()
pictures.show(
    fig,
    "Hit rate over capacity for five policies. Belady rises from 12 to 29 % and is far above the others, which rise "
    "from 4 to 26 % and lie within three points of one another, LFU lowest at 2M and 4M tokens.",
)

# %% [markdown]
# Small caches find little but the system prompt. In between, the four policies differ by less than three points, and
# the gap to Belady is wide: it alone knows who will come back. LFU keeps what was popular, and a conversation that has
# ended was popular. On this traffic, twice the memory is worth more than any of the policies.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Turn the knobs

# %%


def draw_policy(policy: str, capacity: str):
    fig, ax = pictures.subplots(figsize=(7.5, 3.3))
    at = list(GRID).index(capacity)
    ax.plot(range(len(GRID)), [100 * r for r in rates["belady"]], "k*:", label="belady")
    ax.plot(range(len(GRID)), [100 * r for r in rates[policy]], "o-", color=drawings.BLUE, label="chosen")
    ax.plot([at], [100 * rates[policy][at]], "o", ms=13, color=drawings.ORANGE)
    ax.set_xticks(range(len(GRID)), list(GRID))
    ax.set(xlabel="capacity in tokens", ylabel="% found", ylim=(0, 40), title=f"{policy}, {capacity} tokens")
    ax.legend()
    return fig


def describe_policy(policy: str, capacity: str) -> str:
    at = list(GRID).index(capacity)
    rate, best = rates[policy][at], rates["belady"][at]
    return (
        f"{policy} with {capacity} tokens finds {rate:.1%} of the prompt tokens, {rate / best:.0%} of what Belady "
        f"finds. For Llama-3.1-8B that is {GRID[capacity] * 131072 / 1e9:,.0f} GB, and prefill is 1 / (1 - hit rate) = "
        f"{1 / (1 - rate):.2f} times cheaper."
    )


knobs = explorer(
    {
        "policy": widgets.Dropdown(options=list(POLICIES), value="lru", description="policy"),
        "capacity": widgets.SelectionSlider(options=list(GRID), value="2M", description="capacity in tokens"),
    },
    draw_policy,
    describe_policy,
)
knobs

# %% [markdown]
# The dot is the chosen cache, the dotted line the optimum. (Without a running kernel you see LRU with 2M tokens.) From
# code:

# %%
for policy, capacity in (("lru", "0.5M"), ("lru", "8M"), ("belady", "2M")):
    print(describe_policy(policy, capacity))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (1): touch in forward order
#
# Our pool lets the blocks of a request go from the last to the first, so that the end of a prompt is evicted first.
# This mutant does it from the first to the last: one word of difference. Two workloads: two documents of 8 blocks that
# are asked about by turns, with room for 12 blocks; and the chats above. **How many of LRU's hits are left in each?**

# %%
import importlib

from cs336_infer.kv import BlockPool
from cs336_infer.simulate.trace import TraceRequest

replaying = importlib.import_module("cs336_infer.kv.replay")


class Forward(BlockPool):
    def release(self, blocks) -> None:
        super().release(list(reversed(blocks)))


documents = [TraceRequest(0.0, 8 * 512, 1, tuple(range(8 * (i % 2), 8 * (i % 2) + 8)), 512) for i in range(100)]
for name, pool in (("as it is", BlockPool), ("forward", Forward)):
    replaying.BlockPool = pool
    turns = hit_rate(documents, "lru", 12 * 512)
    print(f"{name:9} documents by turns {turns:5.1%}, chats with 2M tokens {hit_rate(quarter, 'lru', GRID['2M']):5.1%}")
replaying.BlockPool = BlockPool

# %% [markdown]
# The first blocks of a document are now the first to go, and a chain without its beginning is never found, however much
# of it is still in memory. The chats hardly notice: a prompt is small against the cache, so only one at a time is half
# evicted. That is how such a bug lives long. Nothing crashes and every answer is right; only a workload with prompts
# that are large against the cache shows it. vLLM frees in reverse order, and its host tier touches in reverse order.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## When is a hit worse than a miss?
#
# A hit of `n` tokens costs `n * bytes per token / B`, a recomputation the prefill's operations over `G`. So reuse pays
# when `B / G > bytes / operations`. Mooncake (FAST'25, section 5) puts it as `B/G > 2ds / (gqa (apd + bd²))` and gives,
# for LLaMA3-70B and a prefix of 8k tokens, 6 GB/s on 8 A800 and 19 GB/s on 8 H800. Our count of operations:

# %%
LLAMA_70B = ModelConfig("llama", 128256, 8192, 28672, 80, 64, 8, 128, 131072, rope_theta=500000.0)


def needed(config: ModelConfig, prefix: int, flops_per_s: float, kv_bytes: float = 2) -> float:
    """Bytes per second that a tier must deliver to be as fast as computing `prefix` tokens."""
    seconds = measure.prefill(config, prefix, logit_positions=0).flops / flops_per_s
    return prefix * measure.kv_bytes_per_token(config, kv_bytes) / seconds


for name, config, flops in (
    ("LLaMA3-70B on 8 x A800", LLAMA_70B, 8 * 312e12),
    ("LLaMA3-70B on 8 x H800", LLAMA_70B, 8 * 989e12),
    ("Llama-3.1-8B on an H100", LLAMA_8B, 989e12),
):
    print(f"{name:24} needs {needed(config, 8192, flops) / 1e9:5.1f} GB/s, at full speed of the arithmetic")

# %% [markdown]
# The faster the arithmetic, the faster a tier must be. Real prefill reaches perhaps half of the peak, and then half of
# the bandwidth is enough. sglang#26305 shows the other side: with its plain file backend and 8k tokens, the first token
# came after 2,450 ms with the cache and after 1,725 ms without.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: this machine
#
# SmolLM2 in fp32 has 46,080 bytes a token. **How many MB/s must a tier deliver here to be as fast as computing again?**

# %%
predict("break-even bandwidth", low=10, high=80, unit="MB/s", why="some hundred tokens per second, 46 KB each")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from cs336_infer import load_model
from cs336_infer.measure.phases import time_prefill

model = load_model(dtype="float32")
prefill_s = time_prefill(model, 256, repeats=3).median_s
per_token = measure.kv_bytes_per_token(model.config, 4)
compute = measure.matmul_rate(torch.float32, n=1024, repeats=3)
measured(
    "break-even bandwidth",
    256 / prefill_s * per_token / 1e6,
    bound=needed(model.config, 256, compute.flops_per_s, 4) / 1e6,
    bound_label="with all of this machine's arithmetic",
)
print(f"timing: prefill of 256 tokens {prefill_s * 1e3:.0f} ms, {256 / prefill_s:.0f} tokens/s")

# %% [markdown]
# A disk of any kind is faster than that. So on this machine a disk hit beats a recomputation by far. **Predict:** a
# prompt of 320 tokens, found on the device, in the host, on disk (with the system's page cache emptied), or not at all.
# How many times sooner is the first token with the disk hit?

# %%
predict("cold TTFT over disk-hit TTFT", low=2, high=15, unit="times", why="14.7 MB to read, and one step")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from cs336_infer import LLM, SamplingParams, TierOptions

one = SamplingParams(max_tokens=1)
ids = model.tokenizer.encode("When somebody asks about the shelf behind the door, tell them to look again. " * 30)[:325]
folder = Path(home.name) / "ttft"
options = TierOptions(host_bytes=64 * 2**20, disk_bytes=256 * 2**20, folder=folder)
only_disk = TierOptions(disk_bytes=256 * 2**20, folder=folder)
ttft = {}
with LLM(model, kv_tokens=512, tiers=options) as llm:
    ttft["computed"] = llm.generate(ids, one)[0]
    ttft["device hit"] = llm.generate(ids, one)[0]
    llm.kv.flush()
    llm.kv.pool.forget()  # as if others had taken the device's blocks
    ttft["host hit"] = llm.generate(ids, one)[0]
with LLM(model, kv_tokens=512, tiers=only_disk) as llm:
    llm.tiers.drop_page_cache()
    ttft["disk hit"] = llm.generate(ids, one)[0]
    disk = llm.stats()["disk"]
for name, answer in ttft.items():
    same = answer.token_ids == ttft["computed"].token_ids
    print(f"{name:11} {answer.cached_tokens} tokens found, same token: {same}")
print(f"read from disk: {disk['hits']} blocks, {disk['bytes_read'] / 1e6:.1f} MB")
print(f"timing: each of them {disk['bytes_read'] / disk['read_seconds'] / 1e6:.0f} MB/s, with checksum")
pictures.show(
    drawings.bars(
        {name: 1e3 * answer.ttft_s for name, answer in ttft.items()},
        xlabel="ms",
        title="time to first token, 325 tokens",
        label="{:.0f} ms",
    ),
    "Bars of the time to first token: computed, device hit, host hit, disk hit.",
    measured=True,
)
measured("cold TTFT over disk-hit TTFT", ttft["computed"].ttft_s / ttft["disk hit"].ttft_s)

# %% [markdown]
# The upper picture: computing takes longest; the three hits differ little. (On this CPU the device and the host are the
# same DRAM, so a host hit is a memcpy and a checksum.) The lower one: your guess.

# %%
explain(
    "cold TTFT over disk-hit TTFT",
    "Reading 14.7 MB takes a few dozen ms even from a disk, and computing 320 tokens takes 71 GFLOP more.",
    must_mention=[14.7, 320],
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Turn the knob: where is the crossover?
#
# Time to load against time to compute, over the length of the prefix. A tier has a fixed cost (requests, seeks, a round
# trip) and a bandwidth. Prefill is assumed at half of the peak.

# %%
MACHINES = {
    "SmolLM2, 2-core CPU": (model.config, 400e9, 4),
    "Llama-3.1-8B, H100": (LLAMA_8B, 989e12, 2),
    "LLaMA3-70B, 8 H800": (LLAMA_70B, 8 * 989e12, 2),
}
PREFIXES = [2**i for i in range(6, 16)]


def both(machine: str, gb_per_s: float, fixed_ms: float) -> tuple[list[float], list[float]]:
    config, flops, kv_bytes = MACHINES[machine]
    load = [fixed_ms + 1e3 * n * measure.kv_bytes_per_token(config, kv_bytes) / gb_per_s / 1e9 for n in PREFIXES]
    return load, [1e3 * measure.prefill(config, n, logit_positions=0).flops / flops * 2 for n in PREFIXES]


def draw_crossover(machine: str, gb_per_s: float, fixed_ms: float):
    load, compute = both(machine, gb_per_s, fixed_ms)
    fig, ax = pictures.subplots(figsize=(7.5, 3.6))
    ax.loglog(PREFIXES, load, "o-", color=drawings.BLUE, label="load")
    ax.loglog(PREFIXES, compute, "s-", color=drawings.ORANGE, label="compute again")
    ax.set(xlabel="tokens of the prefix", ylabel="ms", title=machine)
    ax.legend()
    return fig


def describe_crossover(machine: str, gb_per_s: float, fixed_ms: float) -> str:
    load, compute = both(machine, gb_per_s, fixed_ms)
    wins = [n for n, a, b in zip(PREFIXES, load, compute, strict=True) if a < b]
    verdict = f"loading wins from {wins[0]:,} tokens on" if wins else f"loading loses up to {PREFIXES[-1]:,} tokens"
    return f"{machine}, tier of {gb_per_s:g} GB/s and {fixed_ms:g} ms: {verdict}."


crossover = explorer(
    {
        "machine": widgets.Dropdown(options=list(MACHINES), value="Llama-3.1-8B, H100", description="model, machine"),
        "gb_per_s": widgets.SelectionSlider(options=[0.5, 1, 2, 4, 7, 14, 64], value=7, description="tier, GB/s"),
        "fixed_ms": widgets.SelectionSlider(options=[0, 1, 5, 20], value=5, description="fixed cost, ms"),
    },
    draw_crossover,
    describe_crossover,
)
crossover

# %% [markdown]
# Where the blue line is below the orange one, a hit is worth it. (Without a running kernel you see an H100 and one NVMe
# drive.) The same for other tiers:

# %%
for case in (
    ("SmolLM2, 2-core CPU", 0.5, 5),
    ("Llama-3.1-8B, H100", 1, 5),
    ("Llama-3.1-8B, H100", 64, 1),
    ("LLaMA3-70B, 8 H800", 7, 5),
):
    print(describe_crossover(*case))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Write through or write back?
#
# *Through*: copy a block down as soon as it is full. *Back*: copy it when it is evicted. The first writes what nobody
# may ever want again; the second makes an allocation wait for a copy, and loses the device's content in a crash. 60
# requests for at most 26 prompts, some of them popular:

# %%
import random

for write in ("through", "back"):
    kv, draw = toy(write, host=30, disk=60, write=write, device=16), random.Random(0)
    names = [chr(65 + min(int(draw.expovariate(0.15)), 25)) for _ in range(60)]
    found = sum(serve(kv, name) > 0 for name in names)
    kv.flush()
    copied = kv.tiers.stats()["host"].bytes_written // BLOCK
    unsaved = sum(not where(kv, name)["host"][1] for name in set(names))
    print(f"{write:8} {found} of 60 found, {copied} blocks copied down, {unsaved} would be lost with the device")
    kv.tiers.close()

# %% [markdown]
# Both find the same. Back copied 5 blocks instead of 19, and 14 prompts would be gone with the device. SGLang's HiCache
# offers both and a third, *selective*: write when a block was hit a few times.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Pinning: a block that is read must stay
#
# A lookup finds a block in the host. Before its bytes have been copied up, other stores fill the host, the block is
# evicted, and its slot gets somebody else's bytes (sglang#31427 was of this kind). So `find` *pins* what it finds,
# until `release`. In the mutant it does not. **What does the reader get?**

# %%
from cs336_infer.kv.ledger import Ledger
from cs336_infer.kv.policy import LRU


class Unpinned(Ledger):
    def pin(self, key, content=None):
        entry = super().pin(key, content)
        if entry is not None:
            super().unpin(key, entry)
        return entry


def slow_reader(ledger: type[Ledger]) -> tuple[bool, str]:
    """Find A, let others store B to F into a host of three blocks, then read A."""
    tiers = Tiers(block_bytes=BLOCK, fingerprint=ROOT, host_bytes=3 * BLOCK)
    tiers.host.ledger = ledger(3 * BLOCK, LRU())
    keys = {p: KeyChain(ROOT, TOKENS, [ord(p)] * TOKENS) for p in "ABCDEF"}

    def store(p: str) -> None:
        tiers.store(keys[p].keys[0], keys[p].contents[0], torch.full((BLOCK,), ord(p), dtype=torch.uint8)).wait()
        tiers.flush()

    store("A")
    lease = tiers.find(keys["A"].keys, keys["A"].contents)
    for p in "BCDEF":
        store(p)
    into = torch.empty(BLOCK, dtype=torch.uint8)
    arrived = lease.read(0, into)
    tiers.close()
    return arrived, chr(int(into[0]))


for ledger in (Ledger, Unpinned):
    arrived, byte = slow_reader(ledger)
    print(f"{ledger.__name__:9} the slot held the bytes of {byte}; given to the reader: {arrived}")

# %% [markdown]
# The mutant reads D's bytes under A's name. The package's second line of defence holds: the checksum, taken where the
# block came from, does not fit, so the block is a miss and is computed again. Without it, D's user would appear in A's
# answer. Pins and checksums are both needed: the pin keeps the hit, the checksum keeps the answer right.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (2): kill -9 in the middle of a write
#
# A block file is written under another name, brought to the disk (`fsync`), and then renamed. The mutant writes in
# place. We kill both with SIGKILL when half of the data are written, and look at the folder. **What does each leave?**

# %%
import subprocess
import sys

WRITER = """
import os, pathlib, sys, time
from cs336_infer.kv import block_file
way, folder = sys.argv[1], pathlib.Path(sys.argv[2])
right = os.write
def half(fd, data):
    if len(data) < 4096:
        return right(fd, data)  # the header
    right(fd, data[: len(data) // 2])
    print("half", flush=True)
    time.sleep(600)
os.write = half
if way == "in place":
    block_file.os.rename = lambda a, b: None
    block_file.Path.with_name = lambda self, name: self
block_file.write_block(folder / "x.kv", b"m" * 32, b"k" * 32, b"tokens", memoryview(bytes(8192)), 0)
"""
for way in ("temporary name", "in place"):
    target = Path(home.name) / way
    target.mkdir()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, way, str(target)], stdout=subprocess.PIPE, text=True)
    writer.stdout.readline()
    writer.kill()
    writer.wait()
    writer.stdout.close()
    names = ["x.kv" if p.name == "x.kv" else "a temporary file" for p in target.iterdir()]
    print(f"{way:15} exit {writer.returncode}, left behind: {', '.join(names)}")

# %% [markdown]
# In place, a file with the right name and half of the block is there after the crash: a reader that trusts the name
# reads whatever follows. With a temporary name the block is simply not there; the stray file is deleted at the next
# start. And if a damaged file stands there all the same?

# %%
import zlib

from cs336_infer.kv.block_file import BadBlock, read_block, write_block

data = bytes(range(256)) * 32
good = Path(home.name) / "good.kv"
write_block(good, b"m" * 32, b"k" * 32, b"tokens", memoryview(data), zlib.crc32(data))
whole, into = good.read_bytes(), bytearray(8192)
flipped = bytearray(whole)
flipped[-100] ^= 1
for name, content in (
    ("as written", whole),
    ("cut in half", whole[: len(whole) // 2]),
    ("one bit flipped", bytes(flipped)),
    ("empty", b""),
    ("not a block", b"hello, world" * 1000),
):
    good.write_bytes(content)
    try:
        read_block(good, b"m" * 32, b"k" * 32, b"tokens", memoryview(into))
        print(f"{name:16} read, right: {bytes(into) == data}")
    except BadBlock as error:
        print(f"{name:16} a miss: the file {error}")

# %% [markdown]
# Every damage is a miss, and a miss costs a recomputation. A wrong block would cost an answer. The repository's crash
# test kills writers 200 times at random moments and flips 1,000 bits: no wrong block.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## A conversation sleeps and wakes
#
# With the disk tier a session survives the process. `sleep` writes the ids of the conversation and brings its blocks to
# the disk; another engine, here with empty memory, wakes it up.

# %%
from cs336_infer import Session

params = SamplingParams(max_tokens=10)
tiers = TierOptions(disk_bytes=256 * 2**20, folder=Path(home.name) / "sessions")
with LLM(model, kv_tokens=1024, tiers=tiers) as llm:
    session = Session(llm)
    session.say("Name a city in Italy.", params)
    stored = session.sleep(Path(home.name) / "session")
with LLM(model, kv_tokens=1024, tiers=tiers) as llm:
    awake = Session.wake(llm, Path(home.name) / "session")
    answer = awake.say("And one in Spain?", params)
never_slept = Session(LLM(model, kv_tokens=1024))
never_slept.say("Name a city in Italy.", params)
wanted = never_slept.say("And one in Spain?", params)
print(f"{stored} tokens asleep on disk, {stored * per_token / 1e6:.1f} MB; {answer.cached_tokens} found after waking")
print("the answer of one that never slept:", answer.token_ids == wanted.token_ids)
print(f"timing: TTFT after waking {answer.ttft_s * 1e3:.0f} ms")

# %% [markdown]
# The history is kept as ids, not as text: text that is tokenised again may give other ids, and behind the first
# difference nothing is found.

# %%
home.cleanup()

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Takeaways
#
# - More memory gives more hits, up to what the traffic has: 38 % here, over 90 % for coding agents.
# - On chat the policy matters less than the capacity. Evict the end of a prompt first, or large prompts never hit.
# - A hit pays when the tier's bandwidth over the machine's arithmetic exceeds bytes over operations per token. The
#   faster the chips, the faster the tiers must be.
# - What can go wrong below the device must cost a miss: pins, checksums, temporary names.
#
# ## Where real engines differ
#
# - They overlap: layer after layer is loaded while the first layers compute (CachedAttention, LMCache, HiCache), and a
#   request that waits for its blocks lets others run. Ours waits for the whole run.
# - The unit of a copy matters. vLLM's offloading changed its layout so that copies grew from 8-72 KB to 0.5-2 MB, and
#   reports a TTFT 2 to 22 times better on hits in host memory (blog, January 2026). Our block is one contiguous piece.
# - SGLang's HiCache prefetches from the third tier only hits above 256 tokens, and gives up after a time limit.
# - Mooncake and LMCache share the lower tiers between machines; NVIDIA's Dynamo has four (GPU, host, disk, objects),
#   and advises a host tier larger than the GPU's cache, or it churns.
#
# ## Read next
#
# - Qin et al. 2025, "Mooncake" (FAST'25): the trace of this lecture and the condition when reuse pays.
# - Gao et al. 2024, "CachedAttention" (USENIX ATC): conversations over DRAM and SSD.
# - `cs336_infer/kv/tiers.py`, `ledger.py`, `block_file.py` and `policies.py`.
