"""Bugs that other engines had, in public, as tests of this one: scheduling, stop strings, detokenising, sampling,
uninitialised memory. Each test names its case, runs the case's own small input against an oracle, and where that takes
few lines re-creates the bug (`broken`), to show that the oracle would have seen it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from cs336_kernels.ops import attention
from pydantic import ValidationError

from cs336_infer import LLM, FinishReason, InvalidRequest, LoadedModel, SamplingParams, generate, load_model
from cs336_infer import sampling as sampling_module
from cs336_infer.answer import Answer
from cs336_infer.distribution import probabilities
from cs336_infer.engine.scheduler import OutOfCapacity, Scheduler
from cs336_infer.engine.sequence import Sequence
from cs336_infer.kv import singles
from cs336_infer.kv.manager import KVManager
from cs336_infer.kv.paged import PagedKV, Row
from cs336_infer.sampling import Sampler, draw
from cs336_infer.serve.protocol import ChatRequest
from cs336_infer.text import StopStrings, StreamDetokenizer
from cs336_infer.types import Completion

NAN = float("nan")
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write_model(folder)
    return load_model(folder, dtype="float32", kernels="reference")


def small(model: LoadedModel, **options: Any) -> LLM:
    return LLM(model, **({"block_size": 4, "kv_tokens": 256, "debug": True, "fill": NAN} | options))


def greedy(tokens: int = 8, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **params)


_KNOWN: dict[str, list[int]] = {}


def oracle(model: LoadedModel, prompt: list[int], params: SamplingParams) -> list[int]:
    key = f"{id(model)} {prompt} {params}"
    if key not in _KNOWN:
        _KNOWN[key] = generate(model, prompt, params, kv="none")[0].token_ids
    return _KNOWN[key]


def broken(check: Callable[[], Any]) -> None:
    """The check must not pass: the bug was put in on purpose."""
    try:
        check()
    except Exception:
        return
    pytest.fail("the oracle does not see this bug")


def run(llm: LLM, sequence: Sequence, *, preempt_at: int | None = None, most: int = 400) -> list[int]:
    """Tokens of the events of one sequence; it is preempted once, when it has so many tokens in KV memory."""
    tokens = []
    for _ in range(most):
        if sequence.ended:
            return tokens
        if preempt_at is not None and sequence in llm.engine.running and sequence.stored == preempt_at:
            llm.engine.scheduler.preempt(sequence)
            preempt_at = None
        tokens += [e.token_id for e in llm.engine.step() if e.index == sequence.number]
    raise AssertionError("it does not end")


def add(llm: LLM, prompt: list[int], params: SamplingParams) -> Sequence:
    return llm.engine.add(prompt, params, llm.root())[0]


# ---- scheduling


@pytest.mark.parametrize("caching", [False, True])
def test_a_token_sampled_after_preemption_is_kept_once(model, monkeypatch, caching):
    """GeeeekExplorer/nano-vllm#217: preempted one token behind a full block, the token of the second prefill was lost.
    vllm-project/vllm#16832: the output after a preemption is the output without."""

    def check() -> None:
        for length, at in ((4, 4), (4, 5), (4, 8), (3, 9)):
            prompt, llm = PROMPT[:length], small(model, prefix_cache=caching)
            sequence = add(llm, prompt, greedy())
            events = run(llm, sequence, preempt_at=at)
            assert events == sequence.completion.token_ids == oracle(model, prompt, greedy())
            assert llm.engine.scheduler.preemptions == 1 and llm.kv.pool.live == 0

    check()
    preempt = Scheduler.preempt

    def forgets_one(self: Scheduler, sequence: Sequence) -> None:
        preempt(self, sequence)
        if sequence.completion.token_ids:
            sequence.completion.token_ids.pop()

    monkeypatch.setattr(Scheduler, "preempt", forgets_one)
    broken(check)


def test_a_resumed_sequence_prefills_all_its_tokens(model, monkeypatch):
    """GeeeekExplorer/nano-vllm#144 (1), vllm-project/vllm-gaudi#524, vllm-project/vllm-ascend#11334: whether it is in
    prefill was read from the number of answer tokens, or from the length of the prompt, and a resumed sequence with an
    answer of its own was taken for one in decode."""

    def check() -> None:
        llm = small(model, prefix_cache=False, step_tokens=4)
        sequence = add(llm, PROMPT[:3], greedy(14))
        seen, produced = [], len(sequence.completion.token_ids)
        while not sequence.ended:
            if sequence.stored == 11 and not llm.engine.scheduler.preemptions:
                llm.engine.scheduler.preempt(sequence)
                produced = len(sequence.completion.token_ids)
            llm.engine.step()
            if llm.engine.scheduler.preemptions and len(seen) < 3:
                seen.append((sequence.stored, len(sequence.completion.token_ids) - produced))
        assert seen == [(4, 0), (8, 0), (12, 1)]
        assert sequence.completion.token_ids == oracle(model, PROMPT[:3], greedy(14))

    check()

    def by_prompt(self: Sequence) -> int:
        return max(1, len(self.completion.prompt_token_ids) - self.stored)

    monkeypatch.setattr(Sequence, "remaining", property(by_prompt))
    broken(check)


def test_blocks_are_allocated_when_the_last_one_is_full_and_not_before(model, monkeypatch):
    """GeeeekExplorer/nano-vllm#65, #66: room for the next token, counted as if it were there already."""

    def check() -> None:
        for size, length in ((1, 3), (2, 4), (3, 5), (4, 4), (4, 7)):
            llm = small(model, block_size=size)
            sequence = add(llm, PROMPT[:length], greedy(6))
            while not sequence.ended:
                llm.engine.step()
                assert sequence.kv is None or len(sequence.kv.table) == math.ceil(sequence.stored / size)

    check()
    missing = KVManager.missing
    monkeypatch.setattr(KVManager, "missing", lambda self, kv, new: missing(self, kv, new + 1))
    broken(check)


def test_alone_and_out_of_memory_ends_the_request_and_not_the_engine(model):
    """nano-vllm at bb823b3: a sequence that is alone preempted itself, and the engine died on an assertion."""
    llm = small(model, kv_tokens=8)
    with pytest.raises(OutOfCapacity, match="9 tokens"):
        llm.generate(PROMPT, greedy())
    alone = llm.generate(PROMPT[:6], greedy(20))[0]
    assert alone.finish_reason is FinishReason.ERROR and "KV memory" in str(alone.error)
    assert alone.token_ids == oracle(model, PROMPT[:6], greedy(20))[: len(alone.token_ids)] != []
    assert llm.kv.pool.live == 0 and llm.engine.scheduler.preemptions == 0
    assert llm.generate(PROMPT[:3], greedy(5))[0].token_ids == oracle(model, PROMPT[:3], greedy(5))


def test_penalties_look_at_the_same_tokens_after_a_preemption(model, monkeypatch):
    """vllm-project/vllm#5349 (#3032): after a recomputation the answer so far was counted as prompt, or not at all."""
    params = greedy(12, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3)
    want = oracle(model, PROMPT[:5], params)
    assert want != oracle(model, PROMPT[:5], greedy(12))

    def check() -> None:
        for at in (5, 8, 11):
            llm = small(model)
            sequence = add(llm, PROMPT[:5], params)
            assert run(llm, sequence, preempt_at=at) == want

    check()
    preempt = Scheduler.preempt

    def forgets_counts(self: Scheduler, sequence: Sequence) -> None:
        preempt(self, sequence)
        sequence.sampler = Sampler([params], [sequence.tokens], model.config.vocab_size)

    monkeypatch.setattr(Scheduler, "preempt", forgets_counts)
    broken(check)


