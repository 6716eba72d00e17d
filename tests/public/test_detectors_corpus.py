"""The detectors on 2,000 texts that people wrote: sources, documents, licences, tables and messages in many languages.

Each text goes through them as the token stream of an answer, as the real tokenizer cuts it. None may fire. What really
is a loop is told apart by a rule of its own (`texts.repeats`: a line that stands eight times in a row) and counted.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from test_loops import by_definition

from cs336_infer import DriftRule, LoopRule, load_model
from cs336_infer.measure.texts import PARTS, Text, repeating, repeats, texts
from cs336_infer.models.tokenizer import Tokenizer
from cs336_infer.text import StreamDetokenizer
from cs336_infer.text.drift import DriftMonitor, script
from cs336_infer.text.loops import Loop, LoopDetector

FULL = "CS336_SOAK" in os.environ  # twice as much of every text
PROMPT = 32  # tokens of a text that count as what was asked, where nothing was


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_model().tokenizer


@pytest.fixture(scope="module")
def corpus(tokenizer: Tokenizer) -> list[tuple[Text, list[int]]]:
    return [(t, tokenizer.encode(t.content)) for t in texts(characters=1800 if FULL else 900)]


def loop_in(ids: list[int]) -> Loop | None:
    detector = LoopDetector(LoopRule())
    return next((loop for token in ids if (loop := detector.push(token)) is not None), None)


def drift_in(tokenizer: Tokenizer, text: Text, ids: list[int]) -> bool:
    prompt = text.prompt or tokenizer.decode(ids[:PROMPT])
    monitor, stream = DriftMonitor(DriftRule(), prompt), StreamDetokenizer(tokenizer)
    pieces = [stream.push(token) for token in ids]
    return any([monitor.push(piece) for piece in pieces[0 if text.prompt else PROMPT :]])


def test_the_mix(corpus):
    kinds = Counter(text.kind for text, _ in corpus)
    scripts = Counter(s for text, _ in corpus for s in {script(c) for c in set(text.content)} - {None})
    print(f"{len(corpus)} texts, {sum(len(ids) for _, ids in corpus):,} tokens; {dict(kinds)}; {dict(scripts)}")
    assert kinds == PARTS and sum(kinds.values()) >= 2000
    assert len({text.content for text, _ in corpus}) == len(corpus)
    assert len(scripts) >= 15 and all(scripts[s] >= 5 for s in ("CYRILLIC", "ARABIC", "HAN AND KANA", "DEVANAGARI"))
    assert sum(len(ids) for _, ids in corpus) >= 500_000
    assert not any(repeats(text.content) for text, _ in corpus)


def test_no_text_is_taken_for_a_loop(corpus):
    assert [(t.source, loop) for t, ids in corpus if (loop := loop_in(ids)) is not None] == []


def test_no_text_is_taken_for_drift(corpus, tokenizer):
    assert [t.source for t, ids in corpus if drift_in(tokenizer, t, ids)] == []


def test_the_same_texts_fire_when_something_is_wrong_with_them(corpus, tokenizer):
    """A test that cannot fail shows nothing: a loop and a drift are put into every twentieth text, and found."""
    thai = tokenizer.encode("เครื่องยนต์เก็บตารางของบล็อกไว้และทุกคำขอมีแถวของตัวเอง" * 3)
    for number, (text, ids) in enumerate(corpus[::20]):
        unit = ids[40 : 41 + number % 30]
        assert loop_in(ids[:80] + unit * (64 // len(unit) + 5)) is not None
        if "THAI" not in {script(c) for c in text.content}:
            assert drift_in(tokenizer, text, ids[:80] + thai)


def test_files_that_really_repeat_themselves_are_counted(tokenizer):
    """Tables of zeros, pages of `None,`: loops by anyone's rule. The detector follows its own definition on them."""
    found = list(repeating(900))
    assert len(found) >= 12 and all(repeats(text.content) for text in found)
    fired = 0
    for text in found:
        ids = tokenizer.encode(text.content)
        loop = loop_in(ids)
        ends = [
            end for end in range(64, len(ids) + 1) if by_definition(ids[max(0, end - 200) : end], LoopRule(), set())
        ]
        assert (loop is not None) == bool(ends)
        fired += loop is not None
    print(f"{len(found)} files with a line eight times in a row, {fired} of them loops of 64 tokens or more")
    assert 0 < fired < len(found)
