"""Every kernel compiled without a GPU: what it uses, how wide it reads, and that the committed table is up to date.

`make test` compiles each op at one shape and reads the rest from the table, whose rows carry a fingerprint of the
kernel that they are of. `KERNELS_FULL=1` compiles all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

import triton
import triton.language as tl
from cs336_kernels import aot, binary
from cs336_kernels.catalogue import OPS, Op
from cs336_kernels.compiled import TARGETS, TOKENS, Case, Row, build, cases, row, rows, source
from cs336_kernels.launch import launch, recording
from cs336_kernels.record import Variant, record
from cs336_kernels.shapes import MODELS, Shape

TABLE = Path(__file__).resolve().parents[2] / "kernels" / "aot_table.json"
FULL = os.environ.get("KERNELS_FULL") == "1"
REMAKE = "run: python -m cs336_kernels.aot --write kernels/aot_table.json"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    table = json.loads(TABLE.read_text())
    if table["triton"] != triton.__version__:
        pytest.skip(f"the table is of triton {table['triton']}, this is {triton.__version__}")
    return table


@pytest.fixture(scope="module")
def recorded() -> list[Case]:
    return list(cases(OPS.values(), list(MODELS.values())))


@pytest.fixture(scope="module")
def compiled() -> list[Row]:
    """All cases, or each op at one token of one model."""
    if FULL:
        return rows(list(cases(OPS.values(), list(MODELS.values()))))
    return [r for op in OPS.values() for r in rows(one_case(op))]


def one_case(op: Op) -> list[Case]:
    shape = next(s for s in (MODELS["Llama-3.2-1B"], MODELS["Qwen3-0.6B"]) if op.fits(s))
    return [
        case for case in cases([op], [shape], (1,), ["sm_90"]) if case.dtype == str(op.dtypes[0]).removeprefix("torch.")
    ]


def test_every_op_is_in_the_table_for_every_gpu_and_number_of_tokens(committed: dict[str, Any]) -> None:
    found = {(r["op"], r["target"], r["tokens"]) for r in committed["rows"]}
    assert found == {(op, target, tokens) for op in OPS for target in TARGETS for tokens in TOKENS}
    for op in OPS.values():
        models = {r["model"] for r in committed["rows"] if r["op"] == op.name}
        assert models == {name for name, shape in MODELS.items() if op.fits(shape)}
        dtypes = {r["dtype"] for r in committed["rows"] if r["op"] == op.name}
        assert dtypes == {str(dtype).removeprefix("torch.") for dtype in op.dtypes}
    places = Counter(aot.place_of(r) for r in committed["rows"])
    assert max(places.values()) == 1


def test_rows_say_what_was_asked_for(committed: dict[str, Any]) -> None:
    for fields in committed["rows"]:
        r = Row(**fields)
        assert 16 <= r.registers <= 255
        assert r.num_warps in (1, 2, 4, 8, 16, 32)
        assert r.registers * 32 * r.num_warps <= 65536, f"{r}: not one program fits a multiprocessor"
        assert 0 <= r.shared_bytes <= {"sm_80": 163, "sm_90": 227, "sm_100": 227}[r.target] * 1024
        assert r.loads and set(r.loads.values()) <= {8, 16, 32, 64, 128, 256}
        assert r.load_bits in set(r.loads.values())


def test_no_kernel_spills_and_what_memory_bounds_reads_128_bits_at_once(committed: dict[str, Any]) -> None:
    faults = [f"{' '.join(aot.place_of(fields))}: {f}" for fields in committed["rows"] for f in Row(**fields).faults]
    assert not faults
    bound = {fields["op"] for fields in committed["rows"] if fields["bandwidth_bound"]}
    assert bound == {op.name for op in OPS.values() if op.bandwidth_bound(1)}, "nothing was held to 128 bits for these"


def test_the_table_is_of_the_kernels_as_they_are(committed: dict[str, Any], recorded: list[Case]) -> None:
    assert not aot.stale(recorded, committed), REMAKE


def test_the_page_has_the_summary(committed: dict[str, Any]) -> None:
    page = (TABLE.parent / "README.md").read_text()
    assert aot.summary(committed) in page, "run: python -m cs336_kernels.aot --summary kernels/aot_table.json"


def test_the_table_is_what_the_compiler_makes_now(committed: dict[str, Any], compiled: list[Row]) -> None:
    assert not aot.differences(compiled, committed), REMAKE
    assert not [fault for r in compiled for fault in r.faults]


def test_a_launch_asks_the_compiler_for_the_same() -> None:
    """Triton's own reading of the arguments of a launch, and its cache key: a GPU runs what is compiled ahead."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime import jit

    backend, seen = make_backend(GPUTarget("cuda", 90, 32)), []

    def handler(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        options = kwargs | {"debug": False, "instrumentation_mode": ""}
        bound, specialization, rest = binder(*args, **options)
        _, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, rest)
        seen.append((kernel, signature, constants, attributes))

    op, shape = OPS["qkv"], MODELS["SmolLM2-135M"]
    for tokens in TOKENS:
        arguments = op.make(shape, torch.bfloat16, torch.device("cpu"), tokens)
        with recording(handler):
            op.call(**arguments, path="triton")
        (mine,) = record(lambda a=arguments: op.call(**a, path="triton"))
        asked, signature, constants, attributes = seen.pop()
        assert source(mine.variant).hash() == ASTSource(asked, signature, constants, attributes).hash()
        assert dict(mine.variant.signature) == signature
        names = list(signature)
        assert dict(mine.variant.constants) == {names[path[0]]: value for path, value in constants.items()}
        divisible = {names[path[0]] for path, known in attributes.items() if known}
        assert set(mine.variant.divisible) == divisible


