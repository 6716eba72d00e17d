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
# # 01 · The lifetime of a token
#
# **The question:** you send a sentence, and a moment later a word appears. What happened in between, and where did the
# time go?
#
# After this notebook you can
#
# - name the stations that every token passes, in order, and say what each one decides;
# - write prefill and decode yourself, in ten lines, and show that they give the package's tokens;
# - say which station takes the time, and what the machine's memory has to do with it;
# - break the loop in two ways that still produce fluent text, and catch both with one comparison.
#
# Time: 45 minutes. Needs: a CPU.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The whole map

# %%
from cs336_infer.course import drawings, pictures

stations = [
    ("tokenise", "text to ids", drawings.SKY),
    ("schedule", "who runs now", drawings.AMBER),
    ("look up", "cached prefix", drawings.GREEN),
    ("execute", "layers, head", drawings.BLUE),
    ("sample", "one id", drawings.PINK),
    ("text", "whole characters", drawings.SKY),
    ("stop, safety", "end or go on", drawings.ORANGE),
]
pictures.show(
    drawings.flow(stations, back=(6, 1, "once per token")),
    "Seven stations: tokenise, schedule, look up, execute, sample, text, stop and safety. An arrow leads from the "
    "last one back to schedule, once per token.",
)

# %% [markdown]
# A request enters at the left. The orange arrow is the loop: from "stop, safety" back to "schedule", once for every
# token of the answer. We walk through the stations with the real model.

# %%
import time

import torch

from cs336_infer import SamplingParams, generate, load_model
from cs336_infer.kv import ContiguousKV, NoCache

model = load_model(dtype="float32")
tokenizer, config = model.tokenizer, model.config

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Station 1: tokenise
#
# The model knows 49,152 byte sequences, called tokens. Text is cut into them by rules learned from data (byte-pair
# encoding; Sennrich et al. 2016). Common English words are one token. Characters that were rare in the data are
# several tokens, each only a part of a character.

# %%
for text in ["The capital of France is", "한국어 🙂"]:
    ids = tokenizer.encode(text)
    print(f"{text!r}: {len(ids)} tokens")
    print("  ids  ", ids)
    print("  bytes", [tokenizer.token_bytes(i) for i in ids])

# %% [markdown]
# The second line matters later: a token may end in the middle of a character, so the engine cannot turn each token
# into text by itself.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The picture, at a size we can draw
#
# Five prompt tokens, four tokens out, and a cache in pages of four. The first step feeds the whole prompt (*prefill*).
# Each later step feeds one token (*decode*) and reads the keys and values of all earlier ones from the cache.

# %%
prompt_text = "The capital of France is"
prompt = tokenizer.encode(prompt_text)
answer = generate(model, [prompt], SamplingParams(max_tokens=4))[0]
pieces, produced = ([tokenizer.decode([i]).replace("\n", "\\n") for i in ids] for ids in (prompt, answer.token_ids))
pictures.show(
    drawings.steps_and_pages(pieces, produced, page=4),
    "Left: four steps. Prefill feeds five tokens, each decode step feeds one. Right: eight cached tokens fill two "
    "pages of four; the last token produced is not cached.",
)

# %% [markdown]
# Left: what each step feeds (green in prefill, blue in decode), what it reads from the cache (grey) and what it
# produces (orange). Right: the cache after the last step. The last token produced was never fed, so it is not there.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Station 2: schedule
#
# Many requests share one model. At every step the scheduler decides which of them run and with how many tokens. Two
# rules give most of what real engines do: running requests get their one token first, and what is left of a token
# budget goes to prompts that wait, in pieces if they are long. A later stage builds the real one.


# %%
def plan(waiting: dict[str, int], answers: dict[str, int], budget: int) -> list[dict[str, int]]:
    """Tokens per request and step. waiting: prompt tokens left; answers: output tokens left."""
    waiting, answers, steps = dict(waiting), dict(answers), []  # copies: the caller's numbers stay as they are
    while any(waiting.values()) or any(answers.values()):
        step, left = {}, budget
        for name in answers:  # decode first: nobody who reads an answer should wait for somebody's long prompt
            if not waiting[name] and answers[name] and left:
                step[name], left = 1, left - 1
                answers[name] -= 1
        for name, tokens in waiting.items():  # then prompts, cut to what is left of the budget
            if tokens and left:
                step[name] = min(tokens, left)
                waiting[name], left = tokens - step[name], left - step[name]
                answers[name] -= waiting[name] == 0  # the last piece of a prompt also yields the first token
        steps.append(step)
    return steps


