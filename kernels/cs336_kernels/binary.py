"""What a compiled kernel does, read from its PTX and from the machine code: registers, spills, widths of loads.

The tools come with Triton: `cuobjdump -res-usage` names registers and stack, `nvdisasm -c` writes the machine code
(SASS) as text. SASS says how wide a load is but not from which tensor; PTX says both, because there every address can
be followed back to a parameter of the kernel. So widths are taken from PTX, and SASS confirms that the assembler kept
them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "?"
"""Name of the source of a load whose address comes from no parameter, such as a pointer read from memory."""

_REGISTER = re.compile(r"%[a-z]+\d+")
_ADDRESS = re.compile(r"\[\s*(%[a-z]+\d+)[^\]]*\]")
_PARAM = re.compile(r"\[\s*\w+_param_(\d+)\s*\]")
_WIDTH = re.compile(r"(?:\.v(\d))?\.[busf](\d+)$|(?:\.v(\d))?\.b?f16x2$")
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


@dataclass(frozen=True)
class Machine:
    """The machine code of one kernel.

    Attributes:
        registers: 32-bit, of a thread. local_bytes: memory of a thread for what does not fit into them.
        instructions: how often each stands in the text.
    """

    registers: int
    local_bytes: int
    instructions: Counter[str]

    @property
    def spills(self) -> int:
        """Instructions that move registers to or from local memory."""
        return sum(n for name, n in self.instructions.items() if name.split(".")[0] in ("LDL", "STL"))

    @property
    def loads(self) -> Counter[int]:
        """Loads from global memory by their bits: LDG, and LDGSTS which fills shared memory."""
        widths: Counter[int] = Counter()
        for name, n in self.instructions.items():
            head, *parts = name.split(".")
            if head in ("LDG", "LDGSTS"):
                widths[next((_BITS[p] for p in parts if p in _BITS), 32)] += n
        return widths


def tool(name: str) -> str:
    """Path of one of the tools in Triton's wheel. FileNotFoundError where this wheel has none."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise FileNotFoundError(f"this Triton ({triton.__version__}) has no {name} at {path}")
    return str(path)


def inspect(cubin: bytes) -> Machine:
    """Read a cubin that holds one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage = _run(tool("cuobjdump"), "-res-usage", str(file))
        sass = _run(tool("nvdisasm"), "-c", str(file))
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of registers: {usage[:200]!r}")
    registers, stack, local = map(int, found.groups())
    return Machine(registers, stack + local, Counter(_SASS.findall(sass)))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()[:300]}")
    return done.stdout


def spills(instructions: Counter[str]) -> int:
    """Instructions that move registers to or from local memory."""
    return sum(n for name, n in instructions.items() if name.split(".")[0] in ("LDL", "STL"))


def loads(ptx: str, parameters: list[str]) -> dict[str, Counter[int]]:
    """Loads from global memory by the parameter that their address comes from, and by their bits.

    Args:
        ptx: text of one kernel. parameters: names of its parameters, in order, constants of compilation left out.

    Returns:
        name, or `UNKNOWN`, -> {bits: how many loads stand in the text}. A thread reads that many bits at once.
    """
    statements = list(_statements(ptx))
    origin = _origins(statements)
    found: dict[str, Counter[int]] = {}
    for opcode, operands in statements:
        bits = _load_bits(opcode, operands)
        if not bits:
            continue
        addresses = _ADDRESS.findall(operands)
        sources = origin.get(addresses[-1], frozenset()) if addresses else frozenset()
        # Scratch memory that the compiler adds comes after the last parameter of the source.
        names = {parameters[i] if i < len(parameters) else UNKNOWN for i in sources} or {UNKNOWN}
        for name in names:
            found.setdefault(name, Counter())[bits] += 1
    return found


def _statements(ptx: str) -> Iterator[tuple[str, str]]:
    """(opcode, operands) of every instruction; predicates in front are dropped."""
    body = re.sub(r"//[^\n]*", "", ptx[ptx.find(".entry") :])
    for statement in re.split(r"[;\n]", body):
        words = statement.strip().lstrip("{").strip().split(None, 1)
        if words and words[0].startswith("@") and len(words) == 2:
            words = words[1].split(None, 1)
        if len(words) == 2 and not words[0].startswith((".", "%")):
            yield words[0], words[1]


def _origins(statements: list[tuple[str, str]]) -> dict[str, frozenset[int]]:
    """Register -> parameters that its value was computed from. Values that come from memory have none."""
    origin: dict[str, frozenset[int]] = {}
    edges: list[tuple[list[str], list[str]]] = []
    for opcode, operands in statements:
        if opcode.startswith("ld.param"):
            number = _PARAM.search(operands)
            if number and "64" in opcode:
                for register in _REGISTER.findall(operands.split("[")[0]):
                    origin[register] = frozenset({int(number[1])})
        elif not opcode.startswith(("ld.", "st.", "cp.async", "atom", "red.", "setp", "mma", "wgmma", "bar")):
            target, sources = _target(operands)
            edges.append((target, [r for r in sources if not r.startswith("%p")]))
    changed = True
    while changed:  # a pointer that a loop moves depends on itself
        changed = False
        for targets, sources in edges:
            reaching = frozenset().union(*(origin.get(r, frozenset()) for r in sources))
            for register in targets:
                have = origin.get(register, frozenset())
                if not reaching <= have:
                    origin[register] = have | reaching
                    changed = True
    return origin


def _target(operands: str) -> tuple[list[str], list[str]]:
    text = operands.strip()
    end = text.find("}") + 1 if text.startswith("{") else text.find(",")
    return _REGISTER.findall(text[:end]), _REGISTER.findall(text[end:])


def _load_bits(opcode: str, operands: str) -> int:
    """Bits that one thread gets by this instruction; 0 for what does not load from global memory."""
    if opcode.startswith("cp.async") and ".shared" in opcode and ".global" in opcode and "bulk" not in opcode:
        size = re.search(r"\]\s*,\s*\[[^\]]*\]\s*,\s*(?:0x)?([0-9a-f]+)", operands)
        if size is None:
            raise ValueError(f"no size in {opcode} {operands}")
        return 8 * int(size[1], 16 if "0x" in size[0] else 10)
    if not opcode.startswith(("ld.global", "ld.relaxed", "ld.acquire", "ld.volatile.global")) or "shared" in opcode:
        return 0
    width = _WIDTH.search(opcode)
    if width is None:
        raise ValueError(f"no width in {opcode}")
    lanes = int(width[1] or width[3] or 1)
    return lanes * int(width[2] or 32)
