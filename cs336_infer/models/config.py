"""What shape a model has, read from a Hugging Face `config.json` or from GGUF metadata."""

from __future__ import annotations

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
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"model config: {name} must be >= 1, not {getattr(self, name)}")
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
        return self.layer_params * self.num_layers + self.hidden_size + self.embedding_params * (2 - self.tie_embeddings)

    @property
    def layer_params(self) -> int:
        """Parameters of one transformer block."""
        d, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = 2 * d + (2 * self.head_dim if self.qk_norm else 0)
        return d * (q + 2 * kv) + q * d + 3 * d * self.intermediate_size + norms

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size
