"""Realistic bugs of assignment 3. Each changes one place of the reference and must be caught by the check it names.

(name, exercise, text of the reference, what the bug puts there, title of a hidden check that must fail)

Numbers are public reports: issues and pull requests of the projects named.
"""

MUTANTS = [
    (
        "a prompt that came first takes the whole step: answers stall behind it",
        "schedule_step",
        'key=lambda r: (r["total"] - r["stored"] > 1, r["rank"])):',
        'key=lambda r: r["rank"]):',
        "answers come first, however late they came",
    ),
    (
        "only the first chunk must fit to come in: it gives way again and again (vllm-project/vllm#25538)",
        "schedule_step",
        'too_large = blocks_missing(request, request["total"], block_size) > free',
        'chunk = min(request["total"], request["stored"] + step_tokens)\n'
        "        too_large = blocks_missing(request, chunk, block_size) > free",
        "who comes in fits as a whole, not its first chunk",
    ),
    (
        "a small request overtakes a large one, which waits for ever",
        "schedule_step",
        "        if len(batch) >= max_batch or (batch and too_large):\n            break\n",
        "        if len(batch) >= max_batch or (batch and too_large):\n            continue\n",
        "nobody overtakes, and max_batch counts those who run",
    ),
    (
        "max_batch counts only those who come in now",
        "schedule_step",
        "if len(batch) >= max_batch or",
        "if len(admitted) >= max_batch or",
        "nobody overtakes, and max_batch counts those who run",
    ),
    (
        "the next token is counted before it is there (GeeeekExplorer/nano-vllm#65, #66)",
        "schedule_step",
        'return -(-tokens // block_size) - request["blocks"]',
        'return tokens // block_size + 1 - request["blocks"]',
        "a block is taken when a token needs it, not before",
    ),
    (
        "alone and memory is full: it gives way to itself, for ever (GeeeekExplorer/nano-vllm, bb823b3)",
        "schedule_step",
        '(preempted if len(batch) > 1 else failed).append(victim["id"])',
        'preempted.append(victim["id"])',
        "one that is alone and does not fit has failed",
    ),
    (
        "the first in rank gives way: two requests take each other's blocks",
        "schedule_step",
        'victim = max(batch.values(), key=lambda r: r["rank"])',
        'victim = min(batch.values(), key=lambda r: r["rank"])',
        "the last in rank gives way, even if it asks itself",
    ),
    (
        "the one that asks never gives way itself",
        "schedule_step",
        'victim = max(batch.values(), key=lambda r: r["rank"])',
        'others = [r for r in batch.values() if r["id"] != request["id"]] or [request]\n'
        '            victim = max(others, key=lambda r: r["rank"])',
        "the last in rank gives way, even if it asks itself",
    ),
    (
        "who gave way still computes in the same step, into memory of others",
        "schedule_step",
        '            compute.pop(victim["id"], None)\n',
        "",
        "who gives way leaves its blocks and its tokens to the others",
    ),
    (
        "blocks taken in this step are lost when their owner gives way (xLLM-AI/xllm#828)",
        "schedule_step",
        '                request["blocks"] += need\n',
        "",
        "who gives way leaves its blocks and its tokens to the others",
    ),
    (
        "what the cache found is computed again and counted twice",
        "schedule_step",
        'need = blocks_missing(request, request["stored"] + new, block_size)',
        "need = blocks_missing(request, new, block_size)",
        "random steps: who comes in, computes, gives way",
    ),
    (
        "the last chunk has one token: it is taken for a decode step (tenstorrent/vllm#448)",
        "run_request",
        'return "decode" if self.answer and missing == 1 else "prefill"',
        'return "decode" if missing == 1 else "prefill"',
        "a last chunk of one token belongs to the prompt",
    ),
    (
        "prefill is what has no answer yet: who comes back is taken for a decode step (GeeeekExplorer/nano-vllm#144)",
        "run_request",
        'return "decode" if self.answer and missing == 1 else "prefill"',
        'return "decode" if self.answer else "prefill"',
        "after giving way the answer is computed again before the next token",
    ),
    (
        "the token sampled in the middle of a prompt is kept (vllm-project/vllm#15307)",
        "run_request",
        "if not chunk or self.stored < len(tokens):",
        "if not chunk:",
        "what is sampled in the middle of a prompt is dropped",
    ),
    (
        "who comes back is ready when its prompt is (vllm-project/vllm-ascend#11334, vllm-gaudi#524)",
        "run_request",
        "if not chunk or self.stored < len(tokens):",
        "if not chunk or self.stored < len(self.prompt):",
        "after giving way the answer is computed again before the next token",
    ),
    (
        "after giving way the answer still counts as stored (vllm-project/vllm#5349)",
        "run_request",
        "    def preempt(self) -> None:\n"
        '        """It gives way: its KV memory is gone."""\n'
        "        # BEGIN SOLUTION\n        self.stored = 0\n",
        "    def preempt(self) -> None:\n"
        "        # BEGIN SOLUTION\n        self.stored = max(0, len(self.answer) - 1)\n",
        "after giving way the answer is computed again before the next token",
    ),
    (
        "the token of the step that computed everything again is not appended (GeeeekExplorer/nano-vllm#217)",
        "run_request",
        "        self.answer.append(sampled)\n",
        "        if len(chunk) == 1 or not self.answer:\n            self.answer.append(sampled)\n",
        "after giving way the answer is computed again before the next token",
    ),
    (
        "the end of a chunk lies behind the end of the prompt (torch-spyre/sendnn-inference#552)",
        "run_request",
        "        self.stored += len(chunk)\n",
        "        self.stored += budget if chunk else 0\n",
        "every length with every budget",
    ),
    (
        "giving way loses the answer too (vllm-project/vllm#16832)",
        "run_request",
        "    def preempt(self) -> None:\n"
        '        """It gives way: its KV memory is gone."""\n'
        "        # BEGIN SOLUTION\n        self.stored = 0\n",
        "    def preempt(self) -> None:\n        # BEGIN SOLUTION\n        self.stored, self.answer = 0, []\n",
        "after giving way the answer is computed again before the next token",
    ),
    (
        "the beginning of a stop is shown (vllm-project/vllm#3574, sgl-project/sglang#11446)",
        "run_stops",
        'self.held = next((end for end in ends if any(stop.startswith(end) for stop in self.stops)), "")',
        'self.held = ""',
        "a stop across the borders of tokens",
    ),
    (
        "a stop is only seen where it lies within one piece (vllm-project/vllm#3672)",
        "run_stops",
        "        text = self.held + text\n"
        "        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]\n",
        "        found = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]\n"
        "        text = self.held + text\n",
        "a stop across the borders of tokens",
    ),
    (
        "long stops are forgotten on the way: found in the whole text, not in the stream (vllm-project/vllm#2577)",
        "run_stops",
        "longest = max(map(len, self.stops), default=1) - 1",
        "longest = min(16, max(map(len, self.stops), default=1) - 1)",
        "a long stop, one character at a time",
    ),
    (
        "a fixed number of characters is held: the stream stutters",
        "run_stops",
        'self.held = next((end for end in ends if any(stop.startswith(end) for stop in self.stops)), "")',
        'self.held = next(ends, "")',
        "random texts and stops, cut anywhere",
    ),
    (
        "after a character that does not fit, the search begins behind it",
        "run_stops",
        "ends = (text[-n:] for n in range(min(longest, len(text)), 0, -1))",
        "ends = (text[-n:] for n in range(min(longest, len(text)), 0, -1) if n in (len(text), 1))",
        "a stop that begins inside its own beginning",
    ),
    (
        "the first stop of the list wins, and its name is reported (raullenchai/Rapid-MLX#469)",
        "run_stops",
        "end, _, self.matched = min(found)",
        "end, _, self.matched = found[0]",
        "which stop wins",
    ),
    (
        "of two stops that end together the shorter wins: the rest of the longer is shown",
        "run_stops",
        "-len(stop), stop)",
        "len(stop), stop)",
        "which stop wins",
    ),
    (
        "the stop itself is part of the text",
        "run_stops",
        "return text[: end - len(self.matched)]",
        "return text[:end]",
        "a stop across the borders of tokens",
    ),
    (
        "what is held at the end is lost (Luce-Org/lucebox#641)",
        "run_stops",
        'rest, self.held = self.held, ""\n        return rest',
        'self.held = ""\n        return self.held',
        "what is held at the end comes out, once",
    ),
    (
        "what was held comes out although a stop was found",
        "run_stops",
        '            self.held = ""\n            return text[: end',
        "            return text[: end",
        "random texts and stops, cut anywhere",
    ),
    (
        "text is held for a stop that can never win",
        "run_stops",
        "self.stops = [s for s in stops if not any(other in s[:-1] for other in stops)]",
        "self.stops = [*stops]",
        "nothing is held for a stop that can never win",
    ),
    (
        "twelve dashes are a group of four: the minimum comes before the smallest period (vllm-project/vllm#52677)",
        "watch_loops",
        "if n >= max(min_tokens, min_copies * p)), 0)",
        "if p >= min_period and n >= max(min_tokens, min_copies * p)), 0)",
        "the smallest period first, then the minimum",
    ),
    (
        "every earlier token is kept and looked at: work grows with the answer (vllm-project/vllm#46700)",
        "watch_loops",
        "recent = [*recent, newest][-max_period:]",
        "recent = [*recent, newest]",
        "the state stays small, however long the answer is",
    ),
    (
        "long units are not found: the past is cut too short (ggml-org/llama.cpp#26039)",
        "watch_loops",
        "recent = [*recent, newest][-max_period:]",
        "recent = [*recent, newest][-min(max_period, 48) :]",
        "long units are found, one longer than max_period is not",
    ),
    (
        "copies are counted without the first one",
        "watch_loops",
        "covered = ((p, run + p) for p, run in enumerate(runs, 1) if run)",
        "covered = ((p, run) for p, run in enumerate(runs, 1) if run)",
        "copies and tokens: both must be enough",
    ),
    (
        "enough tokens is enough: two copies of a long unit end a good answer",
        "watch_loops",
        "if n >= max(min_tokens, min_copies * p)), 0)",
        "if n >= min_tokens), 0)",
        "copies and tokens: both must be enough",
    ),
    (
        "the largest period is reported",
        "watch_loops",
        "covered = ((p, run + p) for p, run in enumerate(runs, 1) if run)",
        "covered = ((p, run + p) for p, run in reversed([*enumerate(runs, 1)]) if run)",
        "random answers and rules",
    ),
    (
        "a run is not forgotten when it ends",
        "watch_loops",
        "runs[p - 1] = runs[p - 1] + 1 if same else 0",
        "runs[p - 1] = runs[p - 1] + same",
        "a loop that ends, and another one",
    ),
    (
        "one state for all answers",
        "watch_loops",
        "    recent, runs = state or ([], [0] * max_period)\n",
        "    shared = watch_loops.__dict__.setdefault('shared', [[], [0] * 99])\n"
        "    recent, runs = shared if state else ([], [0] * max_period)\n"
        "    shared[:] = recent, runs\n",
        "many answers at once do not disturb each other",
    ),
]
