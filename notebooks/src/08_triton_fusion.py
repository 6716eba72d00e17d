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
# # 08 · Triton and fusion
#
# **The question:** a decode step is a chain of small jobs: norm, product, rotation, sum. On a GPU each job is a
# kernel. Why is a chain of small kernels slow, what does it save to make one kernel of several, and what can go wrong?
#
# After this notebook you can
#
# - write a Triton kernel for rows of any length, and say which program touches which number;
# - run it without a GPU, and find a missing mask, unwritten memory and a race by the line that causes them;
# - count the launches and the bytes of a layer on each rung, from eager PyTorch to a CUDA graph;
# - say what fusion saves at batch 1 and at batch 64, and which of it matters;
# - read from a compiled kernel whether it can reach the memory's bandwidth.
#
# Time: 75 minutes. Needs: a CPU. **Nothing here is measured on a GPU.** What is said about GPUs is counted, compiled,
# or computed from published figures, and says so.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The picture: one layer, twelve small jobs
#
# A layer of Llama, from left to right. Below it: the kernels of eager PyTorch, of the engine with one Triton kernel
# for each op, and of the engine when it fuses them.

# %%
from cs336_infer.course import kernel_drawings, pictures

JOBS = ["norm", "QKV", "RoPE", "write KV", "attention", "O", "+", "norm", "gate, up", "SwiGLU", "down", "+"]
EAGER = [
    *("rms_norm", "linear", "rotate 3", "copy 2", "sdpa", "linear", "add"),
    *("rms_norm", "linear", "silu, mul 2", "linear", "add"),
]
TRITON = [
    *("rms_norm", "linear", "rope", "write_kv", "decode 2", "linear", "add"),
    *("rms_norm", "linear", "swiglu", "linear", "add"),
]
FUSED = [
    *((0, 3, "qkv", 1), (4, 4, "decode", 2), (5, 6, "linear_add", 1)),
    *((7, 9, "gate_up", 1), (10, 11, "linear_add", 1)),
]


def one_each(names: list[str]) -> list[kernel_drawings.Span]:
    """A box for each job; a number behind a name says how many kernels it takes."""
    parts = [name.rstrip(" 23") for name in names], [name[-1] for name in names]
    return [(i, i, name, int(n) if n in "23" else 1) for i, (name, n) in enumerate(zip(*parts, strict=True))]


CHAINS = {"eager": one_each(EAGER), "triton": one_each(TRITON), "fused": FUSED}
pictures.show(
    kernel_drawings.chains(JOBS, CHAINS, title="kernels of one layer, one token (a number in brackets: several)"),
    "Twelve jobs of a layer and three rows of kernels under them: eager PyTorch launches 16, Triton with one kernel "
    "for each op 13, fused Triton 6. In the fused row norm, QKV, RoPE and the write share one kernel; O and the sum "
    "another; norm, gate, up and SwiGLU another; down and the sum the last.",
)

# %% [markdown]
# Green boxes are fused. Attention stays in two parts, because the pages of one row are split among many programs and
# their results must be merged (lecture 09). Everything else is about the other eleven jobs.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Where numbers live
#
# A GPU has four kinds of memory. Each is larger and slower than the one above.

# %%
pictures.show(
    kernel_drawings.levels(
        [
            ("registers", "64K of 32 bits each", "per multiprocessor; a thread has 255 at most"),
            ("shared memory", "228 KB", "per multiprocessor; each program its share"),
            ("L2 cache", "50 MB", "of all programs"),
            ("HBM3", "80 GB, 3.35 TB/s", "of all programs; an H200: 141 GB, 4.8 TB/s"),
        ]
    ),
    "Four boxes: registers, 64K of 32 bits in each multiprocessor; shared memory, 228 KB in each; L2 cache, 50 MB for "
    "all; HBM3, 80 GB at 3.35 TB/s for all.",
)

# %% [markdown]
# Sizes of an H100 SXM: NVIDIA's *Hopper Tuning Guide* and data sheet; it has 132 multiprocessors. A kernel keeps its
# numbers in registers. **When it ends, they are gone**: what the next kernel needs must go to L2 or HBM and come back.
# That is the first thing fusion saves. The second is the end itself, and the beginning of the next kernel.
#
# A CPU has the same staircase. Here is this machine's: how fast a buffer is read, by its size.

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from cs336_infer.measure import read_bandwidth

