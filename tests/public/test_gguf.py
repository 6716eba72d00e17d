"""GGUF files: every tensor type, the permutation, and what damaged files say."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import write_gguf, write_model

from cs336_infer import ModelLoadError, load_model
from cs336_infer.kv import NoCache
from cs336_infer.models.gguf_file import SUPPORTED, GGUFFile
from cs336_infer.models.zoo import embedded_path

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "head_dim": 8}
QUANTISABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    return folder, write_model(folder, **WIDE)


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_logits_equal_transformers_on_the_same_quantised_weights(kind, checkpoint, tmp_path):
    folder, theirs = checkpoint
    write_gguf(tmp_path / "m.gguf", folder, theirs, kind)
    quant = GGMLQuantizationType[kind]
    expected = write_model(tmp_path / "copy", **WIDE)
    with torch.no_grad():
        for p in expected.parameters():
            if p.dim() == 2:
                rounded = quants.dequantize(quants.quantize(p.numpy(), quant), quant)
                p.copy_(torch.from_numpy(np.array(rounded)).view_as(p))
    ours = load_model(tmp_path / "m.gguf", dtype="float32", device="cpu")
    ids, positions = torch.randint(0, 320, (2, 33)), torch.arange(33).expand(2, 33)
    with torch.inference_mode():
        want = expected(ids).logits
    got = ours.net.forward(ids, positions, NoCache(), last_only=False)
    assert (got - want).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_equals_its_folder(family, tied, tmp_path):
    theirs = write_model(tmp_path, family, tie_word_embeddings=tied, num_key_value_heads=3)
    write_gguf(tmp_path / "m.gguf", tmp_path, theirs)
    a, b = (load_model(p, dtype="float32", device="cpu") for p in (tmp_path, tmp_path / "m.gguf"))
    assert a.config == b.config
    ids, positions = torch.arange(9).expand(1, 9), torch.arange(9).expand(1, 9)
    assert torch.equal(a.net.forward(ids, positions, NoCache()), b.net.forward(ids, positions, NoCache()))
    text = "the capital 한국어 🙂\n"
    assert a.tokenizer.encode(text) == b.tokenizer.encode(text)


def test_rope_freqs_tensor_is_used(checkpoint, tmp_path):
    """Llama 3 GGUF files carry their RoPE scaling as a tensor of divisors."""
    folder, theirs = checkpoint
    write_gguf(tmp_path / "plain.gguf", folder, theirs)
    factors = np.array([1, 2, 4, 8], np.float32)
    write_gguf(tmp_path / "scaled.gguf", folder, theirs, extra={"rope_freqs.weight": factors})
    plain, scaled = (load_model(tmp_path / f"{n}.gguf", device="cpu").net.inv_freq for n in ("plain", "scaled"))
    assert torch.equal(plain / torch.tensor([1.0, 2, 4, 8]), scaled)


def q4_k_reference(block: bytes) -> list[float]:
    """One 256-element block by the format's definition, in plain Python."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(float)
    s = block[4:16]
    out = []
    for j in range(8):
        if j < 4:
            scale, low = s[j] & 63, s[j + 4] & 63
        else:
            scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4
            low = (s[j + 4] >> 4) | (s[j] >> 6) << 4
        chunk = block[16 + 32 * (j // 2) : 48 + 32 * (j // 2)]
        out += [d * scale * ((q >> 4 * (j % 2)) & 15) - dmin * low for q in chunk]
    return out


def q6_k_reference(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    (d,) = np.frombuffer(block[208:210], np.float16).astype(float)
    out = []
    for i in range(256):
        half, j = divmod(i, 128)
        quarter, k = divmod(j, 32)
        nibble = low[half * 64 + (quarter % 2) * 32 + k] >> (4 * (quarter // 2)) & 15
        top = high[half * 32 + k] >> (2 * quarter) & 3
        out.append(d * int(scales[i // 16]) * ((nibble | top << 4) - 32))
    return out


@pytest.mark.parametrize(("kind", "reference"), [("Q4_K", q4_k_reference), ("Q6_K", q6_k_reference)])
def test_k_quants(kind, reference, tmp_path):
    from gguf import GGUFWriter

    quant = GGMLQuantizationType[kind]
    size = GGML_QUANT_SIZES[quant][1]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (3, 2 * size), dtype=np.uint8)
    scale_at = (0, 2) if kind == "Q4_K" else (208,)
    for block in range(2):
        for at in scale_at:
            raw[:, block * size + at : block * size + at + 2] = np.float16([0.25, -0.5, 2]).view(np.uint8).reshape(3, 2)
    w = GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    w.add_tensor("x", raw, raw_dtype=quant)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.tensors["x"].shape == (3, 512)
    got = np.concatenate([rows for _, rows in file.rows("x")])
    want = [reference(raw[r, :size].tobytes()) + reference(raw[r, size:].tobytes()) for r in range(3)]
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_header_equals_that_of_the_gguf_package():
    from gguf import GGUFReader

    ours, theirs = GGUFFile(embedded_path()), GGUFReader(embedded_path())
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    found = {t.name: (t.shape, t.type, t.offset, t.nbytes) for t in ours.tensors.values()}
    wanted = {
        t.name: (tuple(int(n) for n in reversed(t.shape)), t.tensor_type, int(t.data_offset), int(t.n_bytes))
        for t in theirs.tensors
    }
    assert found == wanted
    assert len(found) == 272


@pytest.fixture(scope="module")
def good(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, *checkpoint)
    return path.read_bytes()


def message_of(path) -> str:
    with pytest.raises(ModelLoadError) as e:
        load_model(path, device="cpu")
    text = str(e.value)
    assert "\n" not in text and str(path) in text and len(text) < 400
    return text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b"", "empty"),
        (lambda b: b"GGUF", "damaged or truncated"),
        (lambda b: b"PK\x03\x04" + b[4:], "not a GGUF file"),
        (lambda b: b[:4] + struct.pack("<I", 1) + b[8:], "version 1"),
        (lambda b: b[:4] + struct.pack(">I", 3) + b[8:], "big-endian"),
        (lambda b: b[:16] + struct.pack("<Q", 2**63) + b[24:], "damaged or truncated"),
        (lambda b: b[: len(b) // 3], "truncated"),
        (lambda b: b[:-64], "truncated: tensor"),
        (lambda b: b[:3000], "truncated"),
    ],
)
def test_damaged_files_say_so_in_one_line(change, expected, good, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(good))
    assert expected in message_of(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 6000), st.integers(0, 255))
def test_a_flipped_header_byte_never_gives_a_traceback(good, tmp_path, at, value):
    """It loads (the byte was a harmless one) or says what is wrong; nothing else may escape."""
    path = tmp_path / "flipped.gguf"
    path.write_bytes(good[:at] + bytes([value]) + good[at + 1 :])
    try:
        load_model(path, device="cpu", dtype="float32")
    except ModelLoadError as e:
        assert "\n" not in str(e)


def test_unsupported_tensor_type_is_named(good, tmp_path):
    from gguf import GGUFWriter

    w = GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    w.add_tensor("x", np.zeros((1, 66), np.uint8), raw_dtype=GGMLQuantizationType.IQ2_XXS)
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    text = message_of(tmp_path / "m.gguf")
    assert "IQ2_XXS" in text and all(kind in text for kind in SUPPORTED)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("llama.attention.head_count_kv", 3, "cannot share"),
        ("llama.block_count", 4, "model.layers.3"),
        ("llama.embedding_length", 32, "shape"),
        ("llama.attention.head_count", 0, "num_heads"),
        ("llama.expert_count", 8, "mixture-of-experts"),
        ("llama.rope.dimension_count", 4, "RoPE"),
    ],
)
def test_contradicting_metadata_is_named(key, value, expected, checkpoint, tmp_path):
    write_gguf(tmp_path / "m.gguf", *checkpoint, overrides={key: value})
    assert expected in message_of(tmp_path / "m.gguf")