def test_preemption_does_not_go_on_for_ever(model, monkeypatch):
    """vllm-project/vllm#25538: a resumed sequence was let in when its first chunk fitted, and put out again by the next
    step, for ever. Here it comes in when all of it fits: an answer gives way twice at most, on average."""
    prompts = [[s, *PROMPT[:7]] for s in range(20, 24)]

    def check() -> None:
        llm = small(model, kv_tokens=24, step_tokens=3, prefix_cache=False)
        answers = llm.generate(prompts, greedy(12))
        assert [a.token_ids for a in answers] == [oracle(model, p, greedy(12)) for p in prompts]
        assert 0 < llm.engine.scheduler.preemptions <= 2 * len(prompts)

    check()
    missing = KVManager.missing
    monkeypatch.setattr(KVManager, "missing", lambda self, kv, new: missing(self, kv, min(new, 3)))
    broken(check)


def test_every_prompt_length_and_chunk(model, monkeypatch):
    """tenstorrent/vllm#448: a last chunk of one token was taken for decode. torch-spyre/sendnn-inference#552: a chunk
    ran past the end of the prompt. vllm-project/vllm#15307: an unfinished prefill gave a token of its own."""

    llm = small(model, prefix_cache=False)

    def check() -> None:
        for length, chunk in itertools.product(range(1, 10), range(1, 6)):
            llm.engine.scheduler.step_tokens = chunk
            sequence = add(llm, PROMPT[:length], greedy(2))
            steps = [len(llm.engine.step()) for _ in range(math.ceil(length / chunk))]
            assert steps == [0] * (len(steps) - 1) + [1]
            assert sequence.stored == length
            run(llm, sequence)
            assert sequence.completion.token_ids == oracle(model, PROMPT[:length], greedy(2))

    check()
    remaining = Sequence.remaining.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Sequence, "remaining", property(lambda self: min(remaining(self), 3)))
    broken(check)


def test_who_cannot_be_admitted_holds_no_blocks(model, monkeypatch):
    """vllm-project/vllm#18411: a request that found its blocks, but no room for the rest, kept what it had found."""

    def check() -> None:
        llm = small(model, kv_tokens=48)
        llm.generate(PROMPT, greedy(1))  # two full blocks are cached
        first = add(llm, list(range(40, 72)), greedy(8))
        llm.engine.step()
        waits = add(llm, PROMPT + list(range(80, 92)), greedy(2))
        live = llm.kv.pool.live
        llm.engine.step()
        assert waits in llm.engine.scheduler.waiting and waits.kv is None
        assert llm.kv.pool.live <= live + 1  # at most the block that the first one grew by
        assert run(llm, first) and run(llm, waits) == oracle(model, waits.completion.prompt_token_ids, greedy(2))
        hit = llm.generate(PROMPT[:8], greedy(2))[0]  # cached whole
        assert hit.token_ids == oracle(model, PROMPT[:8], greedy(2)) and llm.kv.pool.live == 0

    check()
    monkeypatch.setattr(Scheduler, "give_back", lambda self, sequence: None)
    broken(check)


# ---- stop strings and limits


def shown_at_once(chunks: list[str], stops: list[str]) -> Iterator[str]:
    """What several engines did: look at what came, and show it."""
    text = ""
    for chunk in chunks:
        text += chunk
        if any(stop in text for stop in stops):
            return
        yield chunk


def test_the_beginning_of_a_stop_is_never_shown():
    """vllm-project/vllm#3574, #2577, sgl-project/sglang#11446: the stream showed "DEF", "G", "HI" of the stop
    "DEFGHIJ". The stream, joined, is what the whole text gives."""
    chunks, stops = ["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"]
    search = StopStrings(stops)
    assert [search.push(c) for c in chunks] == ["ABC", "", "", "", "", ""] and search.matched == "DEFGHIJ"
    search = StopStrings(stops)
    assert [search.push(c) for c in ["ABCDEF", "GHI", "X"]] == ["ABC", "", "DEFGHIX"]  # shown when it cannot be
    assert "".join(shown_at_once(chunks, stops)) != "ABC"


