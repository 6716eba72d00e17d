"""Public checks of assignment 2.

Students read this file, so no answer is in it: what is expected was worked out on paper for a few blocks of 4 tokens,
or is a property that any solution has.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from cs336_infer.course.checks import Ask, check, expect_equal, fail, make_check

check_public = make_check(__name__)

FULL = "out of blocks"


def answers(ask: Ask, function: str, *arguments: Any) -> list[Any]:
    """What `function` returned for each of the operations, the last of `arguments`."""
    got, operations = ask(function, *arguments), arguments[-1]
    if not isinstance(got, list) or len(got) != len(operations):
        size = f"{len(got)} results" if isinstance(got, list) else f"a {type(got).__name__}"
        fail(f"{function}: {size} for {len(operations)} operations")
    return got


# 1. Blocks with several owners ----------------------------------------------------------------------------------------


def owners_of(state: Any) -> dict[int, list[str]]:
    """Block -> names of the sequences whose tables have it."""
    if not isinstance(state, dict) or not isinstance(state.get("tables"), dict):
        fail("state() must have the tables of all sequences, by name")
    owners: dict[int, list[str]] = {}
    for name, table in state["tables"].items():
        for block in table:
            owners.setdefault(block, []).append(name)
    return owners


@check("run_allocator", points=1, title="a sequence takes as many blocks as its tokens need")
def as_many_blocks(ask: Ask, rng: np.random.Generator) -> None:
    operations = [["allocate", "a", 6], ["allocate", "b", 8], ["allocate", "c", 1], ["state"]]
    state = answers(ask, "run_allocator", 6, 4, operations)[-1]
    for block, names in owners_of(state).items():
        if len(names) > 1:
            fail(f"block {block} has two owners, {names[0]} and {names[1]}, and nobody forked")
    sizes = {name: len(table) for name, table in state["tables"].items()}
    expect_equal(sizes, {"a": 2, "b": 2, "c": 1}, what="blocks of 4 for 6, 8 and 1 tokens")
    expect_equal(state["free"], 1, what="free blocks, of 6")


@check("run_allocator", points=1, title="a fork shares every block until it writes")
def fork_then_grow(ask: Ask, rng: np.random.Generator) -> None:
    operations = [["allocate", "a", 6], ["fork", "a", "b"], ["state"], ["grow", "a", 1], ["state"], ["grow", "b", 1]]
    _, _, forked, copies, grown, more = answers(ask, "run_allocator", 6, 4, operations)
    tables = forked["tables"]
    if tables["a"] != tables["b"]:
        fail(f"after the fork a has the blocks {tables['a']} and b {tables['b']}: a fork copies nothing")
    first, last = tables["a"]
    expect_equal(forked["users"][last], 2, what=f"users of block {last} after the fork")
    if grown["tables"]["a"][-1] == last:
        fail(f"block {last} has two owners after the fork, and a writes into it: b would read a's token")
    expect_equal(copies, [[last, grown["tables"]["a"][-1]]], what="what is to be copied when a grows")
    expect_equal(grown["tables"]["b"], [first, last], what="the table of b, which did not grow")
    expect_equal(more, [], what=f"what is to be copied when b grows, which now has block {last} for itself")


@check("run_allocator", points=1, title="out of blocks, and nothing has happened")
def nothing_happened(ask: Ask, rng: np.random.Generator) -> None:
    operations = [["allocate", "a", 6], ["state"], ["grow", "a", 20], ["state"], ["free", "a"], ["state"]]
    _, before, grown, after, _, end = answers(ask, "run_allocator", 4, 4, operations)
    expect_equal(grown, FULL, what="26 tokens in 4 blocks of 4")
    expect_equal(after, before, what="the state after a grow that failed")
    expect_equal(end["free"], 4, what="free blocks when nobody is left")


# 2. Names of blocks ---------------------------------------------------------------------------------------------------


@check("chain_keys", points=1, title="the extras of a root are kept apart")
def roots_differ(ask: Ask, rng: np.random.Generator) -> None:
    extras: list[dict[str, Any]] = [{}, {"salt": None}, {"salt": ""}, {"salt": "1"}, {"salt": 1}, {"adapter": "1"}]
    extras += [{"a": "b", "c": "d"}, {"a": "b,c:d"}]
    roots = [ask("root_key", each) for each in extras]
    if not all(isinstance(root, bytes) and len(root) == 32 for root in roots):
        fail("a root is 32 bytes")
    for i, root in enumerate(roots):
        if root in roots[:i]:
            fail(f"{json.dumps(extras[i])} and {json.dumps(extras[roots.index(root)])} have the same root")
    want = "62add9fc848b9896b727b0a22bf9a939d7479d770d36725f3ebe4746190704ba"
    expect_equal(roots[1].hex(), want, what='the root of {"salt": None}')


@check("chain_keys", points=1, title="a key names everything up to its block's end")
def keys_on_paper(ask: Ask, rng: np.random.Generator) -> None:
    root = bytes(32)
    keys = ask("chain_keys", root, [1, 2, 3, 4, 1, 2, 3, 4, 5], 4)
    expect_equal(len(keys), 2, what="keys of 9 tokens in blocks of 4")
    if keys[0] == keys[1]:
        fail("two blocks with the tokens 1, 2, 3, 4 have the same key, but different tokens stand before them")
    want = ["d8faa8ec8c050056", "8f944a73ee3c245e"]
    expect_equal([key.hex()[:16] for key in keys], want, what="the beginnings of the keys, in hexadecimal")


# 3. What is a hit? ----------------------------------------------------------------------------------------------------

_CACHED = {"p": [7, -1, [1, 2, 3, 4]], "q": [3, 7, [5, 6, 7, 8]], "r": [5, 3, [9, 9, 9, 9]]}
_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 0]


@check("find_prefix", points=1, title="hits are a leading run")
def leading_run(ask: Ask, rng: np.random.Generator) -> None:
    keys = ["p", "q", "r"]
    expect_equal(ask("find_prefix", _PROMPT, 4, keys, _CACHED), [7, 3, 5], what="blocks, all three cached")
    without = {key: entry for key, entry in _CACHED.items() if key != "p"}
    if ask("find_prefix", _PROMPT, 4, keys, without):
        fail("block 0 was evicted, so the blocks behind it are no hits")


@check("find_prefix", points=1, title="a prompt that is cached as a whole")
def whole_prompt(ask: Ask, rng: np.random.Generator) -> None:
    found = ask("find_prefix", _PROMPT[:8], 4, ["p", "q"], _CACHED)
    if found == [7, 3]:
        fail("all 8 tokens are taken from the cache: whose logits choose the next token?")
    expect_equal(found, [7], what="blocks of an 8-token prompt")


# 4. A cache that gives up the right block -----------------------------------------------------------------------------


def fill(name: str, keys: list[Any]) -> list[list[Any]]:
    """Operations: `name` allocates a block for each key and publishes it."""
    return [["allocate", name, len(keys)], *(["publish", name, i, key] for i, key in enumerate(keys))]


@check("run_cache", points=1, title="what was released is found again")
def found_again(ask: Ask, rng: np.random.Generator) -> None:
    operations = [*fill("a", ["p", "q"]), ["release", "a"], ["counts"], ["take", "b", ["p", "q", "r"]], ["counts"]]
    got = answers(ask, "run_cache", 4, operations)
    expect_equal(got[4], [2, 2, 0], what="[free, cached, live] after the only sequence ended")
    expect_equal(got[5], got[0], what="the blocks that the keys p and q find")
    expect_equal(got[6], [2, 0, 2], what="[free, cached, live] with both blocks in use again")


@check("run_cache", points=1, title="a block in use is not evicted")
def in_use(ask: Ask, rng: np.random.Generator) -> None:
    operations = [*fill("a", ["p"]), ["release", "a"], ["take", "b", ["p"]], ["allocate", "c", 2], ["allocate", "d", 1]]
    got = answers(ask, "run_cache", 3, operations)
    held = got[3][0]
    if got[5] != FULL:
        fail(f"3 blocks, all in use, and block {got[5]} is handed out again; b uses block {held}")
    if held in got[4]:
        fail(f"block {held} has two owners: b found it, and c got it as a new one")


@check("run_cache", points=1, title="the end of a prompt goes before its beginning")
def end_first(ask: Ask, rng: np.random.Generator) -> None:
    operations = [*fill("a", ["p", "q", "r"]), ["release", "a"], ["allocate", "b", 1], ["take", "c", ["p", "q", "r"]]]
    got = answers(ask, "run_cache", 3, operations)
    if not got[-1]:
        fail("one block was needed, and the first of the prompt was evicted: what is left of it is no hit any more")
    expect_equal(got[-1], got[0][:2], what="blocks still found")


@check("run_cache", points=1, title="the same key twice")
def same_key_twice(ask: Ask, rng: np.random.Generator) -> None:
    operations = [*fill("a", ["p"]), *fill("b", ["p"]), ["release", "b"], ["counts"], ["take", "c", ["p"]]]
    got = answers(ask, "run_cache", 4, operations)
    expect_equal([got[1], got[3]], [True, False], what="whether a's block, then b's is published")
    expect_equal(got[5], [3, 0, 1], what="[free, cached, live] when b has ended: nobody can find its block")
    expect_equal(got[6], got[0], what="the block that p finds")


# 5. Tiers below the device --------------------------------------------------------------------------------------------


@check("run_tiers", points=1, title="a prompt that was pushed down comes back up")
def down_and_up(ask: Ask, rng: np.random.Generator) -> None:
    operations = [["serve", ["p", "q"]], ["serve", ["r"]], ["where"], ["serve", ["p", "q"]], ["where"]]
    got = answers(ask, "run_tiers", 2, 2, 0, operations)
    expect_equal(got[0], ["computed", "computed"], what="the first prompt")
    expect_equal(got[2], {"device": ["p", "r"], "host": ["q"], "disk": []}, what="where the blocks are")
    expect_equal(got[3], ["device", "host"], what="where the prompt's blocks come from the second time")
    expect_equal(got[4], {"device": ["p", "q"], "host": ["r"], "disk": []}, what="where the blocks are at the end")


@check("run_tiers", points=1, title="what the host gives up goes to the disk")
def to_the_disk(ask: Ask, rng: np.random.Generator) -> None:
    operations = [*(["serve", [key]] for key in "pqrs"), ["where"], ["serve", ["p"]]]
    got = answers(ask, "run_tiers", 1, 1, 4, operations)
    expect_equal(got[4], {"device": ["s"], "host": ["r"], "disk": ["p", "q"]}, what="where the blocks are")
    expect_equal(got[5], ["disk"], what="where the oldest block comes from")


@check("run_tiers", points=1, title="a failed backup is a miss")
def failed_backup(ask: Ask, rng: np.random.Generator) -> None:
    operations = [["serve", ["p"]], ["fail", "host"], ["serve", ["q"]], ["where"], ["serve", ["p"]]]
    got = answers(ask, "run_tiers", 1, 4, 4, operations)
    if got[4] == ["host"]:
        fail("p could not be written to the host, and yet it is said to be found there: whose bytes would be read?")
    expect_equal(got[3], {"device": ["q"], "host": [], "disk": []}, what="where the blocks are after the failure")
    expect_equal(got[4], ["computed"], what="where p comes from")
