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
# # Assignment 1 · Prefill and decode
#
# You write the parts that turn a transformer's layers into a generator: rotary positions, causal attention, attention
# over a KV cache, and the distribution a token is drawn from. Then your functions run inside the real model.
#
# Read lectures 01 and 02 first. Each exercise has public checks beside it; hidden checks use other inputs: other
# shapes, ragged batches, grouped heads, unwritten memory. Passing the public checks is the start, not the end.
#
# Work in this order: a later function may call an earlier one of yours.

# %%
import torch

from cs336_infer.course.a1_open_task import bytes_moved
from cs336_infer.course.a1_prefill_decode import check_public

# %% [markdown]
# ## 1. Rotary positions
#
# A query and a key should know how far apart they are. RoPE (Su et al. 2021) turns each pair of numbers
# `(x[i], x[i + head_dim / 2])` of a head by the angle `position * theta ** (-2 i / head_dim)`:
#
# $$x_i' = x_i \cos\alpha - x_{i+d/2} \sin\alpha, \qquad x_{i+d/2}' = x_{i+d/2} \cos\alpha + x_i \sin\alpha.$$
#
# On paper first: which pairs turn fast, which slowly? What does a position do to a head of size 2?


# %% nbgrader={"schema_version": 3, "grade_id": "rope", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 2, "importance": 4, "minutes": 20, "gpu": false, "forbidden": ["apply_rope", "transformers"]}
def rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate every head by the positions of its tokens.

    Args:
        x: [batch, heads, seq, head_dim] float32.
        positions: [batch, seq] integers; rows may differ, and need not start at 0.
        theta: base of the frequencies.

    Returns:
        [batch, heads, seq, head_dim] float32.
    """
    # Step: one angle for each position and each pair
    # BEGIN SOLUTION
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (positions.double().unsqueeze(-1) * frequencies).unsqueeze(1)
    # Step: turn the two halves against each other
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "rope_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 2}
check_public(rope)

# %% [markdown]
# ## 2. Causal attention
#
# The newest `new` tokens look at all `total` tokens so far. New token `i` is at position `total - new + i` and may see
# positions up to its own. Several query heads share one KV head: query head `h` reads KV head `h // (heads / kv_heads)`.
# Rows of a batch may be padded on the left: row `b` begins at position `starts[b]`.


# %% nbgrader={"schema_version": 3, "grade_id": "causal_attention", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 3, "importance": 5, "minutes": 35, "gpu": false, "forbidden": ["scaled_dot_product_attention", "MultiheadAttention", "flex_attention", "transformers"]}
def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None = None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over the positions that each query may see.

    Args:
        q: [batch, heads, new, head_dim] float32, the newest tokens.
        k, v: [batch, kv_heads, total, head_dim] float32, all tokens so far, total >= new.
        starts: [batch] integers, the number of padding positions at the left of each row; None is no padding.

    Returns:
        [batch, heads, new, head_dim] float32. The outputs of padding queries do not matter, but must be finite.
    """
    # Step: scores of every query head against the keys of its KV head
    # BEGIN SOLUTION
    group, new, total = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
    # Step: hide what is later than the query, and what is padding
    key, query = torch.arange(total), torch.arange(total - new, total).unsqueeze(1)
    visible = (key <= query).unsqueeze(0)
    if starts is not None:
        visible = visible & (key >= starts[:, None, None]) | (key == query)
    # Step: weights, and the mean of the values
    weights = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).softmax(-1)
    return weights @ values
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "causal_attention_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 2}
check_public(causal_attention)

# %% [markdown]
# ## 3. Attention over a cache
#
# Decoding computes keys and values of new tokens only, and keeps them. The cache has room for `capacity` positions, of
# which the first `length` are written. The others hold whatever was in the memory before: other people's numbers, or
# NaN. Reading one of them is the mistake behind some of the strangest production failures.


