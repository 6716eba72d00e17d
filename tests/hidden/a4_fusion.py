"""Hidden checks of assignment 4: ragged shapes, every format, poison, many schedules, bytes.

The open task is in `cs336_infer.course.a4_open_task`.
"""

from __future__ import annotations

import numpy as np
import torch

from cs336_infer.course import a4_attention_cases as attention
from cs336_infer.course import a4_cases as cases
from cs336_infer.course.a4_fusion import KINDS, named, once, repaired_case
from cs336_infer.course.checks import Ask, check, expect_equal, fail
from cs336_infer.course.kernel_cases import FLOATS, close, expect_bytes, expect_fills, launched, padded, run_case

SCHEDULES = 6

# Exercise 1: Residual sum and RMSNorm -------------------------------------------------------------


@check("add_rms_norm_kernel", points=2, title="rows of any size, sums far from 1")
def norm_ragged(ask: Ask, rng: np.random.Generator) -> None:
    for d in (1, 2, int(rng.integers(3, 16)), 33, int(rng.integers(65, 128))):
        run_case(ask, cases.add_rms_norm(rng, int(rng.integers(1, 5)), d))
    for scale in (1e-3, 300.0):
        run_case(ask, cases.add_rms_norm(rng, 2, 20, scale=scale))


@check("add_rms_norm_kernel", points=2, title="half precision within twice an honest error")
def norm_half(ask: Ask, rng: np.random.Generator) -> None:
    for dtype in FLOATS[1:]:
        for scale in (4.0, 300.0):
            run_case(ask, cases.add_rms_norm(rng, 3, int(rng.integers(90, 128)), dtype, scale=scale))


@check("add_rms_norm_kernel", points=1, title="the norm is that of the rounded sum")
def norm_of_rounded(ask: Ask, rng: np.random.Generator) -> None:
    # even numbers above 256, plus 1: each sum lies between two numbers of bfloat16, 0.4 % from both
    case = cases.add_rms_norm(rng, 1, 64, "bfloat16")
    x = 2.0 * torch.from_numpy(rng.integers(128, 250, size=(1, 64))).to(torch.bfloat16)
    residual = torch.ones_like(x)
    case.tensors["x"], case.tensors["residual"] = padded(x, 3, 0.0), padded(residual, 1, 0.0)
    case.tensors["weight"] = torch.ones(64, dtype=torch.bfloat16)
    case.numbers["eps"] = 0.0
    got = launched(ask, case)["tensors"]
    expect_equal(got["summed"], x + residual, what="summed, of even numbers + 1 in bfloat16")
    want = (x + residual).double() / (x + residual).double().square().mean().sqrt()
    off = float((got["normed"].double() / want - 1).abs().max())
    if not off <= 1.01 * 2**-8:
        fail(f"normed is off by {off:.4f} of its value, and rounding once costs at most {2**-8:.4f}")


@check("add_rms_norm_kernel", points=1, title="eps counts where a row is almost zero")
def norm_eps(ask: Ask, rng: np.random.Generator) -> None:
    case = cases.add_rms_norm(rng, 3, 9, scale=1e-4)
    case.numbers["eps"] = 1e-6
    summed = case.expected["summed"][0]
    scale = (summed.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    want = summed * scale * case.tensors["weight"].double()
    case.expected["normed"] = want, want.float()
    run_case(ask, case)


@check("add_rms_norm_kernel", points=2, title="sum and norm: what is between and behind the rows does not matter")
def norm_fills(ask: Ask, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**32))
    expect_fills(ask, lambda fill: cases.add_rms_norm(np.random.default_rng(seed), 3, 21, fill=fill))


@check("add_rms_norm_kernel", points=2, title="sum and norm: clean under every schedule, bytes within 5 %")
def norm_clean(ask: Ask, rng: np.random.Generator) -> None:
    case = cases.add_rms_norm(rng, 5, int(rng.integers(30, 60)), "float16")
    expect_bytes(run_case(ask, case, SCHEDULES, int(rng.integers(1000))), case)


# Exercise 2: RoPE, and keys and values into their pages -------------------------------------------


@check("rope_write_kernel", points=3, title="heads, head sizes and page sizes of any kind")
def rope_ragged(ask: Ask, rng: np.random.Generator) -> None:
    sizes = ((1, 1, 1, 2, 1), (3, 4, 2, 6, 5), (2, 2, 2, 20, 3), (4, 3, 1, 8, 16))
    for tokens, heads, kv_heads, head_dim, block_size in sizes:
        run_case(ask, cases.rope_write(rng, tokens, heads, kv_heads, head_dim, block_size))


@check("rope_write_kernel", points=2, title="rotation in half precision, computed in float32")
def rope_half(ask: Ask, rng: np.random.Generator) -> None:
    for dtype in FLOATS[1:]:
        run_case(ask, cases.rope_write(rng, 4, 3, 1, 24, dtype=dtype))


@check("rope_write_kernel", points=1, title="values are copied, bit for bit")
def rope_values(ask: Ask, rng: np.random.Generator) -> None:
    case = cases.rope_write(rng, 3, 1, 2, 10, dtype="float16", fill=0.0)
    got = launched(ask, case)["tensors"]["values"]
    expect_equal(got, case.expected["values"][1], what="values, in pages of zeros")


@check("rope_write_kernel", points=2, title="no other slot is touched, and nothing unused is read")
def rope_fills(ask: Ask, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**32))
    expect_fills(ask, lambda fill: cases.rope_write(np.random.default_rng(seed), 3, 2, 2, 6, 3, fill=fill))


@check("rope_write_kernel", points=2, title="RoPE and KV write: clean under every schedule, bytes within 5 %")
def rope_clean(ask: Ask, rng: np.random.Generator) -> None:
    case = cases.rope_write(rng, int(rng.integers(2, 5)), 2, 1, 18, dtype="bfloat16")
    expect_bytes(run_case(ask, case, SCHEDULES, int(rng.integers(1000))), case)


# Exercise 3: SwiGLU -------------------------------------------------------------------------------


@check("swiglu_kernel", points=2, title="SwiGLU of any size, over several blocks")
def swiglu_ragged(ask: Ask, rng: np.random.Generator) -> None:
    for n in (1, 7, 16, int(rng.integers(17, 32)), int(rng.integers(33, 64))):
        run_case(ask, cases.swiglu_case(rng, int(rng.integers(1, 4)), n))


@check("swiglu_kernel", points=1, title="gates of -100 and +100")
def swiglu_far(ask: Ask, rng: np.random.Generator) -> None:
    case = cases.swiglu_case(rng, 2, 12, scale=1.0)
    gate_up = case.tensors["gate_up"]
    gate_up[0, :12] = torch.linspace(-100, 100, 12)
    gate, up = gate_up[:, :12].double(), gate_up[:, 12:24].double()
    want = gate * gate.sigmoid() * up
    case.expected["out"] = want, want.float()
    run_case(ask, case)


@check("swiglu_kernel", points=1, title="SwiGLU in half precision within twice an honest error")
def swiglu_half(ask: Ask, rng: np.random.Generator) -> None:
    for dtype in FLOATS[1:]:
        run_case(ask, cases.swiglu_case(rng, 3, 40, dtype))


@check("swiglu_kernel", points=2, title="SwiGLU: what is between the rows does not matter")
def swiglu_fills(ask: Ask, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**32))
    expect_fills(ask, lambda fill: cases.swiglu_case(np.random.default_rng(seed), 3, 19, fill=fill))


@check("swiglu_kernel", points=1, title="SwiGLU: clean under every schedule, bytes within 5 %")
def swiglu_clean(ask: Ask, rng: np.random.Generator) -> None:
    case = cases.swiglu_case(rng, 3, int(rng.integers(20, 40)))
    expect_bytes(run_case(ask, case, SCHEDULES, int(rng.integers(1000))), case)


# Exercise 4: Attention of a decode step -----------------------------------------------------------


@check("split_attention_kernel", points=3, title="rows of any length, an empty one too, in several tiles")
def attention_ragged(ask: Ask, rng: np.random.Generator) -> None:
    lengths = [int(rng.integers(1, 30)), 0, 1, int(rng.integers(17, 40))]
    run_case(ask, attention.split_attention(rng, lengths, 2, 1, 8, 1))
    run_case(ask, attention.split_attention(rng, lengths, 2, 2, 6, 3, block_size=3))
    run_case(ask, attention.split_attention(rng, [5, 23], 3, 1, 12, 2, block_size=5, block_n=4))


@check("split_attention_kernel", points=2, title="more splits than pages: the rest are empty")
def attention_empty_splits(ask: Ask, rng: np.random.Generator) -> None:
    run_case(ask, attention.split_attention(rng, [int(rng.integers(5, 9)), 17], 2, 1, 4, 7))


@check("split_attention_kernel", points=2, title="scores so large that only a running maximum keeps them finite")
def attention_large(ask: Ask, rng: np.random.Generator) -> None:
    run_case(ask, attention.split_attention(rng, [19], 2, 1, 8, 2, scale_of_q=60.0))


@check("split_attention_kernel", points=2, title="groups of query heads that are no power of two")
def attention_groups(ask: Ask, rng: np.random.Generator) -> None:
    case = attention.split_attention(rng, [11, 6], 6, 2, 10, 2)
    answer = run_case(ask, case)
    once(answer, case)


@check("split_attention_kernel", points=2, title="parts in half precision, summed in float32")
def attention_half(ask: Ask, rng: np.random.Generator) -> None:
    for dtype in FLOATS[1:]:
        run_case(ask, attention.split_attention(rng, [21, 8], 2, 1, 16, 2, dtype=dtype))


@check("split_attention_kernel", points=3, title="what is in unused slots and pages does not matter")
def attention_fills(ask: Ask, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**32))
    expect_fills(
        ask, lambda fill: attention.split_attention(np.random.default_rng(seed), [10, 3], 2, 1, 6, 2, fill=fill)
    )


@check("split_attention_kernel", points=2, title="attention: clean under every schedule, bytes within 5 %")
def attention_clean(ask: Ask, rng: np.random.Generator) -> None:
    case = attention.split_attention(rng, [14, 9], 2, 1, 16, 2, block_size=4)
    answer = run_case(ask, case, SCHEDULES, int(rng.integers(1000)))
    expect_bytes(answer, case)
    once(answer, case)


@check("split_attention_kernel", points=2, title="merging parts of any number and size, in every format")
def merge_ragged(ask: Ask, rng: np.random.Generator) -> None:
    for splits, head_dim, dtype in ((1, 5, "float32"), (3, 12, "bfloat16"), (6, 8, "float16"), (9, 3, "float32")):
        run_case(ask, attention.merge(rng, 4, splits, head_dim, dtype))


@check("split_attention_kernel", points=2, title="merging: empty parts hold anything, bytes within 5 %")
def merge_fills(ask: Ask, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**32))
    expect_fills(ask, lambda fill: attention.merge(np.random.default_rng(seed), 4, 5, 6, fill=fill))
    case = attention.merge(rng, 4, 8, 16, empty=0.5)
    expect_bytes(run_case(ask, case, SCHEDULES, int(rng.integers(1000))), case)


@check("split_attention_kernel", points=2, title="both kernels together are attention over the whole row")
def both(ask: Ask, rng: np.random.Generator) -> None:
    for splits in (1, 3, 5):
        case = attention.split_attention(rng, [int(rng.integers(9, 20)), 4], 2, 1, 8, splits)
        parts = run_case(ask, case)["tensors"]
        oracle, lse = case.expected["partials"][0], case.expected["lse"][0]
        whole = (lse.softmax(2)[..., None] * oracle).sum(2).flatten(0, 1)
        merger = attention.merge(rng, 4, splits, 8)
        merger.tensors |= {"partials": parts["partials"].flatten(0, 1), "lse": parts["lse"].flatten(0, 1)}
        merger.expected["out"] = whole, whole.float()
        merger.what = f"{case.what}, merged"
        run_case(ask, merger)


# Exercises 5 and 6: Find what is wrong, and repair one --------------------------------------------

BUGS: dict[str, tuple[str, tuple[int, ...]]] = {
    "double": ("out-of-bounds", (8,)),
    "column_sums": ("race", (10, 11, 12)),
    "reversed_rows": ("uninitialised-read", (12,)),
    "after_the_first": ("plain-load-poll", (16, 17)),
    "all_arrive": ("deadlock", (13, 14)),
    "row_maxima": ("nondeterminism", (9,)),
    "last_adds": ("race", (9, 14)),
}


@check("name_bugs", points=3, title="the kind of each bug")
def kinds(ask: Ask, rng: np.random.Generator) -> None:
    found = named(ask)
    wrong = [name for name, (kind, _) in BUGS.items() if found[name][0] != kind]
    if wrong:
        fail(f"{', '.join(wrong)}: it is another of {', '.join(KINDS)}", share=(len(BUGS) - len(wrong)) / len(BUGS))


@check("name_bugs", points=3, title="the line of each bug")
def places(ask: Ask, rng: np.random.Generator) -> None:
    found = named(ask)
    wrong = [name for name, (_, known) in BUGS.items() if found[name][1] not in known]
    if wrong:
        fail(f"{', '.join(wrong)}: another line", share=(len(BUGS) - len(wrong)) / len(BUGS))


@check("repaired_kernel", points=2, title="sums of any length, clean under every schedule")
def repaired_clean(ask: Ask, rng: np.random.Generator) -> None:
    for n in (1, 8, int(rng.integers(9, 24)), int(rng.integers(40, 50))):
        run_case(ask, repaired_case(rng, n), 12, int(rng.integers(1000)))


@check("repaired_kernel", points=2, title="the same counter serves the next launch")
def repaired_again(ask: Ask, rng: np.random.Generator) -> None:
    case = repaired_case(rng, int(rng.integers(17, 30)))
    question = case.question(schedules=4)
    question["tensors"] |= {"again": {"shape": [1], "dtype": "float32"}, "parts2": question["tensors"]["parts"]}
    kernel, grid, arguments, constants = question["launches"][0]
    question["launches"].append([kernel, grid, {**arguments, "out": "again", "parts": "parts2"}, constants])
    question["out"] = ["out", "again"]
    got = ask(case.kernel, question)["tensors"]
    for name in ("out", "again"):
        which = "second" if name == "again" else "first"
        close(got[name], *case.expected["out"], what=f"{case.what}, {which} launch")
