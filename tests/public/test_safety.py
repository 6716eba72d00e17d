"""Safety checks: no forbidden text in a stream, however it is cut; nothing else missing; nothing held without need."""

from __future__ import annotations

import json
import re
import unicodedata
from itertools import pairwise
from typing import Any

import httpx
import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_serve import NAME, Served

from cs336_infer import LLM, FinishReason, LoadedModel, SamplingParams, Session, generate, load_model
from cs336_infer.cli import main
from cs336_infer.serve.answers import FINISH
from cs336_infer.text.blocklist import Blocklist
from cs336_infer.text.fold import Folder, fold, fold_char, in_word
from cs336_infer.text.safety import AllOf, Classifier, SafetyFailed, as_check, check_prompt
from cs336_infer.types import InvalidRequest, PromptRefused


def first_forbidden(form: str, patterns: list[str], whole_words: bool) -> tuple[int, int] | None:
    """(end, start) in folded text of the pattern that ends first, the longest of those. Regular expressions decide."""
    found = []
    for p in patterns:
        left = r"(?<!\w)" if whole_words and re.match(r"\w", p) else ""
        right = r"(?!\w)" if whole_words and re.search(r"\w\Z", p) else ""
        found += [(m.start() + len(p), m.start()) for m in re.finditer(f"(?={left}{re.escape(p)}{right})", form)]
    return min(found, default=None)


def allowed(text: str, patterns: list[str], whole_words: bool) -> tuple[str, bool]:
    form, places = Folder().push(text)
    found = first_forbidden(form, [fold(p).strip() for p in patterns], whole_words)
    return (text, False) if found is None else (text[: places[found[1]]], True)


def run(check: Any, chunks: list[str]) -> tuple[str, bool]:
    stream = check.watch("")
    shown = "".join(stream.push(c) for c in chunks)
    shown += stream.flush()
    if stream.reason is not None:
        assert stream.push("more") == stream.flush() == ""
    return shown, stream.reason is not None


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(min(p, len(text)) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


# Letters in several forms, what folds to nothing or to several, and what stands between words.
PIECES = st.sampled_from(
    ["a", "b", "A", "á", "a\u0301", "ab", "ﬀ", "f", "ß", "s", "\u200b", " ", "\n", ".", "…", "½", "가", "_"]
)
TEXT = st.lists(PIECES, max_size=24).map("".join)
PATTERN = st.lists(PIECES, min_size=1, max_size=5).map("".join).filter(lambda p: fold(p).strip())
PATTERNS = st.lists(PATTERN, min_size=1, max_size=5)


@settings(max_examples=500, deadline=None)
@given(text=TEXT, patterns=PATTERNS, whole=st.booleans(), places=st.lists(st.integers(0, 40), max_size=10))
@example(text="xfoo bar", patterns=["foo"], whole=True, places=[4])
@example(text="foo", patterns=["foo"], whole=True, places=[1, 2])
@example(text="ab.", patterns=["ab", "b."], whole=True, places=[2])
@example(text="aba", patterns=["ab", "aba"], whole=True, places=[])
@example(text="a  \n b", patterns=["a b"], whole=False, places=[2, 3, 4])
@example(text="ß", patterns=["s"], whole=False, places=[])
def test_a_stream_is_the_text_up_to_the_first_forbidden_string(text, patterns, whole, places):
    check = Blocklist(patterns, whole_words=whole)
    want = allowed(text, patterns, whole)
    for chunks in ([text], list(text), cut(text, places)):
        shown, refused = run(check, chunks)
        assert (shown, refused) == want
        assert not allowed(shown, patterns, whole)[1]
    assert (check.refuses(text) is not None) == want[1]


def can_become(seen: str, held: int, patterns: list[str], whole: bool) -> bool:
    """Whether some text behind `seen` makes the first forbidden string begin at its last `held` characters."""
    form = fold(seen)
    _, places = Folder().push(seen)
    want = len(seen) - held
    for p in patterns:
        for k in range(len(p) + 1):
            if form.endswith(p[:k]):
                for tail in ("", ".") if whole else ("",):
                    found = first_forbidden(form + p[k:] + tail, patterns, whole)
                    if found and found[1] < len(places) and places[found[1]] == want:
                        return True
    return False


@settings(max_examples=300, deadline=None)
@given(text=TEXT, patterns=PATTERNS, whole=st.booleans())
@example(text="xa", patterns=["abcd", "bc"], whole=False)  # "abcd" can never end first: "a" is shown at once
@example(text="xab", patterns=["ab"], whole=True)  # inside a word
def test_held_back_is_what_may_become_a_forbidden_string_and_no_more(text, patterns, whole):
    stream, shown = Blocklist(patterns, whole_words=whole).watch(""), ""
    folded = [fold(p).strip() for p in patterns]
    for n in range(1, len(text) + 1):
        shown += stream.push(text[n - 1])
        if stream.reason is not None:
            break
        held = max((k for k in range(1, n + 1) if can_become(text[:n], k, folded, whole)), default=0)
        assert shown == text[: n - held]


def test_the_folding_of_every_character():
    """A form is one space, or has no white space and no mixture of word and other characters; folding it again
    changes nothing; and letters that Unicode calls equal have one form."""
    for char in map(chr, [*range(0xD800), *range(0xE000, 0x20000), *range(0xE0000, 0xE0200)]):
        form = fold_char.__wrapped__(char)
        assert form == " " or not any(c.isspace() for c in form)
        assert len({in_word(c) for c in form}) < 2
        assert "".join(map(fold_char.__wrapped__, form)) == form
    assert fold("ＢＯＭＢ Straße ﬁ É\u00ad\u200b e\u0301 각") == "bomb strasse fi e e 각"
    assert fold("가") not in fold("각")
    assert fold("\t a\u00a0\u3000\nb ") == " a b "


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_accents_in_any_normal_form(form):
    check = Blocklist(["Café Olé"])
    text = unicodedata.normalize(form, "un CAFÉ\n OLÉ !")
    assert run(check, list(text)) == ("un ", True)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [([], "at least one"), (["ok", " "], "empty"), (["\u200b"], "empty"), ([3], "string"), (["a" * 1001], "1000")],
)
def test_lists_that_cannot_be(patterns, words):
    with pytest.raises(InvalidRequest, match=words) as e:
        Blocklist(patterns)
    assert "\n" not in str(e.value)


