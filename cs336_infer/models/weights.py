"""Weights on disk, one tensor at a time, under the names of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from cs336_infer.models.config import ModelConfig
from cs336_infer.models.gguf_file import GGUFFile
from cs336_infer.types import ModelLoadError

_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class WeightSource(Protocol):
    """A checkpoint that can copy one named tensor into memory of ours."""

    def names(self) -> Iterable[str]:
        """Every tensor it holds."""
        ...

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, or None when the checkpoint does not hold it."""
        ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy the tensor into `out` (same shape, any float dtype), converting on the way."""
        ...


class SafetensorsSource:
    """A folder with `model.safetensors`, or shards and `model.safetensors.index.json`. Files are memory-mapped."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.exists():
            try:
                files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                where = {str(name): folder / Path(str(file)).name for name, file in files.items()}
            except (ValueError, KeyError, AttributeError, TypeError, OSError):
                raise ModelLoadError(f"{index}: not a valid safetensors index") from None
        elif single.exists():
            where = None
        else:
            raise ModelLoadError(f"{folder}: no model.safetensors and no model.safetensors.index.json")
        self._files = {p: _open(p) for p in sorted(set(where.values()))} if where else {single: _open(single)}
        self._where = where or dict.fromkeys(self._files[single].keys(), single)
        names = {p: set(f.keys()) for p, f in self._files.items()}
        for name, path in self._where.items():
            if name not in names[path]:
                raise ModelLoadError(f"{path}: tensor {name} is in the index and not in the file")

    def names(self) -> Iterable[str]:
        return self._where

    def shape(self, name: str) -> tuple[int, ...] | None:
        path = self._where.get(name)
        return tuple(self._files[path].get_slice(name).get_shape()) if path else None

    def read_into(self, name: str, out: torch.Tensor) -> None:
        path = self._where[name]
        tensor = self._files[path].get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelLoadError(f"{path}: tensor {name} has type {tensor.dtype}, which is not supported")
        out.copy_(tensor)


class GGUFSource:
    """A GGUF file, dequantised while it is copied."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self._permuted = file.metadata.get("general.architecture") == "llama"

    def names(self) -> Iterable[str]:
        return map(hf_name, self.file.tensors)

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self.file.tensors.get(gguf_name(name))
        return tensor.shape if tensor else None

    def read_into(self, name: str, out: torch.Tensor) -> None:
        flat = out.view(1, -1) if out.dim() == 1 else out
        unpermute = self._unpermute(name, flat.shape[0])
        for first, rows in self.file.rows(gguf_name(name)):
            target = unpermute[first : first + len(rows)] if unpermute is not None else slice(first, first + len(rows))
            flat[target] = torch.from_numpy(rows).to(out.dtype)

    def _unpermute(self, name: str, n_rows: int) -> torch.Tensor | None:
        """Where each stored row of q or k belongs: llama GGUF files interleave the two halves of every head."""
        if not self._permuted or not (".q_proj." in name or ".k_proj." in name):
            return None
        meta = self.file.metadata
        heads = meta["llama.attention.head_count"]
        if ".k_proj." in name:
            heads = meta.get("llama.attention.head_count_kv", heads)
        return torch.arange(n_rows).view(heads, 2, n_rows // heads // 2).transpose(1, 2).reshape(-1)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor name."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, index, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{_GGUF_BLOCK_NAMES[part]}.{kind}"


def hf_name(name: str) -> str:
    """The inverse of `gguf_name`; a name without a counterpart stays as it is."""
    for theirs, ours in _GGUF_NAMES.items():
        if name == ours:
            return theirs
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, kind = rest.rpartition(".")
    theirs = next((t for t, ours in _GGUF_BLOCK_NAMES.items() if ours == part), None)
    return f"model.layers.{block}.{theirs}.{kind}" if theirs else name


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor a checkpoint of this shape must hold, in the order it is loaded."""
    d, ff, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * hd, config.num_kv_heads * hd
    yield "model.embed_tokens.weight", (config.vocab_size, d)
    for i in range(config.num_layers):
        p = f"model.layers.{i}"
        yield f"{p}.input_layernorm.weight", (d,)
        yield f"{p}.self_attn.q_proj.weight", (q, d)
        yield f"{p}.self_attn.k_proj.weight", (kv, d)
        yield f"{p}.self_attn.v_proj.weight", (kv, d)
        if config.qk_norm:
            yield f"{p}.self_attn.q_norm.weight", (hd,)
            yield f"{p}.self_attn.k_norm.weight", (hd,)
        yield f"{p}.self_attn.o_proj.weight", (d, q)
        yield f"{p}.post_attention_layernorm.weight", (d,)
        yield f"{p}.mlp.gate_proj.weight", (ff, d)
        yield f"{p}.mlp.up_proj.weight", (ff, d)
        yield f"{p}.mlp.down_proj.weight", (d, ff)
    yield "model.norm.weight", (d,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, d)


# Tensors that may be there and are not read as weights: RoPE tables, and a tied head that was stored all the same.
_IGNORED = ("rope_freqs.weight", "lm_head.weight", "rotary_emb.inv_freq")


def check_shapes(source: WeightSource, config: ModelConfig, where: str) -> None:
    """Raise `ModelLoadError` for the first tensor that is missing, has another shape than the config says, or has no
    place in this model: a bias that is not added would make it another model."""
    expected = set()
    for name, wanted in expected_shapes(config):
        found = source.shape(name)
        if found is None:
            raise ModelLoadError(f"{where}: tensor {name} is missing")
        if found != wanted:
            raise ModelLoadError(f"{where}: tensor {name} has shape {found}, the config says {wanted}")
        expected.add(name)
    for name in source.names():
        if name not in expected and not name.endswith(_IGNORED):
            raise ModelLoadError(f"{where}: tensor {name} has no place in a {config.family} model of this config")


def _open(path: Path) -> Any:  # safetensors does not export the type of an open file
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: the file is missing") from None
    except (SafetensorError, OSError, ValueError) as e:
        raise ModelLoadError(f"{path}: damaged or truncated safetensors file ({e})") from None