def answer_of(model: LoadedModel, ids: list[int], **params: Any) -> Completion:
    """What becomes of an answer of these tokens."""
    done = Completion(PROMPT)
    answer = Answer(model, PROMPT, SamplingParams(**({"max_tokens": len(ids)} | params)), done)
    for token in ids:
        if done.finish_reason is None:
            answer.accept(0, token, 0.0)
    return done


def test_a_stop_that_no_token_begins_or_ends_with(model):
    """vllm-project/vllm#3672 (#3572, #3026): stops across tokens, and special tokens among them, cut too much."""
    text = "the capital of France is Paris"
    ids = model.tokenizer.encode(text)
    eos = next(iter(model.tokenizer.eos_ids))
    for start, end in itertools.combinations(range(4, 20, 3), 2):
        stop = text[start:end]
        want = text[: text.find(stop)]
        for tokens in (ids, [i for pair in zip(ids, [eos] * len(ids), strict=True) for i in pair]):
            done = answer_of(model, tokens, stop=stop, ignore_eos=True)
            assert (done.text, done.stop_reason, done.finish_reason) == (want, stop, FinishReason.STOP)
    assert answer_of(model, [*ids, eos]).text == text


def test_a_stop_among_thoughts_ends_the_answer_with_the_text_so_far(model):
    """vllm-project/vllm#14170, #21952, #24941, #52486: the content was None. This engine has no parser of thoughts: a
    stop counts wherever it is, and the text before it is the answer, if need be an empty one."""
    for text, want in (("<think>fib: n", "<think>fib"), (": fib", "")):
        done = answer_of(model, model.tokenizer.encode(text), stop=":")
        assert (done.text, done.finish_reason) == (want, FinishReason.STOP)


