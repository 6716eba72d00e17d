"""What this machine is, and which parts of the course it can run. Nothing here uses the network."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import shutil
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import psutil
import torch

from cs336_infer.devices import BF16_FEATURES
from cs336_infer.models.zoo import INSTALL_HINT, embedded_path

# Bytes free to load and run the embedded model, from measured peaks of 1.06 and 1.13 GB and some room.
BF16_MODEL_NEEDS = 1.3e9
FP32_MODEL_NEEDS = 1.5e9
ISA_FEATURES = (
    *("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    *("neon", "bf16", "i8mm", "sve", "sve2"),
)
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Gpu:
    """One CUDA device; memory in bytes."""

    name: str
    memory_bytes: int
    compute_capability: str


@dataclass(frozen=True)
class Machine:
    """The hardware and software that a measurement is stamped with; sizes in bytes."""

    cpu: str
    physical_cores: int | None
    logical_cores: int | None
    torch_threads: int
    memory_bytes: int
    available_bytes: int
    llc_bytes: int | None  # last-level cache, when the system says
    isa: tuple[str, ...]  # those of ISA_FEATURES that the processor has
    torch: str
    torch_cpu_capability: str  # the widest vector code that torch's own kernels use
    triton: str | None
    gpus: tuple[Gpu, ...]
    os: str
    python: str

    def to_dict(self) -> dict[str, object]:
        """The same as plain dicts, lists, numbers and strings, ready for `json.dumps`."""
        return {**asdict(self), "isa": list(self.isa), "gpus": [asdict(g) for g in self.gpus]}


class Status(StrEnum):
    """OK: runs. WARN: runs, with a limit. NO: does not run here."""

    OK = "ok"
    WARN = "warn"
    NO = "no"


@dataclass(frozen=True)
class Check:
    """One line of `doctor`: what was looked at, how it stands, and what to do about it."""

    name: str
    status: Status
    detail: str


def describe() -> Machine:
    """Look at the machine. Takes a second at the first call, when it imports Triton."""
    return Machine(
        cpu=_cpu_name(),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(logical=True),
        torch_threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        available_bytes=available_bytes(),
        llc_bytes=last_level_cache_bytes(),
        isa=_isa(),
        torch=torch.__version__,
        torch_cpu_capability=torch.backends.cpu.get_cpu_capability(),
        triton=_triton_version(),
        gpus=_gpus(),
        os=platform.platform(),
        python=platform.python_version(),
    )


def available_bytes() -> int:
    """Memory that can still be taken, within the container's limit (cgroup v2) if there is one."""
    free = psutil.virtual_memory().available
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no such file, or no limit: "max"
        return free
    return min(free, max(limit - used, 0))


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Size of the largest cache that core 0 reads through, as Linux lists it; None elsewhere."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = []
    for file in root.glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdigit() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=None)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _isa() -> tuple[str, ...]:
    capabilities = torch.cpu.get_capabilities()
    return tuple(name for name in ISA_FEATURES if capabilities.get(name))


def _triton_version() -> str | None:
    try:
        return importlib.import_module("triton").__version__
    except Exception:  # a broken install fails in many ways, and all of them mean that it cannot be used
        return None


def _gpus() -> tuple[Gpu, ...]:
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(Gpu(p.name, p.total_memory, f"{p.major}.{p.minor}") for p in found)


def doctor() -> list[Check]:
    """What this machine can run and, where it cannot, why not and what to do. Takes about a second."""
    machine = describe()
    return [
        _python_check(),
        _torch_check(machine),
        _bf16_check(machine),
        _model_check(),
        _memory_check(machine),
        _triton_check(machine),
        _gpu_check(machine),
        _package_check("notebooks", ("jupyterlab", "ipywidgets"), 'pip install "cs336-infer[notebooks]"'),
        _package_check("transformers", ("transformers",), 'pip install "transformers>=5,<6" to compare with it'),
        _program_check("npm", ("npm",), "install Node.js to build the slides"),
        _program_check("chromium", CHROMIUM, "install Chromium for the browser tests"),
        _program_check("C++ compiler", COMPILERS, "install g++ or clang++ for the stages with C++ kernels"),
    ]


