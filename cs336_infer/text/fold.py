"""Text as a filter compares it: one form for letters that readers take for the same.

A character is decomposed (NFKD), case folded, freed of accents and of invisible characters, and composed again (NFC).
"É", "é" and "e" are one, as are "ﬁ" and "fi", "ß" and "ss", full-width and plain letters. A run of white space is one
space. Each character is looked at alone, so the form of a text does not depend on how it was cut into chunks.

What it does not fold: letters of different scripts that look alike (Latin "a", Cyrillic "а"), digits for letters
("0" for "o"), Korean or Indic syllables written in another order of parts.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

INVISIBLE = "Cf"  # soft hyphens, zero-width joiners, direction marks


@lru_cache(maxsize=1 << 16)
def fold_char(char: str) -> str:
    """The form of one character: often one, sometimes several, none for an accent or an invisible character.

    A character that would become letters and other characters at once ("½", "⑴") keeps its own form, so that a word
    never begins or ends inside a character.
    """
    if char.isspace():
        return " "
    decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", char).casefold())
    kept = "".join(c for c in decomposed if not unicodedata.combining(c) and unicodedata.category(c) != INVISIBLE)
    folded = unicodedata.normalize("NFC", kept)
    if folded.isspace():
        return " "
    return folded if len({in_word(c) for c in folded}) < 2 else char.casefold()


class Folder:
    """Folds a text that arrives in chunks."""

    def __init__(self) -> None:
        self._after_space = False

    def push(self, text: str) -> tuple[str, list[int]]:
        """The form of the next chunk, and for each of its characters the index in `text` of the one it comes from."""
        out: list[str] = []
        places: list[int] = []
        for i, char in enumerate(text):
            form = fold_char(char)
            if form == " ":
                if self._after_space:
                    continue
                self._after_space = True
            elif form:
                self._after_space = False
            out.append(form)
            places += [i] * len(form)
        return "".join(out), places


def fold(text: str) -> str:
    """The form of a whole text."""
    return Folder().push(text)[0]


def in_word(char: str) -> bool:
    """Letters, digits and "_" make words, as `\\w` has it; scripts without spaces make words that do not end."""
    return char.isalnum() or char == "_"
