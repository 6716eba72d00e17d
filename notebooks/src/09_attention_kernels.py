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
# # 09 · Attention kernels
#
# **The question:** a decode step has one query for each head, and a cache that lies in pages all over memory. How can
# the softmax over it be computed in one pass, and by many programs at once?
#
# After this notebook you can
#
# - compute a softmax average in one pass, by hand and in Triton, and merge the halves of one;
# - say how many programs a launch has, and how many of a GPU's multiprocessors they keep busy;
# - count how often each byte of the cache is asked for, and ask once for a whole group of query heads;
# - say why a test over full pages cannot see a wrong order of pages, and write two tests that can;
# - find a race and an unwritten partial result without a GPU.
#
# Time: 75 minutes. Needs: a CPU and Linux, for Triton. Kernels run in an interpreter here, which says what they compute
# and which bytes they touch, and nothing about their speed. Nothing in this lecture was measured on a GPU by us.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The picture: ten positions in three pages
#
# Two sequences in pages of four (lecture 03 calls them blocks). The *table* of `A` says where its ten positions are: in
# page 4, then 1, then 3.

# %%
from cs336_infer.course import attention_drawings, drawings, kv_drawings, pictures

pictures.show(
    kv_drawings.tables_and_pool({"A": ((4, 1, 3), 10), "B": ((0, 2), 7)}, total=6, page=4, title="memory of 6 pages"),
    "Left, positions 0 to 9 of sequence A in the order of its table, blocks 4, 1 and 3, and 0 to 6 of B in blocks 0 "
    "and 2. Right, memory: block 3 holds positions 8 and 9 of A and two slots that were never written.",
)

# %% [markdown]
# The query `q` of `A` wants the sum of `weight[i] * value[i]` with `weight = softmax(q · key / sqrt(head_dim))`. As
# written, this takes three passes: the largest score (without it `exp` overflows at 89 in fp32), the sum of all
# `exp(score - largest)`, and the average. The scores must be kept in between. For one query that is little. For the
# 8,192 queries of a prompt it is a matrix of 67 million scores in each head.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## One pass, by hand
#
# Keep three numbers: the largest score so far, the sum of weights so far, and the sum of `weight * value` so far. When
# a larger score comes, everything added up so far was measured from the wrong place: multiply it by
# `exp(old - new)` (Milakov and Gimelshein 2018). Eight scores, and eight values that are single numbers:

# %%
import math

SCORES = [1.0, 3.0, 2.0, 5.0, 4.5, 4.0, 7.0, 6.0]
VALUES = [8.0, 1.0, 4.0, 2.0, 9.0, 5.0, 3.0, 7.0]

top, total, acc, history = -math.inf, 0.0, 0.0, []
print("score  largest  shrink   weight     sum  average")
for score, value in zip(SCORES, VALUES, strict=True):
    new_top = max(top, score)
    shrink, weight = math.exp(top - new_top), math.exp(score - new_top)
    total, acc, top = total * shrink + weight, acc * shrink + weight * value, new_top
    history.append((top, total, acc / total))
    print(f"{score:5.1f}  {top:7.1f}  {shrink:6.3f}  {weight:7.4f}  {total:6.3f}  {acc / total:7.4f}")
weights = [math.exp(score - max(SCORES)) for score in SCORES]
exact = sum(w * v for w, v in zip(weights, VALUES, strict=True)) / sum(weights)
print(f"with all scores at hand: sum {sum(weights):.3f}, average {exact:.4f}")
pictures.show(
    attention_drawings.running_softmax(SCORES, *zip(*history, strict=True), exact),
    "Three rows over eight numbers. Bars of the scores with the largest so far as a line that rises at numbers 2, 4 "
    "and 7. The sum of weights, which falls at numbers 4 and 7 where the old sum shrinks. The average so far, which "
    "ends at 4.149, the value of two passes.",
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## A state can be merged
#
# The sum stays small, no weight is above 1, and nothing is kept for each score. `(largest, sum, accumulated)` is a
# *state*. Two states of different numbers merge into one, by the same shrinking. So it does not matter where the eight
# are cut, nor in which order the pieces come. The rest of this lecture is about what follows:
#
# - *many programs* can share one query: each makes a state, and somebody merges;
# - the result does not know in which order things were read, so a test may not know it either.

# %%
import random
from itertools import pairwise

State = tuple[float, float, float]


def state_of(numbers: list[int]) -> State:
    largest = max(SCORES[i] for i in numbers)
    w = {i: math.exp(SCORES[i] - largest) for i in numbers}
    return largest, sum(w.values()), sum(w[i] * VALUES[i] for i in numbers)


def merge(one: State, two: State) -> State:
    largest = max(one[0], two[0])
    a, b = math.exp(one[0] - largest), math.exp(two[0] - largest)
    return largest, one[1] * a + two[1] * b, one[2] * a + two[2] * b


draw, worst = random.Random(0), 0.0
for _ in range(1000):
    order = draw.sample(range(8), 8)
    cuts = [0, *sorted(draw.sample(range(1, 8), draw.randint(0, 7))), 8]
    states = [state_of(order[a:b]) for a, b in pairwise(cuts)]
    while len(states) > 1:  # merge any two
        states.append(merge(states.pop(draw.randrange(len(states))), states.pop(draw.randrange(len(states)))))
    worst = max(worst, abs(states[0][2] / states[0][1] - exact))
print("1000 random cuts, orders and mergings agree to 1e-14:", worst < 1e-14)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The same loop in Triton
#
# One *program* computes one query, page after page; a page of scores takes the place of a single one. `fold` is the
# body of the loop. With `GUARD` it knows a case that the loop above never meets: a page in which nothing may be seen.
#
# Then memory to run it on: `stored` deals pages at random, as an engine does after a while, and fills everything nobody
# wrote with a number of your choice. `exact_attention` is torch in fp64 and never sees a page. `launch` starts a kernel
# on a GPU if the tensors are there, else in the package's interpreter.

# %%
import torch
import triton
import triton.language as tl


@triton.jit
def fold(query, k, v, seen, top, total, acc, HEAD_DIM: tl.constexpr, GUARD: tl.constexpr):
    """Take keys and values [n, HEAD_DIM] into the state; only those with `seen` [n] exist."""
    scores = tl.where(seen, tl.sum(k * query[None, :], 1) * HEAD_DIM**-0.5, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 0))
    base = new_top
    if GUARD:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink, weights = tl.exp(top - base), tl.exp(scores - base)
    return new_top, total * shrink + tl.sum(weights, 0), acc * shrink + tl.sum(weights[:, None] * v, 0)


