"""Counting and timing: every check is on something counted or constructed, never on a speed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from cs336_infer import measure
from cs336_infer.measure import Bound, Cost, Roofline, Status, Timing, bandwidth, bench, cost, machine
from cs336_infer.models.config import ModelConfig
from cs336_infer.types import InvalidRequest

SMOL = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    context_length=8192,
    tie_embeddings=True,
)


def tiny(heads: int = 4, kv_heads: int = 2, head_dim: int = 8, *, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=11,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=64,
        tie_embeddings=tied,
    )


def run_by_hand(c: ModelConfig, rows: list[tuple[int, int]], logit_positions: int) -> int:
    """FLOPs that torch counts when each row's (new, past) tokens go through the model, one query at a time."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    with FlopCounterMode(display=False) as counter:
        for new, past in rows:
            x = torch.randn(new, c.hidden_size)
            for _ in range(c.num_layers):
                queries = (x @ torch.randn(c.hidden_size, q)).view(new, c.num_heads, c.head_dim)
                keys, values = (
                    torch.cat([torch.randn(past, kv), x @ torch.randn(c.hidden_size, kv)])
                    .view(past + new, c.num_kv_heads, c.head_dim)
                    .repeat_interleave(c.queries_per_kv, 1)
                    .transpose(0, 1)
                    for _ in range(2)
                )
                out = []
                for i in range(new):
                    seen = past + i + 1
                    scores = torch.bmm(queries[i, :, None], keys[:, :seen].transpose(1, 2))
                    out.append(torch.bmm(scores.softmax(-1), values[:, :seen]).reshape(q))
                x = x + torch.stack(out) @ torch.randn(q, c.hidden_size)
                gate, up = (x @ torch.randn(c.hidden_size, c.intermediate_size) for _ in range(2))
                x = x + (torch.nn.functional.silu(gate) * up) @ torch.randn(c.intermediate_size, c.hidden_size)
        torch.randn(logit_positions, c.hidden_size) @ torch.randn(c.hidden_size, c.vocab_size)
    return counter.get_total_flops()


# --- cost: FLOPs against torch's own counter -------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 6), (4, 2, 8), (6, 1, 4), (9, 3, 8)])
@pytest.mark.parametrize(("new", "past", "batch"), [(1, 0, 1), (7, 0, 1), (5, 3, 2), (1, 9, 3)])
def test_prefill_flops_are_those_torch_counts(heads, kv_heads, head_dim, new, past, batch):
    c = tiny(heads, kv_heads, head_dim)
    assert cost.prefill(c, new, batch, past=past).flops == run_by_hand(c, [(new, past)] * batch, batch)


def test_ragged_prefill_and_logits_flops():
    c = tiny()
    assert cost.prefill(c, [3, 6], past=[2, 0]).flops == run_by_hand(c, [(3, 2), (6, 0)], 2)
    assert cost.prefill(c, [3, 6], logit_positions=9).flops == run_by_hand(c, [(3, 0), (6, 0)], 9)
    assert cost.prefill(c, 4, logit_positions=0).flops == run_by_hand(c, [(4, 0)], 0)


def test_decode_flops_are_those_torch_counts():
    c = tiny(9, 3)
    assert cost.decode(c, 3, [0, 4, 9]).flops == run_by_hand(c, [(1, 0), (1, 4), (1, 9)], 3)


# --- cost: bytes by hand ---------------------------------------------------------------------------------------


def test_bytes_of_a_tiny_model_by_hand():
    c = tiny()
    # A block: q 24x32, k and v 24x16 each, o 32x24, gate, up and down 24x40 each, two norms of 24.
    block = 24 * 32 + 2 * 24 * 16 + 32 * 24 + 3 * 24 * 40 + 48
    got = cost.prefill(c, [3, 2], past=5, dtype_bytes=4, kv_bytes=2)
    assert got.weight_bytes == 4 * (2 * block + 5 * 24 + 24 + 11 * 24)  # 5 rows looked up, final norm, head
    assert got.kv_write_bytes == 5 * 2 * 2 * 2 * 8 * 2  # tokens, layers, K and V, KV heads, head_dim, bytes
    assert got.kv_read_bytes == 10 * 2 * 2 * 2 * 8 * 2
    # Per token: embedding 24; a block 24+32, 32+32, 32+24, 24+80, 40+24. Per logit row: 24 in, 11 out.
    assert got.activation_bytes == 4 * (5 * (24 + 2 * 344) + 2 * (24 + 11))
    assert got.bytes == got.weight_bytes + got.kv_read_bytes + got.kv_write_bytes + got.activation_bytes
    assert got.intensity == got.flops / got.bytes


