"""The engine on Triton kernels: the same greedy ids as without a cache, in float32, whoever else runs."""

from __future__ import annotations

import math

import pytest
import tiny
import torch

from cs336_infer import LLM, InvalidRequest, SamplingParams, generate, load_model
from cs336_infer.engine.graphs import Graphs

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(3, 300, (n,), generator=draw).tolist() for n in (1, 3, 4, 11)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tiny.write_model(folder, request.param, num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """Each prompt by itself, without a cache, in plain PyTorch."""
    plain = load_model(folder, dtype="float32", device="cpu", kernels="reference")
    return [generate(plain, [prompt], PARAMS, kv="none")[0].token_ids for prompt in prompts()]


@pytest.mark.parametrize("kernels", ["triton", "fused"])
@pytest.mark.parametrize("fill", [math.nan, 3.0e4])
def test_greedy_ids_are_those_of_the_run_without_a_cache(folder, alone, kernels, fill):
    model = load_model(folder, dtype="float32", device="cpu", kernels=kernels)
    llm = LLM(model, block_size=4, kv_tokens=96, step_tokens=7, fill=fill, prefix_cache=False)
    done = llm.generate(prompts(), PARAMS)
    assert [d.token_ids for d in done] == alone
    assert f"kernels={kernels}" in done[0].path


def test_a_cached_prefix_is_read_from_its_pages(folder):
    model = load_model(folder, dtype="float32", device="cpu", kernels="fused")
    plain = load_model(folder, dtype="float32", device="cpu", kernels="reference")
    prompt = torch.randint(3, 300, (13,), generator=torch.Generator().manual_seed(5)).tolist()
    llm = LLM(model, block_size=4, kv_tokens=96, fill=math.nan)
    first = llm.generate([prompt], PARAMS)[0]
    again = llm.generate([prompt], PARAMS)[0]
    assert first.token_ids == again.token_ids == generate(plain, [prompt], PARAMS, kv="none")[0].token_ids
    assert again.cached_tokens == 12


def test_the_separate_kernels_also_run_over_a_contiguous_cache(folder, alone):
    model = load_model(folder, dtype="float32", device="cpu", kernels="triton")
    assert [d.token_ids for d in generate(model, prompts(), PARAMS)] == alone


def test_fused_kernels_refuse_a_cache_without_pages(folder):
    model = load_model(folder, dtype="float32", device="cpu", kernels="fused")
    with pytest.raises(InvalidRequest, match="kernels='fused' writes keys and values into pages"):
        generate(model, [[5, 6]], PARAMS)


def test_a_wrong_slot_is_seen(folder, alone, monkeypatch):
    """Were the ids to stay right with every key one slot off, the tests above would prove nothing."""
    from cs336_infer.kv import triton_step

    right = triton_step.TritonStep.__init__

    def shifted(self, memory, rows):
        right(self, memory, rows)
        self.slots = self.slots ^ 1

    monkeypatch.setattr(triton_step.TritonStep, "__init__", shifted)
    model = load_model(folder, dtype="float32", device="cpu", kernels="fused")
    llm = LLM(model, block_size=4, kv_tokens=96, fill=7.0, prefix_cache=False)
    assert [d.token_ids for d in llm.generate(prompts(), PARAMS)] != alone


def test_steps_over_tensors_that_stay_give_the_same_ids(folder, alone):
    """What a CUDA graph replays, without the graph: everything that changes must come in through its tensors."""
    made = []

    def remember(run):
        made.append(run)
        return run

    model = load_model(folder, dtype="float32", device="cpu", kernels="fused")
    llm = LLM(model, block_size=4, kv_tokens=96, step_tokens=7, fill=math.nan, prefix_cache=False)
    llm.engine.forward = Graphs(model.net, model.config.context_length, capture=remember).forward
    done = llm.generate(prompts(), PARAMS)
    assert [d.token_ids for d in done] == alone
    assert 1 <= len(made) <= len(prompts()), "a graph for each number of rows"
    again = llm.generate(prompts(), PARAMS)
    assert [d.token_ids for d in again] == alone
    assert len(made) <= len(prompts()), "the second time nothing is recorded"


def test_cuda_graphs_are_refused_without_a_gpu(folder):
    with pytest.raises(InvalidRequest, match="kernels='graph' is CUDA graphs of the fused kernels: it needs a GPU"):
        load_model(folder, dtype="float32", device="cpu", kernels="graph")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_cuda_graphs_give_the_same_ids(folder, alone):
    model = load_model(folder, dtype="float32", device="cuda", kernels="graph")
    llm = LLM(model, block_size=4, kv_tokens=96, fill=math.nan, prefix_cache=False)
    assert [d.token_ids for d in llm.generate(prompts(), PARAMS)] == alone
    assert "kernels=graph" in llm.engine.path
