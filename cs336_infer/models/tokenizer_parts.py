"""What a tokenizer is made of, whichever files it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field

import tokenizers as hf


@dataclass(frozen=True)
class TokenizerParts:
    """What a model's files say about its tokenizer."""

    backend: hf.Tokenizer
    byte_level: bool  # pieces are byte-level BPE; otherwise SentencePiece with byte fallback
    drops_first_space: bool = False  # decoding removes the space that encoding put in front
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    named_tokens: dict[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>", for chat templates
