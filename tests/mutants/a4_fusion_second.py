"""Another correct solution of assignment 4: helpers, loops over columns and over parts, `tl.dot`-free."""

import triton
import triton.language as tl

print("a noisy notebook")

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1.0e38)


@triton.jit
def number(place, there):
    return tl.load(place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def put(place, numbers, there):
    tl.store(place, numbers.to(place.dtype.element_ty), mask=there)


@triton.jit
def add_rms_norm_kernel(
    normed, summed, x, residual, weight, step_x, step_residual, eps, D: tl.constexpr, BLOCK: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    there = i < D
    wide = number(x + r * step_x + i, there) + number(residual + r * step_residual + i, there)
    narrow = wide.to(normed.dtype.element_ty)
    put(summed + r * D + i, narrow, there)
    wide = narrow.to(tl.float32)
    mean = tl.sum(wide * wide) / D
    put(normed + r * D + i, number(weight + i, there) * (wide / tl.sqrt(mean + eps)), there)


@triton.jit
def turn(place, to, c, s, there, HALF: tl.constexpr):
    low, high = number(place, there), number(place + HALF, there)
    put(to, low * c - high * s, there)
    put(to + HALF, low * s + high * c, there)


@triton.jit
def rope_write_kernel(
    q_out, keys, values, q, k, v, cos, sin, slots,
    step_q, step_k, step_v, step_keys, step_values,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    there = i < HEAD_DIM // 2
    c = number(cos + t * (HEAD_DIM // 2) + i, there)
    s = number(sin + t * (HEAD_DIM // 2) + i, there)
    if h >= HEADS:
        h -= HEADS
        slot = tl.load(slots + t)
        place = (slot % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + h * HEAD_DIM
        turn(
            k + t * step_k + h * HEAD_DIM + i,
            keys + (slot // BLOCK_SIZE) * step_keys + place + i,
            c,
            s,
            there,
            HEAD_DIM // 2,
        )
        both = tl.arange(0, 2 * BLOCK)
        copied = tl.load(v + t * step_v + h * HEAD_DIM + both, mask=both < HEAD_DIM, other=0)
        tl.store(values + (slot // BLOCK_SIZE) * step_values + place + both, copied, mask=both < HEAD_DIM)
    else:
        turn(q + t * step_q + h * HEAD_DIM + i, q_out + (t * HEADS + h) * HEAD_DIM + i, c, s, there, HEAD_DIM // 2)


@triton.jit
def swiglu_kernel(out, gate_up, step, N: tl.constexpr, BLOCK: tl.constexpr):
    start = gate_up + tl.program_id(0).to(tl.int64) * step
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = number(start + i, i < N)
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    put(out + tl.program_id(0).to(tl.int64) * N + i, number(start + N + i, i < N) * gate * sigmoid, i < N)


@triton.jit
def split_attention_kernel(
    partials, lse, q, keys, values, tables, lengths,
    step_q, step_keys, step_values, step_table, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + r)
    pages = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    each = (pages + tl.num_programs(2) - 1) // tl.num_programs(2)
    first = tl.program_id(2) * each * BLOCK_SIZE
    last = tl.minimum(first + each * BLOCK_SIZE, length)
    heads = tl.arange(0, BLOCK_G)
    i = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    real = heads < HEADS // KV_HEADS
    where = (tl.program_id(1) * (HEADS // KV_HEADS) + heads)[:, None] * HEAD_DIM + i[None, :]
    there = real[:, None] & (i < HEAD_DIM)[None, :]
    asked = number(q + r * step_q + where, there) * (scale * LOG2E)
    best = tl.full([BLOCK_G], NOTHING, tl.float32)
    weight = tl.full([BLOCK_G], 0.0, tl.float32)
    mixed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    position = first
    while position < last:
        known = position + n < last
        page = tl.load(tables + r * step_table + (position + n) // BLOCK_SIZE, mask=known, other=0)
        offset = ((position + n) % BLOCK_SIZE * KV_HEADS + tl.program_id(1)) * HEAD_DIM
        valid = known[:, None] & (i < HEAD_DIM)[None, :]
        k = number(keys + (page * step_keys + offset)[:, None] + i[None, :], valid)
        v = number(values + (page * step_values + offset)[:, None] + i[None, :], valid)
        scores = tl.where(known[None, :], tl.sum(asked[:, None, :] * k[None, :, :], 2), NOTHING)
        now = tl.maximum(best, tl.max(scores, 1))
        old = tl.exp2(best - now)
        new = tl.where(known[None, :], tl.exp2(scores - now[:, None]), 0.0)
        weight = weight * old + tl.sum(new, 1)
        mixed = mixed * old[:, None] + tl.sum(new[:, :, None] * v[None, :, :], 1)
        best = now
        position += BLOCK_N
    to = (r * HEADS + tl.program_id(1) * (HEADS // KV_HEADS) + heads) * tl.num_programs(2) + tl.program_id(2)
    nothing = first >= last
    logarithm = tl.where(nothing, float("-inf"), best / LOG2E + tl.log(tl.where(weight > 0, weight, 1.0)))
    tl.store(lse + to, logarithm, mask=real)
    put(partials + to[:, None] * HEAD_DIM + i[None, :], mixed / tl.where(weight > 0, weight, 1.0)[:, None], there)


@triton.jit
def merge_kernel(
    out, partials, lse, splits, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_D)
    best = NOTHING * 1.0
    weight = 0.0
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for s in range(splits):
        one = tl.load(lse + r * splits + s)
        if one > NOTHING:
            now = tl.maximum(best, one)
            old = tl.exp(best - now)
            new = tl.exp(one - now)
            mixed = mixed * old + number(partials + (r * splits + s) * HEAD_DIM + i, i < HEAD_DIM) * new
            weight = weight * old + new
            best = now
    put(out + r * HEAD_DIM + i, mixed / tl.where(weight > 0, weight, 1.0), i < HEAD_DIM)


# %%
def name_bugs():
    return {
        "double": ("out-of-bounds", 8),
        "column_sums": ("race", 10),
        "reversed_rows": ("uninitialised-read", 12),
        "after_the_first": ("plain-load-poll", 16),
        "all_arrive": ("deadlock", 13),
        "row_maxima": ("nondeterminism", 9),
        "last_adds": ("race", 14),
    }


@triton.jit
def repaired_kernel(out, parts, count, x, n, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    me = tl.program_id(0)
    i = me * BLOCK + tl.arange(0, BLOCK)
    tl.store(parts + me, tl.sum(number(x + i, i < n), 0))
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") + 1 == tl.num_programs(0):
        tl.debug_barrier()
        total = 0.0
        for p in range(tl.num_programs(0)):
            total += tl.load(parts + p)
        tl.store(out, total)
        tl.store(count, 0)
