"""Hidden checks of assignment 2: random histories against models that are slow on purpose, and some that broke engines.

A model names blocks by numbers of its own; which free block a submission takes is the submission's choice, so a map
from the one to the other is kept. The open task is in `cs336_infer.course.a2_open_task`.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from cs336_infer.course.a2_kv_cache import FULL, answers, fill
from cs336_infer.course.checks import Ask, check, expect_equal, fail

# Exercise 1: Blocks with several owners -----------------------------------------------------------


class Owners:
    """Every table, token by token."""

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size, self.made = total, size, 0
        self.tokens: dict[str, int] = {}
        self.tables: dict[str, list[int]] = dict[str, list[int]]()

    def users(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables.values())

    def spare(self) -> int:
        return self.total - len({b for table in self.tables.values() for b in table})

    def do(self, verb: str, name: str, argument: Any = None) -> Any:
        """Copies [[from, to]], or FULL and everything is as before."""
        before = {n: list(table) for n, table in self.tables.items()}, dict(self.tokens)
        copied = []
        if verb == "free":
            del self.tables[name], self.tokens[name]
        elif verb == "fork":
            self.tables[argument], self.tokens[argument] = list(self.tables[name]), self.tokens[name]
        else:
            if verb == "allocate":
                self.tables[name], self.tokens[name] = [], 0
            for _ in range(argument):
                copied += self._one_token(name)
        if self.spare() < 0:
            self.tables, self.tokens = before
            return FULL
        return copied

    def _one_token(self, name: str) -> list[list[int]]:
        table, place = self.tables[name], self.tokens[name] // self.size
        self.tokens[name] += 1
        if place < len(table) and self.users(table[place]) == 1:
            return []
        self.made += 1
        if place == len(table):
            table.append(self.made)
            return []
        old, table[place] = table[place], self.made
        return [[old, self.made]]


def follow_allocator(ask: Ask, total: int, size: int, history: list[list[Any]]) -> None:
    """Ask for the whole history, with the state after every operation, and compare step by step."""
    operations = [step for operation in history for step in (operation, ["state"])]
    got = answers(ask, "run_allocator", total, size, operations)
    model, at = Owners(total, size), {}
    for number, operation in enumerate(history):
        result, state = got[2 * number : 2 * number + 2]
        want = model.do(*operation)
        said = f"operation {number + 1}, {' '.join(map(str, operation))}, {total} blocks of {size}"
        if (result == FULL) != (want == FULL):
            fail(
                f"{said}: {'refused, though there is room' if result == FULL else 'not refused, and there is no room'}"
            )
        _same_tables(state, model, at, said)
        if operation[0] == "grow" and want != FULL:
            expect_equal(result, [[at[a], at[b]] for a, b in want], what=f"{said}: copies")


def _same_tables(state: Any, model: Owners, at: dict[int, int], said: str) -> None:
    """`at` maps the model's blocks to those of the submission."""
    living = {b for table in model.tables.values() for b in table}
    for gone in set(at) - living:
        del at[gone]
    if not isinstance(state, dict) or set(state.get("tables", ())) != set(model.tables):
        fail(f"{said}: the sequences are not {sorted(model.tables)}")
    for name, table in model.tables.items():
        theirs = state["tables"][name]
        if len(theirs) != len(table):
            fail(f"{said}: {name} has {model.tokens[name]} tokens and {len(theirs)} blocks instead of {len(table)}")
        for mine, block in zip(table, theirs, strict=True):
            if at.setdefault(mine, block) != block:
                fail(f"{said}: {name} has block {block} where it must have block {at[mine]}")
    if len(set(at.values())) < len(at):
        twice = [b for b in at.values() if list(at.values()).count(b) > 1]
        fail(f"{said}: block {twice[0]} has two owners who share nothing")
    for mine, block in at.items():
        expect_equal(state["users"][block], model.users(mine), what=f"{said}: users of block {block}")
    expect_equal(state["free"], model.spare(), what=f"{said}: free blocks")


