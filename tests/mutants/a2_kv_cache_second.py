"""A second correct solution of assignment 2: other structures, other blocks chosen, and noisy."""

# %%
import functools
import hashlib
import heapq
import struct
import sys
import warnings
from collections import Counter, defaultdict

print("loading...", file=sys.stderr)
warnings.warn("only a warning", stacklevel=1)


class OutOfBlocks(Exception):
    pass


def noisy(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        print(function.__name__, end="\r", file=sys.stderr)
        return function(*args, **kwargs)

    return inner


# %%
class Books:
    """Free blocks are a heap of negative numbers: the highest goes first. Who uses a block is a set of names."""

    def __init__(self, total, size):
        self.total, self.size = total, size
        self.heap = [-b for b in range(total)]
        heapq.heapify(self.heap)
        self.owners = defaultdict(set)
        self.seqs = {}

    def state(self):
        return {
            "tables": {n: tuple(t) for n, (t, _) in self.seqs.items()},
            "users": [len(self.owners[b]) for b in range(self.total)],
            "free": len(self.heap),
        }

    def get(self, name, n):
        if n > len(self.heap):
            raise OutOfBlocks
        got = []
        while len(got) < n:
            got.append(-heapq.heappop(self.heap))
            self.owners[got[-1]].add(name)
        return got

    def leave(self, name, block):
        self.owners[block].remove(name)
        if not self.owners[block]:
            heapq.heappush(self.heap, -block)

    def allocate(self, name, tokens):
        full, rest = divmod(tokens, self.size)
        self.seqs[name] = (self.get(name, full + bool(rest)), tokens)
        return self.seqs[name][0]

    def grow(self, name, tokens):
        table, length = self.seqs[name]
        if tokens == 0:
            return []
        room = len(table) * self.size - length
        copy = room > 0 and len(self.owners[table[-1]]) > 1
        extra = 0
        while room + extra * self.size < tokens:
            extra += 1
        fresh = self.get(name, extra + copy)
        moves = []
        if copy:
            old = table.pop()
            moves = [(old, fresh[0])]
            self.leave(name, old)
        self.seqs[name] = ([*table, *fresh], length + tokens)
        return moves

    def fork(self, name, child):
        table, length = self.seqs[name]
        self.seqs[child] = (table[:], length)
        for b in table:
            self.owners[b].add(child)
        return table[:]

    def free(self, name):
        for b in self.seqs.pop(name)[0][::-1]:
            self.leave(name, b)


@noisy
def run_allocator(num_blocks, block_size, operations):
    books, said = Books(num_blocks, block_size), []
    for verb, *rest in operations:
        try:
            out = getattr(books, verb)(*rest)
        except OutOfBlocks:
            out = "out of blocks"
        said.append(list(out) if isinstance(out, (list, tuple)) else out)
    return said


# %%
@noisy
def root_key(extras):
    def text(v):
        if v is None:
            return "null"
        if isinstance(v, int):
            return f"{v}"
        out = '"'
        for c in v:
            out += "\\" + c if c in '"\\' else c
        return out + '"'

    pieces = [text(k) + ":" + text(extras[k]) for k in sorted(extras)]
    return hashlib.new("sha256", ("{" + ",".join(pieces) + "}").encode("utf8")).digest()


@noisy
def chain_keys(root, tokens, block_size):
    def step(last, i):
        return hashlib.sha256(last + struct.pack(f"<{block_size}I", *tokens[i : i + block_size])).digest()

    out = [root]
    for i in range(0, len(tokens) - block_size + 1, block_size):
        out.append(step(out[-1], i))
    return out[1:]


# %%
@noisy
def find_prefix(tokens, block_size, keys, cached):
    def good(i, before):
        entry = cached.get(keys[i])
        piece = tokens[i * block_size :][:block_size]
        return entry is not None and tuple(entry[1:]) == (before, piece)

    def walk(i, before):
        if (i + 1) * block_size > len(tokens) - 1 or not good(i, before):
            return []
        block = cached[keys[i]][0]
        return [block, *walk(i + 1, block)]

    return walk(0, -1)


# %%
class Block:
    def __init__(self, number):
        self.number, self.key, self.users, self.left = number, None, 0, 0


class Memory:
    """Time stamps instead of queues, and the policy within: the cached block that was left first."""

    def __init__(self, total):
        self.blocks = [Block(n) for n in range(total)]
        self.clock = 0
        self.held = {}

    def find(self, key):
        return next((b for b in self.blocks if b.key == key), None)

    def counts(self):
        kinds = Counter("live" if b.users else "cached" if b.key is not None else "free" for b in self.blocks)
        return [kinds["free"], kinds["cached"], kinds["live"]]

    def take(self, name, keys):
        mine = self.held[name] = []
        for key in keys:
            block = self.find(key)
            if not block:
                break
            block.users += 1
            mine.append(block)
        return [b.number for b in mine]

    def allocate(self, name, count):
        idle = sorted((b for b in self.blocks if not b.users), key=lambda b: (b.key is not None, b.left, -b.number))
        if len(idle) < count:
            return "out of blocks"
        new = idle[:count]
        for b in new:
            b.key, b.users = None, 1
        self.held.setdefault(name, []).extend(new)
        return [b.number for b in new]

    def publish(self, name, index, key):
        if self.find(key):
            return False
        self.held[name][index].key = key
        return True

    def share(self, name, child):
        self.held[child] = self.held[name][:]
        for b in self.held[child]:
            b.users += 1

    def release(self, name):
        for b in self.held.pop(name)[::-1]:
            self.clock += 1
            b.users, b.left = b.users - 1, self.clock


@noisy
def run_cache(num_blocks, operations):
    memory = Memory(num_blocks)
    return [getattr(memory, verb)(*rest) for verb, *rest in operations]


# %%
@noisy
def run_tiers(device, host, disk, operations):
    """Where a block is and since when, in one table."""
    names, budgets = ("device", "host", "disk"), (device, host, disk)
    place, since, broken, clock = {}, {}, set(), [0]

    def down(key, level, stay):
        while level < 3:
            if budgets[level]:
                there = [k for k, at in place.items() if at == level]
                leaving = None
                if names[level] in broken:
                    return
                if len(there) == budgets[level]:
                    leaving = min((k for k in there if k not in stay), key=since.get, default=None)
                    if leaving is None:
                        return
                    del place[leaving]
                clock[0] += 1
                place[key], since[key] = level, clock[0]
                if leaving is None:
                    return
                key = leaving
            level += 1

    answers = []
    for verb, *rest in operations:
        if verb == "fail":
            answers.append(broken.add(rest[0]))
        elif verb == "repair":
            answers.append(broken.discard(rest[0]))
        elif verb == "where":
            answers.append({n: sorted(k for k, at in place.items() if at == i) for i, n in enumerate(names)})
        else:
            (keys,) = rest
            said, hit = [], True
            for key in keys:
                hit = hit and key in place
                said.append(names[place[key]] if hit else "computed")
            for key in keys[:device][::-1]:
                place.pop(key, None)
                down(key, 0, set(keys))
            answers.append(said)
    return answers
