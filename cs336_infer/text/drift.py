"""Script drift: an answer that slides into letters of another writing system than its prompt's.

Sampling from slightly wrong probabilities (a kernel that reads memory nobody wrote, a quantisation that rounds the
wrong way, an approximate top-k) shows first as Chinese or Thai letters in an English answer. The monitor counts letters
of scripts that the prompt gave no reason for, and raises an alarm when they are more than a share of the last letters.

What is no reason for an alarm: Latin letters anywhere (code, names, units, addresses); scripts of letters in the
prompt; scripts of languages that the prompt names in English ("translate into Thai"); Chinese characters and Japanese
kana beside one another; a Greek letter alone, as formulas have it; a quotation or a name in another script that stays
below the share.

What it cannot see: drift into Latin letters, or between languages of one script (Chinese in a Japanese answer, French
in an English one); a request for a language that is named in another language than English, unless it is written in
its own script; one wrong token in a long answer, which no single answer can show. For the last it counts: the
rate of such letters over many answers is a metric of the server, and a rise there is the earlier sign.

Cost: a table look-up for a letter that is not ASCII, nothing that grows with the answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable
from functools import cached_property, lru_cache

from cs336_infer.types import DriftRule

HAN = "HAN AND KANA"
_EAST_ASIAN = frozenset({"CJK", "IDEOGRAPHIC", "HIRAGANA", "HENTAIGANA", "KATAKANA", "BOPOMOFO"})

_LANGUAGES = {
    HAN: "chinese mandarin cantonese hokkien japanese kanji hanzi hiragana katakana kana bopomofo zhuyin taiwanese",
    "HANGUL": "korean hangul",
    "CYRILLIC": "cyrillic russian ukrainian belarusian bulgarian serbian macedonian kazakh kyrgyz tajik tatar mongolian"
    " uzbek bashkir chechen chuvash ossetian ossetic sakha yakut bosnian montenegrin",
    "GREEK": "greek",
    "ARABIC": "arabic persian farsi urdu pashto dari sindhi uyghur kurdish sorani kashmiri",
    "HEBREW": "hebrew yiddish",
    "DEVANAGARI": "devanagari hindi marathi nepali sanskrit konkani bhojpuri maithili dogri bodo",
    "BENGALI": "bengali bangla assamese",
    "THAI": "thai",
    "LAO": "lao laotian",
    "KHMER": "khmer cambodian",
    "MYANMAR": "burmese myanmar shan",
    "TIBETAN": "tibetan dzongkha",
    "TAMIL": "tamil",
    "TELUGU": "telugu",
    "KANNADA": "kannada",
    "MALAYALAM": "malayalam",
    "GUJARATI": "gujarati",
    "GURMUKHI": "punjabi gurmukhi",
    "ORIYA": "odia oriya",
    "SINHALA": "sinhala sinhalese",
    "GEORGIAN": "georgian",
    "ARMENIAN": "armenian",
    "ETHIOPIC": "ethiopic amharic tigrinya",
    "CHEROKEE": "cherokee",
    "MONGOLIAN": "mongolian",
}
NAMED = {word: {s for s, words in _LANGUAGES.items() if word in words.split()}
         for text in _LANGUAGES.values() for word in text.split()}  # fmt: skip
"""English names of languages and scripts -> the scripts they are written in."""


@lru_cache(maxsize=1 << 16)
def script(char: str) -> str | None:
    """The writing system of a letter, from its Unicode name; None for marks, digits, symbols and letters of no script.

    Chinese characters, kana and bopomofo are one. Letters in disguise (full-width, mathematical) are what they mean.
    """
    for part in unicodedata.normalize("NFKC", char):
        if unicodedata.category(part) in ("Lu", "Ll", "Lt", "Lo"):
            word = unicodedata.name(part, "").partition(" ")[0]
            return HAN if word in _EAST_ASIAN else word or None
    return None


def scripts_expected(prompt: str) -> frozenset[str]:
    """The scripts an answer to this prompt may be written in."""
    found = {"LATIN"} | {s for char in set(prompt) if (s := script(char)) is not None}
    for word in set(re.findall(r"[a-z]+", prompt.lower())):
        found |= NAMED.get(word, set())
    return frozenset(found)


class DriftMonitor:
    """Watches one answer.

    Args:
        rule: when to raise the alarm. prompt: what was asked, or a function that says it; it is called when the first
            letter comes that is not ASCII, so most English answers never need the text of their prompt.

    Attributes:
        letters, foreign: so many so far; foreign are those of scripts that the prompt gave no reason for.
    """

    def __init__(self, rule: DriftRule, prompt: str | Callable[[], str]) -> None:
        self.rule, self._prompt = rule, prompt
        self.letters = self.foreign = 0
        self._recent: deque[int] = deque()  # which of the last letters are foreign, by number
        self._greek_before = False

    @cached_property
    def _expected(self) -> frozenset[str]:
        return scripts_expected(self._prompt if isinstance(self._prompt, str) else self._prompt())

    def push(self, text: str) -> bool:
        """Take more text, cut anywhere. Whether the alarm goes off at one of its letters."""
        alarm = False
        for char in text:
            if char.isascii():
                self.letters += char.isalpha()
                self._greek_before = False
                continue
            found = script(char)
            alone = found == "GREEK" and not self._greek_before
            self._greek_before = found == "GREEK"
            if found is None:
                continue
            self.letters += 1
            if found in self._expected or alone:
                continue
            self.foreign += 1
            self._recent.append(self.letters)
            while self._recent[0] <= self.letters - self.rule.window:
                self._recent.popleft()
            alarm |= len(self._recent) > self.rule.share * self.rule.window
        return alarm
