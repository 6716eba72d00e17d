"""Text to token ids and back, with ids identical to the model's original tokenizer.

A thin layer over the `tokenizers` library. It adds what serving needs: the exact bytes of one token, chat prompts, and
errors that are for people.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from cs336_infer.models.chat_template import ChatTemplate
from cs336_infer.models.tokenizer_folder import read_folder
from cs336_infer.models.tokenizer_gguf import read_gguf
from cs336_infer.models.tokenizer_parts import TokenizerParts
from cs336_infer.types import InvalidRequest, check_unicode


class Tokenizer:
    """The tokenizer of one model. Make it with `from_gguf` or `from_folder`.

    Attributes:
        vocab_size: largest token id + 1. A model may have more logits than that: see `pad_vocabulary`.
        bos_id: the token that begins a text, None when the model has none.
        eos_ids: tokens that end a text.
        add_bos: whether `encode` puts `bos_id` first.
        chat_template: Jinja source, None when the model has none.
        longest_token: no token stands for more bytes than this.
        drops_first_space: `decode` removes one space at the very beginning (SentencePiece).
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._byte_level = parts.byte_level
        self._named_tokens = parts.named_tokens
        self.eos_ids = parts.eos_ids
        self.chat_template = parts.chat_template
        self.drops_first_space = parts.drops_first_space

        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self._pieces: list[str | None] = [None] * self.vocab_size
        for piece, i in vocab.items():
            self._pieces[i] = piece
        added = self._backend.get_added_tokens_decoder()
        self.longest_token = max((len(piece.encode()) for piece in vocab), default=1)
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._verbatim = self._special | (frozenset(added) if self._byte_level else frozenset())

        first, plain = (self._backend.encode("a", add_special_tokens=special).ids[:1] for special in (True, False))
        self.add_bos = first != plain
        self.bos_id = first[0] if parts.bos_id is None and self.add_bos else parts.bos_id

    @classmethod
    def from_gguf(cls, meta: Mapping[str, Any]) -> Tokenizer:
        """From GGUF metadata: a dict of plain values, as `tokenizer.ggml.tokens` -> list of strings.

        Raises:
            ModelLoadError: a key is missing or of the wrong type, a merge names an unknown token, or the tokenizer is
                not byte-level BPE with a pre-tokenizer we know.
        """
        return cls(read_gguf(meta))

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From a Hugging Face folder: tokenizer.json, and where they exist tokenizer_config.json, chat_template.jinja,
        generation_config.json and config.json.

        Raises:
            ModelLoadError: a file is missing, damaged, or of a kind we do not decode.
        """
        return cls(read_folder(Path(path)))

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in the text become their ids, as in the original.

        A vocabulary need not have every byte: SmolLM2's has no token for some control characters, and they vanish.

        Args:
            add_special: add BOS (and EOS) where the original does.

        Raises:
            InvalidRequest: not a string, or a string with half of a surrogate pair, which has no UTF-8 form.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"text must be a string, not {type(text).__name__}")
        check_unicode("text", text)
        return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of token ids: their bytes joined, then read as UTF-8; what is not UTF-8 becomes U+FFFD.

        Raises:
            InvalidRequest: an id is not one of this tokenizer's.
        """
        if not isinstance(ids, Iterable):
            raise InvalidRequest(f"decode takes token ids, not {ids!r}"[:200])
        pieces = [(self.token_bytes(i), self.is_special(i)) for i in ids]
        data = b"".join(piece for piece, special in pieces if not (skip_special and special))
        if self.drops_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, possibly a part of a character. A special token's are those of its name.

        Raises:
            InvalidRequest: the id is not one of this tokenizer's.
        """
        try:
            i = operator.index(token_id)
        except TypeError:
            i = -1
        piece = self._pieces[i] if 0 <= i < len(self._pieces) else None
        if piece is None:
            raise InvalidRequest(f"token id {token_id!r} is not in the vocabulary of {len(self._pieces)} tokens")
        if i in self._verbatim:
            return piece.encode()
        return _byte_level_bytes(piece) if self._byte_level else _sentencepiece_bytes(piece)

    def pad_vocabulary(self, size: int) -> None:
        """Accept ids below `size`, the width of the model's logits: those that name no token have no text.

        Models pad their embedding table to a round number, and nothing keeps them from producing such an id.
        """
        self._pieces += [None] * (size - len(self._pieces))
        self._pieces = ["" if piece is None else piece for piece in self._pieces]

    def is_special(self, token_id: int) -> bool:
        """Whether the token is control, not text: end of sequence, start of a chat turn and the like."""
        return token_id in self._special

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        date: datetime | None = None,
    ) -> str:
        """The prompt of a chat as text; see `ChatTemplate.render`.

        Raises:
            InvalidRequest: the model has no chat template, or a message or the template is bad.
        """
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, date=date)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        date: datetime | None = None,
    ) -> list[int]:
        """The prompt of a chat as token ids. BOS is there once if the template writes it, and otherwise not at all."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, date=date)
        return self.encode(text, add_special=False)

    @cached_property
    def _chat(self) -> ChatTemplate:
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template: give it a plain prompt")
        return ChatTemplate(self.chat_template, self._named_tokens)


def _byte_table() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2): byte 0x20 is "Ġ"."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in kept]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTE_OF = _byte_table()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:  # a token outside the alphabet stands for itself
        return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    """ "▁" is a space, and "<0xAB>" is one byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace("▁", " ").encode()
