"""The block pool under random operations, recounted after each, and public bugs of other engines as tests."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cs336_infer.kv.policies import make_policy
from cs336_infer.kv.pool import BlockPool, OutOfBlocks
from cs336_infer.kv.prefix import KeyChain, root_key

BLOCK = 2
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


def fold4(key: object) -> int:
    """4 bits of a key: collisions all the time."""
    assert isinstance(key, bytes)
    return key[0] & 15


class Machine(RuleBasedStateMachine):
    """Sequences come, fork, end and are forgotten in a pool of few blocks whose keys are found by 4 bits.

    The model: `written` says what each block holds; every hit must hold exactly the tokens that were asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = self.make("lru", 6)
        self.held: list[list[int]] = []
        self.written: dict[int, bytes] = {}

    def make(self, policy: str, blocks: int) -> BlockPool:
        chosen = make_policy(policy, blocks)
        return BlockPool(blocks, policy=chosen, fold=fold4, debug=True, on_evict=self.leaves)

    def leaves(self, block: int, key: object) -> None:
        assert all(block not in blocks for blocks in self.held), "a block in use was evicted"
        self.evicted.append(block)

    @precondition(lambda self: not self.written)
    @rule(policy=st.sampled_from(["lru", "fifo", "lfu", "arc"]), blocks=st.integers(1, 7))
    def begin(self, policy: str, blocks: int) -> None:
        self.pool = self.make(policy, blocks)

    @rule(tokens=TOKENS)
    def serve(self, tokens: list[int]) -> None:
        chain = KeyChain(root_key(model="m"), BLOCK, tokens)
        taken = self.pool.take(chain.keys, chain.contents)
        for number, block in enumerate(taken):
            assert self.written[block] == b"".join(chain.contents[: number + 1]), "a hit with other content"
        new = -(-len(tokens) // BLOCK) - len(taken)
        before = (self.pool.live, self.pool.available)
        try:
            fresh = self.pool.allocate(new)
        except OutOfBlocks:
            assert before == (self.pool.live, self.pool.available) and new > before[1]
            self.pool.release(taken)
            return
        assert not set(fresh) & {b for blocks in self.held for b in blocks}, "a block has two owners"
        for number, block in enumerate([*taken, *fresh]):
            if number >= len(taken):
                self.written[block] = b"".join(chain.contents[: number + 1])
                if number < len(chain.keys):
                    self.pool.publish(block, chain.keys[number], chain.contents[number])
        self.held.append([*taken, *fresh])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.share(blocks)
        self.held.append(list(blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert self.pool.cached == 0

    @invariant()
    def accounts(self) -> None:
        pool = self.pool
        users = [block for blocks in self.held for block in blocks]
        assert pool.live == len(set(users))
        assert all(pool.refs(block) == users.count(block) for block in set(users))
        assert pool.free + pool.cached + pool.live == pool.total
        assert len(self.evicted) >= pool.evictions

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.release(blocks)
        assert self.pool.live == 0
        self.pool.check()


TestPool = Machine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def filled(pool: BlockPool, keys: list[object]) -> list[int]:
    """Serve a prompt of these keys; returns its blocks, in use."""
    taken = pool.take(keys)
    new = pool.allocate(len(keys) - len(taken))
    pool.publish_all(new, keys[len(taken) :])
    return [*taken, *new]


def test_a_hit_is_a_leading_run() -> None:
    """llm-d/llm-d-inference-sim#705: blocks 1, 2, 3 are cached and 1 is evicted; 2 and 3 were counted as hits."""

    class First:
        """Evicts in the order of the keys, the beginning of a prompt first."""

        def __init__(self) -> None:
            self.idle: set = set()

        def released(self, key) -> None:
            self.idle.add(key)

        def reused(self, key) -> None:
            self.idle.remove(key)

        def evicted(self, key) -> None:
            self.idle.discard(key)

        def victim(self):
            return min(self.idle)

    pool = BlockPool(3, policy=First(), debug=True)
    pool.release(filled(pool, [1, 2, 3]))
    pool.allocate(1)
    assert pool.match([1, 2, 3]) == 0 and pool.take([1, 2, 3]) == []
    assert pool.match([2, 3]) == 2, "they are there, and they are no hits of the prompt that begins with 1"


def test_a_block_given_to_another_prompt_is_not_found_by_its_old_key() -> None:
    """GeeeekExplorer/nano-vllm#163: the map still named the block of prompt X after prompt Y had it."""
    pool = BlockPool(1, debug=True)
    pool.release(filled(pool, ["X"]))
    pool.release(filled(pool, ["Y"]))
    assert pool.match(["X"]) == 0 and pool.match(["Y"]) == 1


@pytest.mark.parametrize("fold", [fold4, lambda key: 0])
def test_equal_hashes_of_different_tokens_are_a_miss(fold) -> None:
    """openvinotoolkit/openvino.genai#3722: two different blocks with the same hash shared one memory."""
    chains = [KeyChain(root_key(), 1, [token]) for token in range(40)]
    pool = BlockPool(40, fold=fold, debug=True)
    blocks = {}
    for token, chain in enumerate(chains):
        block = pool.allocate(1)[0]
        if pool.publish(block, chain.keys[0], chain.contents[0]):
            blocks[token] = block
    assert 1 <= len(blocks) <= 16, "the rest collided and keeps its block to itself"
    for token, chain in enumerate(chains):
        assert pool.take(chain.keys, chain.contents) == ([blocks[token]] if token in blocks else [])
    same_key = KeyChain(root_key(), 1, [99]).contents
    token = next(iter(blocks))
    assert pool.match(chains[token].keys, same_key) == 0, "the same key with other tokens is a miss too"


def test_looking_up_and_pinning_are_one_step() -> None:
    """jundot/omlx#3087: a block was evicted and given away between its lookup and the reference to it."""
    pool = BlockPool(4)
    wrong: list[str] = []
    owner: dict[int, object] = {}
    guard = threading.Lock()

    def serve(name: int) -> None:
        for number in range(400):
            key = (name + number) % 7
            blocks = pool.take([key])
            if not blocks:
                try:
                    blocks = pool.allocate(1)
                except OutOfBlocks:
                    continue
                with guard:
                    owner[blocks[0]] = key
                pool.publish(blocks[0], key)
            with guard:
                if owner[blocks[0]] != key:
                    wrong.append(f"block {blocks[0]} is {owner[blocks[0]]}, not {key}")
            pool.release(blocks)

    threads = [threading.Thread(target=serve, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.live == 0
    pool.check()


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "arc"])
def test_no_block_in_use_is_evicted_under_pressure(policy: str) -> None:
    """sgl-project/mini-sglang#52: the leaf in use kept reference count 0, and pressure evicted it."""
    pool = BlockPool(4, policy=make_policy(policy, 4), debug=True)
    held = filled(pool, ["a", "b", "leaf"])
    for n in range(10):
        pool.release(filled(pool, [n]))
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert pool.take(["a", "b", "leaf"]) == held and [pool.refs(b) for b in held] == [2, 2, 2]


def test_eviction_takes_no_reference_of_a_user() -> None:
    """Avarok-Cybersecurity/atlas#373: evicting set the count of a shared block to 0, and it had two owners."""
    pool = BlockPool(3, debug=True)
    one = filled(pool, ["p"])
    two = pool.take(["p"])
    pool.release(one)
    rest = pool.allocate(2)
    assert pool.refs(two[0]) == 1 and two[0] not in rest
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.forget()
    assert pool.refs(two[0]) == 1 and pool.live == 3
    pool.release(two)
    assert (pool.live, pool.free, pool.cached) == (2, 1, 0)


@pytest.mark.parametrize("publish_first", [True, False])
def test_accounts_hold_in_any_order_of_publishing_and_releasing(publish_first: bool) -> None:
    """xLLM-AI/xllm#828: caching before releasing left references behind; use rose to 135 % and all was refused."""
    pool = BlockPool(4, debug=True)
    for n in range(50):
        blocks = pool.take([n, "x"]) or pool.allocate(2)
        if publish_first:
            pool.publish_all(blocks, [n, (n, "x")])
        pool.share(blocks)
        pool.release(blocks)
        if not publish_first:
            pool.publish_all(blocks, [n, (n, "x")])
        assert 0 <= pool.live <= pool.total
        pool.release(blocks)
        assert pool.live == 0 and pool.available == 4


def test_the_end_of_a_chain_is_evicted_before_its_middle() -> None:
    """mstar-project/mstar#210: a page in the middle of a chain was reused and its children kept its id."""
    pool = BlockPool(4, debug=True)
    pool.release(filled(pool, [1, 2, 3, 4]))
    for left in (3, 2, 1, 0):
        pool.allocate(1)
        assert pool.match([1, 2, 3, 4]) == left


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "arc"])
def test_the_index_does_not_grow_with_the_number_of_prefixes(policy: str) -> None:
    """a710128/nanovllm-voxcpm#62: the map kept an entry for each prefix ever seen."""
    pool = BlockPool(8, policy=make_policy(policy, 8))
    for n in range(3000):
        pool.release(filled(pool, [n, (n, 1)]))
    assert sum(pool.match([n]) for n in range(3000)) <= 8
    sizes = [len(v) for v in vars(pool).values() if hasattr(v, "__len__")]
    assert max(sizes) <= 8
    pool.check()


def test_misuse_is_named_and_changes_nothing() -> None:
    pool = BlockPool(2, debug=True)
    block = pool.allocate(1)
    pool.publish(block[0], "k")
    with pytest.raises(ValueError, match="cannot be published"):
        pool.publish(block[0], "other")
    pool.release(block)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(block)
    with pytest.raises(ValueError, match="only live blocks"):
        pool.share(block)
    with pytest.raises(OutOfBlocks, match="3 KV blocks are needed, 2 of 2"):
        pool.allocate(3)
    pool.check()
    assert (pool.cached, pool.free, pool.live, pool.peak) == (1, 1, 0, 1)
