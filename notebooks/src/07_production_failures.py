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
# # 07 · What breaks in production
#
# **The question:** the server answers with status 200, the text is fluent, and it is wrong. Who notices?
#
# After this notebook you can
#
# - tell a doom loop of the model from one that a kernel caused, and detect both while they are produced;
# - find a kernel that reads memory nobody wrote, by filling that memory three times;
# - explain how an English question gets a Russian answer, why a row of "!!!!" means NaN, why a seeded answer changes
#   with its neighbours, and how a stop string leaks;
# - say for each detector what it sees and what it cannot see.
#
# Time: 60 minutes. Needs: a CPU. All faults here are of real kinds, with a public report where one is named, and we put
# them into our engine. Lines that begin with `timing:` may read differently on your machine: a broken engine's numbers
# lie so close together that rounding decides.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The patient
#
# The real model, healthy, and six openings. `run` makes a fresh engine whose KV memory is filled with zeros, so that
# everything below can be repeated.

# %%
from cs336_infer import LLM, LoopRule, SamplingParams, generate, load_model
from cs336_infer.course import drawings, faults, pictures

model = load_model(dtype="float32")
tok = model.tokenizer
OPENINGS = [
    "Once upon a time, in a small village by the sea,",
    "The three most important inventions are",
    "To bake a good loaf of bread, you",
    "The president of the council said on Monday that",
    "Water boils at 100 degrees because",
    "def fibonacci(n):",
]
SHORT = SamplingParams(max_tokens=24, ignore_eos=True)


def run(prompts, params=SHORT, fill: float = 0.0, **options):
    return LLM(model, kv_tokens=4096, prefix_cache=False, fill=fill, **options).generate(prompts, params)


healthy = run(OPENINGS)
oracle = generate(model, OPENINGS, SHORT)
print("as without an engine:", [a.token_ids == b.token_ids for a, b in zip(healthy, oracle, strict=True)])
print(repr(healthy[0].text))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## (a) Doom loops: the symptom
#
# **Symptom:** an answer repeats itself until `max_tokens`. It costs the longest possible time and is worth nothing. One
# of the answers above, and a picture of it: a dot where token `i` equals token `j`. A loop is a set of parallel lines.

# %%
import numpy as np

from cs336_infer.text.loops import LoopDetector

free = SamplingParams(max_tokens=120, ignore_eos=True)
answers = dict(zip(("repeats", "does not"), run(["A good teacher was", OPENINGS[0]], free), strict=True))
fig, axes = pictures.subplots(1, 2, figsize=(9, 4.2))
for ax, (name, answer) in zip(axes, answers.items(), strict=True):
    ids = np.array(answer.token_ids)
    ax.imshow(ids[:, None] == ids[None, :], cmap="Greys", interpolation="nearest")
    ax.set(title=name, xlabel="token", ylabel="token")
    ax.grid(False)
pictures.show(fig, "Two squares of dots where tokens are equal. Left, parallel diagonal lines: a loop. Right, the main "
              "diagonal and scattered dots.")  # fmt: skip
print(repr(answers["repeats"].text[-130:]))

# %% [markdown] slideshow={"slide_type": "slide"}
# ## (a) The detector
#
# A text has period `p` where each token equals the one `p` places before. Count, for every `p`, how long that has been
# so. Report when the stretch is long enough, in tokens *and* in copies of its shortest unit: twelve equal dashes are
# also three groups of four (vllm#52677).

# %%
rule = LoopRule()
print(rule)
for name, answer in answers.items():
    detector = LoopDetector(rule)
    seen = ((at, detector.push(token)) for at, token in enumerate(answer.token_ids, 1))
    at, found = next(((at, loop) for at, loop in seen if loop is not None), (0, None))
    where = f"after {at} tokens: period {found.period}, {found.copies:.1f} copies" if found else "nothing"
    print(f"{name:9} {where}")

# %% [markdown]
# With `SamplingParams(loops=rule)` the engine ends the answer there, with a finish reason of its own. The cost is one
# comparison for each possible period and token, whatever the length of the answer: a client must not choose the largest
# period freely (vllm#46700).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## (a) Predict: how often does the model itself loop?
#
# Nothing is broken yet. 12 greedy continuations of openings like this one, 120 tokens each. **How many does the
# detector end?**

# %%
from cs336_infer.course.predict import explain, measured, predict

predict("greedy answers of 12 that loop", low=1, high=6, unit="answers", why="small models are known for it")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
SUBJECTS = ["The lighthouse", "My grandmother", "A good teacher", "The old bridge", "The river", "Our city"]
SEVERAL = [f"{subject} {ending}" for subject in SUBJECTS for ending in ("was", "has always been")]
GUARDED = SamplingParams(max_tokens=120, ignore_eos=True, loops=rule)