def test_a_fingerprint_follows_the_code_and_not_its_layout(tmp_path: Path) -> None:
    first = "import triton\nimport triton.language as tl\nSTEP: tl.constexpr = tl.constexpr({step})\n\n"
    helper = "@triton.jit\ndef _more(x):\n    return x + {plus}\n\n"
    kernel = "@triton.jit\ndef kernel(out, x, N: tl.constexpr):{comment}\n    tl.store(out, _more(tl.load(x)) + STEP)\n"

    def made(name: str, step: int = 1, plus: int = 1, comment: str = "") -> str:
        (tmp_path / f"{name}.py").write_text((first + helper + kernel).format(step=step, plus=plus, comment=comment))
        namespace = _import(tmp_path / f"{name}.py")
        x = torch.empty(16)
        (only,) = record(lambda: launch(namespace.kernel, (1,), x, x, N=4))
        return only.variant.fingerprint

    same = made("a")
    assert made("b", comment="  # nothing") == same
    assert made("c", step=2) != same
    assert made("d", plus=2) != same


def _import(path: Path) -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Kernels with a fault


@triton.jit
def spilling_kernel(out, x, N: tl.constexpr):
    """Holds a matrix of 128 x 128 in the registers of one warp: 512 a thread."""
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(x + i * N + j)
    for _ in range(3):
        tile = tile * tl.sum(tile, 0)[None, :] + tl.sum(tile, 1)[:, None]
    tl.store(out + i * N + j, tile)


@triton.jit
def narrow_kernel(out, x, step, N: tl.constexpr):
    """Reads every other number: no two neighbours."""
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + 2 * at * step))


@triton.jit
def wide_kernel(out, x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def wrong_kernel(out, x, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), tl.load(x + tl.arange(0, 3)))


