"""Hidden checks of assignment 3: random situations against slow definitions, and some that broke engines.

The open task is in `cs336_infer.course.a3_open_task`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cs336_infer.course.a3_serving import filtered, lived, planned, row, watched, weight
from cs336_infer.course.checks import Ask, check, expect_equal, fail

# Exercise 1: One step of the scheduler ------------------------------------------------------------


class Books:
    """Who holds how many blocks, as a table that is changed one block at a time."""

    def __init__(self, free: int, size: int) -> None:
        self.free, self.size = free, size
        self.held: dict[str, int] = {}

    def grow(self, name: str, tokens: int) -> bool:
        """Whether `tokens` tokens have room; nothing is taken where they have not."""
        taken = 0
        while self.held[name] * self.size < tokens:
            if self.free == 0:
                self.held[name] -= taken
                self.free += taken
                return False
            self.held[name] += 1
            self.free -= 1
            taken += 1
        return True

    def leave(self, name: str) -> None:
        self.free += self.held.pop(name)


def step_by_rule(waiting: Any, running: Any, free: int, size: int, tokens: int, limit: int) -> dict[str, Any]:
    """The rules of the exercise, one after the other."""
    asking = {r["id"]: r for r in (*waiting, *running)}
    books, admitted = Books(free, size), []
    books.held = {r["id"]: r["blocks"] for r in running}
    queue = sorted(waiting, key=lambda r: r["rank"])
    while queue and len(books.held) < limit:
        first = queue.pop(0)
        room = (free + first["blocks"]) * size >= first["total"]
        if books.held and not room:
            break
        books.held[first["id"]] = first["blocks"]
        admitted.append(first["id"])
    missing = {name: asking[name]["total"] - asking[name]["stored"] for name in books.held}
    order = sorted(books.held, key=lambda name: asking[name]["rank"])
    given: dict[str, int] = {}
    gone: list[str] = []
    failed: list[str] = []
    for name in [n for n in order if missing[n] == 1] + [n for n in order if missing[n] != 1]:
        share = min(missing[name], tokens - sum(given.values()))
        while share and name in books.held and not books.grow(name, asking[name]["stored"] + share):
            last = [n for n in order if n in books.held][-1]
            (gone if len(books.held) > 1 else failed).append(last)
            books.leave(last)
            given.pop(last, None)
        if share and name in books.held:
            given[name] = share
    return {"admit": sorted(admitted), "compute": given, "preempt": sorted(gone), "fail": sorted(failed)}


def expect_step(ask: Ask, what: str, *situation: Any) -> None:
    """The step must be the one of the rules."""
    step, want = planned(ask, *situation), step_by_rule(*situation)
    for name in step["compute"]:
        if name in step["preempt"] or name in step["fail"]:
            fail(f"{what}: {name} computes in the step in which it leaves")
    for part in ("admit", "preempt", "fail", "compute"):
        expect_equal(step[part], want[part], what=f"{what}: {part}")


def situation(rng: np.random.Generator) -> tuple[Any, ...]:
    """Some who run and some who wait, with little memory."""
    size, people = int(rng.integers(1, 6)), int(rng.integers(1, 8))
    ranks = [int(r) for r in rng.permutation(20)[:people]]
    waiting, running = [], []
    for rank in ranks:
        total = int(rng.integers(1, 6 * size + 1))
        stored = total - 1 if rng.random() < 0.4 else int(rng.integers(0, total))
        if rng.random() < 0.6:
            running.append(row(f"r{rank}", rank, total, stored, size=size))
        else:
            full = int(rng.integers(0, stored // size + 1)) if rng.random() < 0.3 else 0
            waiting.append(row(f"r{rank}", rank, total, full * size, size=size))
    limit = max(1, len(running) + int(rng.integers(0, 3)))
    return waiting, running, int(rng.integers(0, 8)), size, int(rng.integers(1, 4 * size + 2)), limit


@check("schedule_step", points=3, title="random steps: who comes in, computes, gives way")
def random_steps(ask: Ask, rng: np.random.Generator) -> None:
    for number in range(150):
        expect_step(ask, f"random step {number + 1}", *situation(rng))


@check("schedule_step", points=2, title="step after step, everybody ends")
def everybody_ends(ask: Ask, rng: np.random.Generator) -> None:
    for _ in range(3):
        size, total = int(rng.integers(1, 5)), int(rng.integers(7, 12))
        prompts = [int(n) for n in rng.integers(1, size * 4, 9)]
        room = [size * total - p for p in prompts]
        answers = [int(rng.integers(1, min(3 * size, r) + 1)) for r in room]
        there = {n: row(f"s{n}", n, prompts[n], size=size) for n in range(9)}
        runs: set[int] = set()
        for count in range(400):
            known = {n: r for n, r in there.items() if n <= 2 * count}
            waiting, running = ([r for n, r in known.items() if (n in runs) == yes] for yes in (False, True))
            free = total - sum(r["blocks"] for r in running)
            step = planned(ask, waiting, running, free, size, 2 * size, 4)
            runs |= {int(name[1:]) for name in step["admit"]}
            if step["fail"]:
                fail(f"step {count + 1}: {step['fail'][0]} is given up, and alone it would fit")
            for name in step["preempt"]:
                there[int(name[1:])].update(stored=0, blocks=0)
                runs.discard(int(name[1:]))
            for name, new in step["compute"].items():
                one = there[int(name[1:])]
                one["stored"] += new
                one["blocks"] = max(one["blocks"], -(-one["stored"] // size))
                if int(name[1:]) not in runs or new < 1 or one["stored"] > one["total"]:
                    fail(f"step {count + 1}: {name} computes {new} tokens, which it cannot")
                if one["stored"] == one["total"]:
                    one["total"] += 1
                    if one["total"] > prompts[int(name[1:])] + answers[int(name[1:])]:
                        del there[int(name[1:])]
                        runs.discard(int(name[1:]))
            held = sum(there[n]["blocks"] for n in runs)
            if held > total:
                fail(f"step {count + 1}: {held} blocks are in use, there are {total}")
            if not there:
                break
        if there:
            fail(f"after 400 steps {len(there)} of 9 requests have not ended: somebody waits for ever")


@check("schedule_step", points=1, title="a block is taken when a token needs it, not before")
def needs_it(ask: Ask, rng: np.random.Generator) -> None:
    size = int(rng.integers(2, 7))
    inside = row("a", 0, 2 * size, 2 * size - 1, size=size)
    expect_step(ask, "the last slot of a block is free", [], [inside], 0, size, 8, 4)
    expect_step(ask, "a prompt that fills its blocks", [row("b", 1, 3 * size, size=size)], [inside], 3, size, 99, 4)


@check("schedule_step", points=2, title="who comes in fits as a whole, not its first chunk")
def whole_fits(ask: Ask, rng: np.random.Generator) -> None:
    size = int(rng.integers(2, 6))
    for free in (1, 4, 5):
        large = row("b", 3, 5 * size, size=size)
        expect_step(
            ask, f"5 blocks are needed, {free} free", [large], [row("a", 1, 2, 1, size=size)], free, size, size, 4
        )
    expect_step(ask, "nobody runs", [row("b", 3, 5 * size, size=size)], [], 2, size, size, 4)


@check("schedule_step", points=1, title="what a cache has found counts, for room and for tokens")
def found_counts(ask: Ask, rng: np.random.Generator) -> None:
    size = int(rng.integers(2, 6))
    found = row("b", 3, 4 * size, 3 * size, size=size)
    expect_step(ask, "3 of 4 blocks are found", [found], [row("a", 1, 2, 1, size=size)], 1, size, 99, 4)


@check("schedule_step", points=2, title="who gives way leaves its blocks and its tokens to the others")
def leaves_tokens(ask: Ask, rng: np.random.Generator) -> None:
    size = int(rng.integers(3, 6))
    # answers p and q took a block each; the prompt a needs three, and after it b takes what is left of the budget
    running = [row("a", 0, 5 * size, size, size=size), row("b", 1, 9 * size, size + 1, size=size)]
    running += [row("p", 2, 2 * size + 1, 2 * size, size=size), row("q", 3, 3 * size + 1, 3 * size, size=size)]
    order = [running[int(i)] for i in rng.permutation(4)]
    expect_step(ask, "answers give way to a prompt of lower rank", [], order, 2, size, 4 * size + 3, 8)


@check("schedule_step", points=2, title="the last in rank gives way, even if it asks itself")
def last_gives_way(ask: Ask, rng: np.random.Generator) -> None:
    size = int(rng.integers(2, 6))
    names = [str(n) for n in rng.permutation(["x", "y", "z"])]
    running = [row(name, 3 + 4 * i, size + 1, size, size=size) for i, name in enumerate(names)]
    order = [running[int(i)] for i in rng.permutation(3)]
    for free in (0, 1, 2):
        expect_step(ask, f"three answers need a block each, {free} free", [], order, free, size, 16, 8)


@check("schedule_step", points=1, title="one that is alone and does not fit has failed")
def alone(ask: Ask, rng: np.random.Generator) -> None:
    size = int(rng.integers(2, 6))
    late = row("b", 1, 2, size=size)
    expect_step(ask, "an answer alone", [], [row("a", 0, 3 * size + 1, 3 * size, size=size)], 0, size, 16, 8)
    expect_step(ask, "a prompt alone", [row("a", 0, 9 * size, size=size)], [], 3, size, 99 * size, 8)
    expect_step(ask, "somebody waits behind it", [row("a", 0, 9 * size, size=size), late], [], 3, size, 99 * size, 8)


@check("schedule_step", points=1, title="answers come first, however late they came")
def answers_by_rank(ask: Ask, rng: np.random.Generator) -> None:
    size, budget = 4, int(rng.integers(3, 6))
    prompts = [row(f"p{i}", i, 40, 4) for i in range(2)]
    answers = [row(f"a{i}", 10 + i, 9 + i, 8 + i) for i in range(4)]
    mixed = [*prompts, *answers]
    expect_step(ask, f"budget {budget}", [], [mixed[int(i)] for i in rng.permutation(6)], 20, size, budget, 8)


@check("schedule_step", points=2, title="nobody overtakes, and max_batch counts those who run")
def no_overtaking(ask: Ask, rng: np.random.Generator) -> None:
    running = [row("a", 0, 9, 8), row("b", 1, 6, 5)]
    queue = [row("l", 2, 30), row("s", 3, 2), row("t", 4, 2)]
    mixed = [queue[int(i)] for i in rng.permutation(3)]
    expect_step(ask, "the first of the queue does not fit", mixed, running, 5, 4, 16, 8)
    for limit in (2, 3, 4):
        expect_step(ask, f"max_batch {limit}, two run", mixed, running, 20, 4, 16, limit)


# Exercise 2: What a step means for a request ------------------------------------------------------


def life_by_definition(prompt: list[int], operations: list[list[Any]]) -> list[Any]:
    """Keeps the tokens that are stored, not their number."""
    chosen: list[int] = []
    memory: list[int] = []
    said: list[Any] = []
    for verb, *arguments in operations:
        everything = [*prompt, *chosen]
        rest = everything[len(memory) :]
        if verb == "preempt":
            memory = []
            said.append(None)
        elif verb == "state":
            newest = len(rest) == 1 and len(memory) >= len(prompt)
            phase = "decode" if newest else "prefill"
            said.append({"answer": list(chosen), "stored": len(memory), "phase": phase})
        else:
            budget, sampled = arguments
            computed = rest[: max(budget, 0)]
            memory = memory + computed
            complete = len(computed) > 0 and memory == everything
            said.append([computed, sampled if complete else None])
            chosen += [sampled] * complete
    return said


def expect_life(ask: Ask, prompt: list[int], operations: list[list[Any]]) -> None:
    full = [step for operation in operations for step in (operation, ["state"])]
    got, want = lived(ask, prompt, full), life_by_definition(prompt, full)
    for number, (mine, theirs) in enumerate(zip(want, got, strict=True)):
        operation = " ".join(map(str, operations[number // 2]))
        which = "after " if number % 2 else ""
        expect_equal(theirs, mine, what=f"prompt of {len(prompt)}, operation {number // 2 + 1}, {which}{operation}")


def steps_of(rng: np.random.Generator, count: int, most: int) -> list[list[Any]]:
    return [["step", int(rng.integers(1, most + 1)), int(rng.integers(100, 200))] for _ in range(count)]


@check("run_request", points=3, title="random lives: steps of any budget, giving way at any time")
def random_lives(ask: Ask, rng: np.random.Generator) -> None:
    for _ in range(8):
        prompt = [int(t) for t in rng.integers(0, 50, int(rng.integers(1, 14)))]
        operations: list[list[Any]] = []
        for operation in steps_of(rng, 25, 6):
            operations.append(["preempt"] if rng.random() < 0.12 else operation)
            if rng.random() < 0.1:
                operations.append(["step", 0, 7])
        expect_life(ask, prompt, operations)


@check("run_request", points=2, title="every length with every budget")
def every_length(ask: Ask, rng: np.random.Generator) -> None:
    for length in range(1, 12):
        for budget in range(1, 13):
            count = -(-length // budget) + 2
            expect_life(ask, list(range(length)), [["step", budget, 50 + i] for i in range(count)])


@check("run_request", points=2, title="a last chunk of one token belongs to the prompt")
def one_token(ask: Ask, rng: np.random.Generator) -> None:
    budget = int(rng.integers(2, 7))
    prompt = [int(t) for t in rng.integers(0, 50, 2 * budget + 1)]
    expect_life(ask, prompt, [["step", budget, 60 + i] for i in range(4)])
    expect_life(ask, prompt[:1], [["step", budget, 60], ["step", budget, 61]])


@check("run_request", points=1, title="what is sampled in the middle of a prompt is dropped")
def dropped(ask: Ask, rng: np.random.Generator) -> None:
    prompt = [int(t) for t in rng.integers(0, 50, 20)]
    expect_life(ask, prompt, steps_of(rng, 15, 5))


@check("run_request", points=2, title="after giving way the answer is computed again before the next token")
def comes_back(ask: Ask, rng: np.random.Generator) -> None:
    prompt = [int(t) for t in rng.integers(0, 50, 3)]
    grown = [["step", 9, 70 + i] for i in range(int(rng.integers(4, 9)))]
    for budget in (1, 3, 99):
        again = [["step", budget, 80 + i] for i in range(14)]
        expect_life(ask, prompt, [*grown, ["preempt"], *again])
        expect_life(ask, prompt, [["step", 2, 9], ["preempt"], *grown, ["preempt"], *again[:2], ["preempt"], *again])


# Exercise 3: Text that may be shown ---------------------------------------------------------------


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the text is cut, and by which stop: the first end, of those the longest."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return end - len(stop), stop
    return None


def must_hold(text: str, stops: list[str]) -> int:
    """How many characters at the end of `text`, which has no stop, may still become one that wins."""
    longest = max(map(len, stops))
    for count in range(min(longest - 1, len(text)), 0, -1):
        for stop in [s for s in stops if len(s) > count]:
            if stop.startswith(text[-count:]):
                cut = first_stop(text + stop[count:], stops)
                if cut and cut[1] == stop and len(text) - count == cut[0]:
                    return count
    return 0


def expect_stream(ask: Ask, stops: list[str], pieces: list[str]) -> None:
    got = filtered(ask, stops, pieces)
    said = f"stops {stops}, pieces {pieces}"
    cut = first_stop("".join(pieces), stops)
    want_text = "".join(pieces) if cut is None else "".join(pieces)[: cut[0]]
    shown = "".join(map(str, got["shown"])) + str(got["rest"])
    if shown != want_text:
        fail(f"{said}: shown {shown!r}, the text cut at its stop is {want_text!r}")
    expect_equal(got["matched"], cut and cut[1], what=f"{said}: matched")
    text, out = "", 0
    for number, piece in enumerate(pieces):
        text += piece
        out += len(got["shown"][number])
        found = first_stop(text, stops)
        most = found[0] if found else len(text) - must_hold(text, stops)
        if out != most:
            what = "shown, which may be part of a stop" if out > most else "held back, which can be no stop"
            fail(f"{said}: after piece {number + 1} {abs(out - most)} characters are {what}")
        if found:
            expect_equal(got["rest"], "", what=f"{said}: held after the match")


def cut_up(rng: np.random.Generator, text: str, most: int = 4) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = int(rng.integers(0, most + 1))
        pieces.append(text[at : at + size])
        at += size
    return pieces or [""]


def word(rng: np.random.Generator, longest: int, letters: str = "ab") -> str:
    return "".join(str(c) for c in rng.choice(list(letters), int(rng.integers(1, longest + 1))))


@check("run_stops", points=3, title="random texts and stops, cut anywhere")
def random_streams(ask: Ask, rng: np.random.Generator) -> None:
    for number in range(120):
        letters = ("ab", "abc", "한국\n")[number % 3]
        stops = [word(rng, 6, letters) for _ in range(int(rng.integers(1, 4)))]
        stops = [s if len(s) > 2 else s + 2 * letters[-1] for s in stops]
        expect_stream(ask, stops, cut_up(rng, word(rng, 30, letters)))


@check("run_stops", points=2, title="a stop across the borders of tokens")
def across(ask: Ask, rng: np.random.Generator) -> None:
    stop = "</answer>"
    text = "It is 42. " + stop + " And more."
    for most in (1, 2, 3, 7):
        expect_stream(ask, [stop], cut_up(rng, text, most))
    expect_stream(ask, ["er the"], ["over", " the", " sea"])


@check("run_stops", points=1, title="a long stop, one character at a time")
def long_stop(ask: Ask, rng: np.random.Generator) -> None:
    stop = word(rng, 1, "x") + "".join(chr(97 + int(c)) for c in rng.integers(0, 20, 60))
    expect_stream(ask, [stop], [*("Once " + stop + " upon")])
    expect_stream(ask, [stop], [*("Once " + stop[:50] + " upon")])


@check("run_stops", points=1, title="a stop that begins inside its own beginning")
def own_beginning(ask: Ask, rng: np.random.Generator) -> None:
    for stop, text in (("aab", "aaaab"), ("abab c", "ababab c"), ("\n\n#", "x\n\n\n#"), ("aabaaa", "aabaabaaa")):
        expect_stream(ask, [stop], [*text, "z"])
        expect_stream(ask, [stop], cut_up(rng, text + "z"))


@check("run_stops", points=2, title="which stop wins")
def which_wins(ask: Ask, rng: np.random.Generator) -> None:
    for stops in (["cdefg", "de"], ["e", "cde"], ["cde", "de", "e"], ["efg", "cd"], ["def", "abcdefg"]):
        expect_stream(ask, [stops[int(i)] for i in rng.permutation(len(stops))], cut_up(rng, "abcdefgh"))


@check("run_stops", points=1, title="nothing is held for a stop that can never win")
def never_wins(ask: Ask, rng: np.random.Generator) -> None:
    expect_stream(ask, ["abcd", "bc"], ["x", "a", "b", "d", "a"])
    expect_stream(ask, ["one two three", "two"], ["on", "e t", "wo three"])


@check("run_stops", points=1, title="what is held at the end comes out, once")
def at_the_end(ask: Ask, rng: np.random.Generator) -> None:
    expect_stream(ask, ["STOP"], ["go on", " S", "T"])
    expect_stream(ask, ["STOP", "TOP!"], ["S", "TO"])
    expect_stream(ask, ["STOP"], ["it STOPs", " here ST"])
    expect_stream(ask, ["STOP"], [""])


# Exercise 4: Answers that go round in circles -----------------------------------------------------


def period_by_definition(tokens: list[int], rule: tuple[int, int, int, int]) -> int:
    max_period, min_period, min_copies, min_tokens = rule
    for p in range(1, max_period + 1):
        run = 0
        while run + p < len(tokens) and tokens[-1 - run] == tokens[-1 - run - p]:
            run += 1
        if run and run + p >= max(min_tokens, min_copies * p):
            return p if p >= min_period else 0
    return 0


def expect_periods(ask: Ask, tokens: list[int], rule: tuple[int, int, int, int], sizes: list[int]) -> None:
    """Given in groups of these sizes, over and over."""
    state, found, at, turn = None, [], 0, 0
    while at < len(tokens):
        size = sizes[turn % len(sizes)]
        state, new = watched(ask, state, tokens[at : at + size], rule)
        found += new
        at, turn = at + size, turn + 1
    want = [period_by_definition(tokens[: i + 1], rule) for i in range(len(tokens))]
    limits = "max_period {}, min_period {}, min_copies {}, min_tokens {}".format(*rule)
    wrong = next((i for i, (a, b) in enumerate(zip(found, want, strict=True)) if a != b), None)
    if wrong is not None:
        tail = tokens[max(0, wrong - 29) : wrong + 1]
        fail(f"{limits}: after token {wrong + 1} got {found[wrong]}, expected {want[wrong]}; the answer ends in {tail}")


def babble(rng: np.random.Generator, count: int) -> list[int]:
    """Stretches without order and stretches that repeat."""
    babbled: list[int] = []
    while len(babbled) < count:
        unit = [int(t) for t in rng.integers(0, 4, int(rng.integers(1, 8)))]
        babbled += unit * int(rng.integers(1, 7)) if rng.random() < 0.7 else unit
    return babbled[:count]


@check("watch_loops", points=3, title="random answers and rules")
def random_answers(ask: Ask, rng: np.random.Generator) -> None:
    for _ in range(12):
        rule = (int(rng.integers(1, 9)), int(rng.integers(1, 4)), int(rng.integers(2, 5)), int(rng.integers(1, 25)))
        expect_periods(ask, babble(rng, 150), rule, [1, 7, 30])


@check("watch_loops", points=2, title="the smallest period first, then the minimum")
def smallest_first(ask: Ask, rng: np.random.Generator) -> None:
    dash = int(rng.integers(0, 100))
    expect_periods(ask, [dash] * 24, (8, 4, 3, 1), [5])
    expect_periods(ask, [dash, dash + 1] * 16, (8, 3, 2, 6), [5])
    expect_periods(ask, [dash] * 30 + [1, 2, 3, 4] * 4, (8, 4, 3, 1), [5])


@check("watch_loops", points=2, title="long units are found, one longer than max_period is not")
def long_units(ask: Ask, rng: np.random.Generator) -> None:
    for length in (63, 64, 65):
        unit = [int(t) for t in rng.permutation(length)]
        expect_periods(ask, [500, 501, *unit * 4, 1, *unit[:5]], (64, 1, 3, 64), [40])


@check("watch_loops", points=1, title="copies and tokens: both must be enough")
def both_enough(ask: Ask, rng: np.random.Generator) -> None:
    unit = [int(t) for t in rng.permutation(5)]
    expect_periods(ask, unit * 8, (6, 1, 2, 30), [3])
    expect_periods(ask, unit * 8, (6, 1, 5, 3), [3])


@check("watch_loops", points=1, title="a loop that ends, and another one")
def ends_again(ask: Ask, rng: np.random.Generator) -> None:
    expect_periods(ask, [1, 2, 3] * 5 + [9, 8] + [3, 2] * 6 + [1] + [3, 2] * 2 + [7] * 9, (5, 1, 3, 6), [1, 2])


@check("watch_loops", points=2, title="the state stays small, however long the answer is")
def small_state(ask: Ask, rng: np.random.Generator) -> None:
    rule = (16, 1, 3, 20)
    state, sizes = None, []
    for part in range(12):
        tokens = [int(t) for t in rng.integers(0, 1000, 200)] if part % 3 else [3, 1, 2] * 67
        state, _ = watched(ask, state, tokens, rule)
        sizes.append(weight(state))
    if sizes[-1] > sizes[1]:
        fail(f"the state holds {sizes[1]} numbers after 400 tokens and {sizes[-1]} after 2,400")


@check("watch_loops", points=1, title="many answers at once do not disturb each other")
def many_answers(ask: Ask, rng: np.random.Generator) -> None:
    rule, streams = (6, 1, 3, 9), [babble(rng, 60) for _ in range(3)]
    states: list[Any] = [None] * 3
    found: list[list[int]] = [[], [], []]
    for at in range(0, 60, 5):
        for which in rng.permutation(3):
            states[which], new = watched(ask, states[which], streams[which][at : at + 5], rule)
            found[which].extend(new)
    for tokens, got in zip(streams, found, strict=True):
        want = [period_by_definition(tokens[: i + 1], rule) for i in range(60)]
        expect_equal(got, want, what="periods of one of three answers watched in turns")