def _python_check() -> Check:
    version = platform.python_version()
    if tuple(map(int, platform.python_version_tuple()[:2])) < (3, 11):
        return Check("python", Status.NO, f"Python {version} is too old: install 3.11 or newer.")
    return Check("python", Status.OK, f"Python {version}.")


def _torch_check(machine: Machine) -> Check:
    said = f"torch {machine.torch}, {machine.torch_threads} threads, {machine.torch_cpu_capability} kernels"
    if not machine.torch.startswith("2.13."):
        return Check("torch", Status.WARN, f"{said}; the course is tested with 2.13: pip install torch==2.13.0.")
    return Check("torch", Status.OK, f"{said}.")


def _bf16_check(machine: Machine) -> Check:
    native = [f for f in machine.isa if f in BF16_FEATURES]
    if native:
        return Check("bf16 on the CPU", Status.OK, f"The processor multiplies bf16 itself ({', '.join(native)}).")
    return Check(
        "bf16 on the CPU", Status.WARN, "The processor emulates bf16: right, but slow, so prefer fp32 for prefill."
    )


def _model_check() -> Check:
    file = embedded_path()
    if file is None:
        return Check("embedded model", Status.NO, f"SmolLM2-135M is missing: {INSTALL_HINT}.")
    return Check("embedded model", Status.OK, f"{file.name}, {file.stat().st_size / 1e6:.0f} MB.")


def _memory_check(machine: Machine) -> Check:
    free = f"{machine.available_bytes / 1e9:.1f} GB free"
    if machine.available_bytes >= FP32_MODEL_NEEDS:
        return Check("memory", Status.OK, f"{free}: enough for the embedded model in fp32 and bf16.")
    if machine.available_bytes >= BF16_MODEL_NEEDS:
        need = f"fp32 needs {FP32_MODEL_NEEDS / 1e9:.1f}"
        return Check("memory", Status.WARN, f"{free}: run the embedded model in bf16, or close programs ({need}).")
    return Check(
        "memory",
        Status.NO,
        f"{free}: the embedded model needs {BF16_MODEL_NEEDS / 1e9:.1f} while loading, so close programs.",
    )


def _triton_check(machine: Machine) -> Check:
    if machine.triton is None:
        todo = "pip install triton" if platform.system() == "Linux" else "use Linux, since it has no wheels elsewhere"
        return Check("triton", Status.NO, f"Triton cannot be imported, so its cells are skipped: {todo}.")
    if not machine.gpus:
        return Check(
            "triton", Status.WARN, f"Triton {machine.triton} runs in its interpreter only: speed needs an NVIDIA GPU."
        )
    return Check("triton", Status.OK, f"Triton {machine.triton} compiles for {machine.gpus[0].name}.")


def _gpu_check(machine: Machine) -> Check:
    if not machine.gpus:
        return Check("CUDA GPU", Status.NO, "None seen by torch: GPU checks are skipped; run them on another machine.")
    names = ", ".join(f"{g.name} ({g.memory_bytes / 1e9:.0f} GB, sm {g.compute_capability})" for g in machine.gpus)
    return Check("CUDA GPU", Status.OK, f"{names}.")


def _package_check(name: str, packages: tuple[str, ...], todo: str) -> Check:
    missing = [p for p in packages if importlib.util.find_spec(p) is None]
    if missing:
        return Check(name, Status.NO, f"{' and '.join(missing)} missing: {todo}.")
    return Check(name, Status.OK, f"{' and '.join(packages)} installed.")


def _program_check(name: str, programs: tuple[str, ...], todo: str) -> Check:
    found = next((path for path in map(shutil.which, programs) if path), None)
    return Check(name, Status.OK, f"{found}.") if found else Check(name, Status.NO, f"Not found: {todo}.")
