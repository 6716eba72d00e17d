"""The engine and its paged KV memory: hits that change nothing, forks, tiers, sessions, and requests that cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from cs336_infer import (
    LLM,
    FinishReason,
    InvalidRequest,
    LoadedModel,
    SamplingParams,
    Session,
    TierOptions,
    generate,
    load_model,
)  # fmt: skip
from cs336_infer.engine import SessionError
from cs336_infer.kv import LRU, KeyChain, root_key
from cs336_infer.types import InferError

NAN = float("nan")
P8 = SamplingParams(max_tokens=8, ignore_eos=True)
BLOCK_BYTES = 3 * 2 * 4 * 2 * 8 * 4  # layers, K and V, block of 4, KV heads, head size, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write_model(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] += "{% if add_generation_prompt %}assistant: {% endif %}"
    file.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32", kernels="reference")


def small(model: LoadedModel, **options: object) -> LLM:
    return LLM(model, **({"block_size": 4, "kv_tokens": 240, "debug": True, "fill": NAN} | options))  # type: ignore[arg-type]


def oracle(model: LoadedModel, prompt: list[int], params: SamplingParams = P8) -> list[int]:
    return generate(model, prompt, params, kv="none")[0].token_ids


# Keys


def test_keys_are_the_same_in_every_process():
    """LMCache#2136, #2511: equal tokens must have equal keys whatever PYTHONHASHSEED is, also with a None among the
    extras."""
    code = (
        "from cs336_infer.kv import KeyChain, root_key\n"
        "print(KeyChain(root_key(model='m', adapter=None, salt=''), 4, range(256)).keys[-1].hex())"
    )
    seen = set()
    for seed in ("0", "1", "random"):
        run = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        seen.add(run.stdout)
    seen.add(f"{KeyChain(root_key(model='m', adapter=None, salt=''), 4, range(256)).keys[-1].hex()}\n".encode())
    assert len(seen) == 1


def test_a_key_depends_on_all_that_its_numbers_depend_on():
    roots = [root_key(), root_key(salt=None), root_key(salt=""), root_key(salt="None"), root_key(salt="a", model="b")]
    roots += [root_key(salt="ab", model=""), root_key(salt="", model="ab"), root_key(size=1), root_key(size="1")]
    assert len(set(roots)) == len(roots)
    one, two = KeyChain(roots[0], 2, [1, 2, 3, 4]), KeyChain(roots[0], 2, [9, 2, 3, 4])
    assert one.keys[1] != two.keys[1] and one.contents[1] == two.contents[1]
    grown = KeyChain(roots[0], 2, [1])
    for token in (2, 3, 4, 5):
        grown.extend([token])
    assert grown.keys == one.keys and len(grown) == 5
    fork = grown.fork()
    fork.extend([6])
    assert len(fork.keys) == 3 and len(grown.keys) == 2


# Hits


def test_a_hit_answers_as_a_miss_does(model):
    """tenstorrent/vllm#415: the same prompt twice; the answer of the second, a hit, must be that of the first."""
    llm, prompt = small(model), list(range(30, 51))
    first, second = llm.generate(prompt, P8)[0], llm.generate(prompt, P8)[0]
    assert first.cached_tokens == 0 and second.cached_tokens == 20
    assert first.token_ids == second.token_ids == oracle(model, prompt)


def test_a_prompt_that_is_cached_whole_leaves_a_token_to_compute(model):
    """nano-vllm#144, #199: a prompt of k full blocks, all of them cached, must not become a step of zero tokens."""
    llm, prompt = small(model), list(range(30, 46))
    first, second = llm.generate(prompt, P8)[0], llm.generate(prompt, P8)[0]
    assert second.cached_tokens == 12
    assert first.token_ids == second.token_ids == oracle(model, prompt)


def test_a_block_given_to_another_prompt_is_not_found_any_more(model):
    """nano-vllm#163 and local-inference-lab/vllm#480: after other prompts took all blocks, the first one must miss."""
    llm, prompt = small(model, kv_tokens=32), list(range(30, 50))
    cold = llm.generate(prompt, P8)[0]
    for start in range(60, 200, 20):
        llm.generate(list(range(start, start + 20)), P8)
    again = llm.generate(prompt, P8)[0]
    assert again.cached_tokens == 0 and again.token_ids == cold.token_ids


