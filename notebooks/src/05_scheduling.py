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
# # 05 · Scheduling
#
# **The question:** requests come when they like, with prompts and answers of any length. An engine runs one forward
# pass after the other. Who is in it, and with how many tokens?
#
# After this notebook you can
#
# - write a scheduler with continuous batching and chunked prefill in 30 lines;
# - say what a step costs, and derive from it when an answer stutters and how to bound the stutter;
# - choose what to do when KV memory runs out: recompute or swap, and say why every request still ends;
# - show what a change of the order does to the mean and to the worst waiting time.
#
# Time: 60 minutes. Needs: a CPU.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The picture: four places, six people
#
# Six requests for an engine with four places in its batch: `A` to `F`, each with the step in which it arrives, tokens
# in its prompt, and tokens in its answer (which nobody knows beforehand).

# %%
from dataclasses import dataclass


@dataclass(eq=False)
class Wish:
    """A request, as the scheduler sees it: no text, only counts."""

    name: str
    arrives: int
    prompt: int
    answer: int
    stored: int = 0  # tokens in KV memory
    made: int = 0  # tokens of the answer so far

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return self.prompt + self.made - self.stored


WISHES = [("A", 0, 5, 4), ("B", 0, 3, 14), ("C", 0, 9, 6), ("D", 0, 2, 3), ("E", 1, 6, 5), ("F", 4, 12, 8)]

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Continuous batching, in 30 lines
#
# Whether a request is in *prefill* or in *decode* is not stored anywhere: it computes whatever is missing, and when
# nothing is missing it gets a token. Answers go first, with one token each. What is left of the step's *token budget*
# goes to prompts, in chunks.

# %%
from collections.abc import Callable


def plan(running: list[Wish], budget: int) -> dict[Wish, int]:
    """How many tokens each computes in the next step."""
    todo = {}
    for wish in sorted(running, key=lambda w: (w.remaining > 1, w.arrives, w.name)):
        new = min(wish.remaining, budget)
        if new > 0:
            todo[wish], budget = new, budget - new
    return todo


def run(wishes: list[Wish], places: int, budget: int, may_enter: Callable[[list[Wish]], bool]) -> list[dict]:
    """Step after step, until everybody has an answer: what each one computed."""
    waiting, running, steps = sorted(wishes, key=lambda w: w.arrives), [], []
    while waiting or running:
        here = [w for w in waiting if w.arrives <= len(steps)]
        if may_enter(running):
            entering = here[: places - len(running)]
            running, waiting = running + entering, [w for w in waiting if w not in entering]
        todo = plan(running, budget)
        steps.append({w.name: new for w, new in todo.items()})
        for wish, new in todo.items():
            wish.stored += new
            wish.made += wish.remaining == 0
        running = [w for w in running if w.made < w.answer]
    return steps


# %% [markdown] slideshow={"slide_type": "slide"}
# ## Static and continuous
#
# *Static* batching fills the batch, and lets nobody in until all have left. *Continuous* batching (Yu et al. 2022,
# Orca) looks again before every step. The same function does both:

# %%
static = run([Wish(*w) for w in WISHES], places=4, budget=16, may_enter=lambda running: not running)
continuous = run([Wish(*w) for w in WISHES], places=4, budget=16, may_enter=lambda running: True)
made = sum(w[3] for w in WISHES)
for name, steps in (("static", static), ("continuous", continuous)):
    last = max(i for i, step in enumerate(steps) if step)
    print(f"{name:11} {last + 1} steps for {made} tokens: {made / (last + 1):.1f} a step")

# %% [markdown]
# And drawn. A green cell is a chunk of a prompt, with its number of tokens; a blue one is a step of an answer.

# %%
from cs336_infer.course import drawings, pictures, schedule_drawings


