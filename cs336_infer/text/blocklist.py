"""A list of forbidden strings, searched in a stream: what is shown contains none of them, however it was cut.

Which one ends an answer? The one that ends first, and of several that end at the same character the longest. The text
before it is shown, whole. Held back is exactly the longest end of the text that can still become a forbidden string;
with `whole_words` that may be a complete one, until the next character shows that the word is over.

The search is that of Aho and Corasick ("Efficient string matching", CACM 18(6), 1975) by the library pyahocorasick,
over the folded text (`text/fold.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cs336_infer.text.fold import Folder, fold, in_word
from cs336_infer.text.safety import SafetyStream
from cs336_infer.types import InferError, InvalidRequest, check_unicode, short

MOST_CHARACTERS = 1000  # of a pattern: searching for the held text costs up to its square


class Blocklist:
    """A safety check by forbidden strings.

    Args:
        patterns: non-empty strings. They and the text are compared in their folded form. whole_words: a pattern that
            begins or ends with a letter, digit or "_" is not found inside a longer word.

    Raises:
        InvalidRequest: no pattern, or one that is empty when folded or longer than 1,000 characters.
        InferError: the package pyahocorasick is not installed.
    """

    def __init__(self, patterns: Iterable[str], *, whole_words: bool = False) -> None:
        self.whole_words = whole_words
        folded: dict[str, str] = {}
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if not isinstance(pattern, str):
                raise InvalidRequest(f"a pattern of a blocklist must be a string, not {short(pattern)}")
            check_unicode("a pattern of a blocklist", pattern)
            form = fold(pattern).strip()
            if not form:
                raise InvalidRequest(f"the pattern {short(pattern)} of a blocklist is empty when folded")
            if len(form) > MOST_CHARACTERS:
                raise InvalidRequest(f"a pattern of a blocklist is over {MOST_CHARACTERS} characters: {short(pattern)}")
            folded.setdefault(form, pattern)
        if not folded:
            raise InvalidRequest("a blocklist needs at least one pattern")
        everything = _automaton(folded)
        self.patterns = {form: folded[form] for form in folded if not self._hides(everything, form)}
        self.automaton = _automaton(self.patterns)
        self.longest = max(map(len, self.patterns))

    @classmethod
    def from_file(cls, path: Path | str, *, whole_words: bool = False) -> Blocklist:
        """One pattern a line, in UTF-8; empty lines and lines that begin with "#" are left out.

        Raises:
            InvalidRequest: the file cannot be read, is not UTF-8, or has no pattern.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except OSError as e:
            raise InvalidRequest(f"{path}: the blocklist cannot be read: {e.strerror}") from None
        except UnicodeDecodeError as e:
            raise InvalidRequest(f"{path}: the blocklist is not UTF-8 (byte {e.start})") from None
        patterns = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        try:
            return cls(patterns, whole_words=whole_words)
        except InvalidRequest as e:
            raise InvalidRequest(f"{path}: {e}") from None

    def refuses(self, prompt: str) -> str | None:
        stream = self.watch(prompt)
        stream.push(prompt)
        stream.flush()
        return stream.reason

    def watch(self, prompt: str) -> SafetyStream:
        return _Stream(self)

    def bounded(self, form: str, before: str, text: str, after: str) -> bool:
        """Whether `form` may stand between these two characters ("" at an end of the text)."""
        if not self.whole_words:
            return True
        left = before and in_word(before) and in_word(text[0])
        return not left and not (after and in_word(after) and in_word(form[-1]))

    def _hides(self, automaton: Any, form: str) -> bool:
        """Whether another pattern ends inside `form`: then `form` can never end first."""
        for end, inner in automaton.iter(form[:-1]):
            start = end + 1 - len(inner)
            if self.bounded(inner, form[start - 1 : start], inner, form[end + 1]):
                return True
        return False


class _Stream:
    def __init__(self, blocklist: Blocklist) -> None:
        self._list = blocklist
        self._folder = Folder()
        self._search = blocklist.automaton.iter("")
        self._read = 0  # folded characters so far, as the search counts them
        self._before = ""  # the folded character before the held ones
        self._held = ""  # text held back, its folded form, and where in it each folded character comes from
        self._form = ""
        self._places: list[int] = []
        self._pending = 0  # length of the pattern that is complete unless a letter follows; 0 is none
        self.reason: str | None = None

    def push(self, text: str) -> str:
        if self.reason is not None:
            return ""
        form, places = self._folder.push(text)
        known = len(self._form)
        self._places += [len(self._held) + p for p in places]
        self._held += text
        self._form += form
        if self._pending and form:
            pattern = self._form[known - self._pending : known]
            if not in_word(form[0]):
                return self._end(known - self._pending, pattern)
            self._pending = 0
        self._search.set(form)
        offset = self._read - known
        self._read += len(form)
        found, last = "", -1
        for end, pattern in self._search:
            if found and end != last:
                break
            start = end - offset + 1 - len(pattern)
            after = self._form[start + len(pattern) : start + len(pattern) + 1]
            before = self._form[start - 1] if start > 0 else self._before
            if start < 0 or len(pattern) < len(found) or not self._list.bounded(pattern, before, pattern, after):
                continue
            if after or not self._list.whole_words or not in_word(pattern[-1]):
                found, last = pattern, end
            else:
                self._pending = max(self._pending, len(pattern))
        if found:
            return self._end(last - offset + 1 - len(found), found)
        return self._release()

    def flush(self) -> str:
        if self.reason is not None:
            return ""
        if self._pending:
            start = len(self._form) - self._pending
            return self._end(start, self._form[start:])
        shown, self._held, self._form, self._places = self._held, "", "", []
        return shown

    def _release(self) -> str:
        """Show what can no longer be part of a pattern."""
        form, total = self._form, len(self._form)
        start = max(0, total - self._list.longest)
        while start < total and not self._may_begin(start):
            start += 1
        if start:
            self._before = form[start - 1]
        cut = self._places[start] if start < total else len(self._held)
        shown, self._held, self._form = self._held[:cut], self._held[cut:], form[start:]
        self._places = [p - cut for p in self._places[start:]]
        return shown

    def _may_begin(self, start: int) -> bool:
        before = self._form[start - 1] if start else self._before
        rest = self._form[start:]
        return self._list.bounded(rest, before, rest, "") and self._list.automaton.match(rest)

    def _end(self, start: int, pattern: str) -> str:
        self.reason = f"blocklist: {self._list.patterns[pattern]}"
        shown = self._held[: self._places[start]]
        self._held, self._form, self._places = "", "", []
        return shown


def _automaton(forms: Iterable[str]) -> Any:
    try:
        import ahocorasick
    except ModuleNotFoundError:
        raise InferError("a blocklist needs the package pyahocorasick: pip install 'cs336-infer[serving]'") from None
    automaton = ahocorasick.Automaton()
    for form in forms:
        automaton.add_word(form, form)
    automaton.make_automaton()
    return automaton
