"""Compile the launches of ops for a GPU that is not here, and read what came out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cs336_kernels import binary
from cs336_kernels.catalogue import Op
from cs336_kernels.record import ALIGNMENT, Launch, Variant, record
from cs336_kernels.shapes import Shape

TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
WIDE = 128  # bits: one thread cannot load more at once on sm_80 and sm_90
LARGE = 4  # a tensor counts as large when it has at least 1/4 of the bytes of the largest one that is loaded
SHARE = 16  # a launch that loads less than 1/16 of the op's bytes does not decide its time
TOKENS = (1, 8, 128)
UNSPECIALISED = ("fp32", "u1")  # kinds of arguments whose values never matter to the compiler


@dataclass(frozen=True)
class Row:
    """One kernel of one op at one shape, for one GPU. Equal for equal versions of Triton.

    Attributes:
        registers: 32-bit registers of a thread. spills: instructions that move registers to or from local memory.
        spill_bytes: local memory of a thread. shared_bytes: shared memory of a program.
        load_bits: the narrowest load of a large tensor by one thread, in bits; 0 when it loads none.
        loads: tensor -> its narrowest load in bits.
        bandwidth_bound: whether the time of the op is that of its bytes here, and this launch loads a share of them
            that counts.
        source: of the kernel's code and of what the compiler is told; see `Variant.fingerprint`.
        error: why it did not compile, else "".
    """

    op: str
    kernel: str
    model: str
    dtype: str
    tokens: int
    target: str
    num_warps: int
    num_stages: int
    registers: int
    spills: int
    spill_bytes: int
    shared_bytes: int
    load_bits: int
    loads: dict[str, int]
    bandwidth_bound: bool
    source: str
    error: str = ""

    @property
    def faults(self) -> list[str]:
        """What `--check` refuses."""
        if self.error:
            return [f"does not compile: {self.error}"]
        found = []
        if self.spills or self.spill_bytes:
            found.append(f"spills: {self.spills} instructions, {self.spill_bytes} bytes a thread")
        if self.bandwidth_bound and self.load_bits < WIDE:
            found.append(f"loads its large tensors {self.load_bits} bits at a time, not {WIDE}: {self.loads}")
        return found


@dataclass(frozen=True)
class Case:
    """A launch of an op at one shape, on one GPU."""

    op: Op
    shape: Shape
    dtype: str
    tokens: int
    target: str
    launch: Launch
    minimal_bytes: int

    @property
    def variant(self) -> Variant:
        return self.launch.variant

    @property
    def place(self) -> tuple[str, ...]:
        """What tells one row from another."""
        return self.op.name, self.variant.name, self.shape.name, self.dtype, str(self.tokens), self.target


@dataclass(frozen=True)
class Binary:
    """What one compilation gave."""

    registers: int = 0
    spills: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    loads: tuple[tuple[str, tuple[int, ...]], ...] = ()
    machine_widths: tuple[int, ...] = ()
    num_warps: int = 0
    num_stages: int = 0
    error: str = ""


def cases(
    ops: Iterable[Op], models: Iterable[Shape], tokens: Iterable[int] = TOKENS, targets: Iterable[str] = TARGETS
) -> Iterator[Case]:
    """Launches of ops: their usual dtype at every model and number of tokens, other dtypes at one model."""
    for op in ops:
        for i, shape in enumerate(s for s in models if op.fits(s)):
            for dtype in op.dtypes if i == 0 else op.dtypes[:1]:
                for n in tokens:
                    arguments = op.make(shape, dtype, torch.device("cpu"), n)
                    least = op.minimal_bytes(**arguments)
                    call = partial(op.call, **arguments, path="triton")
                    for target in targets:
                        for launch in record(call, TARGETS[target]):
                            yield Case(op, shape, str(dtype).removeprefix("torch."), n, target, launch, least)


def source(variant: Variant) -> ASTSource:
    """What the compiler is asked for. A launch of this variant asks for the same, and finds it in Triton's cache."""
    # An empty list says that nothing is known. Triton's cache tells it from no entry, and a launch asks with it.
    attributes = {
        (i,): [["tt.divisibility", ALIGNMENT]] if name in variant.divisible else []
        for i, (name, kind) in enumerate(variant.signature)
        if kind not in UNSPECIALISED
    }
    return ASTSource(variant.kernel, dict(variant.signature), dict(variant.constants), attributes)


def compile_for(variant: Variant, capability: int) -> Any:
    """What Triton makes of a variant for one GPU (80, 90, ...); the compiler raises what it likes."""
    return triton.compile(source(variant), target=GPUTarget("cuda", capability, 32), options=dict(variant.options))


def build(variant: Variant, capability: int) -> Binary:
    """Compile for one GPU and read the result. What the compiler refuses is an error in the result."""
    try:
        done = compile_for(variant, capability)
    except Exception as e:  # the compiler's own errors have no common base
        return Binary(error=f"{type(e).__name__}: {' '.join(str(e).split())}"[:300])
    machine = binary.inspect(done.asm["cubin"])
    loads = binary.loads(done.asm["ptx"], variant.parameters)
    return Binary(
        registers=machine.registers,
        spills=machine.spills,
        spill_bytes=machine.local_bytes,
        shared_bytes=done.metadata.shared,
        loads=tuple((name, tuple(sorted(widths))) for name, widths in sorted(loads.items())),
        machine_widths=tuple(sorted(machine.loads)),
        num_warps=done.metadata.num_warps,
        num_stages=done.metadata.num_stages,
    )


def row(case: Case, made: Binary) -> Row:
    """Join what the compiler made with the sizes of the tensors of one launch."""
    narrowest = {name: widths[0] for name, widths in made.loads}
    sizes = {name: case.launch.tensor_bytes.get(name, 0) for name in narrowest}
    largest = max(sizes.values(), default=0)
    large = [bits for name, bits in narrowest.items() if sizes[name] * LARGE >= largest or name == binary.UNKNOWN]
    # The assembler may split what PTX asks for; it says not of which tensor, so it counts as one that matters.
    split = set(made.machine_widths) - {bits for _, widths in made.loads for bits in widths}
    counts = sum(sizes.values()) * SHARE >= case.minimal_bytes
    op, kernel, model, dtype, _, target = case.place
    return Row(
        op=op,
        kernel=kernel,
        model=model,
        dtype=dtype,
        tokens=case.tokens,
        target=target,
        num_warps=made.num_warps,
        num_stages=made.num_stages,
        registers=made.registers,
        spills=made.spills,
        spill_bytes=made.spill_bytes,
        shared_bytes=made.shared_bytes,
        load_bits=min((*large, *split), default=0),
        loads=narrowest,
        bandwidth_bound=case.op.bandwidth_bound(case.tokens) and counts,
        source=case.variant.fingerprint,
        error=made.error,
    )


def rows(found: Iterable[Case], targets: Sequence[str] = tuple(TARGETS)) -> list[Row]:
    """Compile what is distinct among the cases of these targets; one row for each of them."""
    asked = [case for case in found if case.target in targets]
    jobs = list(dict.fromkeys((case.variant, case.target) for case in asked))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # half of the time is ptxas, a process of its own
        made = dict(zip(jobs, pool.map(lambda job: build(job[0], TARGETS[job[1]]), jobs), strict=True))
    return [row(case, made[case.variant, case.target]) for case in asked]