def test_a_list_from_a_file(tmp_path):
    file = tmp_path / "list.txt"
    file.write_bytes("\ufeff# what nobody may say\n\nfoo bar\n  BÄZ  \r\n".encode())
    assert set(Blocklist.from_file(file).patterns) == {"foo bar", "baz"}
    for content, words in ((b"# nothing\n\n", "at least one"), (b"caf\xe9\n", "UTF-8"), (b"a\n\xc2\xad\n", "empty")):
        file.write_bytes(content)
        with pytest.raises(InvalidRequest, match=words) as e:
            Blocklist.from_file(file)
        assert str(file) in str(e.value) and "\n" not in str(e.value)
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(InvalidRequest, match="cannot be read"):
            Blocklist.from_file(path)


def test_work_does_not_grow_with_the_text_already_seen():
    """100,000 characters through a list of near misses: what is held stays below the longest pattern."""
    stream, shown = Blocklist(["a" * 200 + "b", "c" * 200]).watch(""), 0
    for _ in range(100_000):
        shown += len(stream.push("a"))
        assert len(stream._held) <= 200 and len(stream._places) <= 200  # type: ignore[attr-defined]
    assert shown == 100_000 - 200


# ---- a judge of one's own


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab!", max_size=40), places=st.lists(st.integers(0, 40), max_size=8), every=st.integers(1, 12))
def test_a_judge_sees_every_text_before_the_reader(text, places, every):
    asked: list[str] = []

    def judge(prompt: str, answer: str) -> str | None:
        asked.append(answer)
        return "loud" if "!" in answer else None

    ends = [*range(every, len(text), every), len(text)] if text else []
    bad = next((i for i, end in enumerate(ends) if "!" in text[:end]), None)
    want = text if bad is None else text[: ends[bad - 1] if bad else 0]
    for chunks in ([text], list(text), cut(text, places)):
        asked.clear()
        assert run(Classifier(judge, every=every), chunks) == (want, bad is not None)
        assert asked == [text[:end] for end in ends][: None if bad is None else bad + 1]


def test_a_judge_that_raises_or_says_neither_yes_nor_no():
    def raises(prompt: str, answer: str) -> str | None:
        raise RuntimeError("no memory")

    for judge in (raises, lambda p, a: True, lambda p, a: "", lambda p, a: 0):
        check = Classifier(judge, every=2)
        with pytest.raises(SafetyFailed):
            check_prompt(check, "hello")
        stream = check.watch("hello")
        with pytest.raises((SafetyFailed, RuntimeError)):
            stream.push("abcd")


