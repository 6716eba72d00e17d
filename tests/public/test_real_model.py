"""The embedded model answers exactly as transformers does on the same weights, read by transformers' own GGUF loader.

`make test` produces 12 tokens a prompt, and without a cache 4; CS336_SOAK=1 (`make soak-2`) 32 and 32.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from prompts import thirty

from cs336_infer import SamplingParams, generate, load_model, stream
from cs336_infer.kv import ContiguousKV
from cs336_infer.models.zoo import embedded_path

SOAK = os.environ.get("CS336_SOAK") == "1"
NEW, NEW_UNCACHED = (32, 32) if SOAK else (12, 4)


@pytest.fixture(scope="module")
def model():
    return load_model(dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def theirs():
    from transformers import AutoModelForCausalLM

    path = embedded_path()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def oracle(model, theirs):
    """transformers' greedy continuation and the logits behind the prompt, for every prompt, one at a time."""
    result = {}
    for name, ids in thirty(model).items():
        with torch.inference_mode():
            out = theirs.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=NEW,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        result[name] = (ids, out.sequences[0, len(ids) :].tolist(), out.logits[0][0])
    return result


def params(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n)


def test_greedy_ids_equal_transformers(model, oracle):
    wrong = {}
    for name, (ids, want, _) in oracle.items():
        got = generate(model, [ids], params(NEW))[0].token_ids
        if got != want:
            wrong[name] = (got, want)
    assert not wrong


def test_last_logits_are_within_2e_4_of_transformers(model, oracle):
    errors = {}
    for name, (ids, _, want) in oracle.items():
        kv = ContiguousKV(model.config, batch=1, capacity=len(ids), dtype=torch.float32)
        got = model.net.forward(torch.tensor([ids]), torch.arange(len(ids)).unsqueeze(0), kv)[0, 0]
        errors[name] = float((got - want).abs().max())
    assert max(errors.values()) <= 2e-4, errors


def test_a_ragged_batch_of_eight_equals_each_alone(model, oracle):
    names = [n for n in oracle if n != "1,500 tokens"]
    batch = [oracle[n] for n in (*names[::4][:7], "1,500 tokens")]
    assert len(batch) == 8 and len({len(ids) for ids, _, _ in batch}) >= 6
    got = generate(model, [ids for ids, _, _ in batch], params(NEW))
    assert [c.token_ids for c in got] == [want for _, want, _ in batch]


def test_no_cache_equals_cache(model, oracle):
    for ids, want, _ in oracle.values():
        if len(ids) > 200 and not SOAK:
            got = generate(model, [ids], params(2), kv="none")[0].token_ids
        else:
            got = generate(model, [ids], params(NEW_UNCACHED), kv="none")[0].token_ids
        assert got == want[: len(got)]


def test_plain_and_packed_kernels_choose_the_same_ids(model, oracle):
    plain = load_model(dtype="float32", device="cpu", kernels="reference")
    assert (plain.net.path, model.net.path) == ("reference", "packed")
    for ids, want, _ in list(oracle.values())[::6]:
        assert generate(plain, [ids], params(NEW))[0].token_ids == want


def test_streamed_korean_is_never_broken(model):
    prompt = model.tokenizer.encode_chat([{"role": "user", "content": "한국어로 숫자를 세어 주세요: 하나, 둘,"}])
    sampling = SamplingParams(max_tokens=40, temperature=0.7, seed=4)
    events = list(stream(model, [prompt], sampling))
    done = generate(model, [prompt], sampling)[0]
    assert "".join(e.text for e in events) == done.text == model.tokenizer.decode(done.token_ids)
    assert any(e.text == "" for e in events[:-1]), "no character was split over tokens: choose another prompt"
    assert all("\ufffd" not in e.text for e in events[:-1])


MEMORY = """
import resource, sys
import torch
if sys.argv[1] == "load":
    from cs336_infer import load_model
    model = load_model(dtype="bfloat16", device="cpu")
    assert model.config.num_params == 134515008
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_loading_takes_less_than_twice_the_weights():
    peak = {
        what: int(subprocess.run([sys.executable, "-c", MEMORY, what], capture_output=True, check=True).stdout)
        for what in ("import", "load")
    }
    times = (peak["load"] - peak["import"]) / (2 * 134515008)
    assert times < 1.9, f"loading peaked at {times:.2f} times the bf16 weights"
