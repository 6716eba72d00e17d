"""Realistic bugs of assignment 2. Each changes one place of the reference and must be caught by the check it names.

(name, exercise, text of the reference, what the bug puts there, title of a hidden check that must fail)

Numbers are public reports: issues and pull requests of the projects named.
"""

MUTANTS = [
    (
        "a fork writes into the block that its parent reads",
        "run_allocator",
        "shared = tokens > 0 and length % self.block_size > 0 and self.users[table[-1]] > 1",
        "shared = False",
        "an unfinished block with three owners",
    ),
    (
        "full blocks are copied too when a fork grows",
        "run_allocator",
        "shared = tokens > 0 and length % self.block_size > 0 and self.users[table[-1]] > 1",
        "shared = tokens > 0 and len(table) > 0 and self.users[table[-1]] > 1",
        "full blocks are shared and never copied",
    ),
    (
        "the block that was copied keeps a user who has left it: memory in use only grows (xLLM-AI/xllm#828)",
        "run_allocator",
        "            self.users[table[-1]] -= 1\n",
        "",
        "an unfinished block with three owners",
    ),
    (
        "the next token is counted before it is there (GeeeekExplorer/nano-vllm#65, #66)",
        "run_allocator",
        "blocks = self.take(-(-(length + tokens) // self.block_size) - len(table) + shared)",
        "blocks = self.take((length + tokens) // self.block_size + 1 - len(table) + shared)",
        "random histories: every table, count and copy",
    ),
    (
        "freeing sets the count to 0 though a live sequence shares the block (Avarok-Cybersecurity/atlas#373)",
        "run_allocator",
        "            self.users[block] -= 1\n            if",
        "            self.users[block] = 0\n            if",
        "a block stays until its last owner is gone",
    ),
    (
        "finished sequences leave without giving back (jjang-ai/vmlx#68)",
        "run_allocator",
        "                self.free_blocks.append(block)",
        "                pass",
        "a block stays until its last owner is gone",
    ),
    (
        "blocks got before the failure are kept (Avarok-Cybersecurity/atlas#373, suffix)",
        "run_allocator",
        "        if count > len(self.free_blocks):\n",
        "        while self.free_blocks and count > len(self.free_blocks) > 0:\n"
        "            self.users[self.free_blocks.popleft()] = 1\n        if count > len(self.free_blocks):\n",
        "one block short: nothing was taken",
    ),
    (
        "extras in the order in which they were given: two callers, two roots (LMCache/LMCache#1728)",
        "chain_keys",
        "sort_keys=True, ",
        "",
        "roots of random extras, in any order",
    ),
    (
        "Python's hash, another one in every process (LMCache/LMCache#2136, #2511)",
        "chain_keys",
        "return hashlib.sha256(text.encode()).digest()",
        "return hash(text).to_bytes(32, 'little', signed=True)",
        "roots of random extras, in any order",
    ),
    (
        "the salt never reaches the keys: one customer finds what another computed",
        "chain_keys",
        "keys, last = [], root",
        'keys, last = [], b""',
        "other roots and other beginnings give other keys",
    ),
    (
        "a key of the block's own tokens only: equal blocks in different prompts are one",
        "chain_keys",
        "last = hashlib.sha256(last + content).digest()",
        "last = hashlib.sha256(root + content).digest()",
        "other roots and other beginnings give other keys",
    ),
    (
        "the unfinished last block gets a key (sgl-project/sglang#10637)",
        "chain_keys",
        "range(block_size, len(tokens) + 1, block_size)",
        "range(block_size, len(tokens) + block_size, block_size)",
        "an unfinished block has no key",
    ),
    (
        "tokens of two bytes: vocabularies have outgrown them",
        "chain_keys",
        'token.to_bytes(4, "little")',
        '(token % 65536).to_bytes(2, "little")',
        "random tokens, any block size",
    ),
    (
        "hits behind a gap are counted (llm-d/llm-d-inference-sim#705)",
        "find_prefix",
        "            break\n        found.append(block)",
        "            parent = cached.get(keys[i], [-1])[0]\n            continue\n        found.append(block)",
        "a gap ends the run",
    ),
    (
        "tokens are not compared on a hit (openvinotoolkit/openvino.genai#3722)",
        "find_prefix",
        "if content != tokens[i * block_size : (i + 1) * block_size] or its_parent != parent:",
        "if not content or its_parent != parent:",
        "a collision is no hit",
    ),
    (
        "tokens are compared, what stands before them is not (openvinotoolkit/openvino.genai#3722, second half)",
        "find_prefix",
        " or its_parent != parent:",
        ":",
        "the same tokens behind another prefix",
    ),
    (
        "a prompt that is cached as a whole leaves nothing to compute (GeeeekExplorer/nano-vllm#144)",
        "find_prefix",
        "(len(tokens) - 1) // block_size",
        "len(tokens) // block_size",
        "at least one token is left",
    ),
    (
        "a hit does not lock what it found: pressure evicts it (sgl-project/mini-sglang#52)",
        "run_cache",
        "                self.policy.reused(key)\n                self.cached -= 1\n",
        "                self.cached -= 1\n",
        "what a hit pinned stays, however full it gets",
    ),
    (
        "a block is given away and its old key still finds it (GeeeekExplorer/nano-vllm#163)",
        "run_cache",
        "block = self.block_of.pop(key)",
        "block = self.block_of[key]",
        "a block with a new owner is not found under its old key",
    ),
    (
        "an evicted block keeps its key and is cached again without content (ovg-project/kvcached#362)",
        "run_cache",
        "                self.key_of[block] = None\n",
        "",
        "a block that was evicted and not published again is free",
    ),
    (
        "the count of used blocks depends on the order of calls (xLLM-AI/xllm#828)",
        "run_cache",
        "                self.cached -= 1\n                self.policy.evicted(key)",
        "                self.policy.evicted(key)",
        "a block that was evicted and not published again is free",
    ),
    (
        "releasing forces the count to 0 though others use the block (Avarok-Cybersecurity/atlas#373)",
        "run_cache",
        "            self.users[block] -= 1\n            if self.users[block] == 0 and",
        "            self.users[block] = 0\n            if self.users[block] == 0 and",
        "forks: free + cached + live is the total",
    ),
    (
        "a request that cannot be served has evicted what it found (Avarok-Cybersecurity/atlas#373)",
        "run_cache",
        "        if count > len(self.free) + self.cached:\n",
        "        while self.cached and count > len(self.free):\n"
        "            self.free.append(self.block_of.pop(old := self.policy.victim()))\n"
        "            self.key_of[self.free[-1]], self.cached = None, self.cached - 1\n"
        "            self.policy.evicted(old)\n"
        "        if count > len(self.free) + self.cached:\n",
        "out of blocks: nothing was taken or evicted",
    ),
    (
        "two prompts of one step overwrite each other's entry (GeeeekExplorer/nano-vllm#219)",
        "run_cache",
        "        if key in self.block_of:\n            return False\n",
        "",
        "two prompts computed at the same time",
    ),
    (
        "blocks are released from the first to the last: the beginning goes first (mstar-project/mstar#210)",
        "run_cache",
        "for block in reversed(blocks):",
        "for block in blocks:",
        "prompts go from their ends, the older prompt first",
    ),
    (
        "hits do not count as use: first in, first out",
        "run_cache",
        "        self.order[key] = None\n",
        "        self.__dict__.setdefault('born', {}).setdefault(key, len(self.__dict__['born']))\n"
        "        self.order[key] = None\n"
        "        self.order = OrderedDict.fromkeys(sorted(self.order, key=self.born.get))\n",
        "a hit makes a prompt young again",
    ),
    (
        "a fork is not counted as a user",
        "run_cache",
        "        for block in blocks:\n            self.users[block] += 1\n        # END",
        "        pass\n        # END",
        "forks: free + cached + live is the total",
    ),
    (
        "the backup failed, and the block is said to be there (sgl-project/sglang#27108)",
        "run_tiers",
        "if (full and victim is None) or not self.write(name, key):",
        "self.write(name, key)\n        if full and victim is None:",
        "a copy that failed is found nowhere",
    ),
    (
        "the host gives up what is being loaded from it (sgl-project/sglang#31427)",
        "run_tiers",
        "victim = next((old for old in tier if old not in pinned), None)",
        "victim = next(iter(tier), None)",
        "what a prompt found does not leave while it is brought up",
    ),
    (
        "what the host gives up is dropped, the disk stays empty (sgl-project/sglang#5499)",
        "run_tiers",
        "            self.put(number + 1, victim, pinned)\n",
        "            if number == 0:\n                self.put(number + 1, victim, pinned)\n",
        "random prompts through three tiers",
    ),
    (
        "right until the host is full for the first time (vllm-project/vllm#54914)",
        "run_tiers",
        "full = len(tier) >= budget",
        "full = len(tier) > budget",
        "the oldest goes down first, and a hit is young",
    ),
    (
        "a block that went up still counts below: in two tiers at once",
        "run_tiers",
        "            for tier in self.tiers.values():\n                tier.pop(key, None)\n",
        '            self.tiers["device"].pop(key, None)\n',
        "random prompts through three tiers",
    ),
    (
        "hits behind a gap are counted, in tiers (llm-d/llm-d-inference-sim#705)",
        "run_tiers",
        "            if tier is None:\n                break\n",
        "            if tier is None:\n                tier = 'computed'\n",
        "behind a gap nothing is a hit",
    ),
]