def test_several_checks_one_behind_the_other():
    """What the first lets through the second still judges, also when the first ends the answer."""
    judge = Classifier(lambda p, a: "bad" if "bad" in p + a else None, every=100)
    check = AllOf([Blocklist(["stop here"]), judge])
    assert run(check, ["good text, stop", " here"]) == ("good text, ", True)
    stream = check.watch("")
    assert stream.push("bad text, stop here") + stream.flush() == "" and stream.reason == "bad"
    stream = AllOf([judge, Blocklist(["stop here"])]).watch("")
    assert stream.push("x stop here") == "" and stream.flush() == "x " and stream.reason == "blocklist: stop here"
    assert check.refuses("please stop  HERE") == "blocklist: stop here"
    with pytest.raises(PromptRefused) as e:
        check_prompt(check, "a bad prompt")
    assert e.value.reason == "bad" and "bad" not in str(e.value)


@pytest.mark.parametrize("safety", ["a word", 3, [], [Blocklist(["x"]), None], object()])
def test_what_is_no_check_is_refused(safety):
    with pytest.raises(InvalidRequest, match="safety must be"):
        as_check(safety)


# ---- in the engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write_model(folder)
    return load_model(folder, dtype="float32", kernels="reference")


PROMPTS = [[s, s + 1, s + 2] for s in range(5, 300, 23)]


def free_texts(model: LoadedModel, **params: Any) -> list[str]:
    return [c.text for c in generate(model, PROMPTS, SamplingParams(max_tokens=24, **params))]


def some_patterns(texts: list[str]) -> list[str]:
    """Strings from the middle of some answers, so that some are cut and some are not."""
    return [text[i : i + 3] for text, i in zip(texts[::3], (2, 5, 9, 4, 7), strict=True) if text[i : i + 3].strip()]


@pytest.mark.parametrize("stop", [(), ("e", "th")])
def test_answers_of_the_engine_are_cut_and_nothing_else_changes(model, stop):
    texts = free_texts(model, stop=stop)
    patterns = some_patterns(free_texts(model))
    llm = LLM(model, block_size=4, kv_tokens=1024, safety=Blocklist(patterns))
    pieces = ["" for _ in PROMPTS]
    for event in llm.stream(PROMPTS, SamplingParams(max_tokens=24, stop=stop)):
        pieces[event.index] += event.text
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=24, stop=stop))
    reasons = set()
    for text, piece, answer in zip(texts, pieces, answers, strict=True):
        want, refused = allowed(text, patterns, False)
        assert answer.text == piece == want
        assert (answer.finish_reason is FinishReason.FILTERED) == refused == (answer.filtered is not None)
        assert answer.stop_reason is None or not refused
        reasons.add(answer.finish_reason)
    assert FinishReason.FILTERED in reasons and len(reasons) > 1
    assert llm.kv.pool.live == 0


def test_a_stop_that_makes_a_forbidden_word_shows_none(model):
    """A check before the stop strings would have seen "abcdef", which is not the word "abc"."""
    words = [(i, text, m) for i, text in enumerate(free_texts(model)) for m in re.finditer(r"\w{4,}", text)]
    row, text, match = next(w for w in words if w[1].find(w[2][0][2:]) == w[2].start() + 2)
    word, rest = match[0][:2], match[0][2:]
    cut_to = text[: match.start()]
    assert not allowed(text, [word], True)[1] and allowed(cut_to + word, [word], True)[1]
    llm = LLM(model, block_size=4, kv_tokens=1024, safety=Blocklist([word], whole_words=True))
    done = llm.generate(PROMPTS[row], SamplingParams(max_tokens=24, stop=(rest,)))[0]
    assert (done.text, done.finish_reason, done.stop_reason) == (cut_to, FinishReason.FILTERED, None)


def test_prompts_are_refused_before_anything_is_computed(model):
    llm = LLM(model, block_size=4, kv_tokens=1024, safety=Blocklist(["forbidden fruit"]))
    for prompt in ("a FORBIDDEN\n fruit", model.tokenizer.encode("forbidden fruit")):
        with pytest.raises(PromptRefused):
            llm.generate(["the capital", prompt], SamplingParams(max_tokens=4))
    assert llm.engine.steps == 0 and not llm.engine.busy and llm.engine.refused == 2
    assert llm.generate("the capital", SamplingParams(max_tokens=4))[0].finish_reason is FinishReason.LENGTH


def test_logprobs_are_refused_where_answers_are_checked(model):
    llm = LLM(model, block_size=4, kv_tokens=1024, safety=Blocklist(["x"]))
    with pytest.raises(InvalidRequest, match="logprobs"):
        llm.generate("the capital", SamplingParams(max_tokens=4, logprobs=0))
    with pytest.raises(InvalidRequest, match="safety"):
        LLM(model, kv="contiguous", safety=Blocklist(["x"]))


