"""Attention over KV pages in C++: against float64, without reading what is not written, and in the engine."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import tiny
import torch
from cs336_kernels import native
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bounds import FILLS, check, same_over_fills

from cs336_infer import LLM, InvalidRequest, SamplingParams, generate, load_model

WHY = native.unavailable("attention")
needs_compiler = pytest.mark.skipif(WHY is not None, reason=f"C++ kernels: {WHY}")


def case(totals, block, kv_heads, group, head_dim, dtype, fill):
    """Pages in random order in memory that holds `fill` elsewhere; the arguments of `paged_attention`."""
    draw = torch.Generator().manual_seed(len(totals) * 1000 + block + head_dim)
    width = max(1, -(-max(totals) // block))
    pages = torch.randperm(len(totals) * width + 3, generator=draw)[: len(totals) * width].view(len(totals), width)
    memory = torch.full((2, len(totals) * width + 3, block, kv_heads, head_dim), fill, dtype=dtype)
    for row, total in enumerate(totals):
        for at in range(total):
            numbers = torch.randn(2, kv_heads, head_dim, generator=draw)
            memory[:, pages[row, at // block], at % block] = numbers.to(dtype)
        pages[row, -(-total // block) :] = -(1 << 40)  # nobody may look where a row has ended
    q = torch.randn(len(totals), kv_heads * group, head_dim, generator=draw).to(dtype)
    return q, memory[0], memory[1], pages, torch.tensor(totals)


def oracle(q, keys, values, pages, totals):
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // keys.shape[2]
    for row, total in enumerate(totals.tolist()):
        if total:
            mine = pages[row, : -(-total // keys.shape[1])]
            k, v = (t[mine].flatten(0, 1)[:total].double().repeat_interleave(group, 1) for t in (keys, values))
            scores = torch.einsum("hd,lhd->hl", q[row].double(), k) / math.sqrt(q.shape[2])
            out[row] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
    return out


@needs_compiler
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    totals=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    block=st.sampled_from([1, 4, 16]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([8, 20, 64, 80]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_float64_and_reads_nothing_else(totals, block, kv_heads, group, head_dim, dtype):
    def run(fill):
        return native.paged_attention(*case(totals, block, kv_heads, group, head_dim, dtype, fill))

    got = same_over_fills(run)
    exact = oracle(*case(totals, block, kv_heads, group, head_dim, dtype, 0.0))
    check(got, exact, exact.to(dtype))


@needs_compiler
@pytest.mark.parametrize("total", [255, 256, 257, 512, 700])
def test_long_rows_are_cut_and_merged(total):
    arguments = case([total, 3], 16, 1, 2, 16, torch.float32, math.nan)
    check(native.paged_attention(*arguments), oracle(*arguments))


@needs_compiler
def test_arguments_that_do_not_fit_are_named():
    q, keys, values, pages, totals = case([5, 6], 4, 1, 2, 8, torch.float32, 0.0)
    for wrong, named in [
        ((q.double(), keys, values, pages, totals), "q"),
        ((q, keys.bfloat16(), values, pages, totals), "keys"),
        ((q, keys[..., :4], values, pages, totals), "keys"),
        ((q, keys, values, pages.int(), totals), "pages"),
        ((q, keys, values, pages, totals[:1]), "totals"),
    ]:
        with pytest.raises(ValueError, match=f"^{named} "):
            native.paged_attention(*wrong)


@needs_compiler
@pytest.mark.parametrize("fill", FILLS)
def test_the_engine_gives_the_ids_of_a_run_without_a_cache(tmp_path, fill):
    tiny.write_model(tmp_path)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 300, (n,), generator=draw).tolist() for n in (1, 4, 9, 30)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = load_model(tmp_path, dtype="float32", kernels="reference")
    alone = [generate(plain, [prompt], params, kv="none")[0] for prompt in prompts]
    ours = LLM(load_model(tmp_path, dtype="float32", kernels="cpu"), block_size=4, kv_tokens=400, fill=fill)
    done = ours.generate(prompts, params)
    assert [d.token_ids for d in done] == [d.token_ids for d in alone]
    assert "kernels=cpu" in done[0].path


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_compiler_one_line_says_so(tmp_path):
    code = "from cs336_kernels import native; print(native.unavailable('attention'))"
    said = run(code, CXX="no-such-compiler", CS336_NATIVE_CACHE=str(tmp_path))
    assert said == "no C++ compiler (no-such-compiler is not installed)\n"


def test_a_compiler_that_fails_is_quoted(tmp_path):
    code = "from cs336_kernels import native; print(native.unavailable('attention'))"
    assert run(code, CXX="false", CS336_NATIVE_CACHE=str(tmp_path)).startswith("false could not build attention.cpp")


def test_the_rung_is_refused_where_it_cannot_be_built(tmp_path, monkeypatch):
    tiny.write_model(tmp_path)
    monkeypatch.setattr(native, "unavailable", lambda name: "no C++ compiler")
    with pytest.raises(InvalidRequest, match="kernels='cpu' is built on first use, which fails here: no C"):
        load_model(tmp_path, dtype="float32", kernels="cpu")


@needs_compiler
def test_two_processes_may_build_at_once(tmp_path):
    code = "from cs336_kernels import native; print(native.library('attention') is not None)"
    environment = os.environ | {"CS336_NATIVE_CACHE": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) for _ in range(2)]
    assert [p.communicate(timeout=120)[0] for p in both] == [b"True\n"] * 2
    assert [f.suffix for f in tmp_path.iterdir()] == [".so"]


@needs_compiler
def test_small_numbers_of_the_process_stay_as_they_are():
    """A library linked with -ffast-math turns subnormal numbers to zero in every thread that loads it."""
    code = "from cs336_kernels import native; native.library('attention'); print(5e-324 * 1.0 > 0, 1e-308 / 8 > 0)"
    assert run(code) == "True True\n"
    arguments = case([5, 6], 4, 1, 2, 8, torch.float32, 0.0)
    native.paged_attention(*arguments)
    assert torch.tensor([1e-40]).mul(1).item() > 0
