"""Token ids to text, one at a time. A token is a run of bytes, and a character may be cut between two tokens."""

from __future__ import annotations

import codecs
from typing import Protocol


class TokenPieces(Protocol):
    """What a detokeniser needs to know of a tokenizer.

    A tokenizer may also carry `drops_first_space: bool` (SentencePiece puts a space before every text); without it no
    space is dropped.
    """

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_special(self, token_id: int, /) -> bool: ...


class StreamDetokenizer:
    """Streams the text of one sequence. The pieces, joined, are exactly `Tokenizer.decode` of all its ids.

    Holds back only the bytes of an unfinished character, at most 3, so the cost of a token is the cost of its bytes.
    Bytes that cannot be part of UTF-8 become U+FFFD at once, as the Unicode standard recommends (section 3.9,
    "U+FFFD Substitution of Maximal Subparts").

    Args:
        tokenizer: gives the bytes of one token.
        skip_special: leave out end-of-sequence and other control tokens.
    """

    def __init__(self, tokenizer: TokenPieces, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = bool(getattr(tokenizer, "drops_first_space", False))

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty.

        Raises:
            InvalidRequest: the id is not one of the tokenizer's.
        """
        data = self._tokenizer.token_bytes(token_id)
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        if self._drop_space and data:
            data, self._drop_space = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The tail of the text when no token follows: an unfinished character becomes one U+FFFD. Then empty."""
        return self._decoder.decode(b"", final=True)