def test_an_embedding_table_is_read_once_when_tied_and_by_the_row_when_not():
    block, table, row = tiny().layer_params, 11 * 24, 24
    tied, untied = tiny(tied=True), tiny()
    assert cost.decode(tied, 2, dtype_bytes=1).weight_bytes == 2 * block + table + 24
    assert cost.decode(untied, 2, dtype_bytes=1).weight_bytes == 2 * block + table + 2 * row + 24
    assert cost.prefill(tied, 3, logit_positions=0, dtype_bytes=1).weight_bytes == 2 * block + 3 * row
    assert cost.prefill(untied, 50, logit_positions=0, dtype_bytes=1).weight_bytes == 2 * block + table
    assert cost.weight_bytes(untied, 1) == 2 * block + 2 * table + 24


def test_smollm2_numbers():
    assert cost.weight_bytes(SMOL, 4) == 4 * 134_515_008
    assert cost.decode(SMOL, 1, 0).weight_bytes == 2 * 134_515_008
    assert cost.decode(SMOL, 8, 0).weight_bytes == 2 * 134_515_008
    assert cost.kv_bytes_per_token(SMOL, 2) == 23_040
    assert cost.decode(SMOL, 4, 1000).kv_read_bytes == 4000 * 23_040
    assert cost.decode(SMOL, 4, 1000, kv_bytes=1).kv_write_bytes == 4 * 11_520
    # 106.2 M matrix parameters in the blocks and 28.3 M in the head, two FLOPs each.
    assert cost.decode(SMOL, 1, 0).flops == 2 * (30 * 3_538_944 + 49152 * 576) + 4 * 576 * 30


def test_quantised_weights_do_not_shrink_activations():
    half, quarter = cost.decode(SMOL, 1, dtype_bytes=2), cost.decode(SMOL, 1, dtype_bytes=0.625)
    assert quarter.weight_bytes == 134_515_008 * 0.625
    assert quarter.activation_bytes == half.activation_bytes
    assert cost.decode(SMOL, 1, dtype_bytes=4).activation_bytes == 2 * half.activation_bytes


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 4))
def test_decoding_costs_the_flops_of_prefilling(n, past, batch):
    c = tiny(6, 2)
    steps = sum((cost.decode(c, batch, past + i) for i in range(1, n)), cost.decode(c, batch, past))
    whole = cost.prefill(c, n, batch, past=past, logit_positions=n * batch)
    assert steps.flops == whole.flops
    assert steps.kv_write_bytes == whole.kv_write_bytes
    assert steps.weight_bytes >= whole.weight_bytes
    assert sum(cost.attention_flops(c, 1, past + i) for i in range(n)) == cost.attention_flops(c, n, past)


@given(st.integers(1, 60), st.integers(1, 60))
def test_two_chunks_do_the_work_of_one(first, second):
    c = tiny()
    whole = cost.prefill(c, first + second)
    chunks = cost.prefill(c, first, logit_positions=0) + cost.prefill(c, second, past=first)
    assert chunks.flops == whole.flops
    assert chunks.activation_bytes == whole.activation_bytes
    assert chunks.kv_read_bytes == whole.kv_read_bytes + first * cost.kv_bytes_per_token(c)


@given(st.integers(0, 500), st.integers(1, 500), st.integers(1, 8))
def test_more_context_and_more_rows_never_cost_less(context, more, batch):
    now, later = cost.decode(SMOL, batch, context), cost.decode(SMOL, batch, context + more)
    assert later.bytes > now.bytes and later.flops > now.flops
    assert cost.decode(SMOL, batch + 1, context).bytes > now.bytes
    assert cost.prefill(SMOL, more + 1, past=context).bytes > cost.prefill(SMOL, more, past=context).bytes