budget = 8
for i, step in enumerate(plan({"A": 5, "B": 19, "C": 3}, {"A": 4, "B": 2, "C": 3}, budget)):
    print(f"step {i}: {step}, {sum(step.values())} of {budget} tokens")

# %% [markdown]
# B's long prompt is cut into chunks, so A goes on with one token in every step. This is *continuous batching* (Yu et
# al. 2022, Orca) with *chunked prefill* (Agrawal et al. 2024, Sarathi-Serve).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Station 3: look up
#
# If the start of a prompt was computed before, its keys and values may still be cached. To find them, the prompt is
# cut into pages, and each page gets a hash of its tokens *and of the page before*: equal hashes then mean equal
# prefixes. The stage on caching builds this with real memory behind it.

# %%
import hashlib


def page_hashes(ids: list[int], page: int = 4) -> list[str]:
    """One hash per full page, each chained to the one before."""
    hashes, before = [], b""
    for start in range(0, len(ids) - len(ids) % page, page):
        before = hashlib.sha256(before + repr(ids[start : start + page]).encode()).digest()
        hashes.append(before.hex()[:6])
    return hashes


first = tokenizer.encode("You are a helpful assistant. What is the capital of France?")
second = tokenizer.encode("You are a helpful assistant. What is the tallest mountain?")
a, b = page_hashes(first), page_hashes(second)
hits = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
print("pages of the first prompt ", a)
print("pages of the second prompt", b)
print(f"{hits} leading pages are the same: {hits * 4} of {len(second)} tokens need no prefill")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Station 4: execute
#
# Thirty layers, each: normalise, attention over all tokens so far, normalise, a small network for each token. The last
# position's output becomes 49,152 scores, the *logits*.

# %%
tokens = torch.tensor([prompt])
positions = torch.arange(len(prompt)).unsqueeze(0)
cache = ContiguousKV(config, batch=1, capacity=64, dtype=torch.float32)
logits = model.net.forward(tokens, positions, cache)
print("fed", tuple(tokens.shape), "-> logits", tuple(logits.shape))
print(f"cached: {cache.length} positions, {cache.nbytes / cache.capacity / 1024:.0f} KiB each")

# %% slideshow={"slide_type": "fragment"}
best = logits[0, -1].softmax(-1).topk(8)
pictures.show(
    drawings.bars(
        {repr(tokenizer.decode([i])): p for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)},
        xlabel="probability",
        title=f"what may follow {prompt_text!r}",
    ),
    "Bars of the eight most probable next tokens; ' Paris' is the longest.",
)

# %% [markdown]
# The eight most probable next tokens. Greedy decoding takes the first; sampling draws from all of them.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The loop, by hand
#
# This is all of decoding: take the best token, feed it at the next position, repeat.

# %%
out = []
for step in range(12):
    token = int(logits[0, -1].argmax())
    out.append(token)
    place = torch.tensor([[len(prompt) + step]])
    logits = model.net.forward(torch.tensor([[token]]), place, cache)
print(repr(tokenizer.decode(out)))

# %% [markdown]
# The package's version does the same for ragged batches, with sampling and stopping. It must give the same ids:

# %%
package = generate(model, [prompt], SamplingParams(max_tokens=12))[0]
oracle = generate(model, [prompt], SamplingParams(max_tokens=12), kv="none")[0]
print("ours = package:", out == package.token_ids)
print("with cache = without:", package.token_ids == oracle.token_ids)

# %% [markdown]
# The second line is the most useful test in this field. Without a cache every step runs the whole sequence again:
# slow, and simple enough to be trusted. `kv="none"` stays in the package for this reason.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Station 5: sample
#
# Temperature flattens or sharpens the distribution, top-p keeps the most probable tokens until their sum reaches p
# (Holtzman et al. 2020). Turn the knobs: what stays possible?

# %%
import ipywidgets as widgets

from cs336_infer.course.widgets import explorer
from cs336_infer.sampling import probabilities

next_logits = model.net.forward(tokens, positions, NoCache())[0, -1]
candidates = next_logits.topk(8).indices
names = [repr(tokenizer.decode([i])) for i in candidates.tolist()]


def distribution(temperature: float, top_p: float) -> torch.Tensor:
    return probabilities(next_logits, SamplingParams(temperature=temperature, top_p=top_p))


def draw(temperature: float, top_p: float):
    p = distribution(temperature, top_p)[candidates].tolist()
    return drawings.bars(
        dict(zip(names, p, strict=True)), xlabel="probability", title="next token", color=drawings.PINK
    )


