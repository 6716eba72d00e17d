"""The script-drift monitor: scripts against Unicode's own table, alarms against a definition, and what it lets pass."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import pytest
import regex
import tiny
from babel import Locale
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_infer import LLM, DriftRule, FinishReason, InvalidRequest, LoadedModel, SamplingParams, load_model
from cs336_infer.answer import Answer
from cs336_infer.serve.metrics import Metrics
from cs336_infer.text.drift import HAN, NAMED, DriftMonitor, script, scripts_expected
from cs336_infer.types import Completion

SCRIPTS = sorted({s for scripts in NAMED.values() for s in scripts} | {"LATIN"})
UNICODE = {s: ["Han", "Hiragana", "Katakana", "Bopomofo"] if s == HAN else [s.title()] for s in SCRIPTS}


def test_scripts_are_those_of_unicode():
    """`\\p{Script=...}` of the library regex, for every letter of the scripts that the monitor names."""
    patterns = {s: regex.compile("|".join(rf"\p{{Script={u}}}" for u in us)) for s, us in UNICODE.items()}
    odd, seen = set(), set()
    for char in map(chr, [*range(0xD800), *range(0xE000, 0x33000)]):
        if unicodedata.category(char) not in ("Lu", "Ll", "Lt", "Lo"):
            continue
        plain = unicodedata.normalize("NFKC", char)[0]
        want = next((s for s, p in patterns.items() if p.match(plain)), None)
        got = script(char)
        if want != (got if got in UNICODE else None):
            odd.add(char)
        seen.add(want)
    assert odd == set("ŉ〆ℲⅎↃ")  # names that do not begin with a script
    assert seen == {*SCRIPTS, None}


def test_languages_are_those_of_cldr():
    """Languages that are not written in Latin letters: their English names lead to the letters of their own names."""
    codes = "am ar as be bg bn bo brx ckb cv doi dz el fa gu he hi hy ja ka kk km kn ko kok ks ky lo mai mk ml mn mni "
    codes += "mr my ne or os ps ru sa sah sat sd si sr ta te tg th ti tt ug uk ur yi yue zh"
    missing = []
    for code in codes.split():
        locale = Locale.parse(code)
        name = str(locale.english_name).split(" (")[0].lower()
        own = {s for c in str(locale.get_language_name(code) or "") if (s := script(c)) not in (None, "LATIN")}
        expected = scripts_expected(f"Translate into {name.title()}, please.")
        if own and not own & expected:
            missing.append((name, own))
    assert [m for m in missing if m[0] not in {"manipuri", "santali"}] == []  # scripts with very few texts


def by_definition(text: str, prompt: str, rule: DriftRule) -> tuple[int, int, bool]:
    """Letters, foreign letters, and whether any `window` letters in a row hold more than the share."""
    expected, flags, before = scripts_expected(prompt), [], None
    for char in text:
        found = script(char)
        if found is not None:
            flags.append(found not in expected and not (found == "GREEK" and before != "GREEK"))
        before = found
    windows = [sum(flags[max(0, end - rule.window) : end]) for end in range(1, len(flags) + 1)]
    return len(flags), sum(flags), any(w > rule.share * rule.window for w in windows)


PIECES = st.sampled_from(["a", "b ", "Z", "1", "é", "ж", "中", "か", "한", "α", "αβ", " ", "ﾊ", "𝛼", "\u0301"])


@settings(max_examples=500, deadline=None)
@given(
    text=st.lists(PIECES, max_size=40).map("".join),
    prompt=st.sampled_from(["hello", "привет", "안녕", "into Japanese", "これ", "γλώσσα"]),
    rule=st.builds(DriftRule, window=st.integers(1, 12), share=st.sampled_from([0.0, 0.2, 0.5, 0.9])),
    places=st.lists(st.integers(0, 60), max_size=10),
)
def test_it_is_its_definition_however_the_text_is_cut(text, prompt, rule, places):
    edges = [0, *sorted(min(p, len(text)) for p in places), len(text)]
    for chunks in ([text], list(text), [text[a:b] for a, b in pairwise(edges)]):
        monitor = DriftMonitor(rule, prompt)
        alarms = [monitor.push(c) for c in chunks]
        assert (monitor.letters, monitor.foreign, any(alarms)) == by_definition(text, prompt, rule)
        assert len(monitor._recent) <= rule.window + 1


ENGLISH = "The engine keeps a table of blocks, and every request has its own row in it. "
CHINESE = "引擎保存一个块表，每个请求都有自己的一行。"
THAI = "เครื่องยนต์เก็บตารางของบล็อกไว้และทุกคำขอมีแถวของตัวเอง"
RUSSIAN = "Движок хранит таблицу блоков, и у каждого запроса своя строка. "


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Translate into Thai: the engine keeps a table.", THAI),
        ("Say it in Chinese", CHINESE * 3),
        ("翻译成中文: the engine", CHINESE * 3),
        ("Как работает движок?", RUSSIAN * 3 + ENGLISH),
        ("東京について", "東京は日本の首都です。とても大きなまちで、たくさんのひとがすんでいます。"),
        ("Who wrote it?", ENGLISH + "Лев Толстой wrote «Война и мир». " + ENGLISH),
        ("Who said it?", ENGLISH + "«Познание бесконечности требует бесконечного времени» " + ENGLISH),
        ("What is Beijing called?", ENGLISH + "北京 (Běijīng), formerly 北平. " + ENGLISH),
        (
            "State Bayes' rule",
            "p(θ|x) = p(x|θ) p(θ) / ∫ p(x|θ) p(θ) dθ, so α → β and γ ∝ λ μ, σ ≈ π, Σ φ ψ ω ε",
        ),
        ("Write code", "def f(x):\n    return {'α': 1, 'β': 2}[x]  # 中文 comment\n" * 4),
        ("一句话介绍台北", ENGLISH * 3),  # into Latin letters: cannot be seen, and is not an alarm
        ("hi", "Ｆｕｌｌ ｗｉｄｔｈ 𝐁𝐨𝐥𝐝 𝔉𝔯𝔞𝔨𝔱𝔲𝔯 ℂℍℕ ﬁﬂ µm Ω Å " * 4),
        ("hi", "👍🎉✨→≤∑∫√∞ ①②③ ٠١٢٣ १२३ " * 20),
    ],
)
def test_what_is_no_drift(prompt, answer):
    assert not DriftMonitor(DriftRule(), prompt).push(answer)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("How does the engine work?", ENGLISH + CHINESE * 2 + THAI),
        ("How does the engine work?", ENGLISH * 3 + THAI * 2),
        ("How does the engine work?", RUSSIAN * 2),
        ("How does the engine work?", "the 引擎 keeps 一个块表 of 每个请求 and 自己的一行 in 表中的块, " * 3),
        ("Как работает движок?", RUSSIAN + CHINESE * 3),
        ("State Bayes' rule", "Ο κανόνας του Μπέυζ είναι ένα θεώρημα των πιθανοτήτων " * 2),
        ("대한민국의 수도는", THAI * 2),
    ],
)
def test_what_is_drift(prompt, answer):
    """vllm-project/vllm#12954, sgl-project/sglang#33397, vllm-project/vllm-ascend#13615, and
    Anthropic's post-mortem of 2025-09-17 (b): answers in mixed languages."""
    assert DriftMonitor(DriftRule(), prompt).push(answer)


