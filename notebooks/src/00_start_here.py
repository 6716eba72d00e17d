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
# # 00 · Start here
#
# **The question of this notebook:** can the machine in front of you run a real language model, and how near does it
# come to the speed of light?
#
# "Speed of light" is the term of this course for what the hardware allows: nobody can read a model's weights faster
# than the memory delivers them. Every speed in these notebooks is printed with the bytes it moved and with the
# bandwidth of the machine it ran on, measured in the same run.
#
# After this notebook you have
#
# - asked a real model of 135 million parameters a question, on this machine;
# - a list of what this machine can run, and why not the rest;
# - made one prediction, measured it, and explained the difference. The whole course works like that.
#
# Time: 10 minutes. Needs: a CPU.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The way through the course
#
# Each stage is a notebook, a part of the package `cs336_infer`, and an assignment. Each stage is also the oracle of
# the next: the fast version must give the same tokens as the slow one it replaces.

# %% slideshow={"slide_type": "fragment"}
from cs336_infer.course import drawings, pictures

stages = [
    ("one token", "01, 02", drawings.SKY),
    ("KV cache", "pages, tiers", drawings.GREEN),
    ("serving", "many users", drawings.AMBER),
    ("kernels", "Triton", drawings.BLUE),
    ("megakernel", "one launch", drawings.BLUE),
    ("Parcae", "looped model", drawings.PINK),
    ("fleet", "routing", drawings.ORANGE),
]
pictures.show(
    drawings.flow(stages),
    "Seven boxes from left to right: one token, KV cache, serving, kernels, megakernel, Parcae, fleet.",
)

# %% [markdown]
# The seven parts of the course, in the order in which they build on each other. Notebooks 01 and 02 belong to the
# first box.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What this machine can run
#
# `doctor` looks at the machine and says what works and what to do about the rest. Nothing here needs a GPU; with one,
# the same cells get faster.

# %%
from cs336_infer.measure import doctor

for check in doctor():
    print(f"timing: {check.status.value:5} {check.name:18} {check.detail}")

# %% [markdown]
# (Lines that start with `timing:` hold readings of one machine and one moment. They will differ on yours; everything
# else in these notebooks should not, and a test compares it.)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## A real model answers
#
# SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) came with the set-up as a GGUF file of 98 MB with 4-bit weights. The
# package reads it, turns the weights into 32-bit floats, and runs it with code that you can read in an evening.

# %%
from cs336_infer import SamplingParams, generate, load_model

model = load_model(dtype="float32")
config = model.config
print(f"{config.num_params:,} parameters: {config.num_layers} layers, width {config.hidden_size},")
print(f"{config.num_heads} query heads over {config.num_kv_heads} KV heads, vocabulary {config.vocab_size:,}")

# %% slideshow={"slide_type": "fragment"}
question = [{"role": "user", "content": "What is the capital of France?"}]
prompt = model.tokenizer.encode_chat(question)
answer = generate(model, [prompt], SamplingParams(max_tokens=24))[0]
print(answer.text)

# %% [markdown]
# It is a small model: good enough to be a real workload, too small to be trusted. Let it go on and it invents a date:

# %%
answer = generate(model, "The capital of France is", SamplingParams(max_tokens=24))[0]
print(repr(answer.text))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict, measure, explain
#
# Before each measurement you write down a guess. The picture then shows your guess as a band, the result as a dot,
# and what the machine allows as a dashed line. A wrong guess is the point: it shows where your model of the machine
# is off.
#
# Here: how many tokens per second will this model produce in 32-bit floats? Change `low` and `high` to your own guess.
# A hint: each token needs every weight once, and 135 million weights of 4 bytes are 538 MB.

# %%
from cs336_infer.course.predict import explain, measured, predict

predict("decode speed", low=5, high=40, unit="tokens/s", why="538 MB of weights per token, at some tens of GB/s")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from cs336_infer import measure
from cs336_infer.measure.phases import memory_traffic

bandwidth = measure.read_bandwidth()
run = generate(model, "The capital of France is", SamplingParams(max_tokens=32, ignore_eos=True))[0]
per_token = memory_traffic(measure.decode(config, batch=1, context=20, dtype_bytes=4, kv_bytes=4))
print(f"one token moves {per_token / 1e6:.0f} MB")
print(f"timing: this machine reads {bandwidth.bytes_per_s / 1e9:.1f} GB/s")
measured(
    "decode speed",
    1 / run.tpot_s,
    bound=bandwidth.bytes_per_s / per_token,
    bound_label="memory bandwidth of this machine",
)

# %% [markdown]
# Your guess as a band, the measured speed as a dot, and the speed that this machine's memory allows as a dashed line.

# %%
explain(
    "decode speed",
    "Every token reads all weights once, 539 MB with the cached keys and values, so memory bandwidth is the limit.",
    must_mention=539,
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Takeaways
#
# - A language model's answer is a loop: one pass through all weights per token.
# - Speed is meaningless without the bytes it moved and the bandwidth of the machine.
# - Guess first, then measure, then explain.
#
# ## Where real engines differ
#
# Engines such as vLLM (Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
# PagedAttention") and SGLang (Zheng et al. 2024) do what this course does, for many users, models and devices at once.
# You will build the same parts: the scheduler, the paged cache, the kernels. What you will not find here is their
# breadth.
#
# ## Next
#
# `01_lifetime_of_a_token`: what happens between your sentence and the first word of the answer, and where the time
# goes.
