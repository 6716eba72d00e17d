"""The transformer itself: Llama, SmolLM2 and Qwen3 (Touvron et al. 2023; Yang et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from cs336_kernels.ops import Linear, apply_rope, packing_available, rms_norm, rope_tables, swiglu
from tqdm.auto import tqdm

from cs336_infer.models.attend import Attend, KVCache
from cs336_infer.models.config import ModelConfig
from cs336_infer.models.weights import WeightSource, expected_shapes

KERNELS = ("reference", "packed", "cpu", "compile", "triton", "fused", "graph")
"""Rungs: plain PyTorch; weights reordered for the CPU; the same with attention over KV pages in C++; plain PyTorch
through `torch.compile`; a Triton kernel for each op; Triton kernels that fuse chains of ops; in the engine on a GPU
the same with each decode step in a CUDA graph."""
TRITON = ("triton", "fused", "graph")
PACKED = ("packed", "cpu")

Rope = tuple[torch.Tensor, torch.Tensor]


class Block:
    """One transformer layer. Q, K, V share one matrix, gate and up another: fewer, larger reads."""

    def __init__(self, config: ModelConfig, get: Callable[..., torch.Tensor], path: str) -> None:
        self.config, self.path = config, path
        linear = "packed" if path in PACKED else "reference"
        self.attn_norm = get("input_layernorm")
        self.qkv = Linear(get("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), linear)
        self.q_norm = get("self_attn.q_norm") if config.qk_norm else None
        self.k_norm = get("self_attn.k_norm") if config.qk_norm else None
        self.o = Linear(get("self_attn.o_proj"), linear)
        self.mlp_norm = get("post_attention_layernorm")
        self.gate_up = Linear(get("mlp.gate_proj", "mlp.up_proj"), linear)
        self.down = Linear(get("mlp.down_proj"), linear)
        self._project, self._finish = _compiled() if path == "compile" else (Block.project, Block.finish)
        self._whole = _triton(path) if path in TRITON else None

    def __call__(self, x: torch.Tensor, rope: Rope, layer: int, attend: Attend) -> torch.Tensor:
        """x: [batch, seq, hidden] -> the same shape."""
        if self._whole is not None:
            return self._whole(self, x, rope, layer, attend)
        q, k, v = self._project(self, x, rope)
        return self._finish(self, x, attend(layer, q, k, v).reshape(x.shape[0], x.shape[1], -1))

    def project(self, x: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What attention needs: q [batch, seq, heads, head_dim], k and v [batch, seq, kv_heads, head_dim]."""
        c = self.config
        batch, seq, _ = x.shape
        qkv = self.qkv(rms_norm(x, self.attn_norm, c.rms_eps)).view(batch, seq, -1, c.head_dim)
        qk, v = qkv.split([c.num_heads + c.num_kv_heads, c.num_kv_heads], 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([c.num_heads, c.num_kv_heads], 2)
            qk = torch.cat((rms_norm(q, self.q_norm, c.rms_eps), rms_norm(k, self.k_norm, c.rms_eps)), 2)
        q, k = apply_rope(qk, *rope).split([c.num_heads, c.num_kv_heads], 2)
        return q, k, v

    def finish(self, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The rest of the layer; mixed: [batch, seq, heads * head_dim]."""
        x = self.o(mixed, residual=x)
        return self.down(swiglu(self.gate_up(rms_norm(x, self.mlp_norm, self.config.rms_eps))), residual=x)


@cache
def _compiled() -> tuple[Any, Any]:
    """The two halves of a layer through `torch.compile`. Weights are inputs of the graphs, so that all layers share
    them; the number of tokens is symbolic. What lies between the halves, the KV cache, stays Python."""
    return torch.compile(Block.project, dynamic=True), torch.compile(Block.finish, dynamic=True)


def _triton(path: str) -> Callable[..., torch.Tensor]:
    from cs336_infer.models import triton_block  # Triton has wheels for Linux only

    return triton_block.separate if path == "triton" else triton_block.fused


class Llama:
    """A decoder-only transformer with its weights in memory.

    Attributes:
        config: its shape. dtype, device: of the weights. path: one of `KERNELS`.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        path: str = "reference",
        rope_factors: torch.Tensor | None = None,
        progress: bool = False,
    ) -> None:
        if path in PACKED and not packing_available(dtype, device):
            raise ValueError(f"kernels={path!r} is not available for {dtype} on {device}")
        self.config, self.dtype, self.device, self.path = config, dtype, device, path

        expected = dict(expected_shapes(config))

        def get(*names: str) -> torch.Tensor:
            shapes = [expected[n] for n in names]
            out = torch.empty(sum(s[0] for s in shapes), *shapes[0][1:], dtype=dtype)
            for name, part in zip(names, out.split([s[0] for s in shapes]), strict=True):
                source.read_into(name, part)
            return out.to(device)

        def block(i: int) -> Block:
            return Block(config, lambda *parts: get(*(f"model.layers.{i}.{p}.weight" for p in parts)), path)

        self.embed = get("model.embed_tokens.weight")
        layers = tqdm(range(config.num_layers), desc="loading", unit="layer", disable=not progress, leave=False)
        self.blocks = [block(i) for i in layers]
        self.norm = get("model.norm.weight")
        self.head = Linear(
            self.embed if config.tie_embeddings else get("lm_head.weight"),
            "packed" if path in PACKED else "reference",
        )
        self.inv_freq = inverse_frequencies(config, rope_factors).to(device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: KVCache,
        *,
        last_only: bool = True,
        at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run new tokens through all layers; their keys and values go into `kv`.

        Args:
            tokens: [batch, seq] ids. positions: [batch, seq], the place of each token in its sequence.
            last_only: logits of the last position only: the head is the largest matrix, and prefill needs one row.
            at: [n] columns whose logits are wanted instead, in any order; a flat batch has one for each sequence.

        Returns:
            float32 logits [batch, 1 or n or seq, vocab].
        """
        x = F.embedding(tokens, self.embed)
        rope = rope_tables(positions, self.inv_freq, self.dtype)
        attend = kv.extend(tokens.shape[1])
        for i, block in enumerate(self.blocks):
            x = block(x, rope, i, attend)
        if at is not None:
            x = x[:, at]
            if not len(at):  # a chunk of a prompt: nobody chooses a token, and some kernels refuse zero rows
                return x.new_empty((len(tokens), 0, self.config.vocab_size), dtype=torch.float32)
        elif last_only:
            x = x[:, -1:]
        if self.path in TRITON:
            from cs336_infer.models import triton_block

            return triton_block.logits(self, x).float()
        return self.head(rms_norm(x, self.norm, self.config.rms_eps)).float()


def inverse_frequencies(config: ModelConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """RoPE frequencies [head_dim / 2] in radians per position, with Llama 3's scaling where the config has it.

    Frequencies whose wavelength fits `high_freq_factor` times into the original context are kept, those that do
    not fit `low_freq_factor` times are divided by `factor`, in between they are blended (Llama 3.1 release).
    `factors` are ready-made divisors, as GGUF files store them.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    if factors is not None:
        return inv_freq / factors
    s = config.rope_scaling
    if s is None:
        return inv_freq
    turns = s.original_context * inv_freq / (2 * math.pi)
    keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / s.factor
