"""`load_model`: a name or a path becomes a model that can generate."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cs336_kernels.ops import packing_available

from cs336_infer.devices import bf16_is_native, find_device
from cs336_infer.models.config import ModelConfig, config_from_gguf, config_from_hf
from cs336_infer.models.gguf_file import GGUFFile
from cs336_infer.models.llama import KERNELS, PACKED, TRITON, Llama
from cs336_infer.models.tokenizer import Tokenizer
from cs336_infer.models.weights import GGUFSource, SafetensorsSource, WeightSource, check_shapes
from cs336_infer.models.zoo import EMBEDDED, resolve
from cs336_infer.types import InvalidRequest, ModelLoadError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: weights, tokenizer and where they came from."""

    name: str
    source: Path
    config: ModelConfig
    net: Llama
    tokenizer: Tokenizer

    @property
    def dtype(self) -> torch.dtype:
        return self.net.dtype

    @property
    def device(self) -> torch.device:
        return self.net.device

    def describe_path(self, kv: str) -> str:
        """Which rung runs, in words: printed with every result, so that no fallback is silent."""
        dtype = str(self.dtype).removeprefix("torch.")
        threads = f" threads={torch.get_num_threads()}" if self.device.type == "cpu" else ""
        return f"kv={kv} kernels={self.net.path} dtype={dtype} device={self.device}{threads}"


def load_model(
    name_or_path: str | Path = EMBEDDED,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kernels: str = "auto",
    progress: bool | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name_or_path: "smollm2-135m-instruct" (embedded, the default), a GGUF file, a Hugging Face folder with
            config.json and safetensors, or a hub id.
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 where the hardware multiplies it, else float32.
        device: "cpu", "cuda", "cuda:1", or "auto": a GPU if there is one.
        kernels: "reference" (plain PyTorch), "packed" (weights reordered for the CPU), "cpu" (the same, and
            in the engine attention over KV pages in C++, built on first use), "compile" (plain PyTorch through
            `torch.compile`, which takes a minute when it first runs), "triton" (a Triton kernel for each op), "fused"
            (Triton kernels that fuse chains of ops; the engine only), "graph" (the same, and each decode step is one
            CUDA graph), or "auto": packed where it exists. On a CPU
            Triton kernels are interpreted: for tiny models.
            A name that cannot run here is an error.
        progress: show a bar while loading; None shows it only on a terminal or in a notebook.

    Raises:
        ModelLoadError: the files are missing, damaged or of an unsupported kind.
        InvalidRequest: dtype, device or kernels is unknown or not available here.
    """
    torch_device = find_device(device)
    torch_dtype = _dtype(dtype, torch_device)
    path_name = _kernels(kernels, torch_dtype, torch_device)
    path = resolve(name_or_path)
    with _naming(path):
        config, source, tokenizer, factors = _open_folder(path) if path.is_dir() else _open_gguf(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelLoadError(
            f"{path}: the tokenizer makes ids up to {tokenizer.vocab_size - 1}, "
            f"the embedding table has {config.vocab_size} rows"
        )
    check_shapes(source, config, str(path))
    tokenizer.pad_vocabulary(config.vocab_size)
    try:
        net = Llama(
            config,
            source,
            dtype=torch_dtype,
            device=torch_device,
            path=path_name,
            rope_factors=factors,
            progress=_interactive() if progress is None else progress,
        )
    except (torch.OutOfMemoryError, MemoryError):
        need = config.num_params * torch_dtype.itemsize / 2**30
        raise ModelLoadError(f"{path}: not enough memory on {torch_device}: the weights need {need:.1f} GiB") from None
    return LoadedModel(str(name_or_path), path, config, net, tokenizer)


def read_config(path: Path) -> ModelConfig:
    """The shape of the model at a resolved path, from its header alone."""
    with _naming(path):
        return _hf_config(path) if path.is_dir() else _gguf_config(GGUFFile(path))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of the parts that do not know where they came from get the path in front."""
    try:
        yield
    except ModelLoadError as e:
        raise e if str(path) in str(e) else ModelLoadError(f"{path}: {e}") from None
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, OverflowError, RecursionError) as e:
        what = " ".join(str(e).split())[:150]
        raise ModelLoadError(f"{path}: a file of this model holds something unexpected ({what})") from e


Opened = tuple[ModelConfig, WeightSource, Tokenizer, torch.Tensor | None]


def _open_gguf(path: Path) -> Opened:
    file = GGUFFile(path)
    config = _gguf_config(file)
    factors = None
    if "rope_freqs.weight" in file.tensors:
        factors = torch.from_numpy(np.concatenate([rows[0] for _, rows in file.rows("rope_freqs.weight")]))
        if factors.shape != (config.head_dim // 2,):
            raise ModelLoadError(f"{path}: rope_freqs.weight has {len(factors)} values, not {config.head_dim // 2}")
    return config, GGUFSource(file), Tokenizer.from_gguf(file.metadata), factors


def _open_folder(path: Path) -> Opened:
    return _hf_config(path), SafetensorsSource(path), Tokenizer.from_folder(path), None


def _gguf_config(file: GGUFFile) -> ModelConfig:
    embed = file.tensors.get("token_embd.weight")
    if embed is None or len(embed.shape) != 2:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing or not a matrix")
    tied = "output.weight" not in file.tensors
    return config_from_gguf(file.metadata, tied=tied, vocab_size=embed.shape[0], source=str(file.path))


def _hf_config(path: Path) -> ModelConfig:
    file = path / "config.json"
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise ModelLoadError(f"{path}: no readable config.json in this folder (a GGUF file is named itself)") from None
    except ValueError:
        raise ModelLoadError(f"{file}: not valid JSON") from None
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{file}: not a JSON object")
    return config_from_hf(raw, str(path))


def _dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if bf16_is_native(device) else torch.float32
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise InvalidRequest(f"unknown dtype {dtype!r} ({', '.join(DTYPES)} or auto)")
    return found


LATER = {"cpu": "cs336_kernels.native"} | dict.fromkeys(TRITON, "cs336_infer.models.triton_block")
"""Modules behind some rungs; the students' copy of an early stage has not got them."""


def _kernels(kernels: str, dtype: torch.dtype, device: torch.device) -> str:
    if kernels == "auto":
        return "packed" if packing_available(dtype, device) else "reference"
    if kernels not in KERNELS:
        raise InvalidRequest(f"unknown kernels {kernels!r} ({', '.join(KERNELS)} or auto)")
    if kernels in PACKED and not packing_available(dtype, device):
        raise InvalidRequest(f"kernels={kernels!r} does not run with {dtype} on {device} with this build of torch")
    if kernels in LATER and find_spec(LATER[kernels]) is None:
        raise InvalidRequest(f"kernels={kernels!r} is a later stage of the course, which is not installed here")
    if kernels == "cpu":
        from cs336_kernels import native

        if why := native.unavailable("attention"):
            raise InvalidRequest(f"kernels='cpu' is built on first use, which fails here: {why}")
    if kernels in TRITON and find_spec("triton") is None:
        raise InvalidRequest(f"kernels={kernels!r} needs Triton, which has wheels for Linux only")
    if kernels == "graph" and device.type != "cuda":
        raise InvalidRequest(f"kernels='graph' is CUDA graphs of the fused kernels: it needs a GPU, not {device}")
    if kernels == "compile" and device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise InvalidRequest("kernels='compile' needs a C++ compiler, g++ or the one that $CXX names (Debian: g++)")
    return kernels


def _interactive() -> bool:
    """A terminal or a notebook is watching."""
    return sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ
