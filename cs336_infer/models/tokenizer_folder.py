"""Building a tokenizer from the JSON files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers as hf

from cs336_infer.models.tokenizer_parts import TokenizerParts
from cs336_infer.types import ModelLoadError


def read_folder(path: Path) -> TokenizerParts:
    """Parts from a Hugging Face folder; see `Tokenizer.from_folder`."""
    path = Path(path)
    spec = _json(path / "tokenizer.json")
    config = _json(path / "tokenizer_config.json", optional=True)
    try:
        backend = hf.Tokenizer.from_str(json.dumps(spec))
    except Exception as e:  # the library raises a bare Exception
        raise ModelLoadError(f"{path / 'tokenizer.json'} is not a usable tokenizer: {' '.join(str(e).split())}") from e
    backend.no_truncation()
    backend.no_padding()
    byte_level, drops_first_space = _decoder_kind(spec.get("decoder"), path / "tokenizer.json")

    names = {key: _token_text(config, key, path) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    named_tokens = {key: text for key, text in names.items() if text is not None}
    for key in ("bos_token", "eos_token"):
        if key in named_tokens and backend.token_to_id(named_tokens[key]) is None:
            raise ModelLoadError(f"{path}: {key} {named_tokens[key]!r} is not in the vocabulary")
    bos_id = backend.token_to_id(named_tokens.get("bos_token", ""))
    eos_ids = {i for i in (backend.token_to_id(named_tokens.get("eos_token", "")),) if i is not None}
    for name in ("generation_config.json", "config.json"):
        value = _json(path / name, optional=True).get("eos_token_id")
        for i in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(i, bool) or not isinstance(i, int) or backend.id_to_token(i) is None:
                raise ModelLoadError(f"{path / name}: eos_token_id {i!r} is not a token of this tokenizer")
            eos_ids.add(i)
    return TokenizerParts(
        backend, byte_level, drops_first_space, bos_id, frozenset(eos_ids), _folder_template(path, config), named_tokens
    )


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ModelLoadError(f"{path} cannot be read: {' '.join(str(e).split())}") from e
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _token_text(config: Mapping[str, Any], key: str, path: Path) -> str | None:
    """A special token is written as a string or as {"content": string, ...}."""
    value = config.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise ModelLoadError(f"{path / 'tokenizer_config.json'}: {key} must be a string, not {type(text).__name__}")
    return text


def _folder_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja` if there, else tokenizer_config.json's: one template, or a list with one named default."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as e:
            raise ModelLoadError(f"{file} cannot be read: {' '.join(str(e).split())}") from e
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default", next(iter(named.values())) if len(named) == 1 else 0)
    if value is not None and not isinstance(value, str):
        raise ModelLoadError(
            f"{path / 'tokenizer_config.json'}: chat_template must be a string or a list with one named 'default'"
        )
    return value


def _decoder_kind(decoder: Any, path: Path) -> tuple[bool, bool]:
    """(byte level?, drops the first space?) of the decoder in tokenizer.json, if it is one of the two kinds we know."""
    steps = decoder.get("decoders") if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    steps = [{k: v for k, v in s.items() if k not in _BYTE_LEVEL_OPTIONS} for s in steps or [] if isinstance(s, dict)]
    if steps == [{"type": "ByteLevel"}]:
        return True, False
    if steps[:3] == _SENTENCEPIECE and steps[3:] in ([], [_STRIP]):
        return False, steps[3:] == [_STRIP]
    kinds = " + ".join(str(s.get("type")) for s in steps) or "none"
    raise ModelLoadError(f"{path}: decoder {kinds} is not supported, only byte-level and SentencePiece byte fallback")


_BYTE_LEVEL_OPTIONS = ("add_prefix_space", "trim_offsets", "use_regex")
_SENTENCEPIECE = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