def as_records(steps: list[dict]) -> tuple[list[schedule_drawings.StepRecord], dict[int, range]]:
    """For the drawing: numbers instead of names, who waits, and which places are kept for nothing."""
    number = {w[0]: i for i, w in enumerate(WISHES)}
    left = {name: max(i for i, step in enumerate(steps) if name in step) + 1 for name in number}
    first = {name: min(i for i, step in enumerate(steps) if name in step) for name in number}
    records, seen = [], dict.fromkeys(number, 0)
    for i, step in enumerate(steps):
        record = schedule_drawings.StepRecord({number[n]: new for n, new in step.items()})
        for name, arrives, prompt, _ in WISHES:
            seen[name] += step.get(name, 0)
            if name in step and seen[name] >= prompt:
                record.chose.add(number[name])
            if arrives <= i < first[name]:
                record.waiting.add(number[name])
        records.append(record)
    return records, {number[n]: range(left[n], max(left[m] for m in "ABCD")) for n in "ABCD"}


names = {i: w[0] for i, w in enumerate(WISHES)}
records, kept = as_records(static)
pictures.show(
    schedule_drawings.timeline(records, names, title="static: nobody enters before all have left", idle=kept),
    "Static batching over 23 steps: A to D start first, B runs until step 13, and the places of A, C and D are kept "
    "empty for it; E and F wait and start in step 14.",
)

# %%
records, _ = as_records(continuous)
pictures.show(
    schedule_drawings.timeline(records, names, title="continuous: a place is taken again in the next step"),
    "Continuous batching over 14 steps: E and F take the places of A and D in step 4.",
)

# %% [markdown]
# Static: B's long answer holds three empty places (orange) and lets two people wait (grey). The numbers in green show
# the budget at work: in step 0 three prompts fit into 16 tokens and the third one gets what is left.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## The package's version
#
# `Scheduler` decides the same way, over real KV memory. To look at decisions alone we put a network into the real
# engine that computes nothing and takes a stated time (`TimedNet`). Do both agree, on 60 random days of 8 requests?

# %%
import random
from dataclasses import replace

from cs336_infer import LLM, SamplingParams, load_model
from cs336_infer.simulate.timed import TimedNet

model = load_model(dtype="float32")


def simulated(fixed_s: float = 1.0, token_s: float = 0.0, **options) -> LLM:
    """The real engine in a simulated clock."""
    net = TimedNet(model, fixed_s=fixed_s, token_s=token_s)
    llm = LLM(replace(model, net=net), **({"kv_tokens": 16384, "prefix_cache": False} | options))
    llm.engine.clock = net.clock
    return llm


def engine_run(wishes: list[Wish], places: int, budget: int) -> list[dict]:
    llm = simulated(max_batch=places, step_tokens=budget)
    engine, records, ids = llm.engine, schedule_drawings.watch(llm.engine), {}
    for step in range(1000):
        for wish in wishes:
            if wish.arrives == step:
                params = SamplingParams(max_tokens=wish.answer, ignore_eos=True)
                ids[engine.add([7] * wish.prompt, params, llm.root())[0].number] = wish.name
        if not engine.busy and step > max(w.arrives for w in wishes):
            break
        engine.step()
    return [{ids[n]: new for n, new in record.computed.items()} for record in records]


draw, agree, steps = random.Random(0), 0, 0
for _ in range(60):
    places, budget = draw.randint(1, 5), draw.choice([1, 2, 5, 16, 100])
    day = [(f"{i}", draw.randrange(20), draw.randint(1, 30), draw.randint(1, 12)) for i in range(8)]
    day.sort(key=lambda w: w[1])
    ours = run([Wish(*w) for w in day], places, budget, lambda running: True)
    theirs = engine_run([Wish(*w) for w in day], places, budget)
    busy = [step for step in ours if step]
    agree, steps = agree + (busy == [step for step in theirs if step]), steps + len(busy)
