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
# # 02 · Prefill and decode
#
# **The question:** the same model runs a prompt of 512 tokens at over a thousand tokens per second, and an answer at a
# few dozen. Why, and what does it mean for the hardware?
#
# After this notebook you can
#
# - compute the arithmetic intensity of a matrix product and of a whole step by hand;
# - place prefill and decode on the roofline of this machine, with ceilings that you measured;
# - predict what a longer prompt, a larger batch or a cache does to the time of a step;
# - say why decode wants bandwidth, prefill wants arithmetic, and why large services give them different hardware.
#
# Time: 60 minutes. Needs: a CPU.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The picture, at a size we can draw
#
# Both phases multiply by the same weights. Prefill brings many rows to each weight, decode one. In the picture, with
# page size 4: prefill feeds a page of 4 tokens, decode feeds 1; the weight matrix is the same.

# %%
from cs336_infer.course import drawings, pictures

fig, axes = pictures.subplots(1, 2, figsize=(9.5, 2.9))
for ax, rows, name in ((axes[0], 4, "prefill: 4 tokens"), (axes[1], 1, "decode: 1 token")):
    ax.axis("off")
    ax.set(xlim=(-0.5, 17), ylim=(-1.4, 6.6), title=name, aspect="equal")
    for left, height, width, color in (
        (0, rows, 4, drawings.GREEN),
        (6, 4, 4, drawings.BLUE),
        (12, rows, 4, drawings.ORANGE),
    ):
        for y in range(height):
            for x in range(width):
                drawings.cell(ax, left + x, 4 - y, "", color)
    ax.text(5, 3.1, "×", fontsize=16, ha="center", va="center")
    ax.text(11, 3.1, "=", fontsize=16, ha="center", va="center")
    for x, text in ((2, "activations"), (8, "weights"), (14, "result")):
        ax.text(x, -0.2, text, ha="center", va="top")
    ax.text(8, 5.9, f"each weight is read once and used {rows} time{'s' * (rows > 1)}", ha="center")
pictures.show(fig, "Two matrix products with the same weights: prefill has four rows of activations, decode has one.")

# %% [markdown]
# Left: four rows of activations meet the weights, so each weight that was read is used four times. Right: one row, and
# each weight is read for a single use.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Arithmetic intensity by hand
#
# A product of activations `[M, K]` with weights `[K, N]` costs `2 M K N` floating-point operations (a multiplication
# and an addition for each of `M K N` terms). It reads `K N` weights and `M K` activations and writes `M N` results. The
# ratio, in operations per byte, is the *arithmetic intensity*.


# %%
def intensity(m: int, k: int, n: int, bytes_per_number: int) -> float:
    """FLOP per byte of [m, k] times [k, n]."""
    flops = 2 * m * k * n
    moved = bytes_per_number * (k * n + m * k + m * n)
    return flops / moved


print("gate and up projection of SmolLM2, 576 -> 3072, bf16")
for m in (1, 2, 8, 64, 512, 4096):
    print(f"  {m:5} tokens: {intensity(m, 576, 3072, 2):6.1f} FLOP per byte")

# %% [markdown]
# With one token the intensity is 1: two operations for each weight of two bytes, whatever the matrix. Every further
# token in the same step adds nearly one more, until the activations themselves become the traffic.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The package's count
#
# `measure.prefill` and `measure.decode` add this up over a whole model: all matrix products, attention over exactly the
# positions that the causal mask leaves, and the cached keys and values. Is its count of operations what we get by
# hand?

# %%
import torch

from cs336_infer import load_model, measure

model = load_model()  # bf16 where the processor multiplies it, else fp32
c = model.config


def decode_flops(context: int) -> int:
    """One decode step at batch 1 behind `context` cached tokens, by hand."""
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = c.hidden_size * (heads + 2 * kv_heads)  # q, k, v
    layer += heads * c.hidden_size  # output projection
    layer += 3 * c.hidden_size * c.intermediate_size  # gate, up, down
    attention = 2 * heads * (context + 1)  # q k^T and p v, over all tokens so far
    head = c.hidden_size * c.vocab_size
    return 2 * (c.num_layers * (layer + attention) + head)