def test_a_failing_judge_ends_one_answer_with_an_error_and_shows_nothing(model):
    """Fails closed, and does not hurt its neighbours."""
    texts = free_texts(model, ignore_eos=True)
    bad = model.tokenizer.decode(PROMPTS[1])

    def judge(prompt: str, answer: str) -> str | None:
        if prompt == bad and answer:
            raise RuntimeError("out of memory")
        return None

    llm = LLM(model, block_size=4, kv_tokens=1024, safety=[Classifier(judge, every=8)])
    answers = llm.generate(PROMPTS[:3], SamplingParams(max_tokens=24, ignore_eos=True))
    assert [a.text for a in answers] == [texts[0], "", texts[2]]
    assert answers[1].finish_reason is FinishReason.ERROR
    assert answers[1].error == "a safety check failed: RuntimeError"
    assert llm.kv.pool.live == 0


def test_the_next_turn_of_a_session_does_not_read_what_was_filtered(model):
    llm = LLM(model, block_size=4, kv_tokens=2048)
    free = Session(llm).say("fib", SamplingParams(max_tokens=24, ignore_eos=True)).text
    pattern = free[4:8]
    checked = Session(LLM(model, block_size=4, kv_tokens=2048, safety=Blocklist([pattern])))
    assert checked.say("fib", SamplingParams(max_tokens=24, ignore_eos=True)).finish_reason is FinishReason.FILTERED
    assert pattern in model.tokenizer.decode(checked.tokens)
    checked.llm.engine.safety = None
    checked.say("go on", SamplingParams(max_tokens=2))
    assert pattern not in model.tokenizer.decode(checked.tokens[:-2])


# ---- in the server


def test_the_server_refuses_prompts_and_cuts_answers(model):
    free = generate(model, "fib", SamplingParams(max_tokens=24, ignore_eos=True))[0].text
    pattern = free[6:9]
    served = Served(LLM(model, block_size=4, kv_tokens=2048, safety=Blocklist([pattern, "forbidden fruit"])))
    try:
        ask: dict[str, Any] = {"model": NAME, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        refused = served.post("/v1/completions", ask | {"prompt": ["fib", "Forbidden  Fruit"]})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "content_filter"
        assert "fruit" not in refused.json()["error"]["message"].lower()
        logprobs = served.post("/v1/completions", ask | {"prompt": "fib", "logprobs": 1})
        assert logprobs.status_code == 400 and logprobs.json()["error"]["param"] == "logprobs"
        whole = served.post("/v1/completions", ask | {"prompt": "fib"}).json()["choices"][0]
        stream = served.post("/v1/completions", ask | {"prompt": "fib", "stream": True}).text
        chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
        want, _ = allowed(free, [pattern], False)
        assert whole["text"] == "".join(c["choices"][0]["text"] for c in chunks) == want
        assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "content_filter"
        assert whole["stop_reason"] is None and pattern not in stream
        metrics = httpx.get(served.url + "/metrics").text
        assert f'cs336:prompts_refused_total{{model_name="{NAME}"}} 1.0' in metrics
        assert f'finished_reason="filtered",model_name="{NAME}"}} 2.0' in metrics
    finally:
        served.idle()
        served.close()


def test_the_server_answers_500_when_a_check_fails(model):
    def judge(prompt: str, answer: str) -> str | None:
        if "the" in (prompt if not answer else answer[:0]):
            raise RuntimeError("secret detail")
        return 1 / 0 if answer else None  # type: ignore[return-value]

    served = Served(LLM(model, block_size=4, kv_tokens=1024, safety=Classifier(judge)))
    try:
        for prompt in ("the capital", "fib"):
            reply = served.post("/v1/completions", {"model": NAME, "prompt": prompt, "max_tokens": 4})
            assert reply.status_code == 500 and "a safety check failed" in reply.json()["error"]["message"]
            assert "secret" not in reply.text
    finally:
        served.idle()
        served.close()


@pytest.mark.parametrize("content", [None, b"", b"# only a comment\n", b"caf\xe9"])
def test_the_command_line_refuses_a_list_that_is_none(content, tmp_path, capsys):
    file = tmp_path / "list.txt"
    if content is not None:
        file.write_bytes(content)
    assert main(["serve", "--blocklist", str(file)]) == 2
    said = capsys.readouterr().err.strip()
    assert str(file) in said and "\n" not in said


def test_every_way_to_end_has_a_name_in_the_interface():
    assert set(FINISH) == set(FinishReason) and FINISH[FinishReason.FILTERED] == "content_filter"


def test_words_without_a_list(capsys):
    assert main(["serve", "--blocklist-words"]) == 2
    assert "--blocklist" in capsys.readouterr().err