print(f"{agree} of 60 days are the same in every one of their {steps} steps")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: how much does it give on the real model?
#
# Sixteen requests, all there at the start, and eight places. Prompts have 16 tokens; one answer in four has 64 tokens,
# the others have 8. **How many times more tokens per second does continuous batching give?** (A step with few answers
# costs nearly as much as one with eight.)

# %%
from cs336_infer.course.predict import explain, measured, predict

predict("continuous over static, tokens/s", low=1.3, high=2.0, unit="times", why="most places are empty for long")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
import time

lengths = [64 if i % 4 == 0 else 8 for i in range(16)]
story = model.tokenizer.encode("The story of the lighthouse keeper and the seven storms, chapter " * 2)
prompts = [[*story[:15], 40 + i] for i in range(16)]


def serve(groups: list[range]) -> tuple[float, int, list[list[int]]]:
    """Seconds, steps and answers, where a group starts when the one before it has ended."""
    llm, answers, start = LLM(model, kv_tokens=4096, max_batch=8, prefix_cache=False), [], time.perf_counter()
    for group in groups:
        params = [SamplingParams(max_tokens=lengths[i], ignore_eos=True) for i in group]
        answers += [done.token_ids for done in llm.generate([prompts[i] for i in group], params)]
    return time.perf_counter() - start, llm.engine.steps, answers


serve([range(2)])  # the first run of a shape is slower
rounds = [(serve([range(8), range(8, 16)]), serve([range(16)])) for _ in range(2)]
(seconds_static, steps_static, one), (seconds_continuous, steps_continuous, two) = map(min, zip(*rounds, strict=True))
print(f"static {steps_static} steps, continuous {steps_continuous}; the same {sum(lengths)} tokens: {one == two}")
print(
    f"timing: {sum(lengths) / seconds_static:.0f} tokens/s static, {sum(lengths) / seconds_continuous:.0f} continuous"
)
measured(
    "continuous over static, tokens/s",
    seconds_static / seconds_continuous,
    bound=steps_static / steps_continuous,
    bound_label="steps, static over continuous",
)

