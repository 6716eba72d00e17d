"""RMSNorm, QKV, QK norm, RoPE and the writing into pages, as one op."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is for Linux")

from cs336_kernels.ops import qkv, rope_tables
from cs336_kernels.sanitizer import sanitize
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bounds import DTYPES, check, same_over_fills
from matvec import EPS, SETTINGS, normal, rms, tiles  # noqa: F401

HEADS = st.sampled_from(((1, 1), (3, 1), (4, 2), (2, 2)))
HEAD_DIMS = st.sampled_from((2, 18, 32, 64, 80, 96))


class Case:
    """Arguments of `qkv` at one shape. `memory` [pages, 2, 2, block_size, kv_heads, head_dim] has two layers, of which
    the second is used; whatever is not written must keep `fill`."""

    def __init__(
        self,
        tokens: int,
        d: int,
        heads: tuple[int, int],
        head_dim: int,
        block_size: int,
        qk_norm: bool,
        dtype: torch.dtype,
        seed: int,
        fill: float = 0.0,
    ) -> None:
        self.heads, self.kv_heads = heads
        self.head_dim, self.dtype, self.fill = head_dim, dtype, fill
        rows = (self.heads + 2 * self.kv_heads) * head_dim
        self.x = normal(tokens, d, dtype=dtype, seed=seed, fill=fill)
        self.gain = normal(d, dtype=dtype, seed=seed + 1) + 1
        self.weight = normal(rows, d, dtype=dtype, seed=seed + 2, scale=d**-0.5, fill=fill)
        self.norms = [normal(head_dim, dtype=dtype, seed=seed + i) + 1 for i in (3, 4)] if qk_norm else [None, None]
        positions = torch.randint(0, 500, (1, tokens), generator=torch.Generator().manual_seed(seed))
        inv_freq = 100.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        self.cos, self.sin = (t.view(tokens, head_dim) for t in rope_tables(positions, inv_freq, dtype))
        pages = tokens // block_size + 2
        self.memory = torch.full((pages, 2, 2, block_size, self.kv_heads, head_dim), fill, dtype=dtype)
        places = torch.randperm(pages * block_size, generator=torch.Generator().manual_seed(seed))
        self.slots = places[:tokens].contiguous()

    def run(self, path: str) -> list[torch.Tensor]:
        """q, and k and v as read from their slots; nothing else in the memory may have changed."""
        keys, values = self.memory[:, 1, 0], self.memory[:, 1, 1]
        args = (
            self.x,
            self.gain,
            self.weight,
            self.cos,
            self.sin,
            keys,
            values,
            self.slots,
            self.heads,
            EPS,
            *self.norms,
        )
        q = qkv(*args, path=path)
        at = self.slots // keys.shape[1], self.slots % keys.shape[1]
        k, v = keys[at].clone(), values[at].clone()
        keys[at], values[at] = self.fill, self.fill
        untouched = torch.full_like(self.memory, self.fill)
        assert torch.equal(self.memory.view(torch.uint8), untouched.view(torch.uint8)), "another slot was written"
        return [q, k, v]

    def plain(self, work: torch.dtype, rounded: torch.dtype) -> list[torch.Tensor]:
        """q, k, v computed in `work`, rounded to `rounded` where the reference rounds."""

        def cut(t: torch.Tensor) -> torch.Tensor:
            return t.to(rounded).to(work)

        x, gain, weight, cos, sin = (t.to(work) for t in (self.x, self.gain, self.weight, self.cos, self.sin))
        made = cut(F.linear(cut(rms(x, gain)), weight)).view(len(x), -1, self.head_dim)
        q, k, v = made.split([self.heads, self.kv_heads, self.kv_heads], 1)
        result = []
        for t, norm in zip((q, k), self.norms, strict=True):
            if norm is not None:
                t = cut(rms(t, norm.to(work)))
            first, second = t.chunk(2, -1)
            swapped = torch.cat((second, first), -1)
            result.append((cut(t * cos.unsqueeze(1)) + swapped * sin.unsqueeze(1)).to(rounded))
        return [*result, v.to(rounded)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("tiles")
@settings(SETTINGS, max_examples=10)
@given(
    tokens=st.one_of(st.integers(1, 8), st.integers(9, 40)),
    d=st.sampled_from((16, 40, 100, 200)),
    heads=HEADS,
    head_dim=HEAD_DIMS,
    block_size=st.sampled_from((1, 3, 16)),
    qk_norm=st.booleans(),
    seed=st.integers(0, 999),
)
def test_heads_are_those_of_float64(
    dtype: torch.dtype,
    tokens: int,
    d: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    qk_norm: bool,
    seed: int,
):
    shape = (tokens, d, heads, head_dim, block_size, qk_norm, dtype, seed)
    got = same_over_fills(lambda fill: Case(*shape, fill=fill).run("triton"))
    oracle = Case(*shape).plain(torch.float64, torch.float64)
    honest = Case(*shape).plain(torch.float32, dtype)
    for name, mine, theirs, exact, fair in zip("qkv", got, Case(*shape).run("reference"), oracle, honest, strict=True):
        check(mine, exact, fair)
        check(theirs, exact, fair)
        assert mine.dtype == dtype, name
    assert got[0].is_contiguous()


@pytest.mark.parametrize("tokens", [1, 4, 5, 20])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_widest_heads(tokens: int, qk_norm: bool):
    shape = (tokens, 48, (2, 1), 256, 16, qk_norm, torch.bfloat16, 0)
    oracle = Case(*shape).plain(torch.float64, torch.float64)
    honest = Case(*shape).plain(torch.float32, torch.bfloat16)
    for mine, exact, fair in zip(Case(*shape).run("triton"), oracle, honest, strict=True):
        check(mine, exact, fair)


@pytest.mark.parametrize("tokens", [1, 4, 12])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_keys_and_values_are_written_once_and_never_read(tokens: int, qk_norm: bool):
    case = Case(tokens, 64, (2, 1), 32, 4, qk_norm, torch.float32, 0)
    with sanitize(schedules=1) as report:
        case.run("triton")
    assert not report.findings
    (launched,) = report.launches
    traffic = launched.traffic
    assert traffic["weight"].loaded == traffic["weight"].unique_loaded == 4 * 32 * 64 * 4
    memory = traffic["keys"], traffic["values"]  # interleaved views of one storage: the first name may count for both
    assert sum(t.loaded for t in memory) == 0
    assert sum(t.stored for t in memory) == sum(t.unique_stored for t in memory) == 2 * tokens * 32 * 4
    assert traffic["q"].stored == traffic["q"].unique_stored == tokens * 2 * 32 * 4


def test_no_tokens_write_nothing():
    for norm in (True, False):
        case = Case(0, 32, (2, 1), 32, 4, norm, torch.float32, 0, fill=7.0)
        assert case.run("triton")[0].shape == (0, 2, 32)


def changed(**given: object) -> dict[str, object]:
    """Arguments of `qkv` that fit, but for those given."""
    case = Case(3, 32, (2, 1), 16, 4, True, torch.float32, 0)
    fitting = {
        "x": case.x,
        "norm_weight": case.gain,
        "weight": case.weight,
        "cos": case.cos,
        "sin": case.sin,
        "keys": case.memory[:, 1, 0],
        "values": case.memory[:, 1, 1],
        "slots": case.slots,
        "num_heads": 2,
        "eps": EPS,
        "q_norm": case.norms[0],
        "k_norm": case.norms[1],
    }
    return fitting | given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (changed(x=torch.ones(32)), "x is [32], not [tokens, features]"),
        (changed(norm_weight=torch.ones(31)), "norm_weight is [31], not [32]"),
        (changed(num_heads=3), "weight is [64, 32], not [80, 32]"),
        (changed(num_heads=0), "0 heads, 1 KV heads"),
        (changed(cos=torch.ones(3, 8)), "cos is [3, 8], not [3, 16]"),
        (changed(sin=torch.ones(3, 16).half()), "sin is torch.float16"),
        (changed(keys=torch.ones(2, 4, 16)), "keys is [2, 4, 16], not [pages, block_size, kv_heads, head_dim]"),
        (changed(keys=torch.ones(2, 4, 1, 15)), "head_dim is 15, not an even number from 2 to 256"),
        (changed(values=torch.ones(2, 4, 2, 16)), "values is [2, 4, 2, 16], not [2, 4, 1, 16]"),
        (changed(values=torch.ones(2, 4, 1, 32)[..., :16]), "only the first dimension's may be free"),
        (changed(slots=torch.tensor([0, 1])), "slots is [2] torch.int64, not contiguous [3] torch.int64"),
        (changed(slots=torch.tensor([0, 1, 2], dtype=torch.int32)), "slots is [3] torch.int32"),
        (changed(slots=torch.tensor([0, 1, 8])), "slots go from 0 to 8; the pages have slots 0 to 7"),
        (changed(slots=torch.tensor([-1, 1, 2])), "slots go from -1 to 2; the pages have slots 0 to 7"),
        (changed(k_norm=None), "one of q_norm and k_norm is None: give both or neither"),
        (changed(q_norm=torch.ones(8)), "q_norm is [8], not [16]"),
    ],
)
@pytest.mark.parametrize("path", ["reference", "triton"])
def test_what_does_not_fit_is_refused(arguments: dict[str, object], message: str, path: str):
    with pytest.raises(ValueError) as caught:
        qkv(**arguments, path=path)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_unknown_path():
    with pytest.raises(ValueError, match=r"unknown path 'cuda' for qkv \(reference, triton\)"):
        qkv(**changed(), path="cuda")  # type: ignore[arg-type]