def allocator_history(rng: np.random.Generator, total: int, size: int, steps: int) -> list[list[Any]]:
    """Random operations on sequences that exist."""
    model, history, made = Owners(total, size), [], 0
    while len(history) < steps:
        names = list(model.tables)
        verb = str(rng.choice(["allocate", "grow", "grow", "fork", "free"])) if names else "allocate"
        name, amount = str(rng.choice(names)) if names else "", int(rng.integers(0, 3 * size))
        made += 1
        operation: list[Any] = {
            "allocate": ["allocate", f"s{made}", amount],
            "grow": ["grow", name, int(rng.integers(0, 2 * size))],
            "fork": ["fork", name, f"s{made}"],
            "free": ["free", name],
        }[verb]
        model.do(*operation)
        history.append(operation)
    return history


@check("run_allocator", points=3, title="random histories: every table, count and copy")
def random_allocator(ask: Ask, rng: np.random.Generator) -> None:
    for _ in range(4):
        total, size = int(rng.integers(5, 12)), int(rng.integers(1, 6))
        follow_allocator(ask, total, size, allocator_history(rng, total, size, 40))


@check("run_allocator", points=2, title="an unfinished block with three owners")
def three_owners(ask: Ask, rng: np.random.Generator) -> None:
    size = int(rng.integers(3, 7))
    begin = size + int(rng.integers(1, size))
    history = [["allocate", "a", begin], ["fork", "a", "b"], ["fork", "b", "c"]]
    history += [["grow", str(name), 1] for name in rng.permutation(["a", "b", "c"])]
    follow_allocator(ask, 12, size, history)


@check("run_allocator", points=1, title="full blocks are shared and never copied")
def full_blocks(ask: Ask, rng: np.random.Generator) -> None:
    size = int(rng.integers(2, 6))
    history = [["allocate", "a", 2 * size], ["fork", "a", "b"], ["grow", "b", 0], ["grow", "b", 1], ["grow", "a", size]]
    follow_allocator(ask, 8, size, history)


@check("run_allocator", points=2, title="a block stays until its last owner is gone")
def last_owner(ask: Ask, rng: np.random.Generator) -> None:
    size = int(rng.integers(2, 6))
    history = [["allocate", "a", 2 * size], ["fork", "a", "b"], ["fork", "a", "c"]]
    history += [["free", str(name)] for name in rng.permutation(["a", "b", "c"])]
    history.insert(4, ["allocate", "d", 2 * size])
    follow_allocator(ask, 5, size, history)


@check("run_allocator", points=2, title="one block short: nothing was taken")
def one_short(ask: Ask, rng: np.random.Generator) -> None:
    size, spare = int(rng.integers(3, 7)), int(rng.integers(1, 4))
    # b's shared last block has to be copied: spare + 1 blocks are needed for what looks like spare
    history = [["allocate", "a", size + 1], ["fork", "a", "b"], ["grow", "b", size * spare + 1], ["grow", "b", 1]]
    history += [["allocate", "c", size * spare], ["free", "a"], ["allocate", "c", size * (spare + 1)]]
    follow_allocator(ask, 2 + spare, size, history)


# Exercise 2: Names of blocks ----------------------------------------------------------------------

WORDS = ["SmolLM2", "", "a,b", 'say "x"', "1", "null", "한국어", "🙂", "back\\slash"]


def root_by_definition(extras: dict[str, Any]) -> bytes:
    parts = []
    for name in sorted(extras):
        value = extras[name]
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
        parts.append(json.dumps(name, ensure_ascii=False) + ":" + ("null" if value is None else text))
    return hashlib.sha256(("{" + ",".join(parts) + "}").encode("utf-8")).digest()