ours, package = decode_flops(512), measure.decode(c, batch=1, context=512, dtype_bytes=2, kv_bytes=2)
print(f"by hand {ours:,} FLOP, package {package.flops:,} FLOP, equal: {ours == package.flops}")
print(f"weights {package.weight_bytes / 1e6:.1f} MB, KV cache {package.kv_read_bytes / 1e6:.1f} MB")
print(f"decode:          {package.intensity:6.2f} FLOP per byte")
prefill = measure.prefill(c, 512, dtype_bytes=2, kv_bytes=2)
print(f"prefill of 512:  {prefill.intensity:6.2f} FLOP per byte")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The ceilings of this machine
#
# Two numbers decide: how fast memory can be read, and how fast matrices can be multiplied. Their ratio is the *ridge*:
# work with less intensity waits for memory, work with more waits for arithmetic (Williams, Waterman and Patterson
# 2009).

# %%
bandwidth = measure.read_bandwidth()
compute = measure.matmul_rate(model.dtype)
roof = measure.Roofline(bandwidth.bytes_per_s, compute.flops_per_s)
print(f"timing: memory {bandwidth.bytes_per_s / 1e9:.1f} GB/s ({bandwidth.method})")
print(f"timing: matrices {compute.flops_per_s / 1e9:.0f} GFLOP/s in {str(model.dtype)[6:]} ({compute.method})")
print(f"timing: ridge at {roof.ridge:.1f} FLOP per byte")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: one decode step, one prompt
#
# The weights are 269 MB. You know the bandwidth of this machine. **How long does one decode step take?** Then: a prompt
# of 512 tokens needs 118 GFLOP; you know the rate of matrix products. **How long does its prefill take?**

# %%
from cs336_infer.course.predict import explain, measured, predict

predict("decode step", low=8, high=40, unit="ms", why="269 MB at some tens of GB/s, and some overhead")
predict("prefill of 512 tokens", low=250, high=1500, unit="ms", why="118 GFLOP at some hundred GFLOP/s")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from cs336_infer.measure.phases import memory_traffic, time_decode, time_prefill

size = model.dtype.itemsize  # bytes of a number in the model that is timed
step = measure.decode(c, batch=1, context=512, dtype_bytes=size, kv_bytes=size)
decode_time = time_decode(model, context=512, repeats=25)
prefill_time = time_prefill(model, 512, repeats=3)
measured(
    "decode step",
    decode_time.median_s * 1e3,
    bound=memory_traffic(step) / roof.bandwidth * 1e3,
    bound_label="weights and KV cache at this machine's bandwidth",
)
measured(
    "prefill of 512 tokens",
    prefill_time.median_s * 1e3,
    bound=prefill.flops / roof.flops * 1e3,
    bound_label="its operations at this machine's matrix rate",
)

# %% [markdown]
# Each picture: your guess as a band, the measurement as a dot, the bound of this machine as a dashed line. The bound
# of decode comes from bytes, the bound of prefill from operations.

