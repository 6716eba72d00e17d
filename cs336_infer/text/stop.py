"""Stop strings over a stream of text: never show the start of a stop, never hold back more than that.

Which stop wins? A stream must end the moment some stop is complete, so the stop that *ends first* wins. Of several
that end at the same character, the longest wins, and the text is cut where it starts. This does not depend on how
the text was cut into chunks. `find_stop` states the rule in two lines; `StopStrings` obeys it one character at a time,
with the automaton of Aho and Corasick ("Efficient string matching", CACM 18(6), 1975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cs336_infer.types import InvalidRequest


class StopMatch(NamedTuple):
    """A complete stop string: `text[start:end] == stop`, offsets in characters."""

    start: int
    end: int
    stop: str


def find_stop(text: str, stops: Iterable[str]) -> StopMatch | None:
    """The stop that ends first in the whole text, the longest of those that end there; None when there is none."""
    found = [StopMatch(i, i + len(s), s) for s in stops if (i := text.find(s)) >= 0]
    return min(found, key=lambda m: (m.end, m.start), default=None)


class StopStrings:
    """Searches generated text for stop strings as it arrives. Feed it output only: the prompt is never searched.

    Cost: O(total length) to build, then O(1) amortised steps per character, and one copy of the held text per push.
    Released text is never looked at again.

    Args:
        stops: non-empty strings. One that can never win, because another always ends before it, costs nothing.

    Raises:
        InvalidRequest: a stop is empty or not a string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for s in stops:
            if not isinstance(s, str) or not s:
                raise InvalidRequest(f"stop must be non-empty strings, not {s!r}")
        everything = _Automaton(stops)
        self._automaton = _Automaton([s for s in stops if not everything.hits(s[:-1])])
        self._node = 0  # the longest suffix of the text that can still become a stop
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text, return what may be shown. After a match nothing is shown any more: `matched` says which."""
        if self.matched is not None:
            return ""
        auto, node = self._automaton, self._node
        text_with_held = auto.prefix(node) + text
        end = len(text_with_held)
        for i, char in enumerate(text, start=end - len(text)):
            node = auto.step(node, char)
            if auto.terminal[node]:
                self.matched, end = auto.prefix(node), i + 1
                break
        self._node = 0 if self.matched else node
        return text_with_held[: end - auto.depth[node]]

    @property
    def held(self) -> str:
        """The text held back now: the longest suffix of the stream that can still become a stop."""
        return self._automaton.prefix(self._node)

    def flush(self) -> str:
        """The text held back when generation ended for another reason; empty after a match or a second time."""
        held, self._node = self.held, 0
        return held


class _Automaton:
    """Aho-Corasick. Node 0 is the empty prefix; every node is a prefix of some stop, known by its owner and depth."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._owner: list[str] = [""]
        self.depth: list[int] = [0]
        self.terminal: list[bool] = [False]  # some stop ends here
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)  # the longest proper suffix that is a node too
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for i, char in enumerate(stop):
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._owner.append(stop)
                self.depth.append(i + 1)
                self.terminal.append(False)
            node = self._next[node][char]
        self.terminal[node] = True

    def _link(self) -> None:
        todo = deque(self._next[0].values())
        while todo:  # breadth first, so that shorter prefixes are linked before longer ones need them
            node = todo.popleft()
            for char, child in self._next[node].items():
                self._fail[child] = self.step(self._fail[node], char)
                self.terminal[child] |= self.terminal[self._fail[child]]
                todo.append(child)

    def step(self, node: int, char: str) -> int:
        """The node of the longest suffix of (prefix of `node`) + `char`."""
        while char not in self._next[node]:
            if not node:
                return 0
            node = self._fail[node]
        return self._next[node][char]

    def prefix(self, node: int) -> str:
        return self._owner[node][: self.depth[node]]

    def hits(self, text: str) -> bool:
        """Whether some stop occurs in `text`."""
        node = 0
        for char in text:
            node = self.step(node, char)
            if self.terminal[node]:
                return True
        return False