def describe(temperature: float, top_p: float) -> str:
    p = distribution(temperature, top_p)
    return f"{int((p > 0).sum()):,} tokens are possible; the most probable, {names[0]}, has {float(p.max()):.1%}."


knobs = explorer(
    {
        "temperature": widgets.FloatSlider(value=1.0, min=0.1, max=2.0, step=0.1, description="temperature"),
        "top_p": widgets.FloatSlider(value=0.9, min=0.1, max=1.0, step=0.05, description="top-p"),
    },
    draw,
    describe,
)
knobs

# %% [markdown]
# The bars are the eight best candidates. (On a page without a running kernel you see the picture for temperature 1.0
# and top-p 0.9.) The same from code:

# %%
for temperature in (0.3, 1.0, 2.0):
    print(f"temperature {temperature}: {describe(temperature, top_p=0.9)}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Station 6: text
#
# A character may be spread over several tokens. Decoding each token by itself breaks it; holding back the unfinished
# bytes does not.

# %%
from cs336_infer.text import StreamDetokenizer

ids = tokenizer.encode("Seoul 서울 🙂")
one_by_one = "".join(tokenizer.decode([i]) for i in ids)
stream = StreamDetokenizer(tokenizer)
pieces = [stream.push(i) for i in ids]
print("each token by itself:", one_by_one.replace("\ufffd", "?"))
print("held back            ", pieces)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Station 7: stop and safety
#
# Generation ends at the end-of-sequence token, at `max_tokens`, at the end of the context, or at a stop string. A stop
# string may be cut anywhere by token borders, and none of it may be shown. So the engine holds back exactly the text
# that could still become the stop string:

# %%
from cs336_infer.text import StopStrings

stops = StopStrings(["\nUser:"])
for piece in ["Paris", ".", "\n", "Use", " it", " well", "\nUs", "er", ": hi"]:
    shown = stops.push(piece)
    print(f"got {piece!r:9} show {shown!r:9} hold {stops.held!r:9} matched {stops.matched!r}")

# %% [markdown]
# A safety check on a stream needs the same: a word is held back until it is certain that it is not a forbidden one.
# A filter that looks at each token by itself has already shown the first half. The package has no safety check yet;
# the stage on serving adds it behind this mechanism.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Where does the time go?
#
# The prompt below has 60 tokens and the answer 24. You have seen all stations. **Predict:** which share of the time
# from request to last character is spent in "execute", that is in the 30 layers and the LM head?

# %%
from cs336_infer.course.predict import explain, measured, predict

predict("share of execute", low=80, high=99, unit="%", why="the other stations handle single numbers")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from cs336_infer.sampling import Sampler

clock = {"tokenise": 0.0, "prefill": 0.0, "decode": 0.0, "sample": 0.0, "text and stop": 0.0}


def timed(name: str, fn, *args):
    start = time.perf_counter()
    value = fn(*args)
    clock[name] += time.perf_counter() - start
    return value


request = "Once upon a time, in a small village by the sea, there lived a girl who could talk to the wind. " * 3
ids = timed("tokenise", tokenizer.encode, request)[:60]
params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=1)
cache = ContiguousKV(config, batch=1, capacity=len(ids) + 24, dtype=torch.float32)
sampler, words, stops = Sampler([params], [ids], config.vocab_size), StreamDetokenizer(tokenizer), StopStrings(["\n\n"])
feed, place, text = torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0), ""
for step in range(24):
    logits = timed("decode" if step else "prefill", model.net.forward, feed, place, cache)
    token = timed("sample", sampler, logits[:, -1])[0]
    text += timed("text and stop", lambda t: stops.push(words.push(t)), token)
    feed, place = torch.tensor([[token]]), torch.tensor([[len(ids) + step]])

total = sum(clock.values())
pictures.show(
    drawings.bars(
        {name: 100 * t / total for name, t in clock.items()},
        xlabel="% of the time",
        title="where the time goes",
        label="{:.1f} %",
    ),
    "Bars of the share of time of tokenise, prefill, decode, sample, and text and stop.",
    measured=True,
)
measured("share of execute", 100 * (clock["prefill"] + clock["decode"]) / total)
print(f"timing: prefill {clock['prefill'] * 1e3:.0f} ms for {len(ids)} tokens")
print(f"timing: decode {clock['decode'] / 23 * 1e3:.1f} ms a token")

# %% [markdown]
# The upper picture shows each station's share of the whole, the lower one your guess against the share of prefill and
# decode together.

