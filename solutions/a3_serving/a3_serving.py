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
# # Assignment 3 · Serving
#
# Many people ask at the same time, and an engine computes one step after another. You write what decides between two
# steps: who computes how many tokens, what counts as an answer's next token, which text may be shown already, and when
# an answer that repeats itself is ended. No tensor appears. At the end your scheduler, your stop filter and your loop
# detector run inside the real engine, and in the open task your scheduler serves a crowd in a simulated clock.
#
# Public checks stand beside each exercise; hidden checks use other sizes, random histories, and cases that broke real
# engines. Invent small cases on paper: 4 tokens a block, 6 blocks and 3 requests show almost everything.

# %%
import copy

from cs336_infer.course.a3_serving import check_public

# %% [markdown]
# ## 1. One step of the scheduler
#
# A request has `total` tokens (its prompt and what it has answered so far), of which `stored` have their keys and
# values in KV memory, in `blocks` blocks of `block_size` tokens that it holds. What is missing, `total - stored`, it
# must compute before its next token can be chosen. A running answer misses exactly 1: its newest token. A prompt misses
# many, and may compute them in several steps (*chunked prefill*, Sarathi-Serve, Agrawal et al. 2024).
#
# Before each step your function is asked, with plain values and no memory of earlier steps. The rules, in order:
#
# **Who comes in.** Waiting requests come in by `rank`, the lowest first, as long as fewer than `max_batch` run and *all*
# that they miss fits into the blocks that are free at the beginning of the step. The first that does not fit ends it:
# nobody overtakes, or a long prompt would wait for ever. When nobody runs, the first comes in even so.
#
# **Who computes.** A step computes at most `step_tokens` tokens. First come those who miss exactly one token, then all
# others, each group by rank: answers must not stall behind somebody's prompt. Each takes what it misses, or what is
# left of the budget.
#
# **Who gives way.** A request takes a free block only when a token needs one. Are there too few, the *last in rank* of
# those who run gives way: it gives back its blocks, those of this step too, its tokens of this step go back to the
# budget, and it will wait again with nothing stored. That may be the very request that asks. This is repeated until
# the request fits or is gone; how many tokens it takes was settled before. The first in rank is never the victim while
# others run, so it always gets on, and every request ends.
#
# **Who can never be served.** Who runs alone and still does not fit has failed. It leaves, the engine lives.
#
# 4 tokens a block, 3 blocks free, budget 6: `a` (rank 0) is an answer with 8 of 9 tokens stored in 2 blocks, `b` (rank
# 1) a prompt of 7 tokens that waits. b needs 2 blocks, 3 are free: it comes in. a computes 1 token in a new block, b
# the first 5 of its 7 in 2 new blocks.


