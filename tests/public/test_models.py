"""Checkpoints written by transformers load, and give transformers' logits."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from cs336_kernels.ops import packing_available
from tiny import write_model

from cs336_infer import LLM, InvalidRequest, SamplingParams, load_model
from cs336_infer.kv import ContiguousKV, NoCache
from cs336_infer.models.config import ModelConfig, RopeScaling
from cs336_infer.models.llama import inverse_frequencies

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-gqa-1": ("llama", {"num_key_value_heads": 1}),
    "llama-gqa-3": ("llama", {"num_key_value_heads": 3}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-wide-head": ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = float((got - want).abs().max())
    assert error <= 1e-5, f"largest difference {error:.2e}, logits up to {float(want.abs().max()):.1f}"


@pytest.mark.parametrize("kernels", ["reference", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, kernels, tmp_path):
    family, changes = VARIANTS[variant]
    theirs = write_model(tmp_path, family, **changes)
    ours = load_model(tmp_path, dtype="float32", device="cpu", kernels=kernels)
    assert ours.config.tie_embeddings == changes.get("tie_word_embeddings", False)
    assert ours.config.num_params == theirs.num_parameters()
    ids = torch.randint(0, 320, (3, 77))
    positions = torch.arange(77).expand(3, 77)
    with torch.inference_mode():
        want = theirs(ids).logits
    close(ours.net.forward(ids, positions, NoCache(), last_only=False), want)
    close(ours.net.forward(ids, positions, NoCache()), want[:, -1:])

    kv = ContiguousKV(ours.config, batch=3, capacity=90, dtype=torch.float32)
    for t in (*kv.k, *kv.v):
        t.fill_(torch.nan)
    chunks = [(0, 30), (30, 31), (31, 76), (76, 77)]
    got = [ours.net.forward(ids[:, a:b], positions[:, a:b], kv, last_only=False) for a, b in chunks]
    close(torch.cat(got, 1), want)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_the_compiled_rung_equals_the_plain_one(tmp_path):
    write_model(tmp_path, "qwen3")
    plain, compiled = (load_model(tmp_path, dtype="float32", device="cpu", kernels=k) for k in ("reference", "compile"))
    prompts, params = [[5, 6, 7], list(range(20, 50)), [9]], SamplingParams(max_tokens=6, ignore_eos=True)
    graphs, ids = [], []
    for model in (plain, compiled):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        done = LLM(model, kv_tokens=512, step_tokens=8).generate(prompts, params)
        assert f"kernels={model.net.path}" in done[0].path
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        ids.append([c.token_ids for c in done])
    assert ids[0] == ids[1]
    assert graphs[0] == 0 and 2 <= graphs[1] <= 6  # two for all layers, again where a size of 1 is special


def test_the_compiled_rung_needs_a_compiler(tmp_path, monkeypatch):
    write_model(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InvalidRequest, match="compiler"):
        load_model(tmp_path, dtype="float32", device="cpu", kernels="compile")


def test_every_past_token_moves_the_logits(tmp_path):
    """Otherwise a cache that loses a position would pass every test on this model."""
    write_model(tmp_path)
    net = load_model(tmp_path, dtype="float32", device="cpu").net
    ids = torch.randint(0, 320, (1, 40))
    positions = torch.arange(40).expand(1, 40)
    base = net.forward(ids, positions, NoCache())
    for i in range(40):
        changed = ids.clone()
        changed[0, i] = (changed[0, i] + 1) % 320
        assert (net.forward(changed, positions, NoCache()) - base).abs().max() > 1e-3


def test_sharded_checkpoint_equals_single_file(tmp_path):
    write_model(tmp_path / "one")
    write_model(tmp_path / "many", shard="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    ids, positions = torch.arange(20).expand(1, 20), torch.arange(20).expand(1, 20)
    one, many = (load_model(tmp_path / n, dtype="float32", device="cpu").net for n in ("one", "many"))
    assert torch.equal(one.forward(ids, positions, NoCache()), many.forward(ids, positions, NoCache()))


def test_old_config_spelling_of_rope(tmp_path):
    """transformers 4 wrote rope_theta and rope_scaling; both spellings must mean the same."""
    write_model(tmp_path, rope_parameters=LLAMA3_ROPE)
    new = load_model(tmp_path, dtype="float32", device="cpu").config
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = scaling
    file.write_text(json.dumps(raw))
    assert load_model(tmp_path, dtype="float32", device="cpu").config == new
    assert new.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)


def test_ready_made_rope_factors_equal_the_formula():
    """GGUF files of Llama 3 carry divisors instead of the formula."""
    plain = ModelConfig("llama", 8, 8, 8, 1, 1, 1, 128, 4096, rope_theta=500000.0)
    scaled = ModelConfig(
        "llama", 8, 8, 8, 1, 1, 1, 128, 4096, rope_theta=500000.0, rope_scaling=RopeScaling(8, 1, 4, 8192)
    )
    want = inverse_frequencies(scaled)
    factors = inverse_frequencies(plain) / want
    torch.testing.assert_close(inverse_frequencies(plain, factors), want)
    assert factors[0] == 1 and torch.isclose(factors[-1], torch.tensor(8.0))


@pytest.mark.parametrize("theta", [500.0, 1e6])
def test_rope_theta_is_read(theta, tmp_path):
    theirs = write_model(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": theta})
    ours = load_model(tmp_path, dtype="float32", device="cpu")
    ids, positions = torch.randint(0, 320, (1, 200)), torch.arange(200).unsqueeze(0)
    with torch.inference_mode():
        close(ours.net.forward(ids, positions, NoCache(), last_only=False), theirs(ids).logits)


def test_bf16_error_is_that_of_an_honest_bf16_run(tmp_path):
    """Half precision may differ from fp32 as much as transformers' own half precision does, twice at most."""
    theirs = write_model(tmp_path, hidden_size=96, num_hidden_layers=4)
    ids, positions = torch.randint(0, 320, (2, 50)), torch.arange(50).expand(2, 50)
    with torch.inference_mode():
        exact = theirs.double()(ids).logits
        honest = (theirs.bfloat16()(ids).logits.double() - exact).abs().max()
    packed = packing_available(torch.bfloat16, torch.device("cpu"))
    for kernels in ("reference", "packed") if packed else ("reference",):
        ours = load_model(tmp_path, dtype="bfloat16", device="cpu", kernels=kernels).net
        got = ours.forward(ids, positions, NoCache(), last_only=False).double()
        assert (got - exact).abs().max() <= 2 * honest