def op_of(kernel: Any, size: int, *step: int) -> Op:
    def call(x: torch.Tensor, path: str) -> None:
        launch(kernel, (1,), torch.empty_like(x), x, *step, N=size, num_warps=1)

    def arguments(values: Any, shape: Shape, tokens: int) -> dict[str, Any]:
        return {"x": torch.empty(size, size, dtype=values.dtype)}

    return Op(kernel.fn.__name__, "has a fault", call, arguments, lambda x: 2 * x.nbytes, dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("op", "says"),
    [
        (op_of(spilling_kernel, 128), "spills"),
        (op_of(narrow_kernel, 1024, 3), "32 bits at a time"),
        (op_of(wrong_kernel, 16), "does not compile"),
        (op_of(wide_kernel, 1024), ""),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)
def test_check_refuses_a_kernel_with_a_fault(
    op: Op, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(OPS, op.name, op)
    code = aot.main(["--op", op.name, "--target", "sm_90", "--check"])
    said = capsys.readouterr().err
    assert code == (1 if says else 0), said
    assert says in said and bool(said) == bool(says)


def test_a_changed_row_and_a_changed_kernel_are_seen(committed: dict[str, Any], compiled: list[Row]) -> None:
    table = {**committed, "rows": [dict(fields) for fields in committed["rows"]]}
    place = aot.place_of(asdict(compiled[0]))
    mine = next(fields for fields in table["rows"] if aot.place_of(fields) == place)
    mine["registers"] += 1
    (line,) = aot.differences(compiled, table)
    assert "registers" in line and " ".join(place) in line
    mine["source"] = "0" * 12
    found = one_case(OPS[compiled[0].op])
    assert any("the kernel has changed (1 rows)" in line for line in aot.stale(found, table))
    table["rows"].remove(mine)
    assert any(line.endswith("not in the table") for line in aot.differences(compiled, table))


def test_a_load_that_the_assembler_split_counts() -> None:
    """PTX asks for 128 bits, the machine code has a load of 32: the row says 32."""
    (case,) = cases([op_of(wide_kernel, 1024)], [MODELS["SmolLM2-135M"]], (1,), ["sm_90"])
    made = build(case.variant, 90)
    assert row(case, made).load_bits == 128
    split = type(made)(**{**made.__dict__, "machine_widths": (32, 128)})
    assert row(case, split).load_bits == 32


def test_the_command_compiles_where_triton_interprets() -> None:
    command = [sys.executable, "-m", "cs336_kernels.aot", "--op", "swiglu", "--target", "sm_90", "--json"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    found = [Row(**fields) for fields in json.loads(run.stdout)]
    assert {(r.op, r.target, r.error) for r in found} == {("swiglu", "sm_90", "")}
    assert all(r.registers and r.load_bits == 128 for r in found)


PTX = """
.visible .entry kernel(.param .u64 .ptr .global kernel_param_0, .param .u64 kernel_param_1, .param .u32 kernel_param_2)
{
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    ld.param.b32 %r1, [kernel_param_2];
    mul.wide.s32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    mov.b64 %rd9, %rd2;
$L__BB0_1:
    add.s64 %rd9, %rd9, 16;
    @%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd4 + 0 ];
    ld.global.L1::evict_first.b16 %rs1, [%rd9+2];
    cp.async.cg.shared.global [ %r8 + 0 ], [ %rd9 + 0 ], 0x10, %r9;
    ld.global.b64 %rd7, [%rd9];
    ld.global.b32 %r7, [%rd7];
    ld.shared.b32 %r10, [%r8];
    @%p2 bra $L__BB0_1;
    ret;
}
"""


def test_loads_are_followed_to_the_parameter_they_come_from() -> None:
    """Through a loop that moves a pointer; a pointer that was itself loaded has no known origin."""
    found = binary.loads(PTX, ["x", "y", "n"])
    assert found == {"x": Counter({128: 1}), "y": Counter({16: 1, 128: 1, 64: 1}), binary.UNKNOWN: Counter({32: 1})}


def test_recording_runs_nothing_and_reads_nothing() -> None:
    x = torch.full((64, 64), 7.0)
    (only,) = record(lambda: launch(wide_kernel, (4, 2), x, x, N=1024))
    assert (x == 7).all()
    assert only.grid == (4, 2, 1)
    assert isinstance(only.variant, Variant)
    assert only.tensor_bytes == {"out": x.nbytes, "x": x.nbytes}