# %% nbgrader={"schema_version": 3, "grade_id": "schedule_step", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 4, "importance": 5, "minutes": 75, "gpu": false, "forbidden": ["cs336_infer.engine"]}
def blocks_missing(request: dict, tokens: int, block_size: int) -> int:
    """How many more blocks the request needs to have `tokens` tokens stored."""
    # BEGIN SOLUTION
    return -(-tokens // block_size) - request["blocks"]
    # END SOLUTION


def schedule_step(
    waiting: list[dict], running: list[dict], free: int, block_size: int, step_tokens: int, max_batch: int
) -> dict:
    """Plan one step.

    Args:
        waiting, running: requests, in any order: {"id", "rank", "total", "stored", "blocks"}. All ranks differ. One
            that waits may hold blocks too: what a prefix cache has found for it.
        free: blocks that nobody holds.

    Returns:
        {"admit": ids of those who came in, "compute": [[id, tokens], ...] of those who compute at least one token,
        "preempt": ids of those who gave way, "fail": ids of those who can never be served}, each in any order.
    """
    # Step: who comes in
    # BEGIN SOLUTION
    batch = {r["id"]: dict(r) for r in running}
    admitted = []
    for request in sorted(waiting, key=lambda r: r["rank"]):
        too_large = blocks_missing(request, request["total"], block_size) > free
        if len(batch) >= max_batch or (batch and too_large):
            break
        batch[request["id"]] = dict(request)
        admitted.append(request["id"])
    # Step: who computes; answers first
    compute, preempted, failed = {}, [], []
    for request in sorted(batch.values(), key=lambda r: (r["total"] - r["stored"] > 1, r["rank"])):
        new = min(request["total"] - request["stored"], step_tokens - sum(compute.values()))
        # Step: until it fits: the last in rank gives way
        while new > 0 and request["id"] in batch:
            need = blocks_missing(request, request["stored"] + new, block_size)
            if need <= free:
                free -= need
                request["blocks"] += need
                compute[request["id"]] = new
                break
            victim = max(batch.values(), key=lambda r: r["rank"])
            (preempted if len(batch) > 1 else failed).append(victim["id"])
            del batch[victim["id"]]
            compute.pop(victim["id"], None)
            free += victim["blocks"]
    return {"admit": admitted, "compute": [[*pair] for pair in compute.items()], "preempt": preempted, "fail": failed}
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "schedule_step_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 4}
check_public(schedule_step)

# %% [markdown]
# ## 2. What a step means for a request
#
# The scheduler said how many tokens. Now the step has run, and for *every* row of the batch a token was sampled from the
# logits of the row's last token. Whose token is kept?
#
# Only that of a request with nothing left to compute: `stored == total`. The token sampled in the middle of a prompt
# continues half a question. Three cases where engines have gone wrong:
#
# - A prompt of 9 tokens with a budget of 4 a step is computed as [0, 4), [4, 8), [8, 9). The last chunk has one token,
#   like the step of an answer. It is part of the prompt all the same.
# - A request that gives way loses all that is stored and keeps its answer. When it comes back, it computes prompt *and*
#   answer again, in chunks, and only then chooses its next token.
# - A step in which nothing was left of the budget changes nothing.
#
# `phase` is "decode" when exactly the newest token of the answer is missing, and "prefill" otherwise. Derive it from
# tokens and `stored`: a flag beside them is one more thing that can be wrong.


# %% nbgrader={"schema_version": 3, "grade_id": "run_request", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 2, "importance": 5, "minutes": 30, "gpu": false, "forbidden": ["cs336_infer.engine"]}
class Progress:
    """A request on its way; `stored` tokens of prompt + answer are in KV memory. You may keep other attributes too."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.answer: list[int] = []
        self.stored = 0

    def state(self) -> dict:
        """What the checks look at."""
        return {"answer": self.answer, "stored": self.stored, "phase": self.phase()}

    def phase(self) -> str:
        """ "prefill" or "decode": what its next step will be."""
        # BEGIN SOLUTION
        missing = len(self.prompt) + len(self.answer) - self.stored
        return "decode" if self.answer and missing == 1 else "prefill"
        # END SOLUTION

    def step(self, budget: int, sampled: int) -> list:
        """A step in which it may compute at most `budget` tokens; `sampled` was chosen from the last one's logits.

        Returns:
            [tokens that were computed, the token that was kept or None].
        """
        # Step: the next tokens of prompt + answer; is anything left to compute?
        # BEGIN SOLUTION
        tokens = self.prompt + self.answer
        chunk = tokens[self.stored : self.stored + budget]
        self.stored += len(chunk)
        if not chunk or self.stored < len(tokens):
            return [chunk, None]
        self.answer.append(sampled)
        return [chunk, sampled]
        # END SOLUTION

    def preempt(self) -> None:
        """It gives way: its KV memory is gone."""
        # BEGIN SOLUTION
        self.stored = 0
        # END SOLUTION


def run_request(prompt: list[int], operations: list[list]) -> list:
    """What the checks ask for: [["step", 4, 17], ["preempt"], ["state"], ...] -> what each of them returned."""
    # Step: make a Progress, and call its methods one after the other (copy what `state` returns)
    # BEGIN SOLUTION
    request = Progress(prompt)
    return [copy.deepcopy(getattr(request, name)(*arguments)) for name, *arguments in operations]
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "run_request_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 3}
check_public(run_request)

# %% [markdown]
# ## 3. Text that may be shown
#
# A caller gives *stop strings*. The answer ends where one is complete, and neither the stop nor anything behind it is
# shown. Text arrives in pieces, one for each token, and a stop may lie across any number of them. Once it is shown, text
# cannot be taken back. So the end of the text is *held back* as long as it may become a stop:
#
# | stop `DEFGHIJ`, piece | shown | held |
# |---|---|---|
# | `ABC` | `ABC` | |
# | `DEF` | | `DEF` |
# | `GX` | `DEFGX` | |
#
# - **Nothing too much, nothing too little.** After each piece exactly the longest end of the text is held that is the
#   beginning of a stop. Who holds a fixed number of characters makes every answer stutter.
# - **The stop that ends first wins**, and of several that end at the same character the longest. That can be decided
#   the moment it is complete, and does not depend on how the text was cut. A stop with another one inside that ends
#   before it does (`abcd` with `bc`) can therefore never win: nothing is held for it.
# - **After the match** nothing is shown any more. When the answer ends without one, `flush` gives what is held.
# - All that is shown, joined, is what somebody would get who has the whole text and cuts it at its stop.


# %% nbgrader={"schema_version": 3, "grade_id": "run_stops", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 3, "importance": 5, "minutes": 45, "gpu": false, "forbidden": ["StopStrings", "find_stop", "cs336_infer.text"]}
class StopFilter:
    """Text in, text that may be shown out. `matched` is the stop that was found, None as long as there is none."""

    def __init__(self, stops: list[str]) -> None:
        self.stops = stops
        self.held = ""
        self.matched: str | None = None
        # Step: which stops can win?
        # BEGIN SOLUTION
        self.stops = [s for s in stops if not any(other in s[:-1] for other in stops)]
        # END SOLUTION

    def push(self, text: str) -> str:
        """More text of the answer. What may be shown now, "" after a match."""
        # Step: is a stop complete? Which one wins?
        # BEGIN SOLUTION
        if self.matched is not None:
            return ""
        text = self.held + text
        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if found:
            end, _, self.matched = min(found)
            self.held = ""
            return text[: end - len(self.matched)]
        # Step: the longest end that is the beginning of a stop
        longest = max(map(len, self.stops), default=1) - 1
        ends = (text[-n:] for n in range(min(longest, len(text)), 0, -1))
        self.held = next((end for end in ends if any(stop.startswith(end) for stop in self.stops)), "")
        return text[: len(text) - len(self.held)]
        # END SOLUTION

    def flush(self) -> str:
        """The answer has ended for another reason: what is held may be shown, once."""
        # BEGIN SOLUTION
        rest, self.held = self.held, ""
        return rest
        # END SOLUTION


def run_stops(stops: list[str], pieces: list[str]) -> dict:
    """What the checks ask for: a new filter, all pieces, then the end of the answer.

    Returns:
        {"shown": [what was shown for each piece], "rest": what `flush` gave, "matched": the stop or None}
    """
    # BEGIN SOLUTION
    stop_filter = StopFilter(stops)
    shown = [stop_filter.push(piece) for piece in pieces]
    return {"shown": shown, "rest": stop_filter.flush(), "matched": stop_filter.matched}
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "run_stops_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 4}
check_public(run_stops)

# %% [markdown]
# ## 4. Answers that go round in circles
#
# A model may fall into a loop and repeat the same tokens until `max_tokens`: a *doom loop*. It costs as much as a good
# answer, and nobody reads it. Notice it while it happens.
#
# The end of the answer has *period* $p$ over its last $n$ tokens when each of them equals the one $p$ places before,
# the first $p$ of the $n$ excepted. It is a loop when
#
# $$p \le \text{max\_period}, \qquad n \ge \text{min\_tokens}, \qquad n \ge \text{min\_copies} \cdot p.$$
#
# The unit that is repeated is the *smallest* such $p$: twelve equal dashes are also a group of four, three times, but
# what repeats is the dash. Only when it is found, `min_period` is applied: with `min_period = 4` twelve dashes are no
# loop (a rule in a table), with any period.
#
# Your function is called with a few new tokens at a time, and with a *state* that it returned the time before: many
# answers are watched at once, and each has its own. The state may hold at most `min_copies * max_period + min_tokens`
# numbers, however long the answer is: work per token that grows with the answer slows down the engine for everybody,
# and so does a caller who asks for a `max_period` of a million. (For that reason engines cap it.) Strings do not count
# as numbers and are not allowed.


# %% nbgrader={"schema_version": 3, "grade_id": "watch_loops", "grade": false, "solution": true, "locked": false, "task": false} exercise={"difficulty": 3, "importance": 4, "minutes": 40, "gpu": false, "forbidden": ["LoopDetector", "cs336_infer.text"]}
def watch_loops(
    state, tokens: list[int], max_period: int, min_period: int, min_copies: int, min_tokens: int
) -> tuple[object, list[int]]:
    """Look at `tokens`, which follow those that were given before.

    Args:
        state: what the call before returned for this answer; None at its beginning.

    Returns:
        (the new state: numbers, None, and lists of them, and for each of `tokens` the period of the loop that the answer
        is in after it, 0 where it is in none)
    """
    # Step: what has to be known of the past? For each period, how many tokens in a row equal the one p places before?
    # BEGIN SOLUTION
    recent, runs = state or ([], [0] * max_period)
    found = []
    for newest in tokens:
        for p in range(1, max_period + 1):
            same = p <= len(recent) and recent[-p] == newest
            runs[p - 1] = runs[p - 1] + 1 if same else 0
        recent = [*recent, newest][-max_period:]
        # Step: the smallest period that is long enough
        covered = ((p, run + p) for p, run in enumerate(runs, 1) if run)
        period = next((p for p, n in covered if n >= max(min_tokens, min_copies * p)), 0)
        found.append(period if period >= min_period else 0)
    return (recent, runs), found
    # END SOLUTION


# %% nbgrader={"schema_version": 3, "grade_id": "watch_loops_check", "grade": true, "solution": false, "locked": true, "task": false, "points": 3}
check_public(watch_loops)

# %% [markdown] nbgrader={"schema_version": 3, "grade_id": "chunks_and_goodput", "grade": true, "solution": true, "locked": false, "task": false, "points": 3}
# **5. In your own words.** A step takes 10 ms, and 0.03 ms more for each prompt token. 20 answers run, and each of them
# was promised 20 tokens a second. A prompt of 16,000 tokens comes. What do the others and the newcomer see when it is
# computed in one step, in chunks of 2,048, and in chunks of 512? Which chunk would you choose? Then: a service has a
# load 20 % above what it can do. Why is first come, first served the worst rule for the share of requests that are
# served in time, and what is unfair or dishonest about a policy that raises that share? Six or seven sentences with
# numbers.
#
# # BEGIN SOLUTION
# In one step: 10 + 480 = 490 ms in which 20 people see nothing, ten times the 50 ms that each was promised between two
# tokens; the newcomer waits 0.49 s for its first token. Chunks of 2,048: 8 steps of about 71 ms, 20 ms more than was
# promised, TTFT 0.56 s. Chunks of 512: 32 steps of 25 ms, half of what may be taken, TTFT 0.8 s, of which 0.32 s are the
# fixed cost of the steps. The largest chunk that keeps the promise is (50 - 10) / 0.03 = 1,333 tokens: 12 steps, TTFT
# 0.6 s; the budget follows from the objective and not the other way round. Under overload a queue by arrival grows
# without end: after a while everybody waits longer than promised, and the engine works only on requests that have
# failed already. Who leaves out the hopeless, or takes the short ones first, serves most in time; the price is paid by
# long prompts, perhaps always the same customers, so the share of each class belongs beside the total, those who were
# turned away count as failures, and a mean or a median would hide them.
# # END SOLUTION

# %% [markdown]
# ## Your scheduler in the real engine
#
# `plug_serving` puts your scheduler, your stop filter and your loop detector into the engine; the model, KV memory and
# the loop are the package's. Six prompts compete for little memory: 14 blocks of 4 tokens, and at most 12 tokens a step.
# Somebody has to give way.

# %%
from cs336_infer import LLM, LoopRule, SamplingParams, generate, load_model
from cs336_infer.course.a3_sockets import plug_serving
from cs336_infer.course.pictures import show
from cs336_infer.course.schedule_drawings import timeline, watch

plug_serving(schedule_step=schedule_step, StopFilter=StopFilter, watch_loops=watch_loops)
model = load_model(dtype="float32")
prompts = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old man who",
    "2, 4, 8, 16,",
    "Water boils at",
    "The opposite of cold is",
    "A list of the planets, from the sun outwards: Mercury, Venus,",
]
params = SamplingParams(max_tokens=12)
llm = LLM(model, block_size=4, kv_tokens=56, step_tokens=12, max_batch=4, prefix_cache=False)
steps = watch(llm.engine)
mine = llm.generate(prompts, params)
for answer in mine:
    print(f"{len(answer.prompt_token_ids):3} tokens -> {answer.text!r}")
print("steps:", llm.stats()["device"]["steps"], " preemptions:", llm.stats()["device"]["preemptions"])

# %% [markdown]
# A schedule may change how long an answer takes, never the answer. The oracle has no schedule at all: one prompt after
# the other.

# %%
oracle = [generate(model, prompt, params)[0] for prompt in prompts]
print("same tokens as one by one:", [a.token_ids for a in mine] == [a.token_ids for a in oracle])

# %% [markdown]
# What your scheduler did. Each row is a request, each column a step, and each number says how many tokens it computed.

# %%
show(
    timeline(steps, {number: " ".join(prompt.split()[:3]) for number, prompt in enumerate(prompts)}),
    "A row for each of six requests, a column for each step. Prompts are computed in chunks beside the answers of the "
    "others; some requests give way, and later compute all their tokens again.",
)

# %% [markdown]
# The first answer has no gap: whatever comes, it gets its token in every step. The second prompt ends in a chunk of one
# token, which is no answer. Those who give way are the last in rank, and later compute prompt and answer again.
#
# Now stop strings and loops, in a stream. One stop begins within a token and ends in another; for a moment " heart"
# may become the other one.

# %%
params = SamplingParams(max_tokens=60, stop=("ling city", " heart of gold"))
stream = [event.text for event in llm.stream("Once upon a time, there was", params)]
whole = llm.generate("Once upon a time, there was", params)[0]
print(stream)
print(
    "joined, it is the text:", "".join(stream) == whole.text, "| reason:", whole.finish_reason, repr(whole.stop_reason)
)

# %%
rule = LoopRule(max_period=32, min_copies=3, min_tokens=24)
circles = llm.generate("Row, row, row your boat, row, row, row your boat,", SamplingParams(max_tokens=30, loops=rule))[
    0
]
print(f"{len(circles.token_ids)} tokens, reason {circles.finish_reason}: ...{circles.text[-40:]!r}")

# %% [markdown]
# ## Open task: goodput
#
# A server in a simulated clock. A step takes
#
# $$10\,\mathrm{ms} + 0.03\,\mathrm{ms} \cdot \text{prompt tokens} + 0.05\,\mathrm{ms} \cdot \text{answers} +
# 0.03\,\mu\mathrm{s} \cdot \text{tokens read from KV memory},$$
#
# which is roughly a model of 30 billion weights on a node of accelerators. At most 2,048 tokens and 64 requests run in
# one step, and KV memory holds 500,000 tokens. 400 requests come, with lengths and times of a chat service, more than
# the server can take. Each belongs to a class with a promise:
#
# | class | first token within | then a token every, on average |
# |---|---|---|
# | live | 2 s | 50 ms |
# | chat | 5 s | 100 ms |
# | report | 30 s | 200 ms |
#
# The number is *goodput*: the share of all requests that were finished within both (DistServe, Zhong et al. 2024). One
# that is dropped or never finished is a failure like one that is late. It does not depend on a clock of ours: the same
# policy has the same number on every machine.
#
# Below is a start: your `schedule_step`, first come, first served. What would you change? Some questions: which requests
# cannot be in time any more, and what do they cost the others? How long may a step take without making anybody late?
# Of ten prompts of which only some can be in time, which ones serve most people? And look at the three classes
# separately: would you sell this?
#
# When graded, your policy never touches the server: it stays here, and is asked before each step by a message, on
# traffic that it has not seen. A step that cannot be run (unknown requests, more tokens than are missing, fit into the
# step or into memory) ends the run.


# %%
class MyScheduler:
    """The one to beat."""

    def __init__(self, server: dict) -> None:
        """`server`: {"kv_tokens", "step_tokens", "max_batch", "fixed_s", "prefill_s", "decode_s", "kv_s"}."""
        self.server = server

    def rank(self, now: float, request: dict) -> tuple:
        """Who goes first; the lowest."""
        return (request["arrived"], request["id"])

    def step(self, now: float, requests: list[dict]) -> tuple[list, list, list]:
        """Before each step. A request is {"id", "class", "arrived", "prompt", "ttft", "tpot"} (times in seconds) and how
        far it is: {"stored", "produced", "first"}: tokens in memory, tokens of the answer, when the first appeared.

        Returns:
            ([[id, tokens], ...] who computes, [id, ...] who gives up its memory, [id, ...] who is turned away)
        """
        ordered = sorted(requests, key=lambda r: self.rank(now, r))
        rows = [
            {
                "id": r["id"],
                "rank": n,
                "total": r["prompt"] + r["produced"],
                "stored": r["stored"],
                "blocks": r["stored"],
            }
            for n, r in enumerate(ordered)
        ]
        waiting, running = [r for r in rows if not r["stored"]], [r for r in rows if r["stored"]]
        free = self.server["kv_tokens"] - sum(r["stored"] for r in rows)
        made = schedule_step(waiting, running, free, 1, self.server["step_tokens"], self.server["max_batch"])
        return made["compute"], made["preempt"], made["fail"]


_mine = {}


def answer(server: dict | None, now: float, come: list[dict], gone: list[int]) -> tuple[list, list, list]:
    """Given: keeps the requests that are there and how far they are, and asks `MyScheduler`. A `server` begins a run."""
    if server is not None:
        _mine.update(policy=MyScheduler(server), requests={}, last=([], [], []))
    requests, (compute, preempt, drop) = _mine["requests"], _mine["last"]
    for number in preempt:
        requests[number]["stored"] = 0
    for number, tokens in compute:
        row = requests[number]
        row["stored"] += tokens
        if row["stored"] == row["prompt"] + row["produced"]:
            row["produced"] += 1
            row["first"] = now if row["first"] is None else row["first"]
    for number in [*drop, *gone]:
        del requests[number]
    for row in come:
        requests[row["id"]] = {**row, "stored": 0, "produced": 0, "first": None}
    _mine["last"] = _mine["policy"].step(now, [dict(row) for row in requests.values()])
    return _mine["last"]


# %%
from cs336_infer.course.a3_open_task import goodput

print(goodput(answer))