@pytest.mark.parametrize(
    "call",
    [
        lambda: cost.prefill(SMOL, 0),
        lambda: cost.prefill(SMOL, -1),
        lambda: cost.prefill(SMOL, 2.5),  # type: ignore[arg-type]
        lambda: cost.prefill(SMOL, []),
        lambda: cost.prefill(SMOL, [3, 4], 3),
        lambda: cost.prefill(SMOL, 4, past=-1),
        lambda: cost.prefill(SMOL, 4, logit_positions=5),
        lambda: cost.prefill(SMOL, 4, dtype_bytes=0),
        lambda: cost.decode(SMOL, 0),
        lambda: cost.decode(SMOL, 2, [1, 2, 3]),
        lambda: cost.decode(SMOL, 1, kv_bytes=math.nan),
        lambda: Roofline(0, 1.0),
        lambda: Roofline(-1.0, 1.0),
        lambda: Roofline(math.nan, 1.0),
        lambda: Roofline(1.0, math.inf),
        lambda: Roofline(1.0, 1.0).attainable(math.nan),
        lambda: Roofline(1.0, 1.0).fraction(Cost(1, 1, 0, 0, 0), 0.0),
        lambda: Timing(()),
        lambda: Timing((1.0, -1.0)),
        lambda: bench.measure(int, repeats=0),
        lambda: bench.measure(int, device="meta"),
        lambda: bench.interleave({}),
        lambda: bench.ratio(Timing((1.0,)), Timing((1.0, 2.0))),
        lambda: bench.ratio(Timing((1.0,)), Timing((0.0,))),
        lambda: bandwidth.read_bandwidth(size_bytes=100),
        lambda: bandwidth.read_bandwidth(size_bytes=2**60),
        lambda: bandwidth.read_bandwidth(size_bytes=2**20, threads=0),
        lambda: bandwidth.read_bandwidth("cuda:99"),
        lambda: bandwidth.matmul_rate(torch.int8),
    ],
)
def test_bad_input_gets_one_line(call):
    with pytest.raises(InvalidRequest) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value) and len(str(caught.value)) > 20


# --- bench -----------------------------------------------------------------------------------------------------


def test_interleave_rotates_and_leaves_the_warmup_out(monkeypatch):
    order: list[str] = []
    clock = iter(float(t) for t in [0, 9, 9, 18, 20, 21, 30, 33, 40, 45, 50, 57])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    got = bench.interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2, warmup=1)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert got == {"a": Timing((3.0, 5.0)), "b": Timing((1.0, 7.0))}

    order.clear()
    monkeypatch.undo()
    bench.interleave({n: (lambda n=n: order.append(n)) for n in "abc"}, repeats=4, warmup=0)
    assert "".join(order) == "abcbcacababc"


def test_measure_counts_its_calls():
    calls: list[int] = []
    got = bench.measure(lambda: calls.append(1), repeats=3, warmup=2)
    assert len(calls) == 5 and len(got.samples) == 3


def test_timing_and_ratio_on_constructed_samples():
    a, b = Timing((2.0, 9.0, 8.0)), Timing((1.0, 3.0, 16.0))
    assert (a.median_s, a.min_s, a.max_s) == (8.0, 2.0, 9.0)
    # By pairs 2, 3, 0.5: the median of ratios, where the ratio of medians would be 8/3.
    assert bench.ratio(a, b) == bench.Ratio(2.0, 0.5, 3.0)


# --- roofline --------------------------------------------------------------------------------------------------


def test_roofline_on_constructed_numbers():
    roof = Roofline(bandwidth=10.0, flops=200.0)
    assert roof.ridge == 20.0
    assert [roof.attainable(i) for i in (0, 5, 20, 100, math.inf)] == [0, 50, 200, 200, 200]
    slow, fast = Cost(100, 30, 10, 5, 5), Cost(4000, 30, 10, 5, 5)
    assert (roof.time_bound(slow), roof.bound(slow), roof.fraction(slow, 10.0)) == (5.0, Bound.MEMORY, 0.5)
    assert (roof.time_bound(fast), roof.bound(fast), roof.fraction(fast, 80.0)) == (20.0, Bound.COMPUTE, 0.25)
    assert roof.bound(Cost(1000, 50, 0, 0, 0)) is Bound.COMPUTE
    assert Cost(1, 0, 0, 0, 0).intensity == math.inf


def test_placed_points_carry_what_a_plot_needs():
    roof = Roofline(bandwidth=10.0, flops=200.0)
    rows = roof.place({"decode": (Cost(100, 50, 0, 0, 0), 10.0), "prefill": (Cost(4000, 50, 0, 0, 0), 40.0)})
    assert [r.name for r in rows] == ["decode", "prefill"]
    first, second = rows
    assert (first.intensity, first.flops_per_s, first.bytes_per_s, first.attainable) == (2.0, 10.0, 5.0, 20.0)
    assert (first.bound, first.fraction, second.bound, second.fraction) == (Bound.MEMORY, 0.5, Bound.COMPUTE, 0.5)


# --- bandwidth -------------------------------------------------------------------------------------------------