def test_stops_are_not_looked_for_in_the_prompt_and_are_named(model):
    """vllm-project/vllm#11089: a stop of the prompt gave an empty text. raullenchai/Rapid-MLX#469: stops were taken and
    never obeyed, and the wrong one was named."""
    prompt = model.tokenizer.encode("the capital of France")
    llm = small(model)
    free = llm.generate(prompt, greedy(12))[0].text
    stop = free[5:7]
    done = llm.generate(prompt, greedy(12, stop=("France", stop)))[0]
    assert done.text == free[: free.find(stop)] and done.stop_reason == stop
    assert llm.generate("x" + stop, greedy(1, stop=(stop,)))[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("field", ["stop_token_ids", "include_stop_str_in_output", "bad_words", "guided_json", "typo"])
def test_what_is_not_obeyed_is_refused(field):
    """smg-project/smg#1524: stops that the backend could not obey were dropped in silence."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    ChatRequest.model_validate(body | {"stop": ["several tokens long", "</s>"]})
    with pytest.raises(ValidationError, match=field):
        ChatRequest.model_validate(body | {field: [1]})


def test_min_tokens_counts_real_tokens(model, monkeypatch):
    """ROCm/ATOM#1973: placeholders were counted, and the end came too early."""
    eos = next(iter(model.tokenizer.eos_ids))

    def check() -> None:
        llm = small(model)
        for least in (0, 1, 4):
            bias = SamplingParams(max_tokens=10, min_tokens=least, logit_bias={eos: 100})
            done = llm.generate(PROMPT, bias)[0]
            assert done.finish_reason is FinishReason.EOS and done.token_ids.index(eos) == least
            text = model.tokenizer.decode(done.token_ids)
            stopped = llm.generate(PROMPT, greedy(10, min_tokens=least, stop=tuple(set(text) or ("x",))))[0]
            assert len(stopped.token_ids) > least

    check()
    remember = sampling_module._Row.remember

    def counts_a_placeholder(self: Any, token: int) -> None:
        remember(self, token)
        self.produced += 1

    monkeypatch.setattr(sampling_module._Row, "remember", counts_a_placeholder)
    broken(check)


# ---- detokenising


class Bytes:
    """A token per byte."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return False


def streamed(text: str) -> tuple[list[str], str]:
    stream = StreamDetokenizer(Bytes())
    pieces = [stream.push(b) for b in text.encode()]
    return pieces, "".join(pieces) + stream.flush() + stream.flush()


@pytest.mark.parametrize("text", ["🙂🙃 👩‍👩‍👧‍👦", "繁體中文", "ď ů ñ", "한국어", "a\u0301 é"])
def test_a_character_in_several_tokens(text):
    """antonellof/ferrox#124, exo-explore/exo#1691, waybarrios/vllm-mlx#109, tenstorrent/tt-inference-server#2586."""
    pieces, whole = streamed(text)
    assert whole == text and "\ufffd" not in "".join(pieces)
    one_by_one = "".join(bytes([b]).decode("utf-8", "replace") for b in text.encode())
    assert "\ufffd" in one_by_one  # what decoding one id at a time gives


def test_max_tokens_inside_an_emoji_ends_normally(model):
    """timtoole02/Camelid#288: a 503 where the last token ended inside a character. Luce-Org/lucebox#641: the bytes that
    were left at the end came never, or twice."""
    for text in ("ok 🙂", "한국어 🙂"):
        ids = [i for byte in text.encode() for i in [_byte_token(model, byte)]]
        for end in range(1, len(ids) + 1):
            done = answer_of(model, ids[:end])
            assert done.finish_reason is FinishReason.LENGTH
            data = text.encode()[:end]
            assert done.text == data.decode("utf-8", "replace") == model.tokenizer.decode(ids[:end])
            assert done.text.count("\ufffd") <= 1
            with_stop = answer_of(model, ids[:end], stop="never")
            assert with_stop.text == done.text


def _byte_token(model: LoadedModel, byte: int) -> int:
    tokens = range(model.config.vocab_size)
    return next(
        t for t in tokens if not model.tokenizer.is_special(t) and model.tokenizer.token_bytes(t) == bytes([byte])
    )


def test_no_syllable_of_hangul_is_lost():
    """ai-dynamo/dynamo#12630: text decoded again and cut at the length of an earlier decoding that ended in U+FFFD lost
    5 to 13 syllables of an answer."""
    text = "대한민국의 수도는 서울이다. 인공지능은 우리의 삶을 바꾼다. " * 4
    assert streamed(text)[1] == text

    def looks_back(data: bytes) -> str:
        shown, start = "", 0
        for end in range(1, len(data) + 1):
            before = data[start : end - 1].decode("utf-8", "replace")
            now = data[start:end].decode("utf-8", "replace")
            shown += now[len(before) :] if not now.endswith("\ufffd") else ""
        return shown

    assert looks_back(text.encode()) != text


def test_a_token_with_a_space_while_bytes_wait():
    """Blaizzy/mlx-vlm#1771, #1778: it flushed what waited, and lost it."""
    stream = StreamDetokenizer(Bytes())
    assert "".join(stream.push(b) for b in "🙂".encode()[:2] + b" a") + stream.flush() == "\ufffd a"


# ---- sampling


def test_a_seeded_request_beside_an_unseeded_one(model, monkeypatch):
    """vllm-project/vllm#51226: its output varied with its neighbours. vllm-project/vllm#51187: byte-identical requests
    gave different answers in batches of other sizes; here in float32, over batch size and place."""
    seeded, free = greedy(10, temperature=1.0, seed=3), greedy(10, temperature=1.0)

    def check() -> None:
        want = oracle(model, PROMPT, seeded)
        for others, place in ((0, 0), (1, 0), (1, 1), (5, 2)):
            prompts = [list(range(30 + i, 36 + 2 * i)) for i in range(others)]
            params = [free] * others
            prompts.insert(place, PROMPT)
            params.insert(place, seeded)
            assert small(model).generate(prompts, params)[place].token_ids == want

    check()
    shared = torch.Generator()
    monkeypatch.setattr(sampling_module.torch, "Generator", lambda: shared)
    broken(check)


def test_the_best_token_is_never_dropped(monkeypatch):
    """Anthropic's post-mortem of 2025-09-17 (c): an approximate top-k in mixed precision dropped the best token."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 4

    def check() -> None:
        for k in (1, 2, 40, 4999):
            kept = probabilities(logits, SamplingParams(temperature=1.0, top_k=k)).nonzero().flatten()
            assert set(kept.tolist()) == set(logits.sort(descending=True).indices[:k].tolist())

    check()
    exact = torch.Tensor.topk

    def by_bins(self: torch.Tensor, k: int, *args: Any) -> Any:
        """The best of each bin, in bfloat16: what hardware offers as a fast top-k."""
        bins = torch.nn.functional.pad(self.bfloat16().double(), (0, -len(self) % 64), value=-torch.inf).view(64, -1)
        best = bins.max(1)
        found = best.indices + torch.arange(64) * bins.shape[1]
        return exact(self, k, *args) if k > 64 else torch.return_types.topk((self[found[:k]], found[:k]))

    monkeypatch.setattr(torch.Tensor, "topk", by_bins)
    broken(check)


def test_a_distribution_is_tested_and_not_only_its_best_token():
    """vllm-project/vllm#41985: a rounding that was wrong by one bit left greedy answers clean and put one wrong token
    into every few thousand at temperature 1."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 2
    p = probabilities(logits, SamplingParams(temperature=1.0))
    tail = p < 1e-3
    draws = 20_000

    def deviation(drawn_from: torch.Tensor) -> float:
        """Of the number of draws from the tail, in standard deviations."""
        generator = torch.Generator().manual_seed(2)
        got = sum(bool(tail[draw(drawn_from, generator)]) for _ in range(draws))
        mass = float(p[tail].sum())
        return abs(got - draws * mass) / math.sqrt(draws * mass * (1 - mass))

    coarse = probabilities(
        (logits * 2).round() / 2 + 0.35 * (logits < logits.quantile(0.5)), SamplingParams(temperature=1.0)
    )
    assert coarse.argmax() == p.argmax()
    assert deviation(p) < 4 < deviation(coarse)


# ---- memory that nobody wrote


FILLS = (NAN, 1e4, -3.0)


def steps(model: LoadedModel, fill: float) -> list[torch.Tensor]:
    """Attention of two steps over the same memory, the second narrower: rows of 13, 1, 6 and 5 tokens, then of 7 and 2.
    Block 0, which pads every table, and the tails of last blocks hold `fill`."""
    config = model.config
    memory = PagedKV(config, num_blocks=16, block_size=4, dtype=torch.float32, fill=fill)
    shape, rng = (config.num_kv_heads, config.head_dim), torch.Generator().manual_seed(0)
    found = []
    for tables, totals in (([[1, 2, 3, 4], [5], [6, 7], [8, 9]], [13, 1, 6, 5]), ([[10, 11], [12]], [7, 2])):
        keys, values = (torch.randn(sum(totals), *shape, generator=rng) for _ in range(2))
        q = torch.randn(len(totals), config.num_heads, config.head_dim, generator=rng)
        starts = [0, *itertools.accumulate(totals)]
        for table, start, total in zip(tables, starts, totals, strict=False):
            for i in range(total - 1):  # the past; the newest token is stored by the step itself
                memory.data[table[i // 4], 0, 0, i % 4] = keys[start + i]
                memory.data[table[i // 4], 0, 1, i % 4] = values[start + i]
        step = memory.step([Row(t, n - 1, 1) for t, n in zip(tables, totals, strict=True)])
        newest = [start + n - 1 for start, n in zip(starts, totals, strict=False)]
        out = step.extend(len(totals))(0, q[None], keys[None, newest], values[None, newest])
        found.append(out[0])
        for row, (start, n) in enumerate(zip(starts, totals, strict=False)):
            k, v = (t[None, start : start + n].transpose(1, 2) for t in (keys, values))
            torch.testing.assert_close(
                out[0, row], attention(q[row][None, :, None], k, v)[0, :, 0], rtol=1e-5, atol=1e-5
            )
    return found


def test_unwritten_keys_and_values_reach_no_answer(model, monkeypatch):
    """deepbeepmeep/Wan2GP#1628: keys from `torch.empty`, and NaN plus a mask of minus infinity is NaN.
    vllm-project/vllm#641, #936, #940: zero times a NaN in V is NaN. vllm-project/vllm#37442: padded rows that nobody
    wrote were read. vllm-project/vllm#48089: the strides of the widest batch were kept, and rows of a narrower one
    read stale bytes."""

    def check() -> None:
        first, *others = (steps(model, fill) for fill in FILLS)
        for other in others:
            assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, other, strict=True))

    check()
    gather = singles.Gathered.gather

    def masks_only(self: Any, *args: Any) -> torch.Tensor:
        self._hidden = None  # the mask stays
        return gather(self, *args)

    monkeypatch.setattr(singles.Gathered, "gather", masks_only)
    broken(check)


@pytest.mark.parametrize("part", [0, 1])
def test_poisoned_keys_or_values_change_no_token(model, part):
    """The same in the engine: every slot of K, or of V, holds NaN before it is written."""
    prompts = [PROMPT[:n] for n in (1, 5, 8, 9)]
    llm = small(model, fill=None)
    llm.kv.memory.data[:] = 0.5
    llm.kv.memory.data[:, :, part] = NAN
    answers = llm.generate(prompts, greedy(7))
    assert [a.token_ids for a in answers] == [oracle(model, p, greedy(7)) for p in prompts]


def test_the_first_answer_with_an_allocator_that_poisons(model, monkeypatch):
    """vllm-project/vllm-ascend#17003: the first answer after a start read outputs that no kernel had written.
    vllm-project/tpu-inference#3426: carry buffers from `empty` were taken for harmless. torch fills what `empty` gives
    with NaN here."""

    def check() -> None:
        llm = small(model, fill=None, step_tokens=5)
        for _ in range(2):
            answers = llm.generate([PROMPT, PROMPT[:2], PROMPT[:6]], greedy(6))
            assert [a.token_ids for a in answers] == [
                oracle(model, p, greedy(6)) for p in (PROMPT, PROMPT[:2], PROMPT[:6])
            ]

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        check()
        copy = torch.Tensor.index_copy_
        monkeypatch.setattr(torch.Tensor, "index_copy_", lambda self, dim, index, t: copy(self, dim, index[1:], t[1:]))
        broken(check)
    finally:
        torch.use_deterministic_algorithms(False)


def test_logits_that_are_no_numbers_fail_their_request_alone(model, monkeypatch):
    """vllm-project/vllm#22881, #13035, #14126: argmax of NaN is token 0, and the answer "!!!!!!!!" with a 200."""
    forward = type(model.net).forward

    def poisons(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        logits = forward(self, *args, **options).clone()
        if logits.shape[1] == 3:
            logits[0, 1, 7] = NAN
        return logits

    prompts = [PROMPT, PROMPT[:4], PROMPT[:6]]

    def check() -> None:
        answers = small(model).generate(prompts, greedy(6))
        assert [a.finish_reason for a in answers] == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
        assert answers[1].token_ids == [] and "NaN" in str(answers[1].error)
        for i in (0, 2):
            assert answers[i].token_ids == oracle(model, prompts[i], greedy(6))

    monkeypatch.setattr(type(model.net), "forward", poisons)
    check()
    monkeypatch.setattr(Sampler, "__call__", lambda self, logits: logits.argmax(-1).tolist())
    broken(check)


def test_bad_values_of_min_tokens_and_seed_are_refused():
    """What the cases above rely on is checked on creation."""
    for values in ({"min_tokens": -1}, {"min_tokens": 9, "max_tokens": 8}, {"seed": -1}, {"stop": ("",)}):
        with pytest.raises(InvalidRequest):
            SamplingParams(**values)  # type: ignore[arg-type]