# %% nbgrader={"schema_version": 3, "grade_id": "cached_attention", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 3, "importance": 5, "minutes": 30, "gpu": false, "forbidden": ["scaled_dot_product_attention", "MultiheadAttention", "flex_attention", "transformers", "ContiguousKV"]}
def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    length: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Store the keys and values of new tokens behind the first `length`, then attend to all of them.

    Args:
        q: [batch, heads, new, head_dim] float32. k, v: [batch, kv_heads, new, head_dim] float32.
        k_cache, v_cache: [batch, kv_heads, capacity, head_dim] float32; positions from `length` on hold anything.
        length: positions stored already; length + new <= capacity.

    Returns:
        (out [batch, heads, new, head_dim], k_cache, v_cache): the caches with the new positions stored and all
        others as they were.
    """
    # Step: store
    # BEGIN SOLUTION
    end = length + k.shape[2]
    k_cache[:, :, length:end] = k
    v_cache[:, :, length:end] = v
    # Step: attend to what is written, and to nothing else
    return causal_attention(q, k_cache[:, :, :end], v_cache[:, :, :end]), k_cache, v_cache
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "cached_attention_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 1}
check_public(cached_attention)

# %% [markdown]
# ## 4. The distribution of the next token
#
# Divide the logits by the temperature and take the softmax. Then keep the most probable tokens until their sum reaches
# `top_p`; the token that reaches it stays. Of what is left, drop tokens less probable than `min_p` times the most
# probable one. What remains sums to 1 again.


# %% nbgrader={"schema_version": 3, "grade_id": "next_token_distribution", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 2, "importance": 3, "minutes": 25, "gpu": false, "forbidden": ["transformers", "probabilities"]}
def next_token_distribution(logits: torch.Tensor, temperature: float, top_p: float, min_p: float) -> torch.Tensor:
    """Probabilities of the next token.

    Args:
        logits: [vocab] float32, possibly in the hundreds.
        temperature: > 0. top_p: 0 < top_p <= 1. min_p: 0 <= min_p <= 1.

    Returns:
        [vocab] float64, sums to 1; dropped tokens have probability 0.
    """
    # Step: temperature and softmax
    # BEGIN SOLUTION
    p = (logits.double() / temperature).softmax(-1)
    # Step: top-p
    ordered, order = p.sort(descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    # Step: min-p, and normalise
    ordered[ordered < min_p * ordered[0]] = 0
    return torch.zeros_like(p).scatter(0, order, ordered / ordered.sum())
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "next_token_distribution_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 2}
check_public(next_token_distribution)

# %% [markdown]
# ## 5. What a decode step costs
#
# Count by hand, then in code: matrix products (2 FLOPs a multiply-add) of all layers and of the head, and attention over
# the `context` cached tokens and the new one itself. Bytes: all weights once, the norms too, however large the batch;
# the cached keys and values of every row; the new ones written. The embedding table is also the head (tied), so it is
# read once, as the head.


# %% nbgrader={"schema_version": 3, "grade_id": "decode_step_cost", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 3, "importance": 4, "minutes": 30, "gpu": false, "forbidden": ["cs336_infer.measure", "FlopCounterMode", "transformers"]}
def decode_step_cost(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    batch: int,
    context: int,
    bytes_per_number: int,
) -> tuple[int, int]:
    """(FLOPs, bytes) of one decode step of a Llama-like model with a tied head and SwiGLU.

    `batch` rows, each with `context` cached tokens, all numbers of `bytes_per_number` bytes. Norms, RoPE, softmax and
    activations cost no FLOPs here, and activations no bytes; the weights of the norms (two per layer and one before
    the head, `hidden` each) are read.
    """
    # Step: weights that multiply, per layer and in the head
    # BEGIN SOLUTION
    q, kv = heads * head_dim, kv_heads * head_dim
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * intermediate
    multiplying = layers * layer + hidden * vocab
    # Step: attention, two products over context + 1 positions
    attention = layers * 2 * q * (context + 1)
    flops = 2 * batch * (multiplying + attention)
    # Step: bytes: weights once, the cache of every row, the new entries
    weights = multiplying + (2 * layers + 1) * hidden
    cache = layers * 2 * kv * batch * (context + 1)
    return flops, bytes_per_number * (weights + cache)
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "decode_step_cost_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 1}
check_public(decode_step_cost)

# %% [markdown] nbgrader={"schema_version": 3, "grade_id": "why_bandwidth", "grade": true, "solution": true, "locked": false, "task": false, "points": 3}
# **6. In your own words.** A machine gets twice the arithmetic and the same memory. What happens to the time of a
# decode step at batch 1, of a decode step at batch 64, and of a prefill of 2,048 tokens? Three or four sentences, with
# the arithmetic intensity of each.
#
# # BEGIN SOLUTION
# Decode at batch 1 does about one operation per byte it reads, far left of the ridge of any machine, so its time is
# bytes over bandwidth and does not change. At batch 64 the weights serve 64 rows, about 60 operations per byte as long
# as the context is short: on a CPU (ridge near 12) that is bound by arithmetic and becomes faster, on a GPU (ridge near
# 300) it is still bound by memory. Prefill of 2,048 tokens has several hundred operations per byte and takes half the
# time on both.
# # END SOLUTION

# %% [markdown]
# ## Open task: the same answer, fewer bytes
#
# A decode step waits for memory, so the bytes it moves are what it costs. `bytes_moved` counts them, without a clock:
# every operation reads its inputs and writes its outputs, a view is free, an expanded dimension counts once
# (`cs336_infer/measure/traffic.py` says it exactly). Your function may use plain tensor operations only, no fused
# attention, and must not decide by values of tensors. `lengths` are numbers of Python.
#
# Below is a start: exercise 3, row by row. Make the number smaller. The grader counts it too, and reports it beside
# your points.


# %%
def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: list[int],
) -> torch.Tensor:
    """One decode step of every row: store k and v at position `lengths[row]`, attend to that and all before it.

    Args:
        q: [rows, heads, head_dim] float32. k, v: [rows, kv_heads, head_dim] float32.
        k_cache, v_cache: [rows, kv_heads, capacity, head_dim] float32, written in place; the rest holds anything.
        lengths: tokens stored in each row.

    Returns:
        [rows, heads, head_dim] float32.
    """
    outs = []
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        new = (q[one, :, None], k[one, :, None], v[one, :, None])
        outs.append(cached_attention(*new, k_cache[one], v_cache[one], length)[0])
    return torch.cat(outs)[:, :, 0]


print(bytes_moved(decode_attention))

# %% [markdown]
# ## Your functions in the real engine
#
# `plug` puts your functions into the engine: positions in every layer, attention with and without a cache, what the
# sampler draws from, what a step is said to cost. The weights and the loop are the package's. A batch of two prompts of
# different length is padded on the left, so the engine gives you rows that begin at different positions.

# %%
from cs336_infer import SamplingParams, generate, load_model, measure
from cs336_infer.course.plug import plug

plug(
    rope=rope,
    causal_attention=causal_attention,
    cached_attention=cached_attention,
    next_token_distribution=next_token_distribution,
    decode_step_cost=decode_step_cost,
)
model = load_model(dtype="float32")
prompts = ["The capital of France is", "Once upon a time, in a small village by the sea,"]
mine = generate(model, prompts, SamplingParams(max_tokens=12))
for answer in mine:
    print(repr(answer.text))
print("made by:", mine[0].path.partition("plugged=")[2])

# %% [markdown]
# Fluent text is no evidence. These are the tokens of the package's own functions, and the run without a cache:

# %%
PACKAGE = [
    [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33],
    [665, 436, 253, 9357, 1573, 267, 19341, 3365, 17644, 793, 30, 909],
]
oracle = generate(model, prompts, SamplingParams(max_tokens=12), kv="none")
print("same as the package's:", [answer.token_ids for answer in mine] == PACKAGE)
print("with a cache as without:", [answer.token_ids for answer in mine] == [answer.token_ids for answer in oracle])

# %% [markdown]
# Now drawn from your distribution, and what your count says of one step behind 512 tokens in 16-bit numbers:

# %%
params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, min_p=0.05, seed=3)
print(repr(generate(model, "Once upon a time,", params)[0].text))
step = measure.decode(model.config, batch=1, context=512, dtype_bytes=2, kv_bytes=2)
moved = step.weight_bytes + step.kv_read_bytes + step.kv_write_bytes
print(
    f"a decode step: {step.flops / 1e6:.1f} MFLOP, {moved / 1e6:.1f} MB, of which the cache {step.kv_read_bytes / 1e6:.1f}"
)
