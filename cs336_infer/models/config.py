"""What shape a model has, read from a Hugging Face `config.json` or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cs336_infer.types import ModelLoadError


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's RoPE scaling: low frequencies are stretched by `factor`, high ones are kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        ordered = 0 < self.low_freq_factor < self.high_freq_factor < math.inf
        if not (ordered and 0 < self.factor < math.inf and self.original_context >= 1):
            raise ModelLoadError(f"model config: these numbers of RoPE scaling make no sense: {self}")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer of the Llama or Qwen3 family."""

    family: str  # "llama" or "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ModelLoadError(f"model config: {name} must be >= 1, not {getattr(self, name)}")
        for name in ("rms_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelLoadError(f"model config: {name} must be a finite number > 0, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"model config: {self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelLoadError(f"model config: head_dim must be even and >= 2, not {self.head_dim}")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head (1 = multi-head, num_heads = multi-query attention)."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_params(self) -> int:
        """Parameters, the tied head counted once."""
        return (
            self.layer_params * self.num_layers + self.hidden_size + self.embedding_params * (2 - self.tie_embeddings)
        )

    @property
    def layer_params(self) -> int:
        """Parameters of one transformer block."""
        d, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = 2 * d + (2 * self.head_dim if self.qk_norm else 0)
        return d * (q + 2 * kv) + q * d + 3 * d * self.intermediate_size + norms

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size


_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_layers", "num_heads", "num_kv_heads", "context_length"),
)
_HF_FAMILIES = {"llama": "llama", "qwen3": "qwen3"}


def config_from_hf(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """Read a Hugging Face `config.json`. Raises `ModelLoadError` for what this engine would compute wrongly."""
    family = _HF_FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise ModelLoadError(f"{source}: model_type {raw.get('model_type')!r} is not supported (llama, qwen3)")
    rope = _rope_parameters(raw, source)
    for key, allowed in _MUST_BE.items():
        for place in (raw, rope):
            if place.get(key, allowed[0]) not in allowed:
                raise ModelLoadError(f"{source}: {key}={place[key]!r} is not supported")
    if set(raw.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise ModelLoadError(f"{source}: layer_types other than full_attention are not supported")
    try:
        heads = _whole(raw["num_attention_heads"])
        hidden = _whole(raw["hidden_size"])
        default_kv = 32 if family == "qwen3" else heads
        return ModelConfig(
            family=family,
            vocab_size=_whole(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=_whole(raw["intermediate_size"]),
            num_layers=_whole(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=_whole(_get(raw, "num_key_value_heads", default_kv)),
            head_dim=_whole(_get(raw, "head_dim", 128 if family == "qwen3" else hidden // heads)),
            context_length=_whole(_get(raw, "max_position_embeddings", 2048)),
            rms_eps=float(_get(raw, "rms_norm_eps", 1e-6)),
            rope_theta=float(_get(rope, "rope_theta", _get(raw, "rope_theta", 10000.0))),
            rope_scaling=_hf_scaling(rope, source),
            tie_embeddings=bool(_get(raw, "tie_word_embeddings", False)),
            qk_norm=family == "qwen3",
        )
    except KeyError as e:
        raise ModelLoadError(f"{source}: config.json has no {e.args[0]!r}") from None
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as e:
        raise ModelLoadError(f"{source}: config.json holds a value of the wrong kind ({e})") from None


def config_from_gguf(meta: Mapping[str, Any], *, tied: bool, vocab_size: int, source: str) -> ModelConfig:
    """Read GGUF metadata. `tied` and `vocab_size` come from the tensors, which GGUF keeps apart."""
    arch = meta.get("general.architecture")
    if arch not in _HF_FAMILIES:
        raise ModelLoadError(f"{source}: architecture {arch!r} is not supported (llama, qwen3)")

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise ModelLoadError(f"{source}: metadata key {arch}.{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{source}: metadata key {arch}.{key} must be a number, not {value!r}"[:200])
        return value

    scaling = meta.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", ""):
        raise ModelLoadError(f"{source}: RoPE scaling {scaling!r} is not supported in GGUF files")
    if get("expert_count", 0):
        raise ModelLoadError(f"{source}: mixture-of-experts models are not supported")
    if get("attention.sliding_window", 0):
        raise ModelLoadError(f"{source}: sliding-window attention is not supported")
    heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
    head_dim = int(get("attention.key_length", hidden // max(heads, 1)))
    if int(get("rope.dimension_count", head_dim)) != head_dim:
        raise ModelLoadError(f"{source}: RoPE over a part of the head is not supported")
    return ModelConfig(
        family=_HF_FAMILIES[arch],
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=int(get("block_count")),
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        context_length=int(get("context_length")),
        rms_eps=_decimal(get("attention.layer_norm_rms_epsilon")),
        rope_theta=_decimal(get("rope.freq_base", 10000.0)),
        tie_embeddings=tied,
        qk_norm=arch == "qwen3",
    )


# Settings that change the computation and are not implemented: absent or harmless values only.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
}


def _decimal(value: float) -> float:
    """GGUF stores float32: 1e-6 comes back as 9.99999997e-07. The shortest decimal is what the author wrote."""
    return float(f"{value:.7g}")


def _get(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    value = raw.get(key)
    return default if value is None else value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{value!r} is not a whole number")
    return int(value)


def _rope_parameters(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """transformers 5 writes `rope_parameters`, older files `rope_scaling` (and `type` for `rope_type`)."""
    found = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise ModelLoadError(f"{source}: the RoPE settings of config.json must be an object, not {found!r}"[:300])
    return found


def _hf_scaling(rope: Mapping[str, Any], source: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelLoadError(f"{source}: RoPE scaling {kind!r} is not supported (llama3)")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context=_whole(rope["original_max_position_embeddings"]),
    )
