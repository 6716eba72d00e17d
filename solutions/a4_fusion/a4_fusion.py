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
# # Assignment 4 · Fusion
#
# A decode step reads every weight once and computes little with it: what it costs is bytes, and launches. You write the
# kernels that bring both down, in Triton. None of them needs a GPU here: they run in an interpreter, and a *sanitizer*
# counts every byte and looks for races, for reads of what nobody wrote, and for places outside of a tensor. It runs the
# programs of a launch in many orders. No clock is read in this assignment.
#
# When graded, only the text of your kernels counts. It must compile for a GPU (sm_90) by itself, and hold nothing but
# Triton: a kernel, the `@triton.jit` helpers that it calls, and numbers declared as `NAME = tl.constexpr(...)`. The
# signatures are given, and so are grids and constants of the launches; the checks launch your kernels themselves.
#
# Rules for all of them:
#
# - **Load half precision, compute in float32, round once at the store.** `tl.load(...).to(tl.float32)` right away, and
#   `.to(out.dtype.element_ty)` at the end. Results may be off by twice the error of an honest computation, no more.
# - **Read and write only what is yours.** `BLOCK` is a power of two, the data is not. Between rows, behind rows and in
#   unused pages there is NaN, or something worse.
# - **Bytes.** A place that is read or written counts once a launch (*unique* bytes, as with a perfect cache). A launch
#   may move 5 % more than the fewest possible.
# - A row number times a stride can pass 2^31: make it an int64 first, `tl.program_id(0).to(tl.int64)`.

# %%
import triton
import triton.language as tl

from cs336_infer.course.a4_fusion import check_public

# %% [markdown]
# ## 0. A worked example
#
# `out = a x + y` over `n` numbers. The masked load has an `other`: lanes that the mask turns off hold anything
# otherwise. Here is what the sanitizer says about it.


# %%
@triton.jit
def axpy_kernel(out, x, y, a, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    numbers = a * tl.load(x + at, mask=inside, other=0.0) + tl.load(y + at, mask=inside, other=0.0)
    tl.store(out + at, numbers, mask=inside)


# %%
import torch
from cs336_kernels.sanitizer import sanitize

x, y = torch.arange(20.0), torch.ones(20)
with sanitize(schedules=10) as report:
    out = torch.empty(20)
    axpy_kernel[(3,)](out, x, y, 2.0, 20, BLOCK=8)
print(report.findings, torch.equal(out, 2 * x + y))
print(report.table(minimal_bytes=3 * 20 * 4))

# %% [markdown]
# ## 1. Residual sum and RMSNorm
#
# Between two matrix products a layer adds to the residual stream, and norms the sum. As two kernels the sum is written
# and read again; in one kernel it stays in registers, and 5 passes over memory become 4.
#
# $$s = x + r, \qquad n_i = \frac{s_i}{\sqrt{\frac1D \sum_j s_j^2 + \varepsilon}}\, w_i$$
#
# A program owns a row. Two traps: the *rounded* sum is normed, since the next layer adds to what was written; and the
# mean is over `D` numbers, not over `BLOCK`. Grid `(rows,)`; `BLOCK` is the power of two at or above `D`.


# %% nbgrader={"schema_version": 3, "grade_id": "add_rms_norm_kernel", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 2, "importance": 5, "minutes": 30, "gpu": false, "forbidden": []}
@triton.jit
def add_rms_norm_kernel(
    normed, summed, x, residual, weight, step_x, step_residual, eps, D: tl.constexpr, BLOCK: tl.constexpr
):
    """summed = x + residual, normed = RMSNorm(summed), of one row.

    normed, summed: [rows, D], contiguous. x, residual: [rows, D], a row every `step_x` and `step_residual` numbers.
    weight: [D]. All of one type.
    """
    # Step: load both rows; sum, round, store
    # BEGIN SOLUTION
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < D
    total = tl.load(x + row * step_x + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + row * step_residual + at, mask=mask, other=0.0).to(tl.float32)
    total = total.to(summed.dtype.element_ty)
    tl.store(summed + row * D + at, total, mask=mask)
    # Step: the norm of the rounded sum
    total = total.to(tl.float32)
    gain = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    result = total * tl.rsqrt(tl.sum(total * total, 0) / D + eps) * gain
    tl.store(normed + row * D + at, result.to(normed.dtype.element_ty), mask=mask)
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "add_rms_norm_kernel_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 3}
check_public(add_rms_norm_kernel)

# %% [markdown]
# ## 2. RoPE, and keys and values into their pages
#
# The new tokens' queries and keys are rotated, and keys and values go to their slots of paged memory. Apart, rotated keys
# are written, read and written again. Here a program owns one head of one token: the first `HEADS` heads are queries,
# which go to `q_out`; program `HEADS + h` rotates key head `h` and stores it, with value head `h`, in the token's slot.
#
# Slot `s` is place `s % BLOCK_SIZE` of page `s // BLOCK_SIZE`. A page begins every `step_keys` (`step_values`) numbers and
# holds `[BLOCK_SIZE, KV_HEADS, HEAD_DIM]`. For a pair `(a, b)` of numbers at `i` and `i + HEAD_DIM / 2`:
#
# $$a' = a \cos_i - b \sin_i, \qquad b' = b \cos_i + a \sin_i$$
#
# Grid `(tokens, HEADS + KV_HEADS)`. `HEAD_DIM // 2` need not be a power of two; `BLOCK` is the one at or above it.


# %% nbgrader={"schema_version": 3, "grade_id": "rope_write_kernel", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 3, "importance": 5, "minutes": 50, "gpu": false, "forbidden": []}
@triton.jit
def rope_write_kernel(
    q_out, keys, values, q, k, v, cos, sin, slots,
    step_q, step_k, step_v, step_keys, step_values,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token.

    q_out: [tokens, HEADS, HEAD_DIM], contiguous. q, k, v: [tokens, heads, HEAD_DIM], a token every `step_q`, `step_k`,
    `step_v` numbers. cos, sin: [tokens, HEAD_DIM // 2], contiguous. slots: [tokens] int64. All floats of one type.
    """
    # Step: the angles, and where the head is and goes
    # BEGIN SOLUTION
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    mask = at < HALF
    c = tl.load(cos + token * HALF + at, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + at, mask=mask, other=0.0).to(tl.float32)
    if head < HEADS:
        source = q + token * step_q + head * HEAD_DIM + at
        target = q_out + (token * HEADS + head) * HEAD_DIM + at
    else:
        kv_head = head - HEADS
        slot = tl.load(slots + token)
        page = slot // BLOCK_SIZE
        inside = ((slot % BLOCK_SIZE) * KV_HEADS + kv_head) * HEAD_DIM + at
        source = k + token * step_k + kv_head * HEAD_DIM + at
        target = keys + page * step_keys + inside
        # Step: a value head is copied as it is
        given = v + token * step_v + kv_head * HEAD_DIM + at
        copy = values + page * step_values + inside
        tl.store(copy, tl.load(given, mask=mask, other=0.0), mask=mask)
        tl.store(copy + HALF, tl.load(given + HALF, mask=mask, other=0.0), mask=mask)
    # Step: rotate, round, store
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = q_out.dtype.element_ty
    tl.store(target, (a * c - b * s).to(kind), mask=mask)
    tl.store(target + HALF, (b * c + a * s).to(kind), mask=mask)
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "rope_write_kernel_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 3}
check_public(rope_write_kernel)

# %% [markdown]
# ## 3. SwiGLU
#
# The product with the stacked gate and up weights gives rows `[gate | up]` of `2 N` numbers. What goes on is
#
# $$\mathrm{silu}(g)\, u, \qquad \mathrm{silu}(g) = \frac{g}{1 + e^{-g}}$$
#
# A program owns `BLOCK` columns of a row. Grid `(rows, ceil(N / BLOCK))`. Mind the gate at -100 and at +100.


# %% nbgrader={"schema_version": 3, "grade_id": "swiglu_kernel", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 1, "importance": 4, "minutes": 20, "gpu": false, "forbidden": []}
@triton.jit
def swiglu_kernel(out, gate_up, step, N: tl.constexpr, BLOCK: tl.constexpr):
    """out: [rows, N], contiguous. gate_up: [rows, 2 * N], a row every `step` numbers, the gate first; of one type."""
    # BEGIN SOLUTION
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    gate = tl.load(gate_up + row * step + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * step + N + at, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * N + at, result.to(out.dtype.element_ty), mask=mask)
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "swiglu_kernel_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 2}
check_public(swiglu_kernel)

# %% [markdown]
# ## 4. Attention of a decode step, split along the positions
#
# One query a row, thousands of keys in pages. With a program for each row and KV head most of a GPU would be idle, so the
# pages of a row are dealt out to `splits` programs (*Flash-Decoding*, Dao et al. 2023). Each computes the softmax average
# of its own positions, and the logarithm of its sum of exponentials; a second, small kernel merges them.
#
# **Which positions.** A row of length $n$ has $\lceil n / \text{BLOCK\_SIZE} \rceil$ pages. Each split gets
# $\lceil \text{pages} / \text{splits} \rceil$ of them, in order; the last ones may get fewer, or none. Position `p` is in
# page `tables[row, p // BLOCK_SIZE]`, at place `p % BLOCK_SIZE`. Behind the last page that is needed, the table holds
# numbers that lead nowhere.
#
# **What a part is.** With scores $s_p = \text{scale} \cdot q \cdot k_p$ over the split's positions,
#
# $$\mathrm{lse} = \ln \sum_p e^{s_p}, \qquad \text{partial} = \sum_p e^{s_p - \mathrm{lse}}\, v_p .$$
#
# Keep a running maximum $m$, a running sum, and a running weighted sum of values; when a tile of `BLOCK_N` positions
# raises the maximum, what was summed so far is multiplied by $e^{m_\text{old} - m_\text{new}}$. A part without positions
# has the lse $-\infty$; its partial is not looked at.
#
# **Grouped queries.** Query head `h` reads KV head `h // (HEADS / KV_HEADS)`. A program serves all query heads of a KV
# head, so that each key and value is loaded once: `q[:, None, :] * k[None, :, :]`, summed over the last axis, has all scores.
#
# **The merger** weighs each partial with $e^{\mathrm{lse}}$, relative to the largest. What a part of no positions holds
# must not matter, not even NaN, and if all are empty, the result is zeros.
#
# Grids: `(rows, KV_HEADS, splits)`, and `(rows * HEADS,)`.


# %% nbgrader={"schema_version": 3, "grade_id": "split_attention_kernel", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 5, "importance": 5, "minutes": 90, "gpu": false, "forbidden": []}
@triton.jit
def split_attention_kernel(
    partials, lse, q, keys, values, tables, lengths,
    step_q, step_keys, step_values, step_table, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All query heads of a KV head, over one split of a row's pages.

    partials: [rows, HEADS, splits, HEAD_DIM] float32. lse: [rows, HEADS, splits] float32. q: [rows, HEADS, HEAD_DIM], a
    row every `step_q` numbers. keys, values: pages as in exercise 2. tables: [rows, step_table] int64. lengths: [rows]
    int64. BLOCK_G, BLOCK_D: powers of two at or above HEADS / KV_HEADS and HEAD_DIM.
    """
    # Step: which positions are mine
    # BEGIN SOLUTION
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(lengths + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, BLOCK_SIZE), splits) * BLOCK_SIZE
    begin = split * share
    end = tl.minimum(begin + share, length)
    # Step: the queries
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    mine = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + row * step_q + head[:, None] * HEAD_DIM + d[None, :], mask=mine, other=0.0).to(tl.float32)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    # Step: tile after tile
    for start in range(begin, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        seen = at < end
        page = tl.load(tables + row * step_table + at // BLOCK_SIZE, mask=seen, other=0)
        inside = (at % BLOCK_SIZE * KV_HEADS + kv_head) * HEAD_DIM
        tile = seen[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + (page * step_keys + inside)[:, None] + d[None, :], mask=tile, other=0.0).to(tl.float32)
        v = tl.load(values + (page * step_values + inside)[:, None] + d[None, :], mask=tile, other=0.0).to(tl.float32)
        scores = tl.sum(query[:, None, :] * k[None, :, :], 2) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.sum(weights[:, :, None] * v[None, :, :], 1)
        top = higher
    # Step: the part and its lse; what if there was no position?
    some = total > 0
    safe = tl.where(some, total, 1.0)
    to = (row * HEADS + head) * splits + split
    tl.store(partials + to[:, None] * HEAD_DIM + d[None, :], acc / safe[:, None], mask=mine)
    tl.store(lse + to, tl.where(some, top + tl.log(safe), float("-inf")), mask=g < GROUP)
    # END SOLUTION


@triton.jit
def merge_kernel(
    out, partials, lse, splits, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """One row and head.

    out: [rows * HEADS, HEAD_DIM]. partials: [rows * HEADS, splits, HEAD_DIM] float32. lse: [rows * HEADS, splits]
    float32. BLOCK_S, BLOCK_D: powers of two at or above splits and HEAD_DIM.
    """
    # Step: weights relative to the largest lse, then the average
    # BEGIN SOLUTION
    mine = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    parts = tl.load(lse + mine * splits + s, mask=s < splits, other=float("-inf"))
    top = tl.max(parts, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(parts - top)
    filled = (parts != float("-inf"))[:, None] & (d < HEAD_DIM)[None, :]
    tile = tl.load(partials + (mine * splits + s)[:, None] * HEAD_DIM + d[None, :], mask=filled, other=0.0)
    total = tl.sum(weights, 0)
    average = tl.sum(tile * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + mine * HEAD_DIM + d, average.to(out.dtype.element_ty), mask=d < HEAD_DIM)
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "split_attention_kernel_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 5}
check_public(split_attention_kernel, merge_kernel)

# %% [markdown]
# ## 5. Find what is wrong
#
# Seven small kernels, each with a bug planted. `listing` prints one, `launch` runs it. Here is the first, and what the
# sanitizer says: the kind is `out-of-bounds` and the line is 8, where the mask lets one number too many through.

# %%
from cs336_infer.course.a4_broken import BROKEN, RESIDENT, SCHEDULES, launch, listing

print(listing("double"))
with sanitize(schedules=SCHEDULES, resident=RESIDENT) as report:
    launch("double")
for finding in report.findings:
    print(finding)

# %%
for name in list(BROKEN)[1:]:
    print(listing(name), end="\n\n")

# %% [markdown]
# Name the kind and the line of each, by reading or by running. Kinds are `race`, `deadlock`, `out-of-bounds`,
# `uninitialised-read`, `plain-load-poll`, `nondeterminism`. Of a race, either of the two accesses counts; of a deadlock, the
# line that waits.


# %% nbgrader={"schema_version": 3, "grade_id": "name_bugs", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 2, "importance": 4, "minutes": 40, "gpu": false, "forbidden": []}
def name_bugs() -> dict[str, list]:
    """What is wrong with each kernel, by its name, as [kind, line]. Of the example: ["out-of-bounds", 8]."""
    # BEGIN SOLUTION
    return {
        "double": ["out-of-bounds", 8],
        "column_sums": ["race", 12],
        "reversed_rows": ["uninitialised-read", 12],
        "after_the_first": ["plain-load-poll", 17],
        "all_arrive": ["deadlock", 14],
        "row_maxima": ["nondeterminism", 9],
        "last_adds": ["race", 9],
    }
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "name_bugs_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 2}
check_public(name_bugs)

# %% [markdown]
# ## 6. Repair one
#
# `last_adds` adds up many numbers in one launch: each program stores its part, and the one that comes last adds the parts
# up. Attention can merge its parts like this, without a second launch. Repair it, with the same arguments. It must also
# be possible to launch it again with the same `count`, without a launch in between that sets it to 0: look at what the
# counter holds when all are done. The sanitizer says nothing about that.


# %% nbgrader={"schema_version": 3, "grade_id": "repaired_kernel", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 3, "importance": 4, "minutes": 30, "gpu": false, "forbidden": []}
@triton.jit
def repaired_kernel(out, parts, count, x, n, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    """out[0] = sum of x[0 .. n-1]; grid (ceil(n / BLOCK),).

    parts: [programs] float32, written by each program. count: [1] int32, 0 before and after. PROGRAMS: a power of two
    at or above the size of the grid.
    """
    # BEGIN SOLUTION
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + program, tl.sum(tl.load(x + at, mask=at < n, other=0.0), 0))
    tl.debug_barrier()
    before = tl.atomic_add(count, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        tl.debug_barrier()
        p = tl.arange(0, PROGRAMS)
        mine = tl.load(parts + p, mask=p < tl.num_programs(0), other=0.0)
        tl.store(out, tl.sum(mine, 0))
        tl.atomic_xchg(count, 0, sem="relaxed")
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "repaired_kernel_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 2}
check_public(repaired_kernel)

# %% [markdown] nbgrader={"schema_version": 3, "grade_id": "bytes_and_launches", "grade": true, "solution": true, "locked": false, "task": false, "points": 3}
# **7. In your own words.** Llama-3.2-1B in bfloat16 has 16 layers and reads 2.47 GB of weights a token; a GPU with
# 4.8 TB/s needs 515 microseconds for them. A token's activations are 2,048 numbers wide, and the MLP's 8,192. How many
# bytes a layer does the fused add and norm of exercise 1 save for one token, and how long is that? What does it save for
# 4,096 tokens of prefill? A launch in a graph costs about 1.3 microseconds: what is saved when 12 launches a layer become
# 6? Which of the kernels here matter for decoding because of bytes, and which because of launches? Five or six sentences
# with numbers.
#
# # BEGIN SOLUTION
# Fused, the sum is written once and not read again: 2,048 x 2 = 4,096 bytes a norm, 8 KiB a layer with two norms, 128 KiB a
# token, which at 4.8 TB/s is 0.03 microseconds of 515: nothing. For 4,096 tokens it is 512 MiB, 0.11 ms, which is worth
# having beside some 10 ms of computing. Six launches fewer a layer are 96 launches, 125 microseconds at 1.3 each, about a fifth of
# the whole step. So norms, RoPE and SwiGLU are fused in decoding for the sake of launches and of the latency between dependent
# phases, and for the sake of bytes in prefill. Attention matters for bytes, since it reads all of the KV memory (32 KiB a
# position here, 537 MB at 16,000 positions, a fifth of the weights), and each key should be loaded once for all query heads of
# its group. Splitting it adds bytes and a launch, and is worth it only where programs would be too few to fill the GPU.
# # END SOLUTION

# %% [markdown]
# ## Your kernels in the real engine
#
# `plug_kernels` puts your kernels into the engine's Triton path: the norm, RoPE with the KV write, SwiGLU, and decoding over
# pages. The products with the weights stay the package's. Everything is interpreted here, so the model is a tiny one with
# random weights; its answers mean nothing, but each token depends on all before it.

# %%
from cs336_infer import LLM, SamplingParams, generate
from cs336_infer.course.a4_sockets import plug_kernels
from cs336_infer.course.tiny_model import tiny_model

plug_kernels(
    add_rms_norm_kernel=add_rms_norm_kernel,
    rope_write_kernel=rope_write_kernel,
    swiglu_kernel=swiglu_kernel,
    split_attention_kernel=split_attention_kernel,
    merge_kernel=merge_kernel,
)
prompts = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [30]]
params = SamplingParams(max_tokens=6, ignore_eos=True)
llm = LLM(tiny_model("triton"), block_size=4, kv_tokens=96, fill=float("nan"), prefix_cache=False)
mine = llm.generate(prompts, params)
for answer in mine:
    print(answer.token_ids)
print("plugged in:", mine[0].path.split("plugged=")[1].replace(",", ", "))

# %% [markdown]
# The oracle has no kernels at all: plain PyTorch, one prompt after the other, without a cache. In float32 the tokens are
# the same ones. Memory that nobody has written holds NaN.

# %%
plain = tiny_model("reference")
oracle = [generate(plain, [prompt], params, kv="none")[0] for prompt in prompts]
print("same tokens as plain PyTorch:", [a.token_ids for a in mine] == [a.token_ids for a in oracle])

# %% [markdown]
# ## Open task: half a layer
#
# The MLP half of a decode step, for 4 tokens of 96 numbers in float32:
#
# $$s = x + r, \qquad n = \mathrm{RMSNorm}(s)\, w, \qquad y = s + W_\text{down}\,\bigl(\mathrm{silu}(W_\text{gate}\, n) \odot W_\text{up}\, n\bigr)$$
#
# Buffers: `x`, `residual`, `out` [4, 96], `norm` [96], `gate_up` [384, 96] (the gate's 192 rows first), `down` [96, 192]; eps
# is 1e-5. You write a *plan*: which kernels are launched, with what, one after the other, and which scratch they need.
# Scratch of float32 holds anything at first, of int32 zeros. At most 8 launches, of at most 256 programs each.
#
# **The cost** has no clock in it. A launch costs what all its programs move together, each request counted, not only
# the first one; or 16 times what its busiest program moves, whichever is more, as on a GPU with 16 multiprocessors: one
# program that does everything leaves 15 idle. Each launch costs 8,192 bytes more.
#
# 16 programs are resident; programs of one launch may wait for each other, if they are not more than these. The sanitizer
# looks on. Below is a start: one kernel for each operation, one program for each token and piece. How often is each weight
# read? What would it cost to compute the norm again in each program? What must two phases in one launch know of each
# other?


# %%
@triton.jit
def product_kernel(out, x, weight, K, N, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """out[token, n] = sum over k of x[token, k] weight[n, k]; grid (tokens, ceil(N / BLOCK_N))."""
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    numbers = tl.load(x + token * K + k, mask=k < K, other=0.0)
    inside = (n < N)[:, None] & (k < K)[None, :]
    tile = tl.load(weight + n[:, None] * K + k[None, :], mask=inside, other=0.0)
    tl.store(out + token * N + n, tl.sum(tile * numbers[None, :], 1), mask=n < N)


def layer_plan() -> dict:
    """{"scratch": {name: [shape, "float32" or "int32"]}, "launches": [[kernel, grid, arguments, constants], ...]}, where
    arguments are {parameter: a number or the name of a buffer}, and constants {parameter: a number}."""
    norm = {"normed": "normed", "summed": "summed", "x": "x", "residual": "residual", "weight": "norm"}
    steps = {"step_x": 96, "step_residual": 96, "eps": 1e-5}
    up = {"out": "pair", "x": "normed", "weight": "gate_up", "K": 96, "N": 384}
    down = {"out": "small", "x": "hidden", "weight": "down", "K": 192, "N": 96}
    return {
        "scratch": {
            "normed": [[4, 96], "float32"],
            "summed": [[4, 96], "float32"],
            "pair": [[4, 384], "float32"],
            "hidden": [[4, 192], "float32"],
            "small": [[4, 96], "float32"],
        },
        "launches": [
            ["add_rms_norm_kernel", [4], norm | steps, {"D": 96, "BLOCK": 128}],
            ["product_kernel", [4, 24], up, {"BLOCK_K": 128, "BLOCK_N": 16}],
            ["swiglu_kernel", [4, 3], {"out": "hidden", "gate_up": "pair", "step": 384}, {"N": 192, "BLOCK": 64}],
            ["product_kernel", [4, 6], down, {"BLOCK_K": 256, "BLOCK_N": 16}],
            ["axpy_kernel", [6], {"out": "out", "x": "summed", "y": "small", "a": 1.0, "n": 384}, {"BLOCK": 64}],
        ],
    }


# %%
from cs336_infer.course.a4_open_task import layer_cost

print(layer_cost(layer_plan))