def keys_by_definition(root: bytes, tokens: list[int], size: int) -> list[bytes]:
    found = []
    for number in range(len(tokens) // size):
        digest = hashlib.sha256(found[-1] if found else root)
        for token in tokens[number * size : (number + 1) * size]:
            digest.update(bytes((token >> shift) & 255 for shift in (0, 8, 16, 24)))
        found.append(digest.digest())
    return found


def some_tokens(rng: np.random.Generator, count: int, below: int = 1 << 32) -> list[int]:
    return [int(t) for t in rng.integers(0, below, count)]


@check("chain_keys", points=2, title="roots of random extras, in any order")
def random_roots(ask: Ask, rng: np.random.Generator) -> None:
    for _ in range(8):
        names = [str(n) for n in rng.permutation(["model", "adapter", "salt", "dtype", "größe"])[: rng.integers(2, 6)]]
        values = [None, int(rng.integers(-5, 1000)), *(str(w) for w in rng.choice(WORDS, 4))]
        extras = dict(zip(names, (values[i] for i in rng.permutation(len(values))), strict=False))
        expect_equal(ask("root_key", extras), root_by_definition(extras), what=f"the root of {extras}")
    backwards = {"model": "m", "adapter": None}
    expect_equal(ask("root_key", backwards), root_by_definition(backwards), what=f"the root of {backwards}")


@check("chain_keys", points=2, title="random tokens, any block size")
def random_keys(ask: Ask, rng: np.random.Generator) -> None:
    for size in (1, int(rng.integers(2, 6)), 16):
        root, tokens = rng.bytes(32), some_tokens(rng, int(rng.integers(2 * size, 5 * size)) + size // 2)
        got = ask("chain_keys", root, tokens, size)
        expect_equal(got, keys_by_definition(root, tokens, size), what=f"keys of {len(tokens)} tokens, {size} a block")


@check("chain_keys", points=1, title="an unfinished block has no key")
def unfinished(ask: Ask, rng: np.random.Generator) -> None:
    root = rng.bytes(32)
    for count in (0, 1, 3, 4, 7):
        got = ask("chain_keys", root, some_tokens(rng, count), 4)
        expect_equal(len(got), count // 4, what=f"number of keys of {count} tokens in blocks of 4")


@check("chain_keys", points=1, title="other roots and other beginnings give other keys")
def other_beginnings(ask: Ask, rng: np.random.Generator) -> None:
    tokens = some_tokens(rng, 8, 50)
    mine = ask("chain_keys", rng.bytes(32), tokens, 4)
    root = rng.bytes(32)
    other = ask("chain_keys", root, tokens, 4)
    changed = ask("chain_keys", root, [tokens[0] + 1, *tokens[1:]], 4)
    if mine[0] == other[0]:
        fail("two roots, the same tokens, the same key: what one customer computed would be found by another")
    if other[1] == changed[1]:
        fail("the first token of the prompt is another one, and block 1 has the same key")


# Exercise 3: What is a hit? -----------------------------------------------------------------------


def hits_by_definition(tokens: list[int], size: int, keys: list[str], cached: dict[str, list[Any]]) -> list[int]:
    found: list[int] = []
    for number, key in enumerate(keys):
        if (number + 1) * size >= len(tokens) or key not in cached:
            return found
        block, parent, content = cached[key]
        if parent != ([-1, *found][-1]) or content != tokens[number * size : (number + 1) * size]:
            return found
        found.append(block)
    return found


def prompt_and_cache(rng: np.random.Generator, blocks: int, size: int, rest: int) -> tuple[Any, Any, Any]:
    """Tokens, keys and a cache that holds all full blocks."""
    tokens = some_tokens(rng, blocks * size + rest, 9)
    keys = [key.hex() for key in keys_by_definition(b"", tokens, size)]
    places = [int(b) for b in rng.permutation(50)[:blocks]]
    cached = {
        key: [places[i], places[i - 1] if i else -1, tokens[i * size : (i + 1) * size]] for i, key in enumerate(keys)
    }
    return tokens, keys, cached


def expect_hits(ask: Ask, tokens: Any, size: int, keys: Any, cached: Any, what: str) -> None:
    want = hits_by_definition(tokens, size, keys, cached)
    expect_equal(ask("find_prefix", tokens, size, keys, cached), want, what=what)


@check("find_prefix", points=2, title="a gap ends the run")
def gap(ask: Ask, rng: np.random.Generator) -> None:
    tokens, keys, cached = prompt_and_cache(rng, 5, 3, 1)
    for number in range(5):
        rest = {key: entry for key, entry in cached.items() if key != keys[number]}
        expect_hits(ask, tokens, 3, keys, rest, f"blocks found when block {number} was evicted")


@check("find_prefix", points=2, title="a collision is no hit")
def collision(ask: Ask, rng: np.random.Generator) -> None:
    tokens, _, _ = prompt_and_cache(rng, 4, 4, 1)
    weak = [f"{sum(tokens[4 * i : 4 * i + 4]) % 16:x}{i}" for i in range(4)]  # a hash that ignores the order of tokens
    places = [int(b) for b in rng.permutation(20)[:4]]
    cached = {key: [places[i], places[i - 1] if i else -1, tokens[4 * i : 4 * i + 4]] for i, key in enumerate(weak)}
    expect_hits(ask, tokens, 4, weak, cached, "blocks found by short keys that are right")
    wrong = int(rng.integers(1, 4))
    own = cached[weak[wrong]][2]
    cached[weak[wrong]][2] = own[1:] + own[:1] if len(set(own)) > 1 else [own[0] + 1] * 4
    expect_hits(ask, tokens, 4, weak, cached, f"blocks found when the key of block {wrong} belongs to other tokens")


@check("find_prefix", points=2, title="the same tokens behind another prefix")
def other_prefix(ask: Ask, rng: np.random.Generator) -> None:
    tokens, keys, cached = prompt_and_cache(rng, 4, 2, 1)
    number = int(rng.integers(0, 4))
    cached[keys[number]][1] = 77
    what = f"blocks found when block {number} of the cache continues block 77, another prompt's"
    expect_hits(ask, tokens, 2, keys, cached, what)


@check("find_prefix", points=2, title="at least one token is left")
def one_left(ask: Ask, rng: np.random.Generator) -> None:
    for blocks in (1, 2, int(rng.integers(3, 6))):
        tokens, keys, cached = prompt_and_cache(rng, blocks, 4, 0)
        expect_hits(ask, tokens, 4, keys, cached, f"blocks found of a prompt of {4 * blocks} tokens, all cached")
        expect_hits(ask, [*tokens, 1], 4, keys, cached, f"blocks found of a prompt of {4 * blocks + 1} tokens")
    expect_hits(ask, [], 4, [], {}, "blocks found of an empty prompt")


# Exercise 4: A cache that gives up the right block ------------------------------------------------


class Cache:
    """Who holds what, by names; `at` maps the model's blocks to the submission's."""

    def __init__(self, total: int) -> None:
        self.total, self.made = total, 0
        self.held: dict[str, list[int]] = {}
        self.named: dict[str, int] = {}  # key -> block
        self.idle: list[str] = []  # keys of cached blocks, the oldest first
        self.at: dict[int, int] = {}

    def live(self) -> set[int]:
        return {block for blocks in self.held.values() for block in blocks}

    def counts(self) -> list[int]:
        return [self.total - len(self.idle) - len(self.live()), len(self.idle), len(self.live())]

    def take(self, name: str, keys: list[str]) -> list[int]:
        run = next((i for i, key in enumerate(keys) if key not in self.named), len(keys))
        self.held[name] = [self.named[key] for key in keys[:run]]
        self.idle = [key for key in self.idle if key not in keys[:run]]
        return list(self.held[name])

    def allocate(self, name: str, count: int) -> Any:
        spare, cached, _ = self.counts()
        if count > spare + cached:
            return FULL
        for key in self.idle[: max(count - spare, 0)]:
            self.at.pop(self.named.pop(key), None)
        self.idle = self.idle[max(count - spare, 0) :]
        new = [self.made + i for i in range(count)]
        self.made += count
        self.held[name] = [*self.held.get(name, []), *new]
        return new

    def publish(self, name: str, index: int, key: str) -> bool:
        first = key not in self.named
        self.named.setdefault(key, self.held[name][index])
        return first

    def share(self, name: str, child: str) -> None:
        self.held[child] = [*self.held[name]]

    def release(self, name: str) -> None:
        for block in reversed(self.held.pop(name)):
            if block not in self.live():
                keys = [key for key, b in self.named.items() if b == block]
                self.idle += keys
                if not keys:
                    self.at.pop(block, None)


def follow_cache(ask: Ask, total: int, history: list[list[Any]]) -> None:
    """Ask for the whole history, with the counts after every operation, and compare step by step."""
    operations = [step for operation in history for step in (operation, ["counts"])]
    got = answers(ask, "run_cache", total, operations)
    model = Cache(total)
    for number, (verb, *arguments) in enumerate(history):
        result, counts = got[2 * number : 2 * number + 2]
        said = f"operation {number + 1}, {verb} {' '.join(map(str, arguments))}, {total} blocks"
        want = getattr(model, verb)(*arguments)
        if (result == FULL) != (want == FULL):
            fail(
                f"{said}: {'refused, though there is room' if result == FULL else 'not refused, and there is no room'}"
            )
        if verb == "allocate" and want != FULL:
            _new_blocks(result, want, model, said)
        elif verb == "take":
            expect_equal(result, [model.at[block] for block in want], what=f"{said}: blocks found")
        elif verb == "publish":
            expect_equal(result, want, what=f"{said}: published")
        expect_equal(counts, model.counts(), what=f"{said}: [free, cached, live]")


def _new_blocks(result: Any, want: list[int], model: Cache, said: str) -> None:
    if not isinstance(result, list) or len(result) != len(want) or len(set(result)) != len(want):
        fail(f"{said}: got {result}")
    for block in result:
        if type(block) is not int or not 0 <= block < model.total:
            fail(f"{said}: there is no block {block}")
        owner = next((mine for mine, theirs in model.at.items() if theirs == block), None)
        if owner is not None:
            users = [name for name, blocks in model.held.items() if owner in blocks]
            key = next((k for k, b in model.named.items() if b == owner), None)
            state = f"in use by {users[0]}" if users else f"cached under {key}, and not the oldest"
            fail(f"{said}: block {block} is handed out, which is {state}")
    model.at.update(zip(want, result, strict=True))


def cache_history(rng: np.random.Generator, total: int, steps: int) -> list[list[Any]]:
    """Prompts of a few families come, take what is cached, compute the rest, fork and go."""
    model, history, made = Cache(total), [], 0

    def add(*operation: Any) -> Any:
        history.append(list(operation))
        return getattr(model, operation[0])(*operation[1:])

    while len(history) < steps:
        if model.held and rng.random() < 0.45:
            add("release", str(rng.choice(list(model.held))))
        elif model.held and rng.random() < 0.15:
            made += 1
            add("share", str(rng.choice(list(model.held))), f"s{made}")
        else:
            made += 1
            name, family = f"s{made}", str(rng.choice(["p", "q", "r", "t"]))
            keys = [f"{family}{i}" for i in range(int(rng.integers(1, 5)))]
            hits = len(add("take", name, keys))
            if add("allocate", name, len(keys) - hits) != FULL:
                for index in range(hits, len(keys) - int(rng.random() < 0.3)):
                    add("publish", name, index, keys[index])
    return history


@check("run_cache", points=3, title="random histories: every block found, given and counted")
def random_cache(ask: Ask, rng: np.random.Generator) -> None:
    for total in (4, 6, 9, 13):
        follow_cache(ask, total, cache_history(rng, total, 70))


@check("run_cache", points=2, title="what a hit pinned stays, however full it gets")
def pinned(ask: Ask, rng: np.random.Generator) -> None:
    n = int(rng.integers(2, 5))
    keys = [f"p{i}" for i in range(n)]
    history = [*fill("a", keys), ["release", "a"], *fill("o", ["q"]), ["release", "o"], ["take", "b", keys]]
    history += [["allocate", "c", 2], ["allocate", "d", 1]]
    history += [["take", "e", keys], ["release", "b"], ["allocate", "f", 1], ["release", "e"], ["allocate", "g", n]]
    follow_cache(ask, n + 2, history)


@check("run_cache", points=2, title="a block with a new owner is not found under its old key")
def old_key(ask: Ask, rng: np.random.Generator) -> None:
    n = int(rng.integers(2, 5))
    mine, others = [f"p{i}" for i in range(n)], [f"q{i}" for i in range(n)]
    history = [*fill("a", mine), ["release", "a"], *fill("b", others), ["take", "c", mine], ["release", "b"]]
    history += [["take", "d", mine], ["take", "e", others], ["release", "e"]]
    history += [["allocate", "f", n], ["take", "g", others]]
    follow_cache(ask, n, history)


@check("run_cache", points=1, title="a block that was evicted and not published again is free")
def second_life(ask: Ask, rng: np.random.Generator) -> None:
    n = int(rng.integers(2, 5))
    history = [*fill("a", [f"p{i}" for i in range(n)]), ["release", "a"], ["allocate", "b", n], ["release", "b"]]
    history += [["allocate", "c", 1], ["release", "c"], ["take", "d", ["p0"]]]
    follow_cache(ask, n, history)


@check("run_cache", points=2, title="out of blocks: nothing was taken or evicted")
def refused(ask: Ask, rng: np.random.Generator) -> None:
    n = int(rng.integers(2, 5))
    keys = [f"p{i}" for i in range(n)]
    history = [*fill("a", keys), ["release", "a"], ["allocate", "b", 1], ["allocate", "c", n + 2], ["take", "d", keys]]
    follow_cache(ask, n + 2, history)


@check("run_cache", points=1, title="a hit makes a prompt young again")
def young_again(ask: Ask, rng: np.random.Generator) -> None:
    history = [step for k in "pqr" for step in (*fill(k, [k]), ["release", k])]
    again = str(rng.choice(["p", "q"]))
    history += [["take", "x", [again]], ["release", "x"], ["allocate", "y", 2], ["take", "z", [again]]]
    follow_cache(ask, 3, history)


@check("run_cache", points=1, title="prompts go from their ends, the older prompt first")
def from_the_end(ask: Ask, rng: np.random.Generator) -> None:
    a, b = int(rng.integers(2, 5)), int(rng.integers(2, 5))
    history = [*fill("a", [f"p{i}" for i in range(a)]), *fill("b", [f"q{i}" for i in range(b)])]
    history += [["release", "b"], ["release", "a"], *(["allocate", f"x{i}", 1] for i in range(a + b))]
    follow_cache(ask, a + b, history)


@check("run_cache", points=1, title="two prompts computed at the same time")
def same_step(ask: Ask, rng: np.random.Generator) -> None:
    keys = [f"p{i}" for i in range(int(rng.integers(2, 4)))]
    both = [[*fill("a", keys)], [*fill("b", keys)]]
    order = rng.permutation(2)
    history = [*both[order[0]], *both[order[1]], ["release", "a"], ["take", "c", keys]]
    history += [["release", "b"], ["release", "c"]]
    follow_cache(ask, 2 * len(keys), history)


@check("run_cache", points=1, title="forks: free + cached + live is the total")
def forks_counted(ask: Ask, rng: np.random.Generator) -> None:
    n = int(rng.integers(2, 5))
    history = [*fill("a", [f"p{i}" for i in range(n)]), ["share", "a", "b"], ["share", "b", "c"]]
    history += [["release", str(name)] for name in rng.permutation(["a", "b", "c"])]
    follow_cache(ask, n + 1, [*history, ["allocate", "d", n + 1], ["release", "d"]])


# Exercise 5: Tiers below the device ---------------------------------------------------------------


class Shelves:
    """Three lists of keys, the oldest first."""

    names = ("device", "host", "disk")

    def __init__(self, *budgets: int) -> None:
        self.budgets, self.shelves, self.down = budgets, [[], [], []], set()

    def fail(self, name: str) -> None:
        self.down.add(name)

    def repair(self, name: str) -> None:
        self.down.discard(name)

    def where(self) -> dict[str, list[str]]:
        return {name: sorted(shelf) for name, shelf in zip(self.names, self.shelves, strict=True)}

    def serve(self, keys: list[str]) -> list[str]:
        places = [next((n for n, s in zip(self.names, self.shelves, strict=True) if key in s), None) for key in keys]
        run = places.index(None) if None in places else len(keys)
        for key in keys[: self.budgets[0]][::-1]:
            self.shelves = [[k for k in shelf if k != key] for shelf in self.shelves]
            self._bring(key, keys)
        return [*map(str, places[:run]), *["computed"] * (len(keys) - run)]

    def _bring(self, moving: str, stay: list[str]) -> None:
        for level, (budget, name) in enumerate(zip(self.budgets, self.names, strict=True)):
            shelf = self.shelves[level]
            if not budget:
                continue
            may_go = [k for k in shelf if k not in stay]
            if name in self.down or (len(shelf) == budget and not may_go):
                return
            shelf.append(moving)
            if len(shelf) <= budget:
                return
            moving = may_go[0]
            shelf.remove(moving)


def follow_tiers(ask: Ask, budgets: tuple[int, int, int], history: list[list[Any]]) -> None:
    operations = [step for operation in history for step in (operation, ["where"])]
    got, model = answers(ask, "run_tiers", *budgets, operations), Shelves(*budgets)
    for number, (verb, *arguments) in enumerate(history):
        said = f"operation {number + 1}, {verb} {' '.join(map(str, arguments))}, budgets {budgets}"
        want = getattr(model, verb)(*arguments)
        if verb == "serve":
            expect_equal(got[2 * number], want, what=f"{said}: where the blocks come from")
        _in_place(got[2 * number + 1], model, said)


def _in_place(where: Any, model: Shelves, said: str) -> None:
    if not isinstance(where, dict) or set(where) != set(model.names):
        fail(f"{said}: where() must tell the keys in {', '.join(model.names)}")
    everywhere = [key for name in model.names for key in where[name]]
    if twice := [key for key in everywhere if everywhere.count(key) > 1]:
        fail(f"{said}: {twice[0]} is in two tiers")
    for name, budget in zip(model.names, model.budgets, strict=True):
        if len(where[name]) > budget:
            fail(f"{said}: {name} holds {len(where[name])} blocks, its budget is {budget}")
    expect_equal(where, model.where(), what=f"{said}: the tiers")


def prompt(rng: np.random.Generator, longest: int) -> list[Any]:
    family = str(rng.choice(["p", "q", "r", "t"]))
    return ["serve", [f"{family}{i}" for i in range(int(rng.integers(1, longest + 1)))]]


@check("run_tiers", points=3, title="random prompts through three tiers")
def random_tiers(ask: Ask, rng: np.random.Generator) -> None:
    for _ in range(6):
        budgets = (int(rng.integers(1, 5)), int(rng.integers(1, 5)), int(rng.integers(1, 6)))
        follow_tiers(ask, budgets, [prompt(rng, 4) for _ in range(40)])


@check("run_tiers", points=2, title="what a prompt found does not leave while it is brought up")
def in_flight(ask: Ask, rng: np.random.Generator) -> None:
    n = int(rng.integers(2, 4))
    mine, others = [f"p{i}" for i in range(n)], [f"q{i}" for i in range(n)]
    history = [["serve", mine], ["serve", others], ["serve", mine], ["serve", others]]
    follow_tiers(ask, (n, n, 0), history)
    follow_tiers(ask, (n, n - 1, 1), history)


@check("run_tiers", points=2, title="a copy that failed is found nowhere")
def copies_fail(ask: Ask, rng: np.random.Generator) -> None:
    tier = str(rng.choice(["host", "disk"]))
    history = [["serve", [k]] for k in "pqr"] + [["fail", tier], ["serve", ["s"]], ["serve", ["p"]], ["repair", tier]]
    follow_tiers(ask, (1, 1, 3), [*history, ["serve", ["q"]], ["serve", ["r"]], ["serve", ["p"]]])
    wild: list[list[Any]] = []
    for _ in range(30):
        wild += [[str(rng.choice(["fail", "repair"])), str(rng.choice(["host", "disk"]))], prompt(rng, 3)]
    follow_tiers(ask, (2, 2, 3), wild)


@check("run_tiers", points=1, title="behind a gap nothing is a hit")
def gap_in_tiers(ask: Ask, rng: np.random.Generator) -> None:
    # the end of a prompt went down first; the host fails when its middle goes
    history = [["serve", ["p", "q", "r"]], ["serve", ["s"]], ["fail", "host"], ["serve", ["t"]], ["repair", "host"]]
    follow_tiers(ask, (3, 3, 0), [*history, ["serve", ["p", "q", "r"]], ["serve", ["p", "q", "r"]]])


@check("run_tiers", points=1, title="the oldest goes down first, and a hit is young")
def oldest_down(ask: Ask, rng: np.random.Generator) -> None:
    keys = [str(k) for k in rng.permutation(["p", "q", "r"])]
    history = [["serve", [k]] for k in (*keys, keys[0], "s", "t", keys[1], "u")]
    follow_tiers(ask, (3, 2, 1), history)


@check("run_tiers", points=1, title="tiers of no blocks, and prompts longer than the device")
def odd_sizes(ask: Ask, rng: np.random.Generator) -> None:
    for budgets in ((2, 0, 3), (2, 2, 0), (1, 0, 0), (3, 1, 2)):
        follow_tiers(ask, budgets, [prompt(rng, 6) for _ in range(25)])
