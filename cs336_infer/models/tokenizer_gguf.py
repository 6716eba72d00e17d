"""Building a tokenizer from GGUF metadata.

The ids must be exactly those the model was trained on. In byte-level BPE they depend on four things: vocabulary,
merges, which tokens are special, and how text is cut into words before any merge (the pre-tokenizer). GGUF stores the
first three and only a name for the fourth. `_SPLITS` says what each name stands for in the Hugging Face original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tokenizers as hf
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from cs336_infer.models.tokenizer_parts import TokenizerParts
from cs336_infer.types import ModelLoadError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # GGUF token types that are matched in the text before any BPE


def read_gguf(meta: Mapping[str, Any]) -> TokenizerParts:
    """Parts from GGUF metadata, a dict of plain values; see `Tokenizer.from_gguf`."""
    model = _get(meta, "tokenizer.ggml.model", str)
    if model != "gpt2":
        raise ModelLoadError(f"GGUF: tokenizer model {model!r} is not supported, only 'gpt2' (byte-level BPE) is")
    pre = _get(meta, "tokenizer.ggml.pre", str)
    if pre not in _SPLITS:
        raise ModelLoadError(f"GGUF: pre-tokenizer {pre!r} is not supported, only {', '.join(_SPLITS)}")
    tokens: list[str] = _list(meta, "tokenizer.ggml.tokens", str)
    kinds: list[int] = _list(meta, "tokenizer.ggml.token_type", int)
    if len(kinds) != len(tokens):
        raise ModelLoadError(f"GGUF: {len(tokens)} tokens but {len(kinds)} token types")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if vocab[t] != i)
        raise ModelLoadError(f"GGUF: token {twice!r} appears twice in the vocabulary")

    llama3 = _SPLITS[pre] is _llama3_split
    merges = [_merge(m, vocab) for m in _list(meta, "tokenizer.ggml.merges", str)]
    backend = hf.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    backend.pre_tokenizer = _SPLITS[pre]()
    backend.decoder = decoders.ByteLevel()
    if _SPLITS[pre] is _qwen2_split:
        backend.normalizer = normalizers.NFC()
    backend.add_tokens(
        [
            hf.AddedToken(token, normalized=False, special=kind != USER_DEFINED)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )

    bos, eos, *other_ends = (_gguf_id(meta, name, tokens) for name in ("bos", "eos", "eot", "eom"))
    add_bos = _get(meta, "tokenizer.ggml.add_bos_token", bool, llama3 and bos is not None)
    add_eos = _get(meta, "tokenizer.ggml.add_eos_token", bool, False)
    if (add_bos and bos is None) or (add_eos and eos is None):
        raise ModelLoadError("GGUF: add_bos_token or add_eos_token is set, but the file names no such token")
    backend.post_processor = _template(bos if add_bos else None, eos if add_eos else None)
    named = {"bos_token": bos, "eos_token": eos}
    named |= {"unk_token": _gguf_id(meta, "unknown", tokens), "pad_token": _gguf_id(meta, "padding", tokens)}
    return TokenizerParts(
        backend=backend,
        byte_level=True,
        bos_id=bos,
        eos_ids=frozenset(i for i in (eos, *other_ends) if i is not None),
        chat_template=_get(meta, "tokenizer.chat_template", str, None),
        named_tokens={name: tokens[i] for name, i in named.items() if i is not None},
    )


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _word_split(digits: str) -> pre_tokenizers.PreTokenizer:
    """Words of Llama 3 and Qwen2, which differ only in how many digits may stand together."""
    regex = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    words = pre_tokenizers.Split(hf.Regex(regex), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3_split() -> pre_tokenizers.PreTokenizer:
    return _word_split(r"\p{N}{1,3}")


def _qwen2_split() -> pre_tokenizers.PreTokenizer:
    return _word_split(r"\p{N}")


_SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _smollm_split,
    "llama-bpe": _llama3_split,
    "llama3": _llama3_split,
    "qwen2": _qwen2_split,
    "gpt-2": _gpt2_split,
    "default": _gpt2_split,
}


def _template(bos: int | None, eos: int | None) -> Any:
    """Puts BOS before and EOS after a text; either may be None."""
    names = {"bos": bos, "eos": eos}
    single = " ".join(["bos:0"] * (bos is not None) + ["$A:0"] + ["eos:0"] * (eos is not None))
    special = [(name, i) for name, i in names.items() if i is not None]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=special)


def _get(meta: Mapping[str, Any], key: str, kind: type, *default: Any) -> Any:
    """The value of a key, checked; a missing key gives the default, and is an error when there is none."""
    value = meta.get(key)
    if value is None:
        if default:
            return default[0]
        raise ModelLoadError(f"GGUF: the tokenizer needs the key {key!r}, which is missing")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelLoadError(f"GGUF: {key} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _list(meta: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = _get(meta, key, list)
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            raise ModelLoadError(f"GGUF: {key}[{i}] must be {kind.__name__}, not {type(value).__name__}")
    return values


def _gguf_id(meta: Mapping[str, Any], name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    i = _get(meta, key, int, None)
    if i is not None and not 0 <= i < len(tokens):
        raise ModelLoadError(f"GGUF: {key} is {i}, but the vocabulary has {len(tokens)} tokens")
    return i


def _merge(merge: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    for token in (left, right, left + right):
        if token not in vocab:
            raise ModelLoadError(f"GGUF: merge {merge!r} names {token!r}, which is not in the vocabulary")
    return left, right