# %%
explain(
    "decode step",
    "A decode step reads 269 MB of bf16 weights for 1 token (twice that in fp32), below full bandwidth.",
    must_mention=269,
)
explain(
    "prefill of 512 tokens",
    "Prefill uses each weight 512 times, so its 118 GFLOP take longer than reading the weights.",
    must_mention=118,
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The roofline
#
# Prefill of several lengths and decode at several batch sizes, as dots under the two ceilings. Below the slope: waits
# for memory. Below the flat part: waits for arithmetic.

# %% tags=["measured"]
lengths, batches = (32, 128, 512), (1, 4, 12)
points = {}
for n in lengths:
    cost = measure.prefill(c, n, dtype_bytes=size, kv_bytes=size)
    points[f"prefill {n}"] = (cost, time_prefill(model, n, repeats=3).median_s)
for b in batches:
    cost = measure.decode(c, b, 256, dtype_bytes=size, kv_bytes=size)
    points[f"decode x{b}"] = (cost, time_decode(model, 256, b, repeats=9).median_s)
placed = roof.place(points)
pictures.show(
    drawings.roofline(roof, placed),
    "Roofline on logarithmic axes with three prefill lengths and three decode batch sizes.",
    measured=True,
)
for p in placed:
    print(
        f"timing: {p.name:12} {p.intensity:6.1f} FLOP/byte, {p.fraction:4.0%} of the roofline, bound by {p.bound.value}"
    )

# %% [markdown]
# Decode at batch 1 sits far left: one operation per byte. Each further sequence in the batch moves it to the right.
# Prefill of 512 tokens sits far right, under the flat ceiling.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Sweep: how long may a prompt be?
#
# **Predict:** from which prompt length on does prefill stop getting faster per token? Use the ridge: below it, a longer
# prompt is nearly free.

# %%
predict("length at 90 % of the best rate", low=16, high=256, unit="tokens", why="a few times the ridge")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
sweep = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
seconds = [time_prefill(model, n, repeats=3).median_s for n in sweep]
rates = [n / s for n, s in zip(sweep, seconds, strict=True)]
fig, (left, right) = pictures.subplots(1, 2, figsize=(10, 3.6))
left.loglog(sweep, [s * 1e3 for s in seconds], "o-", color=drawings.BLUE)
left.set(xlabel="prompt tokens", ylabel="ms", title="time of one prefill")
right.semilogx(sweep, rates, "o-", color=drawings.ORANGE, label="measured")
right.axhline(roof.flops / (prefill.flops / 512), color=drawings.GREEN, ls="--", label="bound: matrix rate")
right.set(xlabel="prompt tokens", ylabel="tokens per second", title="rate of prefill")
right.legend()
pictures.show(fig, "Left: time of a prefill over its length. Right: tokens per second over the length.", measured=True)
reached = next(n for n, r in zip(sweep, rates, strict=True) if r >= 0.9 * max(rates))
measured("length at 90 % of the best rate", reached)

# %% [markdown]
# Left: the first few tokens cost little more than one, because the weights must be read anyway. Right: the rate rises
# until arithmetic is the limit. From there on, a prompt twice as long takes twice the time, and then more: attention
# grows with the square, so the rate falls again.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Sweep: batch size in decode
#
# **Predict:** how many times more tokens per second do 16 sequences together give than one alone?

# %%
predict("16 sequences against 1", low=4, high=16, unit="times", why="the weights are read once for all")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
sizes = [1, 2, 4, 8, 16, 32]
fig, ax = pictures.subplots()
rates = {}
for context, color in ((64, drawings.BLUE), (1024, drawings.ORANGE)):
    rates[context] = [b / time_decode(model, context, b, repeats=7).median_s for b in sizes]
    ax.plot(sizes, rates[context], "o-", color=color, label=f"context {context}")
ax.plot(sizes, [b * rates[64][0] for b in sizes], ":", color="#888888", label="proportional")
ax.set_xscale("log", base=2)
ax.set_yscale("log", base=2)
ax.set(xlabel="sequences in the batch", ylabel="tokens per second", title="decode")
ax.legend()
pictures.show(
    fig, "Tokens per second over the batch size, for short and long contexts, with a proportional line.", measured=True
)
measured("16 sequences against 1", rates[64][sizes.index(16)] / rates[64][0])

# %% [markdown]
# A batch shares the weights but not the KV cache: each sequence reads its own. With a long context the curve bends
# earlier, because the cache becomes most of the traffic.

# %%
one, many = (measure.decode(c, b, 1024, dtype_bytes=2, kv_bytes=2) for b in (1, 32))
for name, cost in (("batch 1", one), ("batch 32", many)):
    share = cost.kv_read_bytes / memory_traffic(cost)
    print(f"{name}, context 1024: {memory_traffic(cost) / 1e6:6.0f} MB, of which the KV cache is {share:.0%}")
explain(
    "16 sequences against 1",
    "The 269 MB of weights are read once for the whole batch, but every sequence brings its own cache and arithmetic.",
    must_mention=269,
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What the cache is worth
#
# Without a KV cache, every step is a prefill of everything so far. For an answer of 100 tokens behind a prompt of 500
# (the prefill gives the first token, 99 steps the others):

# %%
with_cache = sum((measure.decode(c, 1, 500 + i).flops for i in range(99)), measure.prefill(c, 500).flops)
without = sum(measure.prefill(c, 500 + i).flops for i in range(100))
print(f"with a cache {with_cache / 1e12:.2f} TFLOP, without {without / 1e12:.2f} TFLOP")
print(f"that is {without / with_cache:.0f} times the work")
print(f"price: {measure.kv_bytes_per_token(c) / 1024:.1f} KiB of memory per token")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Why the phases go to different hardware
#
# Turn the knobs: which bound does a step meet on other machines? The specifications are the vendors' peak figures
# (dense bf16), so real speeds are lower. Where a model does not fit into one device, the smallest number of devices
# that hold its weights works together, with perfect scaling and free communication: a bound, not a forecast. The "SRAM
# chip" is of the LPU kind, with 230 MB of memory at 80 TB/s, so it takes 70 of them for an 8B model.

# %%
import math

import ipywidgets as widgets

from cs336_infer.course.widgets import explorer
from cs336_infer.models import ModelConfig

LLAMA_8B = ModelConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, rope_theta=500000.0)
MODELS = {"SmolLM2-135M": c, "Llama-3.1-8B": LLAMA_8B}
HARDWARE = {  # memory, bytes per second, FLOP per second of one device; sources in the text below
    "2-core CPU": (24e9, 32e9, 400e9),
    "A100 SXM 80GB": (80e9, 2.039e12, 312e12),
    "H100 SXM": (80e9, 3.35e12, 989e12),
    "H200 SXM": (141e9, 4.8e12, 989e12),
    "SRAM chips": (230e6, 80e12, 188e12),
}


def devices(name: str, hardware: str) -> int:
    """How many of them hold the weights in bf16."""
    return math.ceil(measure.weight_bytes(MODELS[name]) / HARDWARE[hardware][0])


def rows(name: str, hardware: str, batch: int, context: int):
    _, bandwidth, flops = HARDWARE[hardware]
    many = devices(name, hardware)
    machine, config = measure.Roofline(many * bandwidth, many * flops), MODELS[name]
    return machine, {
        f"prefill {context}": measure.prefill(config, context),
        f"decode x{batch}": measure.decode(config, batch, context),
    }


def draw(name: str, hardware: str, batch: int, context: int):
    machine, costs = rows(name, hardware, batch, context)
    at_bound = machine.place({label: (cost, machine.time_bound(cost)) for label, cost in costs.items()})
    return drawings.roofline(machine, at_bound, title=f"{name} on {devices(name, hardware)} x {hardware}, at the bound")


def describe(name: str, hardware: str, batch: int, context: int) -> str:
    machine, costs = rows(name, hardware, batch, context)
    parts = [
        f"{label}: {machine.time_bound(cost) * 1e3:.3g} ms at best, bound by {machine.bound(cost).value}, "
        f"{min(1, cost.intensity / machine.ridge):.1%} of the arithmetic used"
        for label, cost in costs.items()
    ]
    return f"{name} on {devices(name, hardware)} x {hardware}. " + "; ".join(parts) + "."


knobs = explorer(
    {
        "name": widgets.Dropdown(options=list(MODELS), value="Llama-3.1-8B", description="model"),
        "hardware": widgets.Dropdown(options=list(HARDWARE), value="H100 SXM", description="hardware"),
        "batch": widgets.IntSlider(value=1, min=1, max=512, description="sequences in decode"),
        "context": widgets.IntSlider(value=2048, min=128, max=8192, step=128, description="context tokens"),
    },
    draw,
    describe,
)
knobs

# %% [markdown]
# Two dots at the bound of the chosen machine: prefill under the flat ceiling, decode on the slope. (Without a running
# kernel you see Llama-3.1-8B on one H100.) A table for the same model:

# %%
print(f"{'Llama-3.1-8B, context 2048':26} {'devices':>7} {'prefill':>10} {'decode x1':>10} {'arithmetic used':>16}")
for hardware in HARDWARE:
    machine, costs = rows("Llama-3.1-8B", hardware, 1, 2048)
    first, step = costs.values()
    used = step.intensity / machine.ridge
    times = f"{machine.time_bound(first) * 1e3:7.1f} ms {machine.time_bound(step) * 1e3:7.3f} ms"
    print(f"{hardware:26} {devices('Llama-3.1-8B', hardware):7} {times} {used:16.2%}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Read the table
#
# - H100 to H200: the arithmetic is the same, the memory is 43 % faster. Prefill gains nothing, decode gains all of it.
# - On an H100 a decode step at batch 1 uses a third of a percent of the arithmetic. The chip was bought for it.
# - One SRAM chip has a fifth of an H100's arithmetic and 24 times its bandwidth. Seventy of them finish a decode step
#   well over a thousand times sooner than one H100 could, and prefill only 13 times: hardware built for decode. (At
#   this speed the links between the chips, which we count as free, are what remains.)
#
# So large services run prefill and decode on separate machines, and some on different kinds of machine:
# *disaggregation* (Zhong et al. 2024, DistServe; Patel et al. 2024, Splitwise). The price is moving the KV cache
# between them. Notebooks on the fleet come back to this.
#
# Sources of the figures: NVIDIA data sheets of A100 (2.039 TB/s, 312 TFLOP/s), H100 SXM (3.35 TB/s, 989 TFLOP/s) and
# H200 SXM (141 GB, 4.8 TB/s, 989 TFLOP/s), dense bf16; Groq's description of its LPU (230 MB of SRAM, 80 TB/s, 188
# TFLOP/s in fp16). The CPU row is about this course's test machine.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it: chunks that forget where they are
#
# A long prompt may be prefilled in chunks, so that others need not wait. In this mutant each chunk counts its positions
# from zero again. **Say what breaks**, and which of the two tests below sees it.

# %%
from cs336_infer.kv import ContiguousKV

exact = load_model(dtype="float32")
ids = torch.tensor([exact.tokenizer.encode("Once upon a time, in a small village by the sea, there lived a girl")])


def chunked_logits(chunk: int, *, restart: bool) -> torch.Tensor:
    cache = ContiguousKV(c, batch=1, capacity=ids.shape[1], dtype=torch.float32)
    for begin in range(0, ids.shape[1], chunk):
        piece = ids[:, begin : begin + chunk]
        first = 0 if restart else begin
        places = torch.arange(first, first + piece.shape[1]).unsqueeze(0)
        logits = exact.net.forward(piece, places, cache)
    return logits[0, -1]


whole = chunked_logits(ids.shape[1], restart=False)
for chunk in (ids.shape[1], 5):
    for restart in (False, True):
        got = chunked_logits(chunk, restart=restart)
        agree = bool((got - whole).abs().max() < 2e-3)
        name = "mutant" if restart else "right "
        word = exact.tokenizer.decode([int(got.argmax())])
        print(f"{name}, chunks of {chunk:2}: next word {word!r:8} same logits: {agree}")

# %% [markdown]
# With one chunk the mutant is right, so a test that never cuts a prompt cannot see it. Test with chunks that do not
# divide the prompt.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Takeaways
#
# - Arithmetic intensity is operations per byte. Decode at batch 1 has about 1 in bf16, whatever the model; a long
#   context raises it a little, because query heads share the cache.
# - Work left of the ridge waits for memory, right of it for arithmetic. Decode is left, a long prompt is right.
# - Batching moves decode to the right, until the KV caches are the traffic.
# - Time per output token is bytes over bandwidth. To go faster: fewer bytes (quantise), fewer passes, more bandwidth.
#
# ## Where real engines differ
#
# - They mix a prompt's chunk and everybody's decode tokens in one step, so that the arithmetic that decode leaves idle
#   is used (Sarathi-Serve). Ours runs one phase at a time, for now.
# - They keep decode steps short with CUDA graphs and fused kernels. What holds ours from the bandwidth bound on a CPU
#   is written down in `docs/benchmarks.md`.
#
# ## Read next
#
# - Pope et al. 2022, "Efficiently Scaling Transformer Inference": the accounting of this notebook, at scale.
# - `cs336_infer/measure/cost.py`, the count we checked by hand, and `cs336_infer/generate.py`, the loop on one page.
