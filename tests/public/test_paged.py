"""A step over paged KV memory against plain attention of each sequence by itself."""

from __future__ import annotations

import random

import pytest
import torch
from cs336_kernels import native
from cs336_kernels.ops import attention

from cs336_infer.kv import singles as decoding
from cs336_infer.kv.paged import PagedKV, Row
from cs336_infer.models.config import ModelConfig

CONFIG = ModelConfig(
    family="llama",
    vocab_size=320,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    context_length=256,
    rope_theta=1e4,
    rms_eps=1e-5,
    tie_embeddings=False,
)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("prefills", [3, 0])
@pytest.mark.parametrize(
    ("kernels", "group_bytes"),
    [
        ("torch", 1),
        ("torch", 3000),
        ("torch", 1 << 20),
        pytest.param(
            "native", 0, marks=pytest.mark.skipif(native.unavailable("attention") is not None, reason="no compiler")
        ),
        ("triton", 0),
    ],
)
@pytest.mark.parametrize("fill", [float("nan"), 12345.0])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_row_sees_its_own_tokens_and_no_others(
    monkeypatch, block_size, fill, kernels, group_bytes, prefills
) -> None:
    """Ragged rows, in decode and in chunks of prefill, in one step; tables in any order; unused slots hold `fill`."""
    monkeypatch.setattr(decoding, "GROUP_BYTES", group_bytes)
    draw = random.Random(block_size)
    lengths = [draw.randint(1, 70) for _ in range(12)]
    news = [1] * (12 - prefills) + [draw.randint(1, n) for n in lengths[12 - prefills :]]
    memory = PagedKV(
        CONFIG,
        num_blocks=900 // block_size + 12,
        block_size=block_size,
        dtype=torch.float32,
        fill=fill,
        attention=kernels,
    )
    free = list(range(len(memory.data)))
    draw.shuffle(free)
    rows = []
    for total, new in zip(lengths, news, strict=True):
        table = [free.pop() for _ in range(-(-total // block_size))]
        rows.append(Row(table, total - new, new))
    layer, heads, size = 1, CONFIG.num_kv_heads, CONFIG.head_dim
    k, v = ([randn(n, heads, size, seed=100 * i + kind) for i, n in enumerate(lengths)] for kind in (0, 1))
    for i, row in enumerate(rows):
        for at in range(row.past):
            slot = row.table[at // block_size], layer, slice(None), at % block_size
            memory.data[slot] = torch.stack((k[i][at], v[i][at]))
    before = memory.data.clone()
    step = memory.step(rows)
    q = randn(1, sum(news), CONFIG.num_heads, size, seed=7)
    fresh = [torch.cat([t[i][row.past :] for i, row in enumerate(rows)]).unsqueeze(0) for t in (k, v)]
    out = step.extend(sum(news))(layer, q, *fresh)
    assert step.last.tolist() == [sum(news[: i + 1]) - 1 for i in range(len(rows))]
    for i, row in enumerate(rows):
        end = int(step.last[i]) + 1
        assert step.positions[0, end - row.new : end].tolist() == list(range(row.past, row.total))
        mine = (t[i].unsqueeze(0).transpose(1, 2) for t in (k, v))
        want = attention(q[:, end - row.new : end].transpose(1, 2), *mine).transpose(1, 2)
        torch.testing.assert_close(out[:, end - row.new : end], want, rtol=0, atol=1e-5)
        for at in range(row.total):
            stored = memory.data[row.table[at // block_size], layer, :, at % block_size]
            assert torch.equal(stored, torch.stack((k[i][at], v[i][at])))
    changed = (memory.data != before) & ~(memory.data.isnan() & before.isnan())
    assert int(changed.sum()) == 2 * sum(news) * heads * size, "the step writes its own slots and no others"


def test_groups_hold_rows_of_like_length(monkeypatch) -> None:
    memory = PagedKV(CONFIG, num_blocks=64, block_size=4, dtype=torch.float32)
    singles = [(i, Row(range(n), n * 4 - 1, 1), torch.arange(n)) for i, n in enumerate((10, 2, 9, 7, 10, 2))]
    groups = [[len(table) for _, _, table in group] for group in decoding._alike(singles, memory)]
    assert groups == [[10, 10, 9], [7], [2, 2]]
    monkeypatch.setattr(decoding, "GROUP_BYTES", 25 * memory.page * 4)
    groups = [[len(table) for _, _, table in group] for group in decoding._alike(singles, memory)]
    assert groups == [[10, 10], [9], [7], [2, 2]]