sizes = [2**18, 2**20, 2**22, 2**24, 2**26, 2**28]
rates = [read_bandwidth("cpu", size_bytes=size, repeats=3).bytes_per_s for size in sizes]
fig, ax = pictures.subplots(figsize=(7.5, 3.0))
ax.semilogx([size / 2**20 for size in sizes], [rate / 1e9 for rate in rates], "o-", base=2)
ax.set(xlabel="buffer, MiB", ylabel="GB/s", title="reading a buffer again and again", ylim=(0, None))
ax.set_xticks([size / 2**20 for size in sizes], ["1/4", "1", "4", "16", "64", "256"])
pictures.show(fig, "Bandwidth of this machine over the size of the buffer that is read.", measured=True)
print(f"timing: {rates[1] / 1e9:.0f} GB/s of 1 MiB, {rates[-1] / 1e9:.0f} GB/s of 256 MiB")

# %% [markdown]
# Small buffers stay in a cache, large ones come from memory. Weights are the large buffer: they are read once a step,
# and nothing can keep them. Activations are the small one.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## One kernel by hand: offsets and masks
#
# RMSNorm of 3 rows of 5 numbers. One *program* takes one row. A program works on blocks whose length is a power of
# two, here 8. Its 8 *lanes* reach beyond the row.
#
# Below, the hatched lanes of programs 0 and 1 lie in the next row: reading them is legal, and wrong. Those of program
# 2 lie behind the tensor. A *mask* turns them off; `other` is what they hold instead.