@triton.jit
def one_query(out, q, keys, values, table, length, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """One program: attention of one query over `length` positions."""
    slot, d = tl.arange(0, PAGE), tl.arange(0, HEAD_DIM)
    query = tl.load(q + d)
    top, total, acc = float("-inf"), 0.0, tl.zeros([HEAD_DIM], tl.float32)
    for i in range(0, tl.cdiv(length, PAGE)):
        at = (tl.load(table + i) * PAGE + slot)[:, None] * HEAD_DIM + d[None, :]
        seen = i * PAGE + slot < length
        k = tl.load(keys + at, mask=seen[:, None], other=0.0)
        v = tl.load(values + at, mask=seen[:, None], other=0.0)
        top, total, acc = fold(query, k, v, seen, top, total, acc, HEAD_DIM, False)
    tl.store(out + d, acc / total)


# %%
from dataclasses import dataclass

import torch.nn.functional as F
from cs336_kernels.launch import launch


@dataclass
class Memory:
    """keys, values: [pages, page, kv_heads, head_dim]. tables: [rows, pages]. rows: the same k, v one by one."""

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    rows: list


def stored(lengths, *, page=4, kv_heads=1, head_dim=16, fill=math.nan, seed=0, dtype=torch.float32) -> Memory:
    rng = torch.Generator().manual_seed(seed)
    needed = [-(-n // page) for n in lengths]
    free = torch.randperm(sum(needed) + 2, generator=rng).tolist()
    keys, values = torch.full((2, len(free), page, kv_heads, head_dim), fill, dtype=dtype)
    tables, rows = torch.full((len(lengths), max(needed) + 1), -1, dtype=torch.int32), []
    for row, (length, blocks) in enumerate(zip(lengths, needed, strict=True)):
        tables[row, :blocks] = torch.tensor([free.pop() for _ in range(blocks)])
        k, v = torch.randn(2, length, kv_heads, head_dim, generator=rng).to(dtype)
        at = torch.arange(length)
        where = tables[row, at // page].long(), at % page
        keys[where], values[where] = k, v
        rows.append((k, v))
    return Memory(keys, values, tables, rows)


def queries(tokens, heads, head_dim=16, dtype=torch.float32) -> torch.Tensor:
    return (2 * torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(9))).to(dtype)


def exact_attention(q, row) -> torch.Tensor:
    """Causal attention of the newest tokens of a row, [new, heads, head_dim] float64."""
    new, total = len(q), len(row[0])
    mask = torch.ones(new, total, dtype=torch.bool).tril(total - new)
    by_head = (t.double().transpose(0, 1).unsqueeze(0) for t in (q, *row))
    return F.scaled_dot_product_attention(*by_head, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


def same(got, want) -> bool:
    """As equal as fp32 allows: within 1e-5 of the largest number."""
    return bool(((got.double() - want).abs().max() <= 1e-5 * want.abs().max()).item())


q = queries(1, 1, head_dim=8)
results = []
for fill in (math.nan, 0.0, 12345.0):
    memory = stored([10], head_dim=8, fill=fill)
    out = torch.full((8,), math.nan)
    launch(one_query, (1,), out, q, memory.keys, memory.values, memory.tables, 10, PAGE=4, HEAD_DIM=8)
    results.append(out)
    print(f"unwritten slots hold {fill:7}: as by torch in fp64 {same(out, exact_attention(q, memory.rows[0])[0, 0])}")
print("bitwise the same for all three fills:", all(torch.equal(out, results[0]) for out in results))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The package's version: FlashAttention
#
# `prefill_attention` runs the same loop with a *tile of queries* instead of one: a tile of keys is read once and used
# by all of them, with `tl.dot` on tensor cores. The scores of a tile live in registers and are gone in the next turn
# (Dao et al. 2022). Is its last row what our kernel says? And what does it write?

# %%
from cs336_kernels.ops import decode_attention, merge_attention, prefill_attention
from cs336_kernels.sanitizer import sanitize


def prefill(q, memory: Memory, lengths, path="triton") -> torch.Tensor:
    """All of q are the newest tokens of one row."""
    starts = torch.tensor([0, len(q)])
    return prefill_attention(q, memory.keys, memory.values, memory.tables, starts, torch.tensor(lengths), path)


prompt = queries(10, 1, head_dim=8)
memory = stored([10], head_dim=8)
flash = prefill(prompt, memory, [10])
launch(one_query, (1,), out, prompt[9], memory.keys, memory.values, memory.tables, 10, PAGE=4, HEAD_DIM=8)
print("all ten rows as by torch in fp64:", same(flash, exact_attention(prompt, memory.rows[0])))
print("last row as by our kernel:", same(flash[9, 0], out.double()))
with sanitize(schedules=1) as report:
    prefill(queries(200, 2), stored([200]), [200])
written = sum(t.stored for t in report.launches[0].traffic.values())
print(f"200 queries of 2 heads write {written:,} bytes, the result; their scores would be {200 * 200 * 2 * 4:,}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (1): the tail of the last page
#
# Ten positions leave two slots of the last page unwritten. Their scores are masked, so their weights are 0: may their
# values be read? Here is a mutant of the package: two of its helpers are replaced, and it reads whole pages. The scores
# are still masked. **For which of the three fills does it fail?**

# %%
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from cs336_kernels.ops.triton import decode_attention as decode_file
from cs336_kernels.ops.triton import prefill_attention as prefill_file


@contextmanager
def mutant(**helpers):
    """The package's attention kernels with other helpers."""
    with ExitStack() as stack:
        for file in (decode_file, prefill_file):
            stack.enter_context(patch.multiple(file, **helpers))
        yield


@triton.jit
def find_whole_pages(table, at, end, BLOCK_SIZE: tl.constexpr):
    inside = at // BLOCK_SIZE < tl.cdiv(end, BLOCK_SIZE)
    return tl.load(table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)


@triton.jit
def load_whole_pages(
    memory, stride, pages, at, end, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK_D)
    inside = at // BLOCK_SIZE < tl.cdiv(end, BLOCK_SIZE)
    slots = pages * stride + (at % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
    return tl.load(memory + slots[:, None] + d[None, :], mask=inside[:, None], other=0.0)


def decode(memory: Memory, lengths, heads=1, splits=1, path="triton") -> torch.Tensor:
    q = queries(len(lengths), heads, memory.keys.shape[3], memory.keys.dtype)
    return decode_attention(q, memory.keys, memory.values, memory.tables, torch.tensor(lengths), splits, path)


UNMASKED = {"find_pages": find_whole_pages, "load_tile": load_whole_pages}
right = decode(stored([10]), [10])
for fill in (0.0, 12345.0, math.nan):
    with mutant(**UNMASKED):
        broken = decode(stored([10], fill=fill), [10])
    print(f"unwritten slots hold {fill:7}: right {torch.equal(broken, right)}, finite {bool(broken.isfinite().all())}")

# %% [markdown]
# `0 * NaN` is NaN: a weight of 0 does not hide a value. With zeros, and with any finite number, nothing shows. The
# package masks the loads of K *and* V. FlashAttention-2 sets such values to zero; versions 3 and 4 load whole tiles and
# gave NaN there (Dao-AILab/flash-attention#2374). vLLM had the bug in 2023 (vllm#641), and TensorRT-LLM zeroes the tail
# of a page when it writes the last token (TensorRT-LLM#18925).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Decode: how many programs are there?
#
# A GPU starts the programs of a launch on its multiprocessors (SMs), an H100 has 132. A long prefill has thousands.
# A decode step has one query a row. The natural grid is one program for each row and KV head. Llama-3.1-8B has 8 KV
# heads. Batch 1, 16,384 tokens in the cache: **how many of the 132 SMs have something to do?**

# %%
from cs336_infer.course.predict import explain, measured, predict

predict("SMs at work at batch 1", low=20, high=132, unit="of 132 SMs", why="16,384 tokens are a lot of work")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from cs336_kernels.launch import recording
from cs336_kernels.ops import choose_splits


def grid_of(rows: int, length: int, splits: int | None) -> tuple[int, ...]:
    """Grid of the first launch for Llama-3.1-8B; nothing runs, and memory that is not read is not taken."""
    grids, q = [], torch.zeros(rows, 32, 128, dtype=torch.bfloat16)
    pages = torch.zeros(1, 16, 8, 128, dtype=torch.bfloat16).expand(length // 16, -1, -1, -1)
    tables, lengths = torch.zeros(rows, length // 16, dtype=torch.int32), torch.full((rows,), length)
    with recording(lambda kernel, grid, *args, **kwargs: grids.append(grid)):
        decode_attention(q, pages, pages, tables, lengths, splits, "triton")
    return grids[0]


print(f"{'batch':>5} {'one program a row and KV head':>32} {'the package, with splits':>34}")
for rows in (1, 4, 16, 64):
    whole, split = grid_of(rows, 16384, 1), grid_of(rows, 16384, None)
    print(f"{rows:5} {math.prod(whole):5} programs, {min(math.prod(whole), 132):3} SMs at work"
          f" {math.prod(split):9} programs, {split[2]:2} for each row and head")  # fmt: skip
measured("SMs at work at batch 1", math.prod(grid_of(1, 16384, 1)), bound=132, bound_label="SMs of an H100")

# %%
pictures.show(
    attention_drawings.multiprocessors(
        {"one program for each KV head: 8 programs": 8, "33 programs share each head's pages: 264 programs": 264}
    ),
    "Two panels of 132 squares, one for each multiprocessor. Above, 8 of them have a program and 124 have none. Below, "
    "each has 2.",
)
explain(
    "SMs at work at batch 1",
    "The grid has 8 programs however long the cache is, so 8 of 132 SMs read it and 124 wait. Splitting each head's "
    "pages among 33 programs gives 264, two for each SM.",
    must_mention=[8, 124, 264],
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Who reads which pages
#
# A few SMs cannot ask for enough bytes to fill the memory's bandwidth. So at batch 1 the cache is shared out along its
# *positions* (Flash-Decoding; Dao, Haziza, Massa and Sizov 2023). At batch 64 there are 512 programs anyway, and the
# package splits nothing. Here 22 positions in six pages meet four programs. A program gets whole pages,
# `ceil(6 / 4) = 2` of them, which leaves nothing for the fourth.

# %%
pictures.show(
    attention_drawings.programs_and_pages((5, 0, 7, 2, 3, 6), length=22, page=4, splits=4),
    "Six pages of four positions in the order of the table, two for each of programs 0, 1 and 2; slots 22 and 23 are "
    "empty. Program 3 has no page and leaves lse = -inf. All four hand an average and an lse to the merge, which is a "
    "launch of its own.",
)

# %% [markdown]
# Each program writes the average of *its* values, and one number: `lse = largest + log(sum)`, the logarithm of its sum
# of exponentials. That is the whole state. The merge weighs each average with `exp(lse - LSE)`, where `LSE` is the same
# logarithm over all parts.

# %%
from cs336_kernels.ops.kv_pages import softmax_attention

memory, q = stored([22]), queries(1, 1)
k, v = memory.rows[0]
parts = [softmax_attention(q, k[a : a + 8], v[a : a + 8]) for a in (0, 8, 16)]
lse = torch.stack([weight for _, weight in parts], 2)  # [rows, heads, splits]
averages = torch.stack([average for average, _ in parts], 2)  # [rows, heads, splits, head_dim]
by_hand = ((lse - lse.logsumexp(2, keepdim=True)).exp().unsqueeze(3) * averages).sum(2)
print("shares of the three parts:", [f"{share:.3f}" for share in lse.softmax(2).flatten().tolist()])
want = exact_attention(q, (k, v))
print("merged by hand as torch in fp64:", same(by_hand, want))
print("merge_attention, the package's kernel:", same(merge_attention(averages, lse, "triton"), want))
print("decode_attention with four splits:", same(decode(memory, [22], splits=4), want))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Our own split kernel
#
# Program (row, head, split). Its share of pages has the same size for every split, so some pages of the last ones do
# not exist; `seen` is then false for all of their slots. `GUARD` is the only difference between two versions.


# %%
@triton.jit
def part(
    partials, lse, q, keys, values, tables, lengths, stride_table,
    PAGE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Program (row, query head, split)."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, d = tl.arange(0, PAGE), tl.arange(0, HEAD_DIM)
    length = tl.load(lengths + row)
    share = tl.cdiv(tl.cdiv(length, PAGE), tl.num_programs(2))
    query = tl.load(q + (row * HEADS + head) * HEAD_DIM + d)
    kv_head = head // (HEADS // KV_HEADS)
    top, total, acc = float("-inf"), 0.0, tl.zeros([HEAD_DIM], tl.float32)
    for i in range(split * share, (split + 1) * share):
        seen = i * PAGE + slot < length
        page = tl.load(tables + row * stride_table + i, mask=i * PAGE < length, other=0)
        at = ((page * PAGE + slot) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + d[None, :]
        k = tl.load(keys + at, mask=seen[:, None], other=0.0)
        v = tl.load(values + at, mask=seen[:, None], other=0.0)
        top, total, acc = fold(query, k, v, seen, top, total, acc, HEAD_DIM, GUARD)
    mine = (row * HEADS + head) * tl.num_programs(2) + split
    if GUARD:
        tl.store(partials + mine * HEAD_DIM + d, acc / tl.where(total > 0, total, 1.0))
        tl.store(lse + mine, tl.where(total > 0, top + tl.log(total), float("-inf")))
    else:
        tl.store(partials + mine * HEAD_DIM + d, acc / total)
        tl.store(lse + mine, top + tl.log(total))


def ours(memory: Memory, lengths, heads=1, splits=1, guard=True) -> torch.Tensor:
    (_, page, kv_heads, head_dim), rows = memory.keys.shape, len(lengths)
    partials, lse = torch.full((rows, heads, splits, head_dim), math.nan), torch.full((rows, heads, splits), math.nan)
    q, where = queries(rows, heads, head_dim), (memory.keys, memory.values, memory.tables, torch.tensor(lengths))
    sizes = {"PAGE": page, "HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "GUARD": guard}
    launch(part, (rows, heads, splits), partials, lse, q, *where, memory.tables.stride(0), **sizes)
    return merge_attention(partials, lse, "triton")


for splits in (1, 2, 4, 7):
    got, want = ours(stored([22]), [22], splits=splits), exact_attention(queries(1, 1), stored([22]).rows[0])
    print(f"{splits} splits: as torch in fp64 {same(got, want)}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (2): a part of nothing
#
# Without the guard, a program whose pages do not exist computes `exp(-inf - -inf)`, and `-inf - -inf` is NaN; one NaN
# part makes the merged result NaN. Lengths from 1 to 24, four splits, pages of four. **Which lengths fail?**

# %%
LENGTHS = range(1, 25)


def finite(run) -> list[bool]:
    return [bool(run(stored([n], head_dim=16), [n], splits=4).isfinite().all()) for n in LENGTHS]


rows = {
    "no guard": finite(lambda *args, **kwargs: ours(*args, **kwargs, guard=False)),
    "with guard": finite(ours),
    "the package": finite(decode),
}
pictures.show(
    attention_drawings.verdicts(rows, [str(n) for n in LENGTHS], xlabel="length", title="finite with four splits?"),
    "Lengths 1 to 24. Without the guard only lengths 13 to 16 are finite; with it, and in the package, all are.",
)
print("finite without the guard:", [n for n, good in zip(LENGTHS, rows["no guard"], strict=True) if good])
nobody = decode(stored([22, 0]), [22, 0], splits=4)[1]
print("a row of length 0 gives zeros in the package:", torch.equal(nobody, torch.zeros(1, 16)))

# %% [markdown]
# Four pages for four splits is what a test likes to take, and just there every program has a page. pegainfer fixed this
# bug together with its first split kernel (pegainfer#21). A row of length 0, such as the padding of a batch that was
# captured as a CUDA graph, leaves *all* parts empty: then even the merge needs a guard.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: a byte of the cache, asked for how often?
#
# In *grouped-query attention* several query heads share a KV head: 4 in Llama-3, 3 in SmolLM2. Our `part` has a program
# for each **query** head, the package's kernel one for each **KV** head that takes the group's queries as a tile. Eight
# query heads, two KV heads. **How many times more bytes of K and V does ours ask for?**

# %%
predict("bytes of K and V, per query head over per KV head", low=1, high=3, unit="times", why="caches will help")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
asked = {}
for name, run in (("a program for each query head", ours), ("a program for each KV head", decode)):
    with sanitize(schedules=1) as report:
        run(stored([22], kv_heads=2), [22], heads=8, splits=3)
    traffic = report.launches[0].traffic
    asked[name] = sum(traffic[t].loaded for t in ("keys", "values"))
    unique = sum(traffic[t].unique_loaded for t in ("keys", "values"))
    programs = math.prod(report.launches[0].grid)
    print(f"{name:30} {programs:3} programs ask for {asked[name]:6,} bytes, {unique:,} different ones")
print(f"22 positions, K and V, 2 heads, 16 numbers of 4 bytes: {22 * 2 * 2 * 16 * 4:,}")
ours_asked, package_asked = asked.values()
measured("bytes of K and V, per query head over per KV head", ours_asked / package_asked, bound=8 / 2,
         bound_label="query heads for each KV head")  # fmt: skip

# %%
explain(
    "bytes of K and V, per query head over per KV head",
    "Every one of the 4 query heads of a group asks for the same keys and values, and one program for the group asks "
    "once.",
    must_mention=4,
)

# %% [markdown]
# The different bytes are the same in both. A GPU's L2 cache may catch the repetitions, when the programs of a group
# happen to run together; the loads are issued all the same. Llama-3.1-8B in bf16 holds 128 KiB a token, so 16,384
# tokens are 2.1 GB a step: 0.64 ms at the 3.35 TB/s that NVIDIA states for an H100, and 2.6 ms if each head fetched its
# own.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: which orders of the pages are wrong?
#
# Four pages have 24 orders. One is right. We scramble a row's table in all 24 ways and compare with the right result:
# once for 16 positions (four full pages), once for 14 (the last page has two). **How many of the 24 give another result
# with 14?**

# %%
predict("orders that give another result", low=20, high=23, unit="of 24", why="only one order is right")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from itertools import permutations


def scrambled(length: int) -> dict[tuple[int, ...], float]:
    """Order of the four pages -> largest difference from the right result."""
    memory = stored([length], fill=0.0)
    right, table, found = decode(memory, [length]), memory.tables.clone(), {}
    for order in permutations(range(4)):
        memory.tables[0, :4] = table[0, list(order)]
        found[order] = float((decode(memory, [length]) - right).abs().max())
    return found


differs = {length: {o: gap > 1e-5 for o, gap in scrambled(length).items()} for length in (16, 14)}
for length, seen in differs.items():
    print(f"{length} positions: {sum(seen.values()):2} of 24 orders give another result")
measured("orders that give another result", sum(differs[14].values()), bound=23, bound_label="all but the right one")

pictures.show(
    attention_drawings.orders(differs[14], title="14 positions: an orange order gives another result"),
    "The 24 orders of pages 0 to 3. The 18 in which the last page, 3, is not at the end are orange; the 6 in which it "
    "is at the end are grey.",
)

# %% [markdown]
# *Decode attention is a function of a set.* Does a language model not care about positions? It does, but RoPE turned
# each key when it was stored: the position is inside of the key. A kernel that turns keys when it reads them, or adds a
# bias by distance (ALiBi), or looks at a window, would show the wrong order:

# %%
from cs336_kernels.ops import apply_rope, rope_tables

k, v = stored([16]).rows[0]
moved = [*range(4, 8), *range(4), *range(8, 16)]  # pages 1, 0, 2, 3
turns = rope_tables(torch.arange(16).unsqueeze(0), 10000 ** -(torch.arange(8) / 8), torch.float32)
turned = apply_rope(k.unsqueeze(0), *turns)[0]
q = queries(1, 1)
want = exact_attention(q, (turned, v))
for name, keys in (("stored", turned[moved]), ("read", apply_rope(k[moved].unsqueeze(0), *turns)[0])):
    shows = not same(exact_attention(q, (keys, v[moved])), want)
    print(f"keys turned when {name:6}: the wrong order shows: {shows}")
explain(
    "orders that give another result",
    "A softmax average does not know the order of what it adds, so only the page with 2 unwritten slots must be in its "
    "place: the 6 orders that end with it give the right result.",
    must_mention=[2, 6],
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (3): a kernel with swapped pages
#
# This mutant of the package reads the pages in pairs, the second one first. It is the kind of slip that an index
# computation makes. **Which of these tests see it?** Each compares with torch in fp64, at 1e-5.


# %%
@triton.jit
def find_swapped_pages(table, at, end, BLOCK_SIZE: tl.constexpr):
    page = at // BLOCK_SIZE
    other = page ^ 1
    page = tl.where(other * BLOCK_SIZE < end, other, page)
    return tl.load(table + page, mask=at < end, other=0).to(tl.int64)


def test_decode(*lengths: int, fill: float = math.nan) -> bool:
    memory = stored(lengths, kv_heads=2, fill=fill)
    got, q = decode(memory, lengths, heads=4), queries(len(lengths), 4)
    return same(got, torch.cat([exact_attention(q[i : i + 1], row) for i, row in enumerate(memory.rows)]))


def test_prefill(new: int, length: int, fill: float = math.nan) -> bool:
    q, memory = queries(new, 4), stored([length], kv_heads=2, fill=fill)
    return same(prefill(q, memory, [length]), exact_attention(q, memory.rows[0]))


TESTS = {
    "decode, 16 positions": lambda: test_decode(16),
    "decode, rows of 8, 16 and 64": lambda: test_decode(8, 16, 64),
    "prefill of the last token of 16": lambda: test_prefill(1, 16),
    "decode, 10 positions": lambda: test_decode(10),
    "decode, 14 positions, tail of 0": lambda: test_decode(14, fill=0.0),
    "decode, 14 positions, tail of NaN": lambda: test_decode(14),
    "prefill of all 16": lambda: test_prefill(16, 16),
    "prefill of the last 7 of 16": lambda: test_prefill(7, 16),
}
KERNELS = {
    "pages swapped": {"find_pages": find_swapped_pages},
    "tail not masked": UNMASKED,
}
table = {test: {} for test in TESTS}
for name, helpers in KERNELS.items():
    with mutant(**helpers):
        for test, passes in TESTS.items():
            table[test][name] = not passes()
pictures.show(
    drawings.matrix(table, list(KERNELS), title="which test fails?"),
    "Eight tests and two mutants. Swapped pages are seen by decoding 14 positions and by prefilling several tokens, "
    "not by decoding full pages nor 10 positions. The unmasked tail is seen only by decoding 10 or 14 positions over "
    "NaN.",
)
print("the package itself passes all of them:", all(passes() for passes in TESTS.values()))

# %% [markdown]
# The first three tests have full pages and one new token: blind to order. Of the three pages of 10 positions the third
# has no partner and stays in its place, and the two others are full: *one* ragged length is not enough. A prefill sees
# more, because of the *causal mask*: token 12 may look at positions up to 12, so order decides what it sees. And no
# test replaces another: only ragged lengths over NaN see the unmasked tail.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## In the real engine
#
# `attention="triton"` lets the package's kernels read the pages of all 30 layers, and leaves the rest to torch. The
# prompt has 14 tokens. Then two mutants: pages are swapped while decoding only, and in the prefill as well. **Can you
# see it in the text?**

# %%
from tqdm import tqdm

from cs336_infer import SamplingParams, load_model
from cs336_infer.engine import Engine
from cs336_infer.kv.manager import KVManager
from cs336_infer.kv.paged import PagedKV
from cs336_infer.kv.prefix import root_key

model = load_model(dtype="float32")
text = "The old lighthouse keeper climbed the stairs every evening to light the lamp because"


def answer(attention: str, fill: float, files=()) -> str:
    memory = PagedKV(model.config, num_blocks=8, block_size=4, dtype=torch.float32, fill=fill, attention=attention)
    engine = Engine(model, KVManager(memory))
    (one,) = engine.add(model.tokenizer.encode(text), SamplingParams(max_tokens=3, ignore_eos=True), root_key())
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(patch.multiple(file, find_pages=find_swapped_pages))
        while not one.ended:
            engine.step()
    return f"{one.completion.text!r} ({one.completion.finish_reason.value})"


RUNS = {
    "torch": ("torch", math.nan),
    "the package's kernels": ("triton", math.nan),
    "swapped in decode, over 0": ("triton", 0.0, [decode_file]),
    "swapped in decode, over NaN": ("triton", math.nan, [decode_file]),
    "swapped everywhere, over 0": ("triton", 0.0, [decode_file, prefill_file]),
}
answers = {name: answer(*run) for name, run in tqdm(RUNS.items(), unit="run")}
for name, said in answers.items():
    print(f"{name:28} {said}")

# %% [markdown]
# Over zeros the text is the same: at 15 positions one key is lost and a slot of zeros takes its place, and at 16 all
# pages are full and the mutant is right. Over NaN the engine ends the answer with an error, because it looks whether
# scores are finite. With swapped pages in the prefill the text changes, and reads as well as before. Text is no test.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (4): what only a schedule shows
#
# Two ideas for our split kernel. The step's new key and value could be stored by the same launch: program 0 does it.
# And a program without pages could simply end. **What is wrong with each?** The interpreter runs program after program,
# and there the first one passes. The *sanitizer* runs the same launch under many schedules, switches programs at every
# memory operation, and knows what was written by whom.


# %%
@triton.jit
def hasty(
    partials, lse, q, new, keys, values, table, length, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Program (split): like `part` for one row and head, and the new key and value are stored on the way."""
    split, slot, d = tl.program_id(0), tl.arange(0, PAGE), tl.arange(0, HEAD_DIM)
    if split == 0:
        place = (tl.load(table + (length - 1) // PAGE) * PAGE + (length - 1) % PAGE) * HEAD_DIM
        tl.store(keys + place + d, tl.load(new + d))
        tl.store(values + place + d, tl.load(new + HEAD_DIM + d))
    share = tl.cdiv(tl.cdiv(length, PAGE), tl.num_programs(0))
    if split * share * PAGE >= length:
        return
    query, top, total, acc = tl.load(q + d), float("-inf"), 0.0, tl.zeros([HEAD_DIM], tl.float32)
    for i in range(split * share, tl.minimum((split + 1) * share, tl.cdiv(length, PAGE))):
        at, seen = (tl.load(table + i) * PAGE + slot)[:, None] * HEAD_DIM + d[None, :], i * PAGE + slot < length
        k = tl.load(keys + at, mask=seen[:, None], other=0.0)
        v = tl.load(values + at, mask=seen[:, None], other=0.0)
        top, total, acc = fold(query, k, v, seen, top, total, acc, HEAD_DIM, False)
    tl.store(partials + split * HEAD_DIM + d, acc / total)
    tl.store(lse + split, top + tl.log(total))


def run_hasty(length: int) -> bool:
    """Whether it is right. The newest position is taken out of memory first."""
    memory = stored([length])
    new = torch.stack([t[length - 1] for t in memory.rows[0]])
    page, slot = memory.tables[0, (length - 1) // 4], (length - 1) % 4
    memory.keys[page, slot] = memory.values[page, slot] = math.nan
    partials, lse = torch.empty(1, 1, 4, 16), torch.empty(1, 1, 4)
    where = (memory.keys, memory.values, memory.tables, length)
    launch(hasty, (4,), partials, lse, queries(1, 1), new, *where, PAGE=4, HEAD_DIM=16)
    return same(merge_attention(partials, lse, "triton"), exact_attention(queries(1, 1), memory.rows[0]))


print("program after program: right at 14 positions:", run_hasty(14))

# %%
import linecache

from cs336_kernels.ops import write_kv


def package(length: int) -> None:
    """The newest position is stored by a launch of its own, then all attend."""
    memory, where = stored([length]), length - 1
    page, slot = int(memory.tables[0, where // 4]), where % 4
    memory.keys[page, slot] = memory.values[page, slot] = math.nan
    k, v = (t[where:] for t in memory.rows[0])
    write_kv(memory.keys, memory.values, k, v, torch.tensor([page * 4 + slot]), "triton")
    decode(memory, [length], splits=4)


for run in (run_hasty, package):
    for length in (14, 22):
        with sanitize(schedules=8) as report:
            run(length)
        print(f"{run.__name__}, {length} positions: {'findings' if report.findings else 'nothing found'}")
        for f in {f.kind: f for f in reversed(report.findings)}.values():  # the first of each kind
            print(f"  {f.kind} in {f.kernel}: {f.message}")
            for line in filter(None, (f.line, f.other_line)):
                print("      ", linecache.getline(f.file, line).strip())

# %% [markdown]
# 14 positions are four pages, one for each program: the last program reads what program 0 writes, and nothing makes it
# wait. On a GPU both run at once. 22 positions leave program 3 without a page; it ends, and the merge reads an `lse`
# that nobody wrote: perhaps that of the step before, finite and plausible. The package stores K and V in a launch that
# ends before attention starts, and writes -inf where there is nothing.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: what does splitting do to the error?
#
# Every part is rounded, and so is the merged sum. 512 positions, head_dim 64, against fp64. **How many times larger is
# the fp32 error with 64 splits than with one?**

# %%
predict("fp32 error, 64 splits over one", low=1, high=4, unit="times", why="64 roundings more")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
SPLITS, SEEDS = (1, 4, 16, 64), range(3)
merge_kernel = decode_file.merge


def rms(x: torch.Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())


def error(dtype: torch.dtype, splits: int) -> float:
    """Of four query heads, relative to their size; the same rounded q, k and v in both."""
    found = []
    for seed in SEEDS:
        memory = stored([512], page=8, head_dim=64, seed=seed, dtype=dtype)
        want = exact_attention(queries(1, 4, 64, dtype), memory.rows[0])
        found.append(rms(decode(memory, [512], heads=4, splits=splits) - want) / rms(want))
    return sum(found) / len(found)


curves = {"fp32": [error(torch.float32, n) for n in SPLITS], "bf16": [error(torch.bfloat16, n) for n in SPLITS]}
with patch.multiple(decode_file, merge=lambda part, lse, dtype: merge_kernel(part.bfloat16().float(), lse, dtype)):
    curves["bf16, parts in bf16 too"] = [error(torch.bfloat16, n) for n in SPLITS]
fig, ax = pictures.subplots(figsize=(7.5, 3.4))
for (name, errors), color in zip(curves.items(), (drawings.BLUE, drawings.GREEN, drawings.ORANGE), strict=True):
    ax.plot(SPLITS, errors, "o-", color=color, label=name)
    print(f"timing: {name:24}" + "".join(f" {e:9.2e}" for e in errors) + f" with {SPLITS} splits")
ax.set(
    xlabel="splits", ylabel="relative error", title="error against fp64", xscale="log", yscale="log", ylim=(1e-7, 1e-2)
)
ax.set_xticks(SPLITS, map(str, SPLITS))
ax.legend(loc="center right")
alt = (
    "Relative error over the number of splits: fp32 near 4e-7 and bf16 near 2e-3, both flat; with parts in bf16 higher."
)
pictures.show(fig, alt, measured=True)
measured("fp32 error, 64 splits over one", curves["fp32"][-1] / curves["fp32"][0])
one, four = (decode(stored([512], page=8, head_dim=64), [512], splits=n) for n in (1, 4))
print("one and four splits give the same bits:", torch.equal(one, four))

# %%
explain(
    "fp32 error, 64 splits over one",
    "Most of the error is made in the scores, which are the same with 1 and with 64 splits. The sums over 512 weights "
    "become shorter chains of additions, so they do not lose more either.",
    must_mention=[64, 512],
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Turn the knob: how many splits?
#
# Llama-3.1-8B on 132 SMs, pages of 16. Left: how many positions the busiest SM reads. Right: what the parts cost,
# written and read again, in percent of K and V. These are counts and not times. (Without a running kernel you see batch
# 1, 16,384 tokens and 33 splits: shares of 32 pages, so that the last program of each head finds none.)

# %%
import ipywidgets as widgets

from cs336_infer.course.widgets import explorer

COUNTS = [1, 2, 4, 8, 16, 33, 64, 128, 256]


def counts(batch: int, length: int, splits: int) -> tuple[int, int, float]:
    """Positions that the busiest SM reads, programs with pages, and bytes of parts as a share of K and V."""
    pages = -(-length // 16)
    share = -(-pages // splits)
    busy = batch * 8 * -(-pages // share)
    parts = 2 * batch * 32 * splits * (128 + 1) * 4 if splits > 1 else 0
    return -(-busy // 132) * min(share * 16, length), busy, parts / (batch * length * 2 * 8 * 128 * 2)


def draw_splits(batch: int, length: int, splits: int):
    chain, _, extra = zip(*(counts(batch, length, n) for n in COUNTS), strict=True)
    at = COUNTS.index(splits)
    fig, (left, right) = pictures.subplots(1, 2, figsize=(10, 3.4))
    for ax, ys, color in ((left, chain, drawings.BLUE), (right, [100 * e for e in extra], drawings.GREEN)):
        ax.plot(COUNTS, ys, "o-", color=color)
        ax.plot([splits], [ys[at]], "o", ms=12, color=drawings.ORANGE)
        ax.set(xlabel="splits", xscale="log")
        ax.set_xticks(COUNTS, map(str, COUNTS))
        ax.minorticks_off()
    left.set(ylabel="positions", title="read by the busiest SM", yscale="log")
    right.set(ylabel="% of K and V", title="parts, written and read", ylim=(0, None))
    return fig


def describe_splits(batch: int, length: int, splits: int) -> str:
    chain, busy, extra = counts(batch, length, splits)
    return (
        f"Batch {batch}, {length:,} tokens, {splits} splits: {busy:,} of {batch * 8 * splits:,} programs have pages, "
        f"the busiest SM reads {chain:,} positions, the parts move {extra:.1%} of the bytes of K and V. "
        f"The package would take {choose_splits(length, batch, 8)} splits."
    )


knob = explorer(
    {
        "batch": widgets.SelectionSlider(options=[1, 4, 16, 64], value=1, description="batch"),
        "length": widgets.SelectionSlider(options=[512, 2048, 16384, 131072], value=16384, description="tokens"),
        "splits": widgets.SelectionSlider(options=COUNTS, value=33, description="splits"),
    },
    draw_splits,
    describe_splits,
)
knob

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What others have measured
#
# Published figures, by their authors. **Our kernels were not measured on a GPU.**
#
# - **Flash-Decoding**, pytorch.org blog, October 2023, CodeLlama-34B on A100s: up to 8x faster generation at long
#   contexts. The attention alone is up to 50x faster than FlashAttention-2, and takes nearly the same time up to 32k.
# - **SGLang** pull request 21775 (closed), Qwen3-8B on an H100 at 32,000 tokens: 48 to 111 tokens/s, when the number of
#   splits follows the number of SMs and parts are merged in parallel.
# - **pegainfer** pull request 21, Qwen3-4B on an RTX 5070 Ti at 1,024 tokens: 32 programs become 128 for 84 SMs, and a
#   layer's attention takes about 15 instead of 70 µs.
# - **MinivLLM** pull request 93 (open), Qwen3-0.6B on an RTX 4090, batch 1 and 2,048 tokens, with 16 programs for the
#   grid (row, head): 0.916 ms reading position by position, 0.057 ms reading blocks of positions, 0.054 ms with splits
#   too.
#
# Read the last one twice. From 0.916 to 0.054 is 17 times, and nearly all of it comes from reading a *block* of
# positions at once, still with 16 programs. Splitting gave 5 % there. Ask of each speedup: over what?

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Cascade: another way to cut
#
# Four rows share a system prompt of 12 tokens. A split need not belong to one row: all four queries attend to the
# shared pages *together*, as a tile, each to its own rest, and the same merge joins them (FlashInfer's *cascade
# attention*).

# %%
shared, own = stored([12]).rows[0], stored([3, 6, 1, 9], seed=1).rows
q = queries(4, 1)
out, weight = softmax_attention(q, *shared)
rest = [softmax_attention(q[i : i + 1], *row) for i, row in enumerate(own)]
parts = torch.stack([out, torch.cat([o for o, _ in rest])], 2)
got = merge_attention(parts, torch.stack([weight, torch.cat([w for _, w in rest])], 2), "triton")
whole = [tuple(torch.cat([a, b]) for a, b in zip(shared, row, strict=True)) for row in own]
want = torch.cat([exact_attention(q[i : i + 1], row) for i, row in enumerate(whole)])
print("as torch in fp64 over the whole rows:", same(got, want))
print(f"positions read: {sum(12 + len(k) for k, _ in own)} row by row, {12 + sum(len(k) for k, _ in own)} in a cascade")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Takeaways
#
# - Softmax in one pass: a largest score, a sum, an average. Two such states merge, in any order.
# - At batch 1 the grid must cut along the positions. Count programs before you count microseconds.
# - One program for a group of query heads asks for each byte of K and V once.
# - Empty parts, unwritten tails, unwritten parts: -inf - -inf, 0 * NaN, and whatever was in memory.
# - Splitting costs no precision while parts are fp32; parts in bf16 cost about 30 % more error. It does change bits.
# - Decode attention is a function of a set. Test with several ragged lengths, with chunks, over NaN, under schedules.
#
# ## Where real engines differ
#
# - FlashInfer has two calls: `plan` looks at the lengths of a batch once a step and deals pieces of work of about equal
#   size, `run` executes the plan in every layer. Ours cuts every row into the same number of parts, so beside one long
#   row the programs of short ones find little or nothing.
# - vLLM's first CUDA kernels cut every 512 positions (PagedAttention V2, vllm#1348). Its Triton kernel splits while the
#   grid is small; the limit ignored length, and long contexts at batch 12 paid twice the time per token (vllm#48076).
# - FlashInfer's authors report up to 31x over vLLM's kernel of that time for long shared prefixes (cascade, H100).
# - The package chooses the number of splits from the longest row and the batch, so a neighbour can change the last bit
#   of a row. In vLLM's batch-invariant mode the Triton kernel does not split.
# - Multi-head latent attention (DeepSeek) has *one* KV head for 128 query heads. A kernel that reads each byte once
#   then does so much arithmetic for it that decode is bound by arithmetic as often as by memory.
#
# ## Read next
#
# - Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention".
# - Dao, Haziza, Massa and Sizov 2023, "Flash-Decoding for long-context inference" (pytorch.org).
# - Ye et al. 2025, "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving"; the blog post
#   "Cascade Inference" (flashinfer.ai, 2024).
# - `kernels/cs336_kernels/ops/triton/decode_attention.py`, `prefill_attention.py` and `kv_pages.py`.