# %%
explain(
    "continuous over static, tokens/s",
    "Static batching runs twice 64 steps. Continuous batching lets the next ones in after 8 steps, so that all four "
    "long answers run beside each other most of the time; a step with more answers costs a little more.",
    must_mention=[64, 8],
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What does a step cost?
#
# A step reads all weights once, and computes 2 FLOPs per weight and token. With few tokens the reading decides, with
# many the arithmetic (lecture 02). Here is the time of a step over the tokens in it, on this machine.

# %% tags=["measured"]
from statistics import median

llm = LLM(model, kv_tokens=4096, prefix_cache=False)
sizes, took = [1, 8, 32, 64, 128, 256, 512], []
for size in sizes:
    readings = []
    for _ in range(2 if size > 100 else 4):
        llm.engine.add([9] * size, SamplingParams(max_tokens=1), llm.root())
        start = time.perf_counter()
        llm.engine.step()
        readings.append(time.perf_counter() - start)
    took.append(median(readings))
slope = (took[-1] - took[-3]) / (sizes[-1] - sizes[-3])
fig, ax = pictures.subplots(figsize=(7.5, 3.4))
ax.plot(sizes, [1e3 * s for s in took], "o-", color=drawings.BLUE, label="measured")
ax.plot(sizes, [1e3 * (took[0] + slope * s) for s in sizes], "--", color=drawings.ORANGE, label="fixed + per token")
ax.set(xlabel="tokens in the step", ylabel="ms", title="time of one step")
ax.legend()
pictures.show(
    fig, "Time of a step over its tokens, and a straight line of a fixed cost and one per token.", measured=True
)
print(f"timing: one token {1e3 * took[0]:.0f} ms; each of many {1e3 * slope:.2f} ms")

# %% [markdown]
# The line is the model of a step that the rest of this lecture uses: a fixed cost and a cost per token. A step of 512
# tokens takes many times as long as one of eight, and *everybody in the batch waits for it*.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: a long prompt arrives
#
# Three answers are running. After ten steps somebody sends a prompt of 600 tokens. If the prompt goes into one step,
# the three wait for it. With a budget of 64 tokens it takes ten steps, each with room for the three. **How many times
# shorter is the longest gap between two tokens of an answer?**

# %%
predict("longest gap, whole prompt over chunks", low=4, high=10, unit="times", why="600 tokens against 64")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from itertools import pairwise

long_prompt = model.tokenizer.encode(
    "Everything that was said about the lighthouse and its keeper in those days. " * 50
)[:600]


def gaps_of(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def interrupted(budget: int) -> tuple[list[float], float, list[list[int]]]:
    """Times of every step in which the three get a token, and the newcomer's time to first token."""
    llm = LLM(model, kv_tokens=2048, step_tokens=budget, prefix_cache=False)
    engine, params, times = llm.engine, SamplingParams(max_tokens=32, ignore_eos=True), []
    three = [engine.add(prompts[i], params, llm.root())[0] for i in range(3)]
    late = None
    while engine.busy:
        if engine.steps == 10 and late is None:
            (late,) = engine.add(long_prompt, SamplingParams(max_tokens=2, ignore_eos=True), llm.root())
        before = len(three[0].completion.token_ids)
        engine.step()
        if len(three[0].completion.token_ids) > before:
            times.append(time.perf_counter())
    return times, late.completion.ttft_s, [s.completion.token_ids for s in (*three, late)]


whole, ttft_whole, ids_whole = interrupted(2048)
chunked, ttft_chunked, ids_chunked = interrupted(64)
fig, ax = pictures.subplots(figsize=(8, 3.2))
for times, color, label in (
    (whole, drawings.ORANGE, "budget 2048: in one step"),
    (chunked, drawings.BLUE, "budget 64"),
):
    ax.plot([1e3 * gap for gap in gaps_of(times)], "o-", ms=4, color=color, label=label)
ax.set(xlabel="token of an answer", ylabel="ms since the one before", title="gaps between tokens", yscale="log")
ax.legend()
alt = "Gaps between the tokens of an answer: one high peak with the whole prompt, ten low ones with chunks."
pictures.show(fig, alt, measured=True)
gap_whole, gap_chunked = max(gaps_of(whole)), max(gaps_of(chunked))
print("the same four answers:", ids_whole == ids_chunked)
print(f"timing: longest gap {1e3 * gap_whole:.0f} ms whole, {1e3 * gap_chunked:.0f} ms in chunks")
print(f"timing: the newcomer's first token after {ttft_whole:.2f} s whole, {ttft_chunked:.2f} s in chunks")
bound = (took[0] + slope * 603) / (took[0] + slope * 64)
measured("longest gap, whole prompt over chunks", gap_whole / gap_chunked, bound=bound, bound_label="by the line above")

# %%
explain(
    "longest gap, whole prompt over chunks",
    "A gap is as long as the longest step. The step with 600 tokens costs ten times the arithmetic of one with 64, but "
    "both pay the fixed cost, so the ratio is below ten; ten steps instead of one make the newcomer wait longer.",
    must_mention=[600, 64],
)

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Turn the knob: the token budget
#
# The budget trades the newcomer's first token against everybody's longest gap. Here in the simulated clock, with steps
# of 40 ms and 2 ms for each token: eight answers running, and a prompt of your choice that comes at 1 s.

# %%
import functools

import ipywidgets as widgets

from cs336_infer.course.widgets import explorer

BUDGETS = [16, 32, 64, 128, 256, 512, 1024, 2048]


@functools.cache
def newcomer(budget: int, length: int) -> tuple[float, float, tuple[float, ...]]:
    """Its time to first token, the longest gap of the others, and their gaps, in seconds."""
    llm = simulated(0.04, 0.002, step_tokens=budget)
    engine, params, times, late = llm.engine, SamplingParams(max_tokens=180, ignore_eos=True), [], None
    eight = [engine.add([7] * 16, params, llm.root())[0] for _ in range(8)]
    while not eight[0].ended:
        if engine.clock() >= 1.0 and late is None:
            (late,) = engine.add([8] * length, SamplingParams(max_tokens=1), llm.root())
        before = len(eight[0].completion.token_ids)
        engine.step()
        if len(eight[0].completion.token_ids) > before:
            times.append(engine.clock())
    gaps = gaps_of(times)
    return late.completion.ttft_s, max(gaps), tuple(gaps)


def draw_budget(budget: int, length: int):
    _, _, gaps = newcomer(budget, length)
    fig, (left, right) = pictures.subplots(1, 2, figsize=(10, 3.4))
    left.plot([1e3 * gap for gap in gaps[:120]], color=drawings.BLUE)
    left.set(xlabel="token of an answer", ylabel="ms since the one before", title="gaps", ylim=(0, None))
    ttft, worst, _ = zip(*(newcomer(b, length) for b in BUDGETS), strict=True)
    right.plot(worst, ttft, "o-", color=drawings.GREEN)
    at = BUDGETS.index(budget)
    right.plot([worst[at]], [ttft[at]], "o", ms=12, color=drawings.ORANGE)
    right.set(xlabel="longest gap, s", ylabel="newcomer's TTFT, s", title="every budget", xscale="log")
    return fig


def describe_budget(budget: int, length: int) -> str:
    ttft, worst, _ = newcomer(budget, length)
    return (
        f"Budget {budget}, prompt of {length}: first token of the newcomer after {ttft:.2f} s, longest gap of the "
        f"others {worst * 1e3:.0f} ms."
    )


knob = explorer(
    {
        "budget": widgets.SelectionSlider(options=BUDGETS, value=128, description="tokens per step"),
        "length": widgets.SelectionSlider(options=[200, 600, 1500], value=600, description="tokens of the prompt"),
    },
    draw_budget,
    describe_budget,
)
knob

# %% [markdown]
# Left: the answers' gaps, with a plateau while the prompt is computed. Right: what each budget gives; the orange dot is
# yours. (Without a running kernel you see a budget of 128 and 600 tokens.) The same from code:

# %%
for budget in (16, 64, 256, 2048):
    print(describe_budget(budget, 600))

# %% [markdown]
# A budget of 16 leaves 8 tokens a step for the prompt: both are bad, for the fixed cost of 40 ms is paid 75 times.
# Above 512 nothing is gained for the newcomer. Engines choose from 512 to 8192 on a GPU, where a token costs less.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## When KV memory runs out
#
# Answers grow. Four requests of up to 30 tokens each share memory for 64, in blocks of 4. Admission lets a request in
# when all that it has to compute fits, but its answer is not reserved (lecture 03). When somebody needs a block and
# none is left, the last in rank gives way.

# %%
llm = simulated(max_batch=4, step_tokens=16, block_size=4, kv_tokens=64, debug=True)
records = schedule_drawings.watch(llm.engine)
crowd = [
    llm.engine.add([7 + i] * length, SamplingParams(max_tokens=14, ignore_eos=True), llm.root())[0]
    for i, length in enumerate((9, 14, 6, 16))
]
while llm.engine.busy:
    llm.engine.step()
pictures.show(
    schedule_drawings.timeline(records, {s.number: "ABCD"[s.number] for s in crowd}, title="64 tokens of KV memory"),
    "Four sequences over 29 steps: first D, then C, give way when memory is full, wait, and compute prompt and answer "
    "again in green chunks when there is room.",
)
print("preemptions:", llm.engine.scheduler.preemptions, " tokens computed again:", llm.engine.scheduler.recomputed)
print("all ended with", {s.completion.finish_reason.value for s in crowd}, "and blocks in use:", llm.kv.pool.live)

# %% [markdown]
# A pink cell is a preemption: the blocks go back, and the tokens wait. Later a green chunk computes prompt *and* answer
# again, and the sequence goes on where it was. Does everybody end? The first in rank never gives way, so it ends; then
# another one is first. Progress needs nothing else, and that is why the order must be total.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Predict: recompute or swap?
#
# A preempted sequence can be computed again, or copied to host memory and fetched back (`preemption="swap"`). One of
# 400 tokens holds 18.4 MB of KV here. **How many times sooner is a swapped one back than a recomputed one?**

# %%
predict("recompute over swap", low=4, high=30, unit="times", why="90 GFLOP, or 18.4 MB twice")

# %% slideshow={"slide_type": "fragment"} tags=["measured"]
from cs336_infer import TierOptions


def away_and_back(**options) -> tuple[float, float, int, list[int]]:
    """Seconds to leave and to be back with the next token, tokens computed again, and the answer."""
    with LLM(model, kv_tokens=1024, **options) as llm:
        engine = llm.engine
        (one,) = engine.add(long_prompt[:400], SamplingParams(max_tokens=6, ignore_eos=True), llm.root())
        for _ in range(3):
            engine.step()
        start = time.perf_counter()
        engine.scheduler.preempt(one)
        left = time.perf_counter()
        llm.kv.pool.forget()  # as if others had taken the blocks meanwhile
        engine.step()
        back = time.perf_counter()
        while engine.busy:
            engine.step()
        return left - start, back - left, engine.scheduler.recomputed, one.completion.token_ids


away_recompute, back_recompute, again, ids_recompute = away_and_back()
in_host = TierOptions(host_bytes=64 * 2**20, write="back")
away_swap, back_swap, again_swap, ids_swap = away_and_back(tiers=in_host, preemption="swap")
print(f"computed again: {again} tokens, or {again_swap}; the same answer: {ids_recompute == ids_swap}")
print(f"timing: recompute: away {1e3 * away_recompute:.1f} ms, back {1e3 * back_recompute:.0f} ms")
print(f"timing: swap: away {1e3 * away_swap:.0f} ms, back {1e3 * back_swap:.0f} ms")
measured("recompute over swap", (away_recompute + back_recompute) / (away_swap + back_swap))

# %%
explain(
    "recompute over swap",
    "Swapping moves 18.4 MB down and up at the speed of memory, with a checksum each time, and then needs one step; "
    "recomputing 400 tokens is 90 GFLOP of prefill.",
    must_mention=[18.4, 400],
)

# %% [markdown]
# On a GPU the copy crosses PCIe, some 25 to 55 GB/s, and prefill is a thousand times faster than here: there
# recomputing wins for short sequences, and vLLM's second engine (V1) preempts by recomputing only. The crossover is the
# one of lecture 04.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Who goes first?
#
# The order is a socket: `rank` maps a sequence to something that can be compared. First come, first served is fair. If
# many small requests wait behind a few large ones, shortest prompt first has a far better mean. **And the worst case?**
# 60 requests in the simulated clock, one in six with a prompt of 1,000 to 2,000 tokens.

# %%
from statistics import mean

from cs336_infer.engine.roster import first_come


def shortest_first(sequence) -> int:
    return len(sequence.completion.prompt_token_ids)


def short_but_ageing(sequence) -> float:
    """A second of waiting is worth 100 tokens. The order of two requests never changes: both age alike."""
    return shortest_first(sequence) + 100 * sequence.arrived


def day(rank, requests: int = 60) -> list[float]:
    """Times to first token, by arrival."""
    draw, llm = random.Random(4), simulated(0.04, 0.002, max_batch=6, step_tokens=256, rank=rank)
    arrivals, at = [], 0.0
    for i in range(requests):
        at += draw.expovariate(1.2)
        arrivals.append((at, draw.randint(1000, 2000) if i % 6 == 0 else draw.randint(20, 200), draw.randint(10, 60)))
    added = []
    while llm.engine.busy or len(added) < requests:
        now = llm.engine.clock()
        while len(added) < requests and arrivals[len(added)][0] <= now:
            _, length, answer = arrivals[len(added)]
            added += llm.engine.add([7] * length, SamplingParams(max_tokens=answer, ignore_eos=True), llm.root())
        if llm.engine.busy:
            llm.engine.step()
        else:
            llm.model.net.now_s = arrivals[len(added)][0]
    return [s.completion.ttft_s for s in added]


RANKS = (
    ("first come, first served", first_come),
    ("shortest first", shortest_first),
    ("with ageing", short_but_ageing),
)
fig, ax = pictures.subplots(figsize=(8, 3.2))
for (name, rank), color in zip(RANKS, (drawings.BLUE, drawings.ORANGE, drawings.GREEN), strict=True):
    waits = sorted(day(rank))
    ax.plot(waits, [100 * (i + 1) / len(waits) for i in range(len(waits))], color=color, label=name)
    print(f"{name:25} mean TTFT {mean(waits):5.2f} s, median {median(waits):5.2f} s, worst {waits[-1]:6.2f} s")
ax.set(xlabel="time to first token, s", ylabel="% of the requests", title="one day, three orders")
ax.legend()
pictures.show(fig, "Share of the requests over their time to first token, for three orders: shortest first is best for "
              "most and worst for the last ones.")  # fmt: skip

# %% [markdown]
# Shortest first more than halves the mean, and a few long prompts pay for it: while short ones keep coming they are
# overtaken again and again. Ageing bounds that. Whether an order is good depends on what was promised to whom, a
# *service level objective*. The share of requests within theirs is the **goodput**, the open task of `a3_serving`.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (1): a chunk of one token is no decode
#
# Every answer computes one token a step. So one token means decode? This mutant thinks so, and chooses a token whenever
# a sequence computed one (tenstorrent/vllm#448 and vllm#15307 were of this kind). Three answers run, a prompt of 17
# tokens comes. **For which budgets is its answer wrong?**

# %%
from cs336_infer.engine import Engine


class ByLength(Engine):
    @staticmethod
    def _chooses(sequence, new: int) -> bool:
        return new == 1 or new == sequence.remaining


def newcomers_answer(kind: type[Engine], budget: int) -> list[int]:
    llm = LLM(model, kv_tokens=512, prefix_cache=False)
    engine = kind(model, llm.kv, step_tokens=budget)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    for i in range(3):
        engine.add(prompts[i][:4], params, llm.root())
    while len(engine.running) < 3 or any(s.remaining > 1 for s in engine.running):
        engine.step()
    (late,) = engine.add(long_prompt[:17], SamplingParams(max_tokens=4, ignore_eos=True), llm.root())
    while not late.ended:
        engine.step()
    return late.completion.token_ids


right = newcomers_answer(Engine, 2048)
for budget in (2048, 20, 8, 4):
    same = [newcomers_answer(kind, budget) == right for kind in (Engine, ByLength)]
    print(f"budget {budget:4}: chunks of {min(17, budget - 3):2}: right {same[0]}, mutant right {same[1]}")

# %% [markdown]
# Only when the batch is so full that a single token is left for the prompt does the mutant choose tokens in the middle
# of it. A test with one request never sees it, nor does one with a large budget. "As alone, under any budget" does. The
# package asks what *remains*, and nobody stores a phase that could be wrong.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Break it (2): letting in who fits with one chunk
#
# Memory for 96 tokens. `A` has a prompt of 40 and an answer of 40, `B` a prompt of 60. The engine lets B in when its
# *whole* prompt has room. This mutant asks for room for the *next chunk* (vllm#25538). **What does B do?**

# %%
from cs336_infer.engine import Scheduler


class OneChunk(Scheduler):
    def _fits(self, sequence) -> bool:
        return self.kv.missing(sequence.kv, min(sequence.remaining, self.step_tokens)) <= self.kv.pool.available


def crowded(scheduler: type[Scheduler]) -> list[schedule_drawings.StepRecord]:
    llm = simulated(block_size=4, kv_tokens=96)
    llm.engine.scheduler = scheduler(llm.kv, step_tokens=12)
    records = schedule_drawings.watch(llm.engine)
    for prompt, answer in ((40, 40), (60, 4)):
        llm.engine.add([7] * prompt, SamplingParams(max_tokens=answer, ignore_eos=True), llm.root())
    while llm.engine.busy:
        llm.engine.step()
    decided = llm.engine.scheduler
    print(f"{scheduler.__name__:9} {llm.engine.steps} steps, {decided.preemptions:2} preemptions, "
          f"{decided.recomputed:3} tokens computed again")  # fmt: skip
    return records


crowded(Scheduler)
records = crowded(OneChunk)
few = [replace(record, computed=dict(record.computed)) for record in records[:30]]
pictures.show(
    schedule_drawings.timeline(few, {0: "A", 1: "B"}, title="the mutant, 30 steps"),
    "Thirty steps of the mutant: A decodes; B computes a few chunks, gives way, and begins again, several times.",
)

# %% [markdown]
# B comes in, computes some chunks, finds memory full, gives way, and starts from nothing in the next step. It ends at
# all only because A is first in rank and gets done. Nothing is wrong with any answer: what a test can see is the number
# of tokens that were computed again.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What can never fit, and what is late
#
# A request that needs more memory than there is, even alone, ends with an error that says so, and the engine lives. One
# whose deadline passes ends as it is.

# %%
tight = LLM(model, block_size=16, kv_tokens=64, prefix_cache=False)
params = SamplingParams(max_tokens=60, ignore_eos=True)
for done in tight.generate([long_prompt[:30], prompts[0]], [params, SamplingParams(max_tokens=4, ignore_eos=True)]):
    print(f"{done.finish_reason.value:7} {len(done.token_ids):2} tokens  {done.error or ''}")
llm = simulated(0.04, 0.002)
late = llm.generate([[7] * 20], SamplingParams(max_tokens=500), timeout_s=2.0)[0]
print(f"{late.finish_reason.value:7} {len(late.token_ids):2} tokens  at {llm.engine.clock():.2f} s")

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Takeaways
#
# - A step has a fixed cost, the weights, and a cost per token. Full batches share the first.
# - Continuous batching fills a place in the next step. Phases follow from what remains to be computed.
# - The longest step is the longest gap. A token budget bounds it; too small a budget pays the fixed cost too often.
# - Preemption keeps admission simple. Every request ends because the first in a *fixed* order always advances.
# - The mean waiting time and the worst one are two different goals.
#
# ## Where real engines differ
#
# - vLLM's scheduler has no phases either: each request has a number of computed tokens that catches up with its tokens.
#   Its default budget is 2048 to 16384 by hardware; it preempts by recomputing.
# - Sarathi-Serve (Agrawal et al. 2024) introduced chunks beside decodes, *stall-free*. SGLang runs prefills first by
#   default and mixes only on request.
# - Large deployments take prefill away altogether: other workers compute prompts and send the KV (DistServe, Splitwise,
#   Mooncake). A later lecture weighs that against chunks.
# - Their steps overlap: the scheduler plans step n + 1 while the GPU runs step n. Ours plans between steps.
#
# ## Read next
#
# - Yu et al. 2022, "Orca" (OSDI); Agrawal et al. 2024, "Taming Throughput-Latency Tradeoff in LLM Inference with
#   Sarathi-Serve" (OSDI).
# - Sheng et al. 2024, "Fairness in Serving Large Language Models" (OSDI), for fairness between users.
# - `cs336_infer/engine/scheduler.py`, `engine.py`; the assignment `a3_serving`.