def looping(answers) -> int:
    return sum(answer.finish_reason.value == "loop" for answer in answers)


own = run(SEVERAL, GUARDED)
print(f"timing: {looping(own)} of {len(own)} end in a loop; the others go on to 120 tokens")
measured("greedy answers of 12 that loop", looping(own), bound=12, bound_label="all of them")

# %%
explain(
    "greedy answers of 12 that loop",
    "Greedy decoding takes the most probable token every time; once a phrase has been said twice, saying it again is "
    "the most probable continuation, and 135 million parameters do not know better. Nothing else ends it here.",
    must_mention=135,
)

# %% [markdown]
# Over 59 continuations of 256 tokens the repository's `benchmarks/model_loops.py` saw three in four loop, nearly all to
# the end, and 44 % of all tokens come after the detector's verdict: that is the throughput it gives back. So a loop
# alone does not prove a broken kernel. A *rise* of their rate does.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## (a) Loops that a kernel caused
#
# **Cause:** a step was captured as a graph, and its positions are not updated when it is replayed: the rotary embedding
# puts every token of an answer at the same place. The same 12 openings. **How many now?**

# %%
with faults.stuck_positions():
    stuck = run(SEVERAL, GUARDED)
for a, b in list(zip(stuck, own, strict=True))[:4]:
    same = next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y)
    print(f"timing: {a.finish_reason.value:6} first wrong token {same:2}  {a.text[-60:]!r}")
print(f"timing: loops: {looping(own)} of 12 healthy, {looping(stuck)} of 12 with stuck positions")

# %% [markdown]
# **Detector:** one loop says nothing, but the *rate* has risen. A server counts its finish reasons; that is where this
# fault shows. **Test:** greedy ids against a run without any cache, which fails within a few tokens.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## (b) One element off: memory that nobody wrote
#
# **Cause:** a kernel writes 191 of the 192 numbers of each key and each value (a bound that is one too small). The last
# one keeps whatever was in memory (of the class of vllm-ascend#17003). **Predict the symptom**, when memory holds
# zeros, as a fresh process usually finds it.

