"""Tiny random checkpoints, written by transformers, for tests that need a model and not its knowledge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = "the capital of France is Paris; def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)  한국어 繁體中文 🙂"


def write_tokenizer(folder: Path, vocab_size: int = 300) -> None:
    """A byte-level BPE tokenizer with <eos> = 0 and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    config = {"eos_token": "<eos>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_model(folder: Path, family: str = "llama", *, seed: int = 0, shard: str | None = None, **changes: Any) -> Any:
    """Write a checkpoint whose every past token moves the logits; return transformers' model."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    shape.update(changes)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**shape)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # transformers starts norms at 1, where a forgotten weight cannot be seen
                parameter.uniform_(0.5, 1.5)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    write_tokenizer(folder)
    return model


def write_gguf(
    path: Path,
    folder: Path,
    model: Any,
    kind: str = "F32",
    *,
    overrides: dict[str, int] | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """The same checkpoint as GGUF: q and k rows interleaved as llama.cpp stores them, matrices in type `kind`.

    `overrides` replace integer metadata, `extra` are more tensors.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    c = model.config
    arch = c.model_type
    w = GGUFWriter(str(path), arch)
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(c.head_dim)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(vocab["vocab"], key=vocab["vocab"].get)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types([3 if t == "<eos>" else 1 for t in tokens])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in vocab["merges"]])
    w.add_eos_token_id(0)
    for key, value in (overrides or {}).items():
        w.kv_data[0].pop(key, None)
        w.add_uint32(key, value)
    for name, array in (extra or {}).items():
        w.add_tensor(name, array)
    quant = GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = c.num_attention_heads if ".q_proj." in name else c.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        stored = GGMLQuantizationType.F32 if array.ndim == 1 else quant
        w.add_tensor(_gguf_name(name), quants.quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _gguf_name(name: str) -> str:
    table = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for theirs, ours in table.items():
        name = name.replace(theirs, ours)
    return name
