"""A student's functions in the real engine: the same tokens, the same costs, and nothing left behind."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from tiny import write_model, write_tokenizer

from cs336_infer import SamplingParams, generate, load_model, measure
from cs336_infer.course.assignment import Role, read_assignment
from cs336_infer.course.plug import PLUGGED, plug, plug_notebook
from cs336_infer.types import InferError

REPO = Path(__file__).resolve().parents[2]
NAMES = ("rope", "causal_attention", "cached_attention", "next_token_distribution", "decode_step_cost")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]


@pytest.fixture(scope="module")
def mine():
    namespace = {"torch": torch}
    for cell in read_assignment(REPO / "solutions" / "a1_prefill_decode" / "a1_prefill_decode.py").cells:
        if cell.role is Role.SOLUTION:
            exec(cell.source, namespace)
    return {name: namespace[name] for name in NAMES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def _nothing_left():
    before = generate, measure.decode, measure.prefill
    yield
    assert not PLUGGED and (generate, measure.decode, measure.prefill) == before


@pytest.mark.parametrize("kv", ["contiguous", "none"])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["ragged", "one"])
def test_the_same_tokens(model, mine, kv, prompts):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    want = generate(model, prompts, params, kv=kv)
    calls = dict.fromkeys(NAMES, 0)

    def counted(name):
        def call(*args, **kwargs):
            calls[name] += 1
            return mine[name](*args, **kwargs)

        return call

    with plug(**{name: counted(name) for name in NAMES}):
        got = generate(model, prompts, params, kv=kv)
    assert [a.token_ids for a in got] == [a.token_ids for a in want]
    assert got[0].path.endswith(f"plugged={','.join(NAMES)}") and "plugged" not in want[0].path
    assert calls["rope"] and calls["cached_attention" if kv == "contiguous" else "causal_attention"]
    assert generate(model, prompts, params, kv=kv)[0].path == want[0].path


def test_the_same_draws(model, mine, folder):
    params = SamplingParams(max_tokens=20, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, seed=4, ignore_eos=True)
    want = generate(model, PROMPTS[0], params)[0].token_ids
    with plug(next_token_distribution=mine["next_token_distribution"]):
        assert generate(model, PROMPTS[0], params)[0].token_ids == want
    half = load_model(folder, dtype="bfloat16", device="cpu")
    with plug(**mine):
        assert [len(a.token_ids) for a in generate(half, PROMPTS, params)] == [20, 20, 20]


def test_the_same_costs(model, mine):
    c = dataclasses.replace(model.config, tie_embeddings=True)
    cases = [
        lambda: measure.decode(c, 3, 50),
        lambda: measure.decode(c, 2, [5, 9], dtype_bytes=0.5, kv_bytes=1),
        lambda: measure.prefill(c, [5, 9], past=[2, 0], dtype_bytes=4),
        lambda: measure.prefill(c, 7, 2),
    ]
    want = [case() for case in cases]
    flops = measure.attention_flops(c, 5, 3)
    with plug(decode_step_cost=mine["decode_step_cost"]):
        got = [case() for case in cases]
        assert measure.attention_flops(c, 5, 3) == flops
    for a, b in zip(got, want, strict=True):
        assert (a.flops, a.kv_read_bytes, a.kv_write_bytes) == (b.flops, b.kv_read_bytes, b.kv_write_bytes)
        assert a.weight_bytes == b.weight_bytes and a.activation_bytes == 0


def test_mistakes_change_the_answer_and_are_not_hidden(model, mine):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    want = generate(model, PROMPTS, params)

    def forgets(q, k, v, k_cache, v_cache, length):
        _, k_cache, v_cache = mine["cached_attention"](q, k, v, k_cache, v_cache, length)
        end = max(length + k.shape[2] - 1, 1)
        return (
            mine["causal_attention"](q[:, :, -1:], k_cache[:, :, :end], v_cache[:, :, :end]).expand_as(q),
            k_cache,
            v_cache,
        )

    with plug(cached_attention=forgets):
        assert [a.token_ids for a in generate(model, PROMPTS, params)] != [a.token_ids for a in want]
    with plug(rope=lambda x, positions, theta: x):
        assert [a.token_ids for a in generate(model, PROMPTS, params)] != [a.token_ids for a in want]


@pytest.mark.parametrize(
    ("name", "function", "says"),
    [
        ("rope", lambda x, p, t: x[:1, :1], "rope returned"),
        ("rope", lambda x, p, t: None, "rope returned NoneType to the engine, which expects a tensor of shape"),
        ("cached_attention", lambda *a: a[0], "cached_attention must return (out, k_cache, v_cache), not Tensor"),
        ("cached_attention", lambda *a: (a[0], a[1], a[2]), "cached_attention returned"),
    ],
)
def test_answers_of_the_wrong_kind_are_named(model, name, function, says):
    with plug(**{name: function}), pytest.raises(InferError) as error:
        generate(model, PROMPTS[0], SamplingParams(max_tokens=2))
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"), [({"sampler": print}, "no place in the engine is called 'sampler'"), ({"rope": 3}, "not a int")]
)
def test_what_cannot_be_plugged(given, says):
    with pytest.raises(InferError, match=says):
        plug(**given)


def test_nested_plugs_come_out_one_by_one(model, mine):
    with plug(rope=mine["rope"]):
        with plug(rope=lambda x, p, t: x * 0, causal_attention=mine["causal_attention"]):
            assert list(PLUGGED) == ["rope", "causal_attention"]
        assert {"rope": mine["rope"]} == PLUGGED


def test_the_functions_of_a_notebook(tmp_path, mine):
    cells = [
        "import torch\n1 / 0",
        "%matplotlib inline\nx = 1",
        "half = 2",
        "raise ValueError",
        "def rope(x, p, t):\n    return x / half",
    ]
    path = tmp_path / "a1.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells]), path)
    with plug_notebook(path):
        assert list(PLUGGED) == ["rope"] and float(PLUGGED["rope"](torch.ones(1), None, None)) == 0.5
    with plug_notebook(REPO / "solutions" / "a1_prefill_decode" / "a1_prefill_decode.ipynb"):
        assert list(PLUGGED) == list(NAMES)
    path.write_text("{}")
    with pytest.raises(InferError, match="not a notebook that can be read"):
        plug_notebook(path)
    nbformat.write(nbformat.v4.new_notebook(), path)
    with pytest.raises(InferError, match="none of its functions has a place"):
        plug_notebook(path)


def test_the_places_of_later_assignments_are_known_at_once():
    """In a process that has imported nothing else."""
    notebook = REPO / "solutions" / "a2_kv_cache" / "a2_kv_cache.ipynb"
    code = (
        "import sys; from cs336_infer.course.plug import PLUGGED, plug_notebook\n"
        "assert not any(name.endswith('_sockets') for name in sys.modules)\n"
        "with plug_notebook(sys.argv[1]): print(*PLUGGED)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(notebook)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["root_key", "chain_keys", "find_prefix", "LRU", "PrefixCache"]
