"""Streaming detokeniser and stop strings: the stream must equal what one look at the whole text gives."""

import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cs336_infer.text import StopStrings, StreamDetokenizer, find_stop
from cs336_infer.types import InvalidRequest


class ByteTokenizer:
    """One token per byte, a two-byte token for each half of a euro sign, and one special token."""

    drops_first_space = False

    def __init__(self, drops_first_space: bool = False) -> None:
        self.drops_first_space = drops_first_space
        self.pieces = [bytes([i]) for i in range(256)] + [b"\xe2\x82", b"\x82\xac", b"", b" a", b"<eos>"]

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == 260

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        data = b"".join(self.pieces[i] for i in ids if not (skip_special and i == 260))
        return (data.removeprefix(b" ") if self.drops_first_space else data).decode("utf-8", errors="replace")


# Bytes that begin, continue or break a character, far more often than uniform ids would give them.
BYTES = st.sampled_from([0x20, 0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC2, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF])
IDS = st.lists(st.one_of(BYTES, st.integers(0, 260)), max_size=24)


@settings(max_examples=300, deadline=None)
@given(ids=IDS, skip=st.booleans(), drops=st.booleans())
@example(ids=[0xF0, 0x9F, 260, 0x98, 0x80], skip=True, drops=False)
@example(ids=[0xED, 0xA0, 0x80], skip=True, drops=False)
@example(ids=[258, 0x20, 0x20], skip=True, drops=True)
def test_stream_equals_decode(ids, skip, drops):
    tokenizer = ByteTokenizer(drops)
    stream = StreamDetokenizer(tokenizer, skip_special=skip)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, skip)
    assert stream.flush() == ""


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=12))
@example(text="한국어 😀👨‍👩‍👧 ď")
def test_a_character_is_shown_as_soon_as_it_is_complete(text):
    stream, data, shown = StreamDetokenizer(ByteTokenizer()), text.encode(), ""
    for n, byte in enumerate(data, start=1):
        shown += stream.push(byte)
        assert shown == data[:n].decode("utf-8", errors="ignore")
    assert stream.flush() == ""


def test_the_end_inside_a_character_gives_one_replacement_once():
    stream = StreamDetokenizer(ByteTokenizer())
    assert [stream.push(b) for b in "a😀".encode()[:-1]] == ["a", "", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_space_token_after_pending_bytes_keeps_both():
    stream = StreamDetokenizer(ByteTokenizer())
    assert stream.push(0xE2) + stream.push(259) + stream.flush() == "\ufffd a"


# ---- stop strings


def stream_stops(chunks, stops):
    search = StopStrings(stops)
    shown = "".join(search.push(c) for c in chunks)
    return shown + search.flush(), search.matched


def reference(text, stops):
    match = find_stop(text, stops)
    return (text, None) if match is None else (text[: match.start], match.stop)


def cut(text, places):
    edges = [0, *sorted(min(p, len(text)) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize(
    ("text", "stops", "shown", "matched"),
    [
        ("ABCDEFGHIJK", ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        ("aaab", ["aab"], "a", "aab"),
        ("xxabcd", ["abcd", "bc"], "xxa", "bc"),  # "bc" is complete before "abcd"
        ("xxabc", ["bc", "abc"], "xx", "abc"),  # both end at "c": the longest
        ("xxabc", ["abc", "ab"], "xx", "ab"),
        ("stop", ["stop", "stop"], "", "stop"),
        ("a\n\nb", ["\n\n", "\n\n\n"], "a", "\n\n"),
        ("a👨‍👩‍👧b", ["👩‍👧"], "a👨‍", "👩‍👧"),
        ("never", ["neverx"], "never", None),
        ("", ["a"], "", None),
        ("abc", [], "abc", None),
    ],
)
def test_which_stop_wins(text, stops, shown, matched):
    assert reference(text, stops) == (shown, matched)
    assert stream_stops(list(text), stops) == (shown, matched)
    assert stream_stops([text], stops) == (shown, matched)


ALPHABET = st.sampled_from(["a", "b", "ab", "😀", "‍"])
TEXT = st.lists(ALPHABET, max_size=30).map("".join)
STOPS = st.lists(st.lists(ALPHABET, min_size=1, max_size=5).map("".join), max_size=5)


@settings(max_examples=500, deadline=None)
@given(text=TEXT, stops=STOPS, places=st.lists(st.integers(0, 40), max_size=12))
@example(text="aaab", stops=["aab"], places=[1, 2, 3])
@example(text="abcab" * 3 + "abcabd", stops=["abcabd", "bcb"], places=[])
def test_stream_equals_reference_for_every_chunking(text, stops, places):
    assert stream_stops(cut(text, places), stops) == reference(text, stops)
    assert stream_stops(list(text), stops) == reference(text, stops)


def can_still_win(seen, held, stops):
    """Whether the last `held` characters seen could begin the stop that ends the text."""
    for stop in stops:
        if held < len(stop) and stop.startswith(seen[len(seen) - held :]):
            future = seen + stop[held:]
            match = find_stop(future, stops)
            if match and (match.start, match.end) == (len(seen) - held, len(future)):
                return True
    return False


@settings(max_examples=300, deadline=None)
@given(text=TEXT, stops=STOPS)
@example(text="ab", stops=["abcd", "bc"])  # "abcd" can never win, so "a" is shown at once
def test_holds_back_exactly_what_may_become_a_stop(text, stops):
    search, shown = StopStrings(stops), ""
    for n in range(1, len(text) + 1):
        shown += search.push(text[n - 1])
        if search.matched is not None:
            break
        seen = text[:n]
        held = max((k for k in range(1, n + 1) if can_still_win(seen, k, stops)), default=0)
        assert shown == seen[: n - held]


def test_nothing_is_shown_after_a_match():
    search = StopStrings(["END"])
    assert search.push("oneEN") == "one"
    assert search.push("Dtwo") == ""
    assert (search.push("three"), search.flush(), search.matched) == ("", "", "END")


def test_held_text_is_given_back_once():
    search = StopStrings(["</s>"])
    assert search.push("a</") == "a"
    assert (search.flush(), search.flush(), search.matched) == ("</", "", None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None], [3]])
def test_bad_stops_are_refused_in_one_line(stops):
    with pytest.raises(InvalidRequest) as e:
        StopStrings(stops)
    assert "stop must be non-empty strings" in str(e.value) and "\n" not in str(e.value)


def test_cost_does_not_grow_with_the_text_already_seen():
    search, detok = StopStrings(["a" * 300 + "b", "c" * 300]), StreamDetokenizer(ByteTokenizer())
    start = time.process_time()
    shown = sum(len(search.push(detok.push(0x61))) for _ in range(100_000))
    assert shown == 100_000 - 300
    assert time.process_time() - start < 5  # 0.15 s when linear; a rescan of the text is minutes


def test_many_long_stops_build_in_linear_time():
    start = time.process_time()
    StopStrings([f"{i:04d}" * 50 for i in range(500)])
    assert time.process_time() - start < 5