def test_a_row_with_a_hit_beside_one_without(model):
    """vllm#7018: one batch, one request with a hit and one without; each row has its own block table."""
    llm, known, new = small(model), list(range(30, 51)), list(range(60, 73))
    llm.generate(known, P8)
    hit, miss = llm.generate([known, new], P8)
    assert hit.cached_tokens == 20 and miss.cached_tokens == 0
    assert hit.token_ids == oracle(model, known) and miss.token_ids == oracle(model, new)


def test_equal_prompts_in_one_step_keep_their_own_blocks(model):
    """nano-vllm#219, #243: identical prompts that are computed in the same step."""
    llm, prompt = small(model), list(range(30, 51))
    answers = llm.generate([prompt] * 3, P8)
    assert {tuple(a.token_ids) for a in answers} == {tuple(oracle(model, prompt))}
    assert llm.kv.pool.live == 0 and llm.generate(prompt, P8)[0].cached_tokens == 20


def test_salts_and_the_off_switch(model):
    llm, prompt = small(model), list(range(30, 51))
    llm.generate(prompt, P8, salt="alice")
    assert llm.generate(prompt, P8, salt="bob")[0].cached_tokens == 0
    assert llm.generate(prompt, P8, salt="alice")[0].cached_tokens == 20
    off = small(model, prefix_cache=False)
    off.generate(prompt, P8)
    assert off.generate(prompt, P8)[0].cached_tokens == 0 and off.kv.pool.cached == 0
    assert "prefix_cache=off" in off.generate(prompt, P8)[0].path


def test_answers_to_one_prompt_share_it(model):
    """n answers hold the prompt once: its full blocks, and its last block until they write to it."""
    llm, prompt = small(model), list(range(30, 51))  # 5 full blocks and one token
    answers = llm.engine.add(
        prompt, SamplingParams(max_tokens=8, temperature=0.9, seed=5, ignore_eos=True), llm.root(), n=4
    )
    llm.engine.step()
    assert llm.kv.pool.live == 6
    llm.engine.step()
    assert llm.kv.pool.live == 5 + 4
    while llm.engine.busy:
        llm.engine.step()
    for i, answer in enumerate(answers):
        params = SamplingParams(max_tokens=8, temperature=0.9, seed=5 + i, ignore_eos=True)
        assert answer.completion.token_ids == oracle(model, prompt, params)
    assert llm.kv.pool.live == 0


def test_the_other_answers_outlive_a_cancelled_first(model):
    llm, prompt = small(model), list(range(30, 51))
    first, second, third = llm.engine.add(prompt, P8, llm.root(), n=3)
    llm.engine.cancel(first)
    llm.engine.cancel(third)
    while llm.engine.busy:
        llm.engine.step()
    assert first.completion.finish_reason is third.completion.finish_reason is FinishReason.CANCELLED
    assert second.completion.token_ids == oracle(model, prompt)


# Too much for the memory


def test_preempted_sequences_end_as_if_nothing_had_happened(model):
    """vllm#16832, nano-vllm#217: recompute preemption must not lose or repeat a token; penalties stay as they were."""
    params = SamplingParams(max_tokens=30, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True)
    prompts = [list(range(s, s + 17)) for s in (30, 60, 90, 120)]
    llm = small(model, kv_tokens=100)
    answers = llm.generate(prompts, params)
    assert llm.engine.scheduler.preemptions > 0
    assert [a.token_ids for a in answers] == [oracle(model, p, params) for p in prompts]