# %%
pictures.show(
    kernel_drawings.offsets(3, 5, 8, title="x: 3 rows of 5 numbers, blocks of 8"),
    "Fifteen numbers in memory, and above them three blocks of eight: program 0 covers 0 to 7, program 1 covers 5 to "
    "12, program 2 covers 10 to 17. The last three lanes of each are hatched: they lie in the next row, or behind the "
    "end.",
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Which program touches what, and when
#
# Without a GPU a kernel can be *interpreted*: its Python body runs once for each program, with numpy arrays for
# blocks. `trace` does that and notes every load and store.

# %%
import torch
import triton
import triton.language as tl

from cs336_infer.course.kernel_trace import trace


@triton.jit
def rms_norm_by_hand(out, x, weight, eps, D: tl.constexpr, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    inside = lane < D
    numbers = tl.load(x + row * D + lane, mask=inside, other=0.0)
    gain = tl.load(weight + lane, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(numbers * numbers) / D + eps)  # the lanes that are off hold 0: they add nothing
    tl.store(out + row * D + lane, numbers * scale * gain, mask=inside)


torch.manual_seed(0)
x, weight, out = torch.randn(3, 5), torch.rand(5) + 0.5, torch.empty(3, 5)
accesses = trace(rms_norm_by_hand, (3,), out, x, weight, 1e-5, D=5, BLOCK=8)
pictures.show(
    kernel_drawings.lanes(accesses, title="elements, in the order of the interpreter"),
    "Nine rows, three for each of three programs: load x, load weight, store out. Lanes 0 to 4 hold elements 0 to 4 "
    "for program 0, 5 to 9 for program 1, 10 to 14 for program 2; of the weight always 0 to 4. Lanes 5 to 7 are empty.",
)

# %% [markdown]
# Each program reads the whole weight, and its own row of the rest. The order between programs is the interpreter's: a
# GPU starts hundreds at once and promises none.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The package's version, and its bytes
#
# The package's kernel does the same. The sanitizer runs kernels too, under many orders; it watches each access and
# counts bytes. Before most norms a layer adds to its residual. Apart, the sum is written by one kernel and read by the
# other; the package's `add_rms_norm` is one kernel. (To write it is the first exercise of assignment a4.)

# %%
from cs336_kernels.ops import add_rms_norm, rms_norm
from cs336_kernels.sanitizer import sanitize

right = torch.nn.functional.rms_norm(x.double(), (5,), weight.double(), 1e-5)
print("the package's is the same:", torch.equal(rms_norm(x, weight, 1e-5, "triton"), out))
print("near float64:", torch.allclose(out.double(), right, rtol=1e-5))
residual = torch.randn(3, 5)
with sanitize() as report:
    normed, summed = add_rms_norm(x, residual, weight, 1e-5, "triton")
print(report.table(minimal_bytes=4 * (4 * 15 + 5)))
with sanitize() as report:
    rms_norm(x + residual, weight, 1e-5, "triton")
print(f"apart: {3 * 60} bytes for the sum by torch, {report.unique_bytes} for the norm: {3 * 60 + report.unique_bytes}")

# %% [markdown]
# `loaded` counts what all programs ask for, `unique` each place once. The weight is asked for three times and comes
# from memory once, if a cache holds it. Fusing saves 60 of 320 bytes: the sum is not read again. Of this small chain
# that is a fifth. Keep the figure in mind.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (1): masks
#
# Three mutants of a plain RMSNorm. One has no mask. One has `<=` in place of `<`. One leaves out the last lane.
# **Which of them does the sanitizer see, and which rows are wrong?**

# %%
import linecache


def tell(report) -> None:
    for found in report.findings:
        print(f"  {found.kind}: {found.message}\n      {linecache.getline(found.file, found.line).strip()}")
    print(f"  {len(report.findings)} findings")


@triton.jit
def without_mask(out, x, weight, D: tl.constexpr, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    numbers = tl.load(x + row * D + lane)
    gain = tl.load(weight + lane)
    scale = tl.rsqrt(tl.sum(numbers * numbers) / D + 1e-5)
    tl.store(out + row * D + lane, numbers * scale * gain)


@triton.jit
def with_reach(out, x, weight, D: tl.constexpr, BLOCK: tl.constexpr, REACH: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    numbers = tl.load(x + row * D + lane, mask=lane < REACH, other=0.0)
    gain = tl.load(weight + lane, mask=lane < D, other=0.0)
    scale = tl.rsqrt(tl.sum(numbers * numbers) / D + 1e-5)
    tl.store(out + row * D + lane, numbers * scale * gain, mask=lane < D)


right = torch.nn.functional.rms_norm(x, (5,), weight, 1e-5)
print("no mask")
with sanitize() as report:
    without_mask[(3,)](out, x, weight, D=5, BLOCK=8)
tell(report)
for name, reach in (("lane <= D", 6), ("lane < D - 1", 4), ("lane < D", 5)):
    print(name)
    with sanitize() as report:
        with_reach[(3,)](out, x, weight, D=5, BLOCK=8, REACH=reach)
    tell(report)
    print("  rows that are right:", [torch.allclose(*pair) for pair in zip(out, right, strict=True)])

# %% [markdown]
# Look at `lane <= D`. The finding is about the last row, the only one that is *right* here. Rows 0 and 1 read their
# neighbour's first number: inside the tensor, so no tool for memory errors can know. The third mutant is wrong
# everywhere and reads nothing it should not. A sanitizer finds what a kernel *may not* do. Whether it does what it
# *should* is seen by comparing, with rows whose length is no power of two.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (2): memory that nobody has written
#
# `torch.empty` gives what lies around. A kernel that writes all but the last number of a row, and one that reads them:


# %%
@triton.jit
def double_most(out, x, D: tl.constexpr, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    numbers = tl.load(x + row * D + lane, mask=lane < D)
    tl.store(out + row * D + lane, 2 * numbers, mask=lane < D - 1)


with sanitize() as report:
    doubled = torch.empty(3, 5)
    double_most[(3,)](doubled, x, D=5, BLOCK=8)
    rms_norm(doubled, weight, 1e-5, "triton")
for found in report.findings:
    print(f"{found.kind}: {found.message}; the read is in {found.kernel}")

# %% [markdown]
# On a GPU that memory often holds the result of the last step, which is nearly the right one. Such a bug can live for
# months. Tests of this project fill unused memory with NaN, and with two different finite values.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What an interpreter does not show
#
# **Half precision:** Triton's interpreter keeps bfloat16 as 16-bit integers, and multiplies *those*. So load, convert
# to float32, compute, convert at the store. It is what a GPU does best, too. **Speed:** none at all; see for yourself.

# %%
import time
from statistics import median

from cs336_kernels.launch import launch


@triton.jit
def square(out, x, UPCAST: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    v = tl.load(x + lane)
    if UPCAST:
        v = v.to(tl.float32)
    tl.store(out + lane, (v * v).to(tl.bfloat16))


numbers, squares = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16), torch.empty(4, dtype=torch.bfloat16)
for upcast in (False, True):
    launch(square, (1,), squares, numbers, UPCAST=upcast, BLOCK=4)
    print("converted first:" if upcast else "as loaded:      ", squares.tolist())


def seconds(run, times: int) -> float:
    """The median of some runs."""
    readings = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        readings.append(time.perf_counter() - start)
    return median(readings)


rows, gains = torch.randn(64, 576), torch.rand(576)
by_torch = seconds(lambda: rms_norm(rows, gains, 1e-5), 50)
interpreted = seconds(lambda: rms_norm(rows, gains, 1e-5, "triton"), 3)
with sanitize(schedules=1) as report:
    rms_norm(rows, gains, 1e-5, "triton")
print(f"RMSNorm of 64 rows: {report.launches[0].grid[0]} programs, {report.launches[0].steps} memory operations")
print(f"timing: torch {1e6 * by_torch:.0f} us, interpreted {1e3 * interpreted:.0f} ms")

# %% [markdown]
# Each program is a dozen numpy calls through Triton's Python layer, thousands of times slower than torch. On a CPU
# Triton is for right or wrong, at toy sizes, and never for speed.
#
# **Order:** programs run one after the other, so no race can show, and one that waits for a later one waits for ever.
# The sanitizer interleaves them; see the last experiment. From here on we count.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The ladder, counted at the size of Llama-3.2-1B
#
# Counting needs no numbers. Eager ops run on *meta* tensors, which have a shape and no content, and are written down
# on the way; launches of Triton kernels are *recorded* in place of being made. One token, 1,024 positions, bfloat16.
#
# | rung | `kernels=` | what it is |
# |---|---|---|
# | eager | `"reference"` | plain PyTorch; one kernel an op, at best |
# | compile | `"compile"` | `torch.compile`. **By a rule, not run:** neighbours fuse, products and KV writes are walls |
# | triton | `"triton"` | one Triton kernel for each op |
# | fused | `"fused"` | five or six launches |
# | graph | `"graph"` | the launches of "fused", recorded once in a CUDA graph and started by one call |
#
# The rule for `compile` is what a compiler can do at best that never enters a product. Inductor on a CPU, tried once,
# made 9 loops where the rule has 5.

# %%
from cs336_kernels.shapes import MODELS

from cs336_infer.course.layer_ladder import RUNGS, layer

LLAMA = MODELS["Llama-3.2-1B"]
one = layer(LLAMA, 1)
for rung in ("eager", "fused"):
    print(f"{rung}:", ", ".join(f"{kernel.name} {kernel.moved / 1e3:,.1f}" for kernel in one.rungs[rung]), "(kB)")
drawn = {name: sum(launches for *_, launches in spans) for name, spans in CHAINS.items()}
print("as drawn above:", drawn == {rung: one.launches(rung) for rung in drawn})

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: how many bytes does fusion save?
#
# The small chain above lost a fifth of its bytes. **By what factor does the whole layer shrink, from one kernel for
# each op to fused, at one token?**

# %%
from cs336_infer.course.predict import explain, measured, predict

predict("bytes of a layer, separate over fused", low=1.05, high=1.4, unit="times", why="results stay in registers")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
floor = one.weights + one.cached
for name, number in (("weights", one.weights), ("keys and values", one.cached)):
    print(f"{name:16} {number / 1e6:9.3f} MB")
for rung in RUNGS:
    print(f"the rest, {rung:8} {one.between(rung) / 1e6:7.3f} MB  = {one.between(rung) / one.moved(rung):.2%} of all")
measured(
    "bytes of a layer, separate over fused",
    one.moved("triton") / one.moved("fused"),
    bound=one.moved("triton") / floor,
    bound_label="nothing but weights, keys and values",
)

# %%
explain(
    "bytes of a layer, separate over fused",
    "Fusion saves 113 kB of a layer's traffic, but one token needs all 121.6 MB of weights, so nearly nothing changes.",
    must_mention=[113, 121.6],
)
pictures.show(
    kernel_drawings.rungs(
        RUNGS,
        [one.launches(rung) for rung in RUNGS],
        [("weights", one.weights / 1e6), ("keys and values", one.cached / 1e6)],
        [one.between(rung) / 1e6 for rung in RUNGS],
        title="one layer of Llama-3.2-1B, one token",
    ),
    "Three bar charts for five rungs. Launches: 16, 12, 13, 6, 6. Bytes: nearly 124 MB on every rung, almost all "
    "weights. The rest in kB: 255, 193, 264, 151, 151.",
)

# %% [markdown]
# This is the finding that surprises: **at batch 1 fusion saves launches, not bytes.** From 13 to 6 launches; from
# 123.996 to 123.883 MB. If a fused decode kernel is faster, look for the reason in the left chart.
#
# ("triton" moves 9 kB more than "eager": the parts of its attention go through memory and are counted. What torch's
# attention does inside is not seen.)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Turn the knob: tokens and models
#
# With more sequences in the batch the weights are shared, activations are not. Where does traffic begin to matter?

# %%
import ipywidgets as widgets

from cs336_infer.course.widgets import explorer


def draw_rungs(model: str, tokens: int):
    counted = layer(MODELS[model], tokens)
    return kernel_drawings.rungs(
        RUNGS,
        [counted.launches(rung) for rung in RUNGS],
        [("weights", counted.weights / 1e6), ("keys and values", counted.cached / 1e6)],
        [counted.between(rung) / 1e6 for rung in RUNGS],
        title=f"one layer of {model}, batch of {tokens}",
    )


def describe_rungs(model: str, tokens: int) -> str:
    counted = layer(MODELS[model], tokens)
    before, after = counted.moved("triton"), counted.moved("fused")
    return (
        f"{model}, batch of {tokens}: launches {', '.join(f'{rung} {counted.launches(rung)}' for rung in RUNGS)}; "
        f"fused moves {after / 1e6:,.1f} MB, {1 - after / before:.2%} less than one kernel for each op."
    )


knob = explorer(
    {
        "model": widgets.Dropdown(options=list(MODELS), value="Llama-3.2-1B", description="model"),
        "tokens": widgets.SelectionSlider(options=[1, 2, 4, 8, 16, 32, 64], value=64, description="sequences"),
    },
    draw_rungs,
    describe_rungs,
)
for tokens in (1, 8):
    print(describe_rungs("Llama-3.2-1B", tokens))
print(describe_rungs("SmolLM2-135M", 64))
knob

# %% [markdown]
# (Without a running kernel you see 64 sequences of Llama-3.2-1B.) There the rest is a few percent, and the cache of
# keys and values has passed the weights. With 64 rows of 8 KV heads there are programs enough without splitting a row,
# so the second launch of attention goes. In prefill, with thousands of tokens, activations are most of the traffic
# outside of products. Training is like prefill: there fused norms and losses save memory and time (Liger, see below).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The price: work done twice
#
# `gate_up` needs the norm of a row in every program, and each program computes it again. Nobody waits for anybody. How
# many bytes do the programs *ask for*, when each reads x and the gain?

# %%
from math import prod

from cs336_infer.course.layer_ladder import launched

print(f"{'kernel':20} {'programs':>8} {'weights, MB':>12} {'x asked, MB':>12} {'gain asked, MB':>15}")
asked = [0.0, 0.0]
for start in launched(LLAMA, 1, "fused")[0]:
    sizes, programs = start.tensor_bytes, prod(start.grid)
    if "weight" in sizes:
        row, gain = (programs * sizes.get(name, 0) / 1e6 for name in ("x", "gain"))
        print(f"{start.variant.name:20} {programs:8,} {sizes['weight'] / 1e6:12.1f} {row:12.1f} {gain:15.1f}")
        asked = [asked[0] + row, asked[1] + gain]
print(f"{'together':42} {asked[0]:12.1f} {asked[1]:15.1f}")

# %% [markdown]
# A program is one warp and takes one to four rows of the weight, so there are thousands. Together they ask for 65 MB
# of x. That has nothing to do with fusion: after a separate norm they would ask for the normed row as often. What
# fusion adds is the gain, 23 MB. Neither comes from HBM: x and gain are 4 kB each, the caches hold them (50 MB of L2,
# and 256 KB beside each multiprocessor). Measured by others: on an RTX 3090, MegaQwen computed the norm in every block
# in place of synchronising, which removed 56 waits of a step and made it 1.42 times as fast.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: from launches to microseconds
#
# A launch costs twice: the *host* must start it, and the *GPU* drains one kernel before it fills the next.
# Published costs, in microseconds:
#
# | | host, a launch | GPU, between two kernels |
# |---|---:|---:|
# | PyTorch op | 7 (fitted on H100, meta-pytorch/autoparallel#146) | 2.1 |
# | Inductor kernel | 6.8 (GB200, meta-pytorch/tritonbench#1017) | 2.1 |
# | Triton `kernel[grid]` | 8.7 (GB200, vllm-project/vllm#34838) | 2.1 |
# | node of a CUDA graph | one call for all | 1.3 |
#
# The last column is of an empty kernel on an H100 (Spector et al. 2025, "Look Ma, No Bubbles!"). The two sides
# overlap: the host runs ahead, and the slower one decides.
#
# **How long does Python on this machine take to call 258 ops of PyTorch, as an eager step does, if each only adds two
# numbers?** No GPU, no launch: just the calls.

# %%
predict("calling 258 ops of PyTorch", low=20, high=150, unit="us", why="an addition takes a nanosecond")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
H100, H200 = 3.35e12, 4.8e12  # bytes per second, data sheets


def launches_of(rung: str) -> int:
    """Of a whole step: all layers, the last norm, the head."""
    return LLAMA.layers * one.launches(rung) + 2


def reading_us(rung: str, bandwidth: float) -> float:
    """Of a whole step: the bytes of all layers and of the head."""
    return 1e6 * (LLAMA.layers * one.moved(rung) + 2 * LLAMA.vocab * LLAMA.hidden) / bandwidth


def call_all() -> None:
    with torch.inference_mode():
        for _ in range(launches_of("eager")):
            torch.add(number, number)


number = torch.ones(1)
calling = 1e6 * seconds(call_all, 30)
measured(
    "calling 258 ops of PyTorch",
    calling,
    bound=reading_us("eager", H100),
    bound_label="an H100 reads all bytes of the step (computed)",
)

# %%
explain(
    "calling 258 ops of PyTorch",
    "Python and PyTorch's dispatcher take about a microsecond for each of 258 calls, before anything is computed, and "
    "a launch takes several more; meanwhile an H100 could read every byte of the step, in 748 us.",
    must_mention=[258, 748],
)
HOST = {"eager": 7.0, "compile": 6.8, "triton": 8.7, "fused": 8.7, "graph": 0.0}  # us a launch, as above
GAP = {"eager": 2.1, "compile": 2.1, "triton": 2.1, "fused": 2.1, "graph": 1.3}
host = [launches_of(rung) * HOST[rung] or HOST["eager"] for rung in RUNGS]  # the graph: one call for the step
gaps = [launches_of(rung) * GAP[rung] for rung in RUNGS]
pictures.show(
    kernel_drawings.step_times(
        RUNGS, reading_us("fused", H100), gaps, host,
        title="a step of Llama-3.2-1B at 3.35 TB/s: computed from counts, not measured",
    ),
    "Computed microseconds of a step on an H100 for five rungs. Reading takes 748 on each. Between kernels: 542 eager, "
    "407 compile, 441 triton, 206 fused, 127 graph. The host needs 1,806, 1,319, 1,827, 853 and 7.",
)  # fmt: skip
for name, bandwidth in (("H100", H100), ("H200", H200)):
    reading = reading_us("graph", bandwidth)
    print(f"graph, {name}, computed: {launches_of('graph')} gaps are {gaps[-1] / (reading + gaps[-1]):.0%} of "
          f"{reading + gaps[-1]:.0f} us")  # fmt: skip

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What the model says, and what it leaves out
#
# - One Triton kernel for each op gains **nothing** over eager PyTorch: the host is the limit of both, and Triton's
#   start in Python is the slower one.
# - Fusion halves the launches, and brings the host and the GPU to the same time.
# - A graph takes the host away. Only then do the gaps count, and fewer launches still help: 98 against 210 of them at
#   1.3 us is 0.15 ms. On faster memory the gaps weigh more: 15 % of a step on an H100, 20 % on an H200.
#
# Published for this model and one token on an H100: 980 us for a graph of 100 kernels with overlapped starts, 973 us
# for the megakernel (msaroufim/megakernels-vs-cuda-graphs, 2026); ours computes 876. What is missing: kernels that are
# too short to reach the full bandwidth, tails in which most multiprocessors idle, and that nobody reaches 3.35 TB/s.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Compiled without a GPU
#
# Triton's compiler needs no GPU. It makes machine code for an H100 (`sm_90`) here, and we can read what came out:
# registers of a thread, spills, shared memory, and how many bits one thread loads at once.

# %%
from dataclasses import replace

from cs336_kernels.catalogue import OPS
from cs336_kernels.compiled import build, cases
from cs336_kernels.compiled import rows as compiled_rows

parts = [OPS[name] for name in ("qkv", "decode_attention", "linear_add", "gate_up")]
found = [case for case in cases(parts, [LLAMA], tokens=(1,)) if case.dtype == "bfloat16"]
print(f"{'kernel':20} {'warps':>5} {'registers':>9} {'spills':>6} {'shared':>7}  bits of a load")
for row in compiled_rows(found, ["sm_90"]):
    loads = ", ".join(f"{name} {bits}" for name, bits in row.loads.items() if name not in ("cos", "sin", "slots"))
    print(f"{row.kernel:20} {row.num_warps:5} {row.registers:9} {row.spills:6} {row.shared_bytes:7}  {loads}")

promised = next(case.variant for case in found if case.variant.name == "linear_few_kernel")
for name, variant in (("as launched", promised), ("no promise", replace(promised, divisible=()))):
    made = build(variant, 90)
    print(f"{name:12} {made.registers} registers, weight loads of {dict(made.loads)['weight']} bits")

# %% [markdown]
# No spills, and 128 bits for everything large. `python -m cs336_kernels.aot` makes this table for all kernels, four
# models and three GPUs; `--check` fails when one spills or loads narrowly.
#
# **Why 128 bits (`LDG.128`)?** A load takes an issue slot and an entry in the memory pipeline, whether it brings 2
# bytes or 16. To keep HBM busy, bandwidth times latency must be on its way: with an assumed 0.7 us that is 2.3 MB, or
# 18 kB in each multiprocessor. With 16 bytes a lane, 35 warp loads in flight do it; with 2 bytes, 278.
#
# The width hangs on a promise that addresses are divisible by 16, which Triton sees in the arguments of a launch. The
# last line has no promise. A view that begins at an odd element, or an odd row length, is such a launch: right, and
# with eight times as many loads. No test of values sees it. A check of the compiled code does.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Fusion rounds elsewhere
#
# Separate kernels round to bfloat16 after the norm, after the product, and after SiLU. The fused kernel rounds once,
# at the end. The results differ, and a test must say which difference is allowed:

# %%
from cs336_kernels.catalogue import Separate
from cs336_kernels.shapes import TINY

op = OPS["gate_up"]
arguments = op.make(TINY["tiny"], torch.bfloat16, torch.device("cpu"), 4, seed=0)
fused = op.call(**arguments, path="triton").double()
apart = op.separate(Separate("triton"), **arguments).double()
doubles = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
truth = op.call(**doubles, path="reference")
error = {name: float((made - truth).norm()) for name, made in (("fused", fused), ("apart", apart))}
print("equal:", torch.equal(fused, apart), " fused is nearer to float64:", error["fused"] < error["apart"])

# %% [markdown]
# Nearer to the truth is not nearer to what the model was trained with. vLLM's `fused_add_rms_norm` rounds the sum
# before it takes the mean square, its compiled path does not, and greedy answers differ between the two (vllm#52104).
# A gain multiplied in float32 in place of bfloat16 was a regression there, too (vllm#42379). Our ops write down where
# they round (the gain is multiplied in float32, as torch does), and tests compare each with an honest half-precision
# reference.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The engine on these kernels
#
# `kernels=` chooses the rung. Here all three run the same random model of two layers, interpreted, and must give the
# ids of plain PyTorch. KV memory is filled with NaN where nobody has written. Then one decode step of both sequences
# runs under the sanitizer: two layers and the head.

# %%
from collections import Counter

from cs336_infer import LLM, SamplingParams
from cs336_infer.course.tiny_model import tiny_model

prompts, greedy = [[5, 9, 300, 17, 4], [200, 3]], SamplingParams(max_tokens=6, ignore_eos=True)
answers = {}
for kernels in ("reference", "triton", "fused"):
    llm = LLM(tiny_model(kernels), block_size=4, kv_tokens=96, fill=float("nan"), prefix_cache=False)
    done = llm.generate(prompts, greedy)
    answers[kernels] = [d.token_ids for d in done]
    same = answers[kernels] == answers["reference"]
    print(f"{done[0].path.split(' dtype')[0]:34} same as reference: {same}  {done[0].token_ids}")


def decode_step(kernels: str):
    """What the sanitizer saw in the first decode step of both prompts."""
    llm = LLM(tiny_model(kernels), block_size=4, kv_tokens=96, fill=float("nan"), prefix_cache=False)
    for prompt in prompts:
        llm.engine.add(prompt, greedy, llm.root())
    llm.engine.step()  # both prompts
    with sanitize(schedules=1) as report:
        llm.engine.step()
    return report


seen = {kernels: decode_step(kernels) for kernels in ("triton", "fused")}
for kernels, report in seen.items():
    print(f"{kernels:6} {len(report.launches):2} launches, {report.unique_bytes:,} bytes of different places, "
          f"{report.total_bytes:,} asked for, {len(report.findings)} findings")  # fmt: skip
    print("      ", dict(Counter(start.kernel for start in report.launches)))

# %% [markdown]
# The same counts as on the ladder: 10 launches a layer and two sums that torch makes, against 5; each has 2 for the
# head. A row this short is not split. (Interpreted programs are larger than a GPU's, so that fewer of them ask again.)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (3): when programs must talk
#
# Until now no program waited for another. Suppose a row is too long for one program, and two take a half each: both
# write a partial sum, raise a counter, wait for the other, and read both. **One of these four lines may be missing or
# weaker. Will the answer be wrong?**


# %%
@triton.jit
def rms_norm_in_halves(out, x, parts, arrived, HALF: tl.constexpr, BARRIER: tl.constexpr,
                       SET: tl.constexpr, POLL: tl.constexpr):  # fmt: skip
    half, lane = tl.program_id(0), tl.arange(0, HALF)
    numbers = tl.load(x + half * HALF + lane)
    tl.store(parts + half, tl.sum(numbers * numbers))
    if BARRIER:
        tl.debug_barrier()  # all threads of this program have stored
    tl.atomic_add(arrived, 1, sem=SET)
    if POLL == "plain":
        while tl.load(arrived) < 2:
            pass
    else:
        while tl.atomic_add(arrived, 0, sem=POLL) < 2:
            pass
    total = tl.load(parts) + tl.load(parts + 1)
    tl.store(out + half * HALF + lane, numbers * tl.rsqrt(total / (2 * HALF) + 1e-5))


row, result = torch.randn(16), torch.empty(16)
wanted = torch.nn.functional.rms_norm(row, (16,), None, 1e-5)
for name, *variant in (
    ("as it should be", True, "release", "acquire"),
    ("no barrier", False, "release", "acquire"),
    ("no release", True, "relaxed", "acquire"),
    ("no acquire", True, "release", "relaxed"),
    ("a plain load", True, "release", "plain"),
):
    with sanitize() as report:
        counter = torch.zeros(1, dtype=torch.int32)
        rms_norm_in_halves[(2,)](result, row, torch.empty(2), counter, 8, *variant)
    print(f"{name}: right: {torch.allclose(result, wanted)}")
    tell(report)
print("as it should be, but only one program fits")
with sanitize(resident=1) as report:
    counter = torch.zeros(1, dtype=torch.int32)
    rms_norm_in_halves[(2,)](result, row, torch.empty(2), counter, 8, True, "release", "acquire")
tell(report)

# %% [markdown]
# The answer is right every time, and four of the five kernels are wrong. The sanitizer does not wait for a wrong
# answer: it asks whether anything *orders* the store of one program before the load of the other. Where nothing does,
# a GPU may be right for years, until the compiler, the clock or the neighbours change. (Up to Triton 3.8 the missing
# barrier lets one thread raise the counter while others still store; and a loop around a plain load is deleted.)
#
# And if both do not fit on the GPU at once, the first waits for one that cannot start: the deadlock above.
#
# This is why our fused kernels compute the norm again in every program: 4 kB from a cache need no promise from
# anybody. The megakernel lectures come back to kernels that wait.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Takeaways
#
# - A program owns a block; offsets say where it lies, masks say which lanes count. Test with odd row lengths.
# - Fusion saves what passes between kernels, and the kernels' ends. At batch 1 the first is 0.1 % of a layer's bytes;
#   the second is the difference between 210 launches a step and 98.
# - Starting kernels from Python costs more than the gaps. Fuse, then record a CUDA graph.
# - Work done twice is cheap when its input is small. Waiting is not, and is hard to get right.
# - Without a GPU you can know: right or wrong, races, bytes, launches, registers, width of loads. You cannot know time.
#
# ## Where real engines differ
#
# - vLLM writes models in PyTorch and fuses by passes over the graph of `torch.compile`: all-reduce + norm, norm +
#   quantisation, QK norm + RoPE, RoPE + KV write. Its documentation states 2 to 20 % end to end for each (*Fusion
#   torch.compile passes*). Fusing residual and norm in its Transformers backend gave 2.6 % (vllm#48757).
# - FlashInfer offers `fused_add_rmsnorm`, in place, with an option for *programmatic dependent launch*: the next kernel
#   starts while this one drains, which hides a part of the gap.
# - Products come from cuBLAS or CUTLASS there, not from Triton; fusing a norm *into* a product, as `qkv` and `gate_up`
#   do here, is rare above a few tokens, where tensor cores want the normed row in half precision.
# - Liger (training) fuses norm, RoPE, SwiGLU and the loss: there the saved memory is the point (Liger-Kernel#812).
# - vLLM and SGLang run decode in CUDA graphs by default, one graph for each of a list of batch sizes.
#
# ## Read next
#
# - Tillet, Kung and Cox 2019, "Triton" (MAPL); the tutorials *Fused Softmax* and *Layer Normalization* of Triton.
# - Spector et al. 2025, "Look Ma, No Bubbles! Designing a Low-Latency Megakernel for Llama-1B".
# - `kernels/cs336_kernels/ops/triton/gate_up.py`, `products.py`; `cs336_infer/models/triton_block.py`: a layer on 60
#   lines. Lecture 09 goes into `decode_attention`; the assignment is `a4_fusion`.
