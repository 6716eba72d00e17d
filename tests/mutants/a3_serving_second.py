"""A second correct solution of assignment 3: other structures, other orders, and noisy."""

# %%
import functools
import sys
import warnings
from collections import deque

print("loading...", file=sys.stderr)
warnings.warn("only a warning", stacklevel=1)


def noisy(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        print(function.__name__, end="\r", file=sys.stderr)
        return function(*args, **kwargs)

    return inner


# %%
class Racer:
    def __init__(self, values, size):
        self.name, self.rank = values["id"], values["rank"]
        self.total, self.stored, self.blocks = values["total"], values["stored"], values["blocks"]
        self.size = size
        self.tokens = 0

    @property
    def left(self):
        return max(0, self.total - self.stored)

    def short_of(self, tokens):
        return max(0, (tokens + self.size - 1) // self.size - self.blocks)


@noisy
def schedule_step(waiting, running, free, block_size, step_tokens, max_batch):
    """A list in order of rank; victims are popped from its end."""
    line = deque(sorted((Racer(v, block_size) for v in waiting), key=lambda r: r.rank))
    active = [Racer(v, block_size) for v in running]
    joined = []
    while line and len(active) < max_batch:
        head = line.popleft()
        if active and head.short_of(head.total) > free:
            break
        active.append(head)
        joined.append(head)
    active.sort(key=lambda r: r.rank)
    left, out, dead = step_tokens, [], []
    answers = [r for r in active if r.left == 1]
    prompts = [r for r in active if r.left > 1]
    for one in [*answers, *prompts]:
        if one not in active:
            continue
        want = min(left, one.left)
        if want == 0:
            continue
        while one.short_of(one.stored + want) > free:
            last = active.pop()
            (out if active else dead).append(last)
            free += last.blocks
            left += last.tokens
            last.tokens = 0
            if last is one:
                break
        else:
            new = one.short_of(one.stored + want)
            one.blocks += new
            free -= new
            one.tokens = want
            left -= want
    return {
        "fail": [r.name for r in dead],
        "preempt": [r.name for r in reversed(out)],
        "compute": [(r.name, r.tokens) for r in reversed(active) if r.tokens],
        "admit": [r.name for r in reversed(joined)],
    }


# %%
@noisy
def run_request(prompt, operations):
    """No class: two lists and what is left to do."""
    known, todo, replies = list(prompt), list(prompt), []
    for verb, *rest in operations:
        if verb == "preempt":
            todo = known[:]
            replies.append(None)
        elif verb == "state":
            generated = known[len(prompt) :]
            decoding = len(todo) == 1 and len(generated) > 0
            state = {"stored": len(known) - len(todo), "answer": generated, "phase": ["prefill", "decode"][decoding]}
            replies.append(state)
        else:
            budget, token = rest
            chunk, todo = todo[:budget], todo[budget:]
            if chunk and not todo:
                known.append(token)
                todo = [token]
                replies.append((chunk, token))
            else:
                replies.append((chunk, None))
    return replies


# %%
@noisy
def run_stops(stops, pieces):
    """One character at a time: for each stop, which of its beginnings the text ends in."""
    useful = [s for s in stops if all(t not in s[:-1] for t in stops)]
    alive = [set() for _ in useful]
    shown, text, out, winner = [], "", 0, None
    for piece in pieces:
        for char in piece:
            if winner is not None:
                break
            text += char
            done = []
            for number, stop in enumerate(useful):
                alive[number] = {n + 1 for n in alive[number] | {0} if stop[n] == char}
                if len(stop) in alive[number]:
                    done.append(stop)
                    alive[number].discard(len(stop))
            if done:
                winner = sorted(done, key=len)[-1]
                text = text[: len(text) - len(winner)]
        held = 0 if winner is not None else max((n for a in alive for n in a), default=0)
        shown.append(text[out : len(text) - held])
        out = len(text) - held
    return {"matched": winner, "rest": text[out:], "shown": tuple(shown) and [*shown]}


# %%
@noisy
def watch_loops(state, tokens, max_period, min_period, min_copies, min_tokens):
    """The failure function of Knuth, Morris and Pratt over the last tokens, read backwards."""
    keep = max(min_tokens, min_copies * max_period)
    tail = list(state) if state is not None else []
    periods = []
    for newest in tokens:
        tail = [newest, *tail][:keep]
        fail = [0, 0]
        best = None
        for n in range(2, len(tail) + 1):
            k = fail[-1]
            while k and tail[k] != tail[n - 1]:
                k = fail[k]
            fail.append(k + 1 if tail[k] == tail[n - 1] else 0)
            p = n - fail[n]
            if p < n and p <= max_period and n >= min_copies * p and n >= min_tokens:
                best = p if best is None else min(best, p)
        periods.append(best if best is not None and best >= min_period else 0)
    return [tail, periods]