def test_read_bandwidth_names_the_winner_and_restores_threads():
    before = torch.get_num_threads()
    got = bandwidth.read_bandwidth(size_bytes=2**20 + 5, repeats=3, threads=1)
    assert torch.get_num_threads() == before
    assert got.size_bytes == 2**20 and len(got.samples) == 3
    assert got.candidates[got.method] == got.bytes_per_s == max(got.candidates.values()) > 0
    assert got.best_bytes_per_s == max(got.samples)


def test_a_small_buffer_says_that_a_cache_served_it():
    def of(size: int, cache: int | None) -> bandwidth.Bandwidth:
        return bandwidth.Bandwidth("sum", size, (1.0,), {"sum": 1.0}, cache)

    assert of(2**20, 2**20).in_cache
    assert not of(2**22, 2**20).in_cache
    assert not of(2**20, None).in_cache


def test_the_buffer_has_memory_of_its_own():
    size = 64 * 2**20
    before = psutil.Process().memory_info().rss
    buffer = bandwidth.filled_buffer(size)
    assert psutil.Process().memory_info().rss - before > 0.9 * size
    assert buffer.min() == buffer.max() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_rate_counts_the_winner(dtype):
    got = bandwidth.matmul_rate(dtype, n=64, repeats=2)
    assert got.dtype is dtype and got.shape in {(64, 64, 64), (512, 64, 64)}
    assert got.candidates[got.method] == got.flops_per_s == max(got.candidates.values()) > 0
    assert f"{got.shape[0]}x64x64" in got.method


def test_rates_divide_work_by_time(monkeypatch):
    monkeypatch.setattr(bandwidth, "interleave", lambda fns, **_: {name: Timing((0.5, 0.25)) for name in fns})
    assert bandwidth.read_bandwidth(size_bytes=8192).samples == (16384.0, 32768.0)
    got = bandwidth.matmul_rate(torch.float32, n=16)
    flops = 2 * math.prod(got.shape)
    assert got.samples == (2 * flops, 4 * flops)


# --- machine ---------------------------------------------------------------------------------------------------


def test_describe_is_json_and_says_what_torch_says():
    said = json.loads(json.dumps(measure.describe().to_dict()))
    assert said["torch"] == torch.__version__ and said["torch_threads"] == torch.get_num_threads()
    assert 0 < said["available_bytes"] <= said["memory_bytes"]
    assert len(said["gpus"]) == torch.cuda.device_count()
    assert ("avx2" in said["isa"]) == bool(torch.cpu.get_capabilities().get("avx2"))


def test_last_level_cache_is_the_largest(tmp_path: Path):
    assert machine.last_level_cache_bytes(tmp_path) is None
    for index, size in enumerate(["32K", "1024K", "32M", "odd"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert machine.last_level_cache_bytes(tmp_path) == 32 * 2**20


def statuses() -> dict[str, Status]:
    checks = machine.doctor()
    for check in checks:
        assert check.detail.endswith(".") and "\n" not in check.detail and len(check.detail) < 130
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check.status for check in checks}


def test_doctor_on_a_bare_machine(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine, "_triton_version", lambda: None)
    monkeypatch.setattr(machine, "_gpus", lambda: ())
    monkeypatch.setattr(machine, "_isa", lambda: ("avx2",))
    monkeypatch.setattr(machine, "available_bytes", lambda: 10**9)
    monkeypatch.setattr(machine.platform, "python_version_tuple", lambda: ("3", "9", "1"))
    monkeypatch.setattr(machine.torch, "__version__", "2.12.0")
    got = statuses()
    warned = {name for name, status in got.items() if status is Status.WARN}
    assert warned == {"torch", "bf16 on the CPU"}
    assert all(status is Status.NO for name, status in got.items() if name not in warned)


def test_doctor_on_a_full_machine(monkeypatch, tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"x")
    monkeypatch.setattr(machine, "embedded_path", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(machine, "_triton_version", lambda: "3.7.1")
    monkeypatch.setattr(machine, "_gpus", lambda: (machine.Gpu("H100", 80 * 10**9, "9.0"),))
    monkeypatch.setattr(machine, "_isa", lambda: ("avx2", "avx512_bf16"))
    monkeypatch.setattr(machine, "available_bytes", lambda: 10**10)
    assert set(statuses().values()) == {Status.OK}
    monkeypatch.setattr(machine, "_gpus", lambda: ())
    monkeypatch.setattr(machine, "available_bytes", lambda: int(1.4e9))
    got = statuses()
    assert (got["triton"], got["CUDA GPU"], got["memory"]) == (Status.WARN, Status.NO, Status.WARN)