def test_a_request_that_can_never_fit_ends_alone(model):
    """A sequence larger than the pool ends with an error; its neighbour and the engine live on."""
    llm = small(model, kv_tokens=40)
    long, short = llm.generate([list(range(30, 60)), [5, 6, 7]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert long.finish_reason is FinishReason.ERROR and long.error and "KV memory" in long.error
    assert long.token_ids == oracle(model, list(range(30, 60)), SamplingParams(max_tokens=20, ignore_eos=True))[:11]
    assert short.token_ids == oracle(model, [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    with pytest.raises(InferError, match=r"41 tokens.*holds 40"):
        llm.generate([[5], list(range(41))], P8)
    assert llm.kv.pool.live == 0 and llm.generate([5, 6, 7], P8)[0].token_ids == oracle(model, [5, 6, 7])


class Wrong(LRU):
    """A policy that gives back what it must not."""

    answer: object = b"no such key"

    def victim(self):
        return self.answer


def test_a_wrong_policy_is_named_and_the_engine_lives(model):
    policy = Wrong()
    llm = small(model, kv_tokens=32, policy=policy)
    llm.generate(list(range(30, 50)), P8)
    failed = llm.generate(list(range(60, 80)), P8)[0]
    assert failed.finish_reason is FinishReason.ERROR and failed.error and "Wrong chose block" in failed.error
    assert llm.kv.pool.live == 0
    policy.answer = next(iter(llm.kv.pool._index))
    assert llm.generate(list(range(60, 70)), SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv": "pages"}, "unknown kv 'pages'"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 257}, "block_size"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"kv_tokens": -5}, "kv_tokens"),
        ({"kv_tokens": 1 << 50}, "GiB, more than"),
        ({"max_batch": 0}, "max_batch"),
        ({"step_tokens": True}, "step_tokens"),
        ({"kv": "contiguous", "kv_tokens": 64}, "contiguous"),
        ({"prefix_cache": False, "tiers": TierOptions(host_bytes=1 << 20)}, "prefix_cache"),
        ({"tiers": TierOptions(host_bytes=-1)}, "host_bytes"),
        ({"tiers": TierOptions(disk_bytes=1 << 20)}, "folder"),
    ],
)
def test_options_that_cannot_be(model, options, words):
    with pytest.raises(InferError, match=words) as e:
        LLM(model, **({"kv_tokens": 240} | options))
    assert "\n" not in str(e.value)


def test_block_sizes_that_are_odd(model):
    prompt = list(range(30, 51))
    for size in (1, 3, 256):
        assert small(model, block_size=size, kv_tokens=256).generate(prompt, P8)[0].token_ids == oracle(model, prompt)


def test_contiguous_is_the_old_rung(model):
    llm, prompt = LLM(model, kv="contiguous"), list(range(30, 51))
    assert llm.generate(prompt, P8)[0].token_ids == oracle(model, prompt)
    assert llm.generate(prompt, P8)[0].path.startswith("kv=contiguous")
    assert [e.token_id for e in llm.stream(prompt, P8)] == oracle(model, prompt)
    with pytest.raises(InvalidRequest, match="paged"):
        llm.generate(prompt, P8, n=2)


def test_a_reader_who_stops_gives_everything_back(model):
    llm = small(model)
    events = llm.stream([list(range(30, 51)), [5, 6]], P8)
    next(events)
    assert llm.kv.pool.live > 0
    events.close()
    assert llm.kv.pool.live == 0 and not llm.engine.busy
    text = {0: "", 1: ""}
    for event in llm.stream([list(range(30, 51)), [5, 6]], P8):
        text[event.index] += event.text
    assert [text[0], text[1]] == [c.text for c in llm.generate([list(range(30, 51)), [5, 6]], P8)]


# Tiers and sessions


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("host_blocks", [0, 4, 100])
def test_blocks_come_back_from_a_tier(model, tmp_path, write, host_blocks):
    options = TierOptions(host_blocks * BLOCK_BYTES, 1 << 20, tmp_path / "kv", write)
    prompt = list(range(30, 51))
    with small(model, kv_tokens=32, tiers=options) as llm:
        cold = llm.generate(prompt, P8)[0]
        for start in range(60, 200, 20):
            llm.generate(list(range(start, start + 20)), P8)
        warm = llm.generate(prompt, P8)[0]
        stats = llm.stats()
    assert warm.cached_tokens == 20 and warm.token_ids == cold.token_ids == oracle(model, prompt)
    assert stats["host"]["hits"] + stats["disk"]["hits"] >= 5
    assert (stats["disk"]["hits"] == 0) == (host_blocks == 100)


def test_a_preempted_sequence_asks_the_tiers(model, tmp_path):
    """LMCache#1969: a request that starts again after preemption finds its blocks in every tier."""
    prompts = [list(range(s, s + 17)) for s in (30, 60, 90, 120)]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with small(model, kv_tokens=100, tiers=TierOptions(host_bytes=1 << 20)) as llm:
        answers = llm.generate(prompts, params)
        assert llm.engine.scheduler.preemptions > 0 and llm.stats()["host"]["hits"] > 0
    assert [a.token_ids for a in answers] == [oracle(model, p, params) for p in prompts]


def test_another_model_or_dtype_finds_nothing(model, folder, tmp_path):
    options = TierOptions(disk_bytes=1 << 20, folder=tmp_path / "kv")
    prompt = list(range(30, 51))
    with small(model, tiers=options) as llm:
        llm.generate(prompt, P8)
    other_folder = tmp_path / "other"
    tiny.write_model(other_folder, seed=7)
    for other in (
        load_model(other_folder, dtype="float32", kernels="reference"),
        load_model(folder, dtype="bfloat16", kernels="reference"),
    ):
        with small(other, tiers=options) as llm:
            assert llm.generate(prompt, P8)[0].cached_tokens == 0
    with small(model, tiers=options) as llm:
        assert llm.generate(prompt, P8)[0].cached_tokens == 20


SLEEPER = """
import json, sys
from cs336_infer import LLM, SamplingParams, Session, TierOptions, load_model
folder, kv, file = sys.argv[1:]
model = load_model(folder, dtype="float32", kernels="reference")
params = SamplingParams(max_tokens=12, ignore_eos=True)
with LLM(model, block_size=4, kv_tokens=1024, tiers=TierOptions(disk_bytes=1 << 22, folder=kv)) as llm:
    if file.endswith("new"):
        session = Session(llm, system="Be brief.")
        session.say("What is the capital of France?", params)
        stored = session.sleep(file)
        third = session.say("And of Italy?", params)
        print(json.dumps([stored, third.token_ids]))
    else:
        session = Session.wake(llm, file)
        answer = session.say("And of Italy?", params)
        print(json.dumps([answer.cached_tokens, answer.token_ids, session.reencoded]))
"""


def test_a_session_sleeps_and_goes_on_in_another_process(folder, tmp_path):
    def run(file: Path) -> list:
        command = [sys.executable, "-c", SLEEPER, str(folder), str(tmp_path / "kv"), str(file)]
        return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()[-1])

    stored, wanted = run(tmp_path / "s.new")
    os.rename(tmp_path / "s.new", tmp_path / "s")
    cached, got, reencoded = run(tmp_path / "s")
    assert got == wanted and reencoded == 0
    assert stored > 0 and cached >= stored
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_a_history_of_ids_is_found_and_one_of_text_may_not_be(model):
    """mlc-llm#3179, prime-rl#1863: a reply tokenised again has other ids; a session keeps those produced."""
    llm = small(model, kv_tokens=1024)
    session = Session(llm)
    params = SamplingParams(max_tokens=17, temperature=1.0, seed=3, ignore_eos=True)  # ids no tokenizer would choose
    first = session.say("fib", params)
    tokens = list(session.tokens)
    again = model.tokenizer.encode(first.text, add_special=False)
    assert again != first.token_ids, "choose a seed whose reply is not tokenised canonically"
    second = session.say("more", params)
    assert session.tokens[: len(tokens)] == tokens and session.reencoded == 0
    assert second.cached_tokens >= (len(tokens) - 1) // 4 * 4


def test_a_template_that_changes_earlier_text_costs_hits_and_no_answer(model, monkeypatch):
    """Rapid-MLX#214: where a template renders a finished turn differently, the conversation is tokenised anew."""
    tokenizer = type(model.tokenizer)
    original = tokenizer.apply_chat_template

    def renders(self, messages, **options):
        return original(self, [m | {"content": m["content"] + str(len(messages))} for m in messages], **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", renders)
    session = Session(small(model, kv_tokens=1024))
    session.say("fib", P8)
    answer = session.say("more", P8)
    assert session.reencoded == 1 and answer.token_ids == oracle(model, session.tokens[:-8])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no session can be read"),
        ("", "not JSON"),
        ("[]", "not a session"),
        ('{"format": "cs336-infer session", "version": 2}', "not a session of this version"),
        ('{"format": "cs336-infer session", "version": 1, "salt": null, "root": "00"}', "another model"),
    ],
)
def test_files_that_are_no_session(model, tmp_path, content, words):
    file = tmp_path / "s"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SessionError, match=words):
        Session.wake(small(model), file)


def test_a_session_that_cannot_be_written(model, tmp_path):
    session = Session(small(model))
    with pytest.raises(SessionError, match="cannot be written"):
        session.sleep(tmp_path / "no" / "s")