# %%
explain(
    "share of execute",
    "Each of the 24 steps runs through all 134,515,008 weights; sampling looks at 49,152 numbers, the rest at fewer.",
    must_mention=134_515_008,
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Prefill against decode
#
# **Predict:** prefill runs 60 tokens in one step, decode one. How many times faster, per token, is prefill?

# %%
predict(
    "prefill speed per token, in decode steps", low=3, high=30, unit="times", why="weights are read once for 60 tokens"
)

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
per_prefill, per_decode = clock["prefill"] / len(ids), clock["decode"] / 23
measured("prefill speed per token, in decode steps", per_decode / per_prefill, bound=60, bound_label="prompt tokens")

# %% [markdown]
# Both phases read the same weights once per step. Decode pays that price for one token, prefill for sixty: the more
# tokens share a step, the less the memory matters and the more the arithmetic does. The gap is smaller than 60
# because prefill is no longer limited by memory. Notebook 02 is about nothing else.

# %%
explain(
    "prefill speed per token, in decode steps",
    "Prefill reads the weights once for 60 tokens and decode once for 1, until arithmetic becomes the limit.",
    must_mention=60,
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (1): a position that is one off
#
# In this mutant, decode places every token one position too far to the right. Read the text before you read on: would
# you notice?

# %%
import importlib

stage = importlib.import_module("cs336_infer.generate")


def shifted(feed, cache, starts):
    return right_positions(feed, cache, starts) + (1 if feed.shape[1] == 1 else 0)


story = tokenizer.encode("Once upon a time, in a small village by the sea,")
right_positions = stage.positions
right = generate(model, [story], SamplingParams(max_tokens=24))[0]
stage.positions = shifted
broken = generate(model, [story], SamplingParams(max_tokens=24))[0]
stage.positions = right_positions
print("right: ", repr(right.text))
print("mutant:", repr(broken.text))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (2): a cache that forgets the newest token
#
# Here attention in decode does not see the token it was just given, a mistake of one in a slice. Again, the text alone
# will not tell you. (`generate` takes a cache of your own as `kv=`.)

# %%
from cs336_kernels.ops import attention


class Forgetful(ContiguousKV):
    """Attends to one position too few in every decode step."""

    def extend(self, new):
        begin, attend_right = self.length, super().extend(new)
        if new > 1:
            return attend_right

        def attend(layer, q, k, v):
            attend_right(layer, q, k, v)
            keys, values = self.k[layer][:, :, :begin], self.v[layer][:, :, :begin]
            return attention(q.transpose(1, 2), keys, values).transpose(1, 2)

        return attend


forgetful = generate(model, [story], SamplingParams(max_tokens=24), kv=Forgetful)[0]
print("mutant:", repr(forgetful.text))

# %% [markdown]
# **Say what breaks** before you run the check. Then compare each with the run without a cache, token by token:

# %%
oracle = generate(model, [story], SamplingParams(max_tokens=24), kv="none")[0]
for name, done in [("right", right), ("position one off", broken), ("forgets the newest", forgetful)]:
    same = next((i for i, (x, y) in enumerate(zip(done.token_ids, oracle.token_ids, strict=True)) if x != y), 24)
    print(f"{name:20} agrees with the oracle for {same} of 24 tokens")

# %% [markdown]
# Neither mutant crashes and neither prints nonsense. Fluent text is no evidence that an engine is right: language
# models are good at hiding such mistakes. "Cache equals no cache, token by token" finds both.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Takeaways
#
# - Every token passes: tokenise, schedule, look up, execute, sample, text, stop and safety.
# - Prefill feeds the whole prompt in one step, decode one token per step. Both read all weights.
# - Nearly all time is spent in "execute"; the other stations decide whether the answer is right.
# - The old rung is the oracle of the new one: without a cache, the same tokens must come out.
#
# ## Where real engines differ
#
# - vLLM keeps the schedule, the block tables and the prefix hashes in one process and the model in others, and starts
#   scheduling the next step before the present one has ended (its V1 design notes).
# - SGLang finds shared prefixes with a radix tree over tokens instead of a chain of page hashes (Zheng et al. 2024).
# - Both sample on the GPU for a whole batch at once. Ours loops over rows, which is easier to read and slower.
# - Production systems check the prompt and the stream for safety, with lists and with classifiers. We only showed
#   what such a check must hold back.
#
# ## Next
#
# `02_prefill_and_decode`: arithmetic intensity by hand, the roofline of this machine, and why the two phases end up on
# different hardware.