@pytest.mark.parametrize("values", [{"window": 0}, {"share": 1.0}, {"share": -0.1}, {"share": "x"}, {"ends": 1}])
def test_rules_that_cannot_be(values):
    with pytest.raises(InvalidRequest, match=next(iter(values))):
        DriftRule(**values)


# ---- in the engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write_model(folder)
    return load_model(folder, dtype="float32", kernels="reference")


def answer_of(model: LoadedModel, text: str, rule: DriftRule | None) -> Completion:
    """What becomes of an answer that consists of this text."""
    ids = model.tokenizer.encode(text)
    params = SamplingParams(max_tokens=len(ids), drift=rule)
    done = Completion(model.tokenizer.encode("the capital"))
    answer = Answer(model, done.prompt_token_ids, params, done)
    for i, token in enumerate(ids):
        if done.finish_reason is None:
            answer.accept(0, token, float(i))
    return done


def test_an_alarm_is_noted_and_ends_an_answer_only_if_asked(model):
    text = "capital " + "繁體中文" * 15
    noted, ended, off = (answer_of(model, text, rule) for rule in (DriftRule(), DriftRule(ends=True), None))
    assert (noted.text, noted.finish_reason) == (text, FinishReason.LENGTH)
    assert (noted.letters, noted.foreign_letters) == (7 + 60, 60)
    assert ended.finish_reason is FinishReason.DRIFT and ended.drifted_at == noted.drifted_at == len(ended.token_ids)
    assert ended.text == text[: 8 + 52]  # more than 0.4 times 128
    assert (off.drifted_at, off.letters, off.foreign_letters) == (None, 0, 0)
    with pytest.raises(InvalidRequest, match="drift"):
        SamplingParams(drift=0.5)  # type: ignore[arg-type]


def test_the_metrics_of_the_server(model):
    metrics = Metrics(LLM(model, block_size=4, kv_tokens=64), "m")
    for text in ("capital " + "繁體中文" * 15, "capital 繁"):
        metrics.ended(answer_of(model, text, DriftRule()))
    lines = metrics.text().decode()
    for name, value in (("script_drift", 1), ("letters", 75), ("foreign_letters", 61)):
        assert f'cs336:{name}_total{{model_name="m"}} {value}.0' in lines


def test_the_prompt_is_read_when_a_letter_asks_for_it_and_once():
    asked = []
    monitor = DriftMonitor(DriftRule(), lambda: asked.append(1) or "into Thai")
    assert not monitor.push(ENGLISH * 3) and asked == []
    assert not monitor.push(THAI * 3) and asked == [1] and monitor.foreign == 0
