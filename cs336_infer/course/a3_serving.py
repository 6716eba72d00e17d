"""Public checks of assignment 3.

Students read this file, so no answer is in it: what is expected was worked out on paper for a few blocks of 4 tokens,
or is a property that any solution has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cs336_infer.course.checks import Ask, check, expect_equal, fail, make_check

check_public = make_check(__name__)

# 1. One step of the scheduler -----------------------------------------------------------------------------------------

PARTS = ("admit", "compute", "preempt", "fail")


def row(name: str, rank: int, total: int, stored: int = 0, blocks: int | None = None, size: int = 4) -> dict[str, Any]:
    """A request as `schedule_step` is given it; it holds the blocks that its stored tokens need."""
    held = -(-stored // size) if blocks is None else blocks
    return {"id": name, "rank": rank, "total": total, "stored": stored, "blocks": held}


def planned(ask: Ask, *arguments: Any) -> dict[str, Any]:
    """What `schedule_step` returned: lists in order of id, `compute` as id -> tokens."""
    step = ask("schedule_step", *arguments)
    if not isinstance(step, dict) or set(step) != set(PARTS) or not all(isinstance(v, list) for v in step.values()):
        fail(f"schedule_step must return a dict of the lists {', '.join(PARTS)}, not {step!r:.80}")
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in step["compute"]):
        fail(f"compute must hold pairs [id, tokens], not {step['compute']!r:.80}")
    compute = {name: tokens for name, tokens in step["compute"]}
    if len(compute) < len(step["compute"]):
        fail("compute names a request twice")
    return {**{part: sorted(step[part]) for part in PARTS if part != "compute"}, "compute": compute}


@check("schedule_step", points=1, title="answers first, prompts from what is left")
def answers_first(ask: Ask, rng: np.random.Generator) -> None:
    waiting, running = [row("b", 1, 7)], [row("a", 0, 9, 8)]
    step = planned(ask, waiting, running, 3, 4, 6, 8)
    expect_equal(step["admit"], ["b"], what="who comes in: b misses 7 tokens, and 3 blocks of 4 are free")
    expect_equal(step["compute"], {"a": 1, "b": 5}, what="tokens of a step of 6: a is an answer, b a prompt of 7")
    step = planned(ask, [], [row("old", 0, 30, 4), row("new", 9, 9, 8)], 9, 4, 6, 8)
    if "new" not in step["compute"]:
        fail("an answer got no token because a prompt of lower rank took the whole step: its reader sees it stall")
    expect_equal(
        step["compute"], {"old": 5, "new": 1}, what="tokens of a step of 6: 26 of a prompt are missing, 1 of an answer"
    )


@check("schedule_step", points=1, title="who comes in must fit as a whole, and nobody overtakes")
def comes_in(ask: Ask, rng: np.random.Generator) -> None:
    waiting, running = [row("small", 2, 3), row("large", 1, 20)], [row("a", 0, 9, 8)]
    step = planned(ask, waiting, running, 4, 4, 6, 8)
    if step["admit"] == ["small"]:
        fail("a small request comes in before a large one that came first: with enough small ones it waits for ever")
    if step["admit"]:
        fail("a prompt of 20 tokens comes in, which needs 5 blocks, and 4 are free: it will give way in the middle")
    step = planned(ask, waiting[1:], [], 4, 4, 6, 8)
    expect_equal(step["admit"], ["large"], what="who comes in when nobody runs, 4 blocks free")
    step = planned(ask, [row("c", 3, 2), row("b", 2, 2)], [row("a", 0, 9, 8)], 9, 4, 6, 2)
    expect_equal(step["admit"], ["b"], what="who comes in with max_batch 2, one running")


@check("schedule_step", points=1, title="the last in rank gives way")
def gives_way(ask: Ask, rng: np.random.Generator) -> None:
    running = [row("a", 0, 9, 8), row("b", 1, 5, 4), row("c", 2, 12, 6)]
    step = planned(ask, [], running, 0, 4, 16, 8)
    if "a" in step["preempt"]:
        fail("a, the first in rank, gives way: two requests can take each other's blocks for ever")
    if step["preempt"] == ["c"] and "c" in step["compute"]:
        fail("c gave its blocks back and computes in the same step: into whose memory?")
    expect_equal(step["preempt"], ["c"], what="who gives way when a and b need a block each, and c holds 2")
    expect_equal(step["compute"], {"a": 1, "b": 1}, what="tokens of the step")


@check("schedule_step", points=1, title="alone and too large")
def too_large(ask: Ask, rng: np.random.Generator) -> None:
    step = planned(ask, [], [row("a", 0, 13, 12)], 0, 4, 16, 8)
    if step["preempt"]:
        fail("a request that runs alone gives way to nobody: it comes back, and does so again, for ever")
    expect_equal(
        step, {"admit": [], "preempt": [], "fail": ["a"], "compute": {}}, what="a step of one that cannot go on"
    )


# 2. What a step means for a request -----------------------------------------------------------------------------------


def lived(ask: Ask, prompt: list[int], operations: list[list[Any]]) -> list[Any]:
    """What `run_request` returned, one result for each operation."""
    got = ask("run_request", prompt, operations)
    if not isinstance(got, list) or len(got) != len(operations):
        fail(f"run_request: {len(operations)} operations, and not a list of as many results")
    return got


@check("run_request", points=1, title="a prompt in chunks, the last of them one token")
def last_chunk(ask: Ask, rng: np.random.Generator) -> None:
    operations = [["step", 4, 90], ["step", 4, 91], ["state"], ["step", 4, 92], ["state"], ["step", 4, 93]]
    first, second, before, third, after, fourth = lived(ask, [1, 2, 3, 4, 5, 6, 7, 8, 9], operations)
    if first[1] is not None or second[1] is not None:
        fail(f"token {first[1] or second[1]} was sampled before the prompt was complete, and is kept")
    expect_equal(first[0], [1, 2, 3, 4], what="the first chunk of 9 tokens")
    if before["phase"] == "decode":
        fail("one token of the prompt is missing, and that is called decode: its length does not tell")
    expect_equal(third, [[9], 92], what="the last chunk, and the token it chooses")
    expect_equal(after, {"answer": [92], "stored": 9, "phase": "decode"}, what="the state after the prompt")
    expect_equal(fourth, [[92], 93], what="the step after it computes the newest token")


@check("run_request", points=1, title="who gave way computes its answer again too")
def came_back(ask: Ask, rng: np.random.Generator) -> None:
    operations = [["step", 9, 7], ["step", 9, 8], ["preempt"], ["state"], ["step", 3, 90], ["state"], ["step", 9, 9]]
    got = lived(ask, [1, 2, 3], operations)
    if got[3]["phase"] == "decode":
        fail("it gave way, nothing of it is stored, and its next step is called decode")
    expect_equal(got[3], {"answer": [7, 8], "stored": 0, "phase": "prefill"}, what="the state after it gave way")
    if got[4][1] is not None:
        fail("after 3 of 5 tokens a token is kept: the prompt is complete, but the answer is not computed again")
    expect_equal(got[6], [[7, 8], 9], what="the last chunk, and the token it chooses")


@check("run_request", points=1, title="a step without budget")
def no_budget(ask: Ask, rng: np.random.Generator) -> None:
    got = lived(ask, [1, 2], [["step", 0, 5], ["step", 2, 6], ["step", 0, 7], ["state"]])
    expect_equal(got[0], [[], None], what="a step with budget 0")
    if got[2][1] is not None:
        fail("nothing was computed, and a token is kept")
    expect_equal(got[3], {"answer": [6], "stored": 2, "phase": "decode"}, what="the state after three steps")


# 3. Text that may be shown --------------------------------------------------------------------------------------------


def filtered(ask: Ask, stops: list[str], pieces: list[str]) -> dict[str, Any]:
    """What `run_stops` returned."""
    got = ask("run_stops", stops, pieces)
    if not isinstance(got, dict) or set(got) != {"shown", "rest", "matched"}:
        fail("run_stops must return a dict of shown, rest, matched")
    if not isinstance(got["shown"], list) or len(got["shown"]) != len(pieces):
        fail(f"run_stops: {len(pieces)} pieces, so `shown` must have as many texts")
    return got


@check("run_stops", points=1, title="nothing of a stop is shown")
def nothing_of_it(ask: Ask, rng: np.random.Generator) -> None:
    got = filtered(ask, ["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "JK"])
    if "D" in "".join(got["shown"]):
        fail(f"the beginning of the stop is shown: {''.join(got['shown'])!r}")
    expect_equal(got, {"shown": ["ABC", "", "", "", ""], "rest": "", "matched": "DEFGHIJ"}, what="ABC DEF G HI JK")


@check("run_stops", points=1, title="what is no stop is shown as soon as that is known")
def as_soon(ask: Ask, rng: np.random.Generator) -> None:
    got = filtered(ask, ["DEFGHIJ"], ["ABC", "DEF", "GX", "Y"])
    if "".join(got["shown"]) + got["rest"] != "ABCDEFGXY":
        fail(f"no stop is in the text ABCDEFGXY, and {''.join(got['shown']) + got['rest']!r} is what came out of it")
    if got["shown"][0] != "ABC":
        fail("ABC cannot be part of the stop, and some of it is held back")
    expect_equal(got["shown"], ["ABC", "", "DEFGX", "Y"], what="shown for each of ABC DEF GX Y")
    expect_equal(filtered(ask, ["aab"], ["aa", "ab", "c"])["shown"], ["", "a", ""], what="aa ab c with the stop aab")


@check("run_stops", points=1, title="the end of an answer")
def end_of_answer(ask: Ask, rng: np.random.Generator) -> None:
    got = filtered(ask, ["</s>"], ["x <", "/s"])
    if got["rest"] == "":
        fail("the answer ended within what might have become a stop, and its last characters are lost")
    expect_equal(got, {"shown": ["x ", ""], "rest": "</s", "matched": None}, what="an answer that ends in </s")


@check("run_stops", points=1, title="the stop that ends first")
def ends_first(ask: Ask, rng: np.random.Generator) -> None:
    got = filtered(ask, ["cdef", "d"], ["abcdef"])
    expect_equal(got, {"shown": ["abc"], "rest": "", "matched": "d"}, what="abcdef with the stops cdef and d")
    got = filtered(ask, ["d", "bcd"], ["abcde"])
    expect_equal(got, {"shown": ["a"], "rest": "", "matched": "bcd"}, what="abcde with the stops d and bcd")


# 4. Answers that go round in circles ----------------------------------------------------------------------------------

NUMBERS = (int, float)


def weight(state: Any) -> int:
    """How many numbers a state holds."""
    if state is None or type(state) in NUMBERS:
        return int(state is not None)
    if isinstance(state, list | tuple):
        return sum(map(weight, state))
    fail(f"the state holds a {type(state).__name__}; numbers, None and lists of them are allowed")


def watched(ask: Ask, state: Any, tokens: list[int], rule: tuple[int, int, int, int]) -> tuple[Any, list[int]]:
    """The new state and the periods that `watch_loops` returned; the state is weighed."""
    max_period, _, min_copies, min_tokens = rule
    got = ask("watch_loops", state, tokens, *rule)
    if not isinstance(got, list | tuple) or len(got) != 2 or not isinstance(got[1], list | tuple):
        fail("watch_loops must return (state, periods)")
    limit = min_copies * max_period + min_tokens
    if (numbers := weight(got[0])) > limit:
        fail(f"the state holds {numbers} numbers, {limit} are allowed: the work per token grows with the answer")
    if len(got[1]) != len(tokens):
        fail(f"watch_loops: {len(got[1])} periods for {len(tokens)} tokens")
    return got[0], list(got[1])


@check("watch_loops", points=1, title="a loop of three tokens")
def loop_of_three(ask: Ask, rng: np.random.Generator) -> None:
    rule = (4, 1, 3, 6)
    _, found = watched(ask, None, [9, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 7], rule)
    if 3 in found[:10]:
        fail("two copies and a bit of 1 2 3, and the rule asks for three")
    expect_equal(found, [0] * 10 + [3, 3, 0], what="periods after 9 8 1 2 3 1 2 3 1 2 3 1 7")


@check("watch_loops", points=1, title="what repeats is the dash")
def dashes(ask: Ask, rng: np.random.Generator) -> None:
    _, found = watched(ask, None, [5] * 12, (4, 1, 3, 4))
    expect_equal(found, [0] * 3 + [1] * 9, what="periods of twelve equal tokens, at least 4 of them in 3 copies")
    _, found = watched(ask, None, [5] * 12, (4, 4, 3, 4))
    if 4 in found:
        fail("twelve equal tokens are said to repeat a group of four, and groups of less than four do not count")
    expect_equal(found, [0] * 12, what="periods of twelve equal tokens when less than 4 does not count")


@check("watch_loops", points=1, title="two answers at once, and long ones")
def two_at_once(ask: Ask, rng: np.random.Generator) -> None:
    rule, states, found = (3, 1, 2, 4), [None, None], [[], []]
    for tokens in ([1, 2], [1, 2, 1]):
        for which, shift in enumerate((0, 10)):
            states[which], new = watched(ask, states[which], [t + shift for t in tokens], rule)
            found[which] += new
    expect_equal(found, [[0, 0, 0, 2, 2]] * 2, what="periods of 1 2 1 2 1 and of 11 12 11 12 11, taken in turns")
    state = None
    for _ in range(5):
        state, _ = watched(ask, state, [int(t) for t in rng.integers(0, 50, 40)], rule)