# %%
QUESTIONS = [
    "Write a short letter to a friend about the sea.",
    "Explain why the sky is blue.",
    "List three uses of a paper clip.",
]
CHAT = [tok.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
brief = SamplingParams(max_tokens=28)
right = run(CHAT, brief)
with faults.unwritten_element():
    zeros = run(CHAT, brief, fill=0.0)
for a, b in zip(right, zeros, strict=True):
    print("right: ", repr(a.text[:88]))
    print("broken:", repr(b.text[:88]))

# %% [markdown]
# Fluent English, on the subject, and other words than it should say. No monitor of texts will ever see this. Memory is
# not always zero, though. Here with random numbers, as other requests might leave them:

# %%
import torch


def noisy(scale: float):
    """The broken kernel over memory full of random numbers."""
    llm = LLM(model, kv_tokens=2048, prefix_cache=False)
    llm.kv.memory.data.normal_(0, scale, generator=torch.Generator().manual_seed(0))
    with faults.unwritten_element():
        return llm.generate(CHAT, brief)


for scale in (1, 3, 10):
    answers = noisy(scale)
    letters = sum(c.isascii() and c.isalpha() for a in answers for c in a.text)
    share = letters / sum(len(a.text) for a in answers)
    print(f"timing: numbers of size {scale:2}: {share:4.0%} English letters  {answers[0].text[:60]!r}")

# %% [markdown]
# With small numbers it is English still, with larger ones the text leaves English: fragments, signs, full-width
# letters. Only 286 of this model's 49,152 tokens hold letters of other scripts; a large multilingual one goes over to
# Thai or Chinese, as users of a large assistant saw in August 2025.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## (b) The detector: fill it three times
#
# Nothing about the *text* proves the fault. But an engine that reads only what was written gives the same numbers
# whatever the rest of memory holds, **bit for bit**. So fill all unused memory with NaN, and with two different finite
# numbers. Any difference is a read of unwritten memory.

# %%
from cs336_infer.course.poison import poisoned

FILLS = (float("nan"), 1e4, -7.0)
print("healthy engine: ", poisoned(model, CHAT, FILLS))
with faults.unwritten_element():
    print("one element off:", poisoned(model, CHAT, FILLS))

# %% [markdown]
# Why three? NaN alone is not seen where it is compared or put through a maximum (`max(NaN, x)` may be `x`), nor in
# integers; one finite fill may be what was there anyway. **Test:** a ragged batch, lengths that end inside a block, a
# fresh process, and this comparison in the continuous tests. Here every test of the engine runs over NaN.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## (b) The wrong language
#
# An English question, a Russian answer. **Cause:** keys of the prefix cache that collide, and nobody compares the
# tokens of a hit (of the class of openvino.genai#3722): the question gets the memory of somebody else's prompt. That
# memory is *consistent*, so the answer is fluent.

# %%
ENGLISH = (
    "The lighthouse stands on a rock above the sea. Every evening the keeper climbs the stairs, lights the lamp and "
)
ENGLISH = tok.encode(
    ENGLISH + "looks out over the water. In the morning he walks down to the village, buys bread, milk"
)[:48]
OTHERS = {
    "Russian": "Москва является столицей России, и в ней живёт много людей. Город стоит на реке. " * 3,
    "Chinese": "北京是中国的首都,有很多人住在这里。这个城市很大。" * 4,
}


def after(neighbour: str, tokens: int):
    """The English prompt, on an engine that has just answered `neighbour`."""
    llm = LLM(model, kv_tokens=2048)
    llm.generate(neighbour, SamplingParams(max_tokens=1))
    return llm.generate([*ENGLISH, *tok.encode("\n")], SamplingParams(max_tokens=tokens, ignore_eos=True))[0]


for language, neighbour in OTHERS.items():
    healthy_one = after(neighbour, 12)
    with faults.colliding_keys():
        mixed = after(neighbour, 64)
    print(f"after a {language} prompt: healthy {healthy_one.text[:40]!r}")
    print(f"timing: collision, {mixed.cached_tokens} tokens 'found': {mixed.text[:60]!r}")
    print(f"timing: {mixed.foreign_letters} of {mixed.letters} letters are of a script that the prompt gave no reason "
          f"for; alarm at token {mixed.drifted_at}")  # fmt: skip

# %% [markdown]
# **Detector:** the *script-drift monitor*: letters of scripts that the prompt gave no reason for, as a share of the
# last 128 letters, and as a rate over all answers. It is blind to a Spanish answer, and to one wrong token in a
# thousand in a single answer: for that there is the rate. **Test:** compare the tokens of every hit, and inject a short
# hash. (It is a privacy incident too. The Chinese answer has too few letters yet for 40 % of 128: no alarm so far.)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## (c) "!!!!!!!!"
#
# **Symptom:** one and the same token for ever, with status 200. **Cause:** the scores are not numbers. The largest of
# 49,152 NaNs is the first, token 0: "!" in many vocabularies (vllm#22881, #13035, #14126), a special token without text
# in this one. Here the unwritten element holds a NaN, and the sampler does not look.

# %%
with faults.unwritten_element(), faults.blind_sampler():
    for answer in run(OPENINGS[:2], SamplingParams(max_tokens=8, ignore_eos=True), fill=float("nan")):
        print("blind sampler: ", answer.token_ids, repr(answer.text), answer.finish_reason.value)
with faults.unwritten_element():
    for answer in run(OPENINGS[:2], SamplingParams(max_tokens=8, ignore_eos=True), fill=float("nan")):
        print("healthy sampler:", answer.token_ids, answer.finish_reason.value, "-", answer.error)

# %% [markdown]
# **Detector:** one sum over the scores of a step, which is finite only if all are; the *request* fails with its reason,
# and the engine goes on. **Test:** NaN in a single row of a batch must fail that row alone.

# %%
llm = LLM(model, kv_tokens=2048, prefix_cache=False)
forward = model.net.forward
model.net.forward = lambda *args, **options: forward(*args, **options).index_fill(1, torch.tensor([1]), torch.nan)
sick = llm.generate(OPENINGS[:3], SamplingParams(max_tokens=1))
del model.net.forward
print("NaN in row 1 of 3:", [a.finish_reason.value for a in sick])

# %% [markdown] slideshow={"slide_type": "slide"}
# ## (d) A seed that is not enough
#
# **Symptom:** the same prompt with the same seed gives another answer when the server is busy. **Cause:** one stream of
# random numbers for the whole batch (vllm#51226): who else draws decides which numbers you get.

# %%
SEEDED = SamplingParams(max_tokens=10, temperature=1.0, seed=5)


def with_neighbours(n: int) -> str:
    return run(OPENINGS[: n + 1], SEEDED)[0].text


print("healthy:", with_neighbours(0))
print("healthy, the same with 1 and 3 neighbours:", [with_neighbours(n) == with_neighbours(0) for n in (1, 3)])
texts = []
for n in (0, 1, 3):
    with faults.shared_random_numbers():
        texts.append(with_neighbours(n))
print("shared, the same with 1 and 3 neighbours: ", [text == texts[0] for text in texts[1:]])
print(f"timing: {texts}")

# %% [markdown]
# **Detector and test:** the answer alone against the answer in company, for several companies. The package gives each
# request a generator of its own. In float32 that is enough here; in bfloat16 the *shape* of the batch moves the sums a
# little, and ids may still change: 1,000 runs of one prompt gave 80 different answers on a large model, until the order
# of all reductions was fixed (Thinking Machines 2025).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## (e) A stop string that leaks
#
# **Symptom:** the whole answer is cut correctly, but the stream has already shown the first half of the stop string.
# **Cause:** text is sent before it is known not to begin a stop (vllm#3574).

# %%
from contextlib import nullcontext

QUESTION = "Q: What is the capital of France?\nA: Paris\n\nQ: What is the capital of Italy?\nA:"
STOP = " the capital of"
STOPPED = SamplingParams(max_tokens=20, stop=STOP, ignore_eos=True)


def pieces() -> list[str]:
    llm = LLM(model, kv_tokens=2048, prefix_cache=False)
    return [event.text for event in llm.stream(QUESTION, STOPPED)]


for name, fault in (("healthy", nullcontext), ("leaking", faults.leaking_stop)):
    with fault():
        shown = pieces()
    leaked = next((STOP[:k] for k in range(len(STOP), 0, -1) if "".join(shown).endswith(STOP[:k])), "")
    print(f"{name}: shown {shown}, of the stop {leaked!r}")

# %% [markdown]
# **Detector and test:** for random texts, stops and cuts, what was shown is the text up to the stop, and never more is
# held back than could still become one. That is `find_stop` in two lines against the automaton (`text/stop.py`).

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Who sees what
#
# All faults against all detectors. **Which cells will be filled?** A detector that looks at one answer's text (left)
# sees little; those that compare two runs (right) see nearly everything.

# %%
from cs336_infer.course.detectors import DETECTORS, examine

table = examine(model)
pictures.show(
    drawings.matrix(table, DETECTORS, title="which detector sees which fault"),
    "A table of faults and detectors. Each fault is seen by at least one detector, the healthy engine by none; the "
    "detectors that compare runs see most.",
)
for fault, seen in table.items():
    print(f"{fault:22} {', '.join(name for name in DETECTORS if seen[name]) or 'nobody'}")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## False alarms
#
# A detector that cries wolf is switched off. Here are texts that people really wrote, in many languages, with code,
# tables, licences and lists, replayed as token streams. (The repository's tests take 2,000 of them.)

# %%
from cs336_infer.measure.texts import texts as real_texts
from cs336_infer.text.drift import DriftMonitor
from cs336_infer.types import DriftRule

counted, alarms = {}, 0
for text in real_texts(scale=0.1):
    detector, monitor = LoopDetector(rule), DriftMonitor(DriftRule(), text.prompt or text.content[:200])
    loop = any(detector.push(token) is not None for token in tok.encode(text.content))
    drift = monitor.push(text.content)
    counted[text.kind] = counted.get(text.kind, 0) + 1
    alarms += loop or drift
print(f"{sum(counted.values())} texts ({', '.join(f'{n} {kind}' for kind, n in counted.items())}): {alarms} alarms")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Takeaways
#
# - Broken kernels speak fluently. The text is the last place to look; compare runs first.
# - Fill unused memory with NaN and two finite numbers, and compare bit for bit.
# - A detector in production needs a rule, a bounded cost, a finish reason of its own, and a rate that somebody watches.
# - "As alone" (any batch, any budget, any cache) is the cheapest property and finds most.
# - Fail the request, with its reason. An answer that is wrong costs more than an error.
#
# ## Where real engines differ
#
# - vLLM has `repetition_detection` since 2026, off by default. Others check every 20 tokens over a window of 200.
# - Providers watch canaries: fixed prompts per server, sticky routing off after an alarm. Anthropic's report of
#   September 2025 names three overlapping faults (routing, a misconfigured TPU, an approximate top-k).
# - `compute-sanitizer --tool initcheck` finds unwritten reads on a GPU; `torch.utils.deterministic` fills new tensors,
#   but not memory that a pool hands out again, as KV memory is.
#
# ## Read next
#
# - "A postmortem of three recent issues", Anthropic engineering, September 2025.
# - Horace He and Thinking Machines Lab 2025, "Defeating Nondeterminism in LLM Inference".
# - `cs336_infer/course/faults.py`, `text/loops.py`, `text/drift.py`, and `tests/public/test_faults.py`.
