"""A hub id is fetched by the real client from a hub that runs here; bad folders say what is wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import write_model

from cs336_infer import ModelLoadError, load_model

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "files"
    write_model(folder, shard="20KB")
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    return folder


@pytest.fixture
def hub(checkpoint):
    """The few requests of a model hub, over HTTP on this machine."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            path = self.path.split("?")[0]
            files = sorted(p.name for p in checkpoint.iterdir())
            if path.startswith("/api/models/acme/tiny"):
                if "/tree/" in path:
                    body = json.dumps([{"type": "file", "path": f, "size": 1, "oid": SHA} for f in files]).encode()
                else:
                    info = {"id": "acme/tiny", "sha": SHA, "siblings": [{"rfilename": f} for f in files]}
                    body = json.dumps(info).encode()
            elif path.startswith("/acme/tiny/resolve/") and path.rsplit("/", 1)[1] in files:
                body = (checkpoint / path.rsplit("/", 1)[1]).read_bytes()
            else:
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", SHA)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


LOAD = """
import sys
from cs336_infer import ModelLoadError, load_model
try:
    print(load_model(sys.argv[1], device="cpu").config.num_params)
except ModelLoadError as e:
    print("refused:", e)
"""


def load(name, cache, endpoint, **env):
    """In a process of its own: the client reads its settings when it is imported."""
    import os

    settings = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **env}
    done = subprocess.run([sys.executable, "-c", LOAD, name], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hub_id_is_fetched_then_cached(hub, checkpoint, tmp_path):
    endpoint, asked = hub
    params = str(load_model(checkpoint, device="cpu").config.num_params)
    assert load("acme/tiny", tmp_path, endpoint) == params
    assert any("safetensors" in a for a in asked)
    assert not any("resolve" in a and "pytorch_model.bin" in a for a in asked), "weights of another format were fetched"
    before = len(asked)
    assert load("acme/tiny", tmp_path, endpoint, HF_HUB_OFFLINE="1") == params
    assert len(asked) == before


def test_unknown_and_unreachable_hubs_are_one_line(hub, tmp_path):
    endpoint, _ = hub
    for name, where in [("acme/none", endpoint), ("acme/tiny", "http://127.0.0.1:1")]:
        said = load(name, tmp_path / "empty", where)
        assert said.startswith(f"refused: {name!r} is not on this disk") and "\n" not in said


def edit_config(**changes):
    def change(folder):
        file = folder / "config.json"
        raw = json.loads(file.read_text())
        raw.update(changes)
        file.write_text(json.dumps({k: v for k, v in raw.items() if v != "DELETE"}))

    return change


def first_shard(folder):
    return sorted(folder.glob("*.safetensors"))[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "not valid JSON"),
        (edit_config(model_type="mamba"), "mamba"),
        (edit_config(hidden_size="DELETE"), "hidden_size"),
        (edit_config(hidden_size="wide"), "wrong kind"),
        (edit_config(vocab_size=400), "embed_tokens"),
        (edit_config(vocab_size=100), "embedding table has 100 rows"),
        (edit_config(num_hidden_layers=9), "layers.3"),
        (edit_config(attention_bias=True), "attention_bias"),
        (edit_config(hidden_act="gelu"), "gelu"),
        (edit_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "yarn"),
        (edit_config(rope_parameters={"rope_type": "llama3", "factor": 4.0}), "low_freq_factor"),
        (edit_config(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        (edit_config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (edit_config(rope_parameters=[1]), "must be an object"),
        (edit_config(rope_parameters="linear"), "must be an object"),
        (edit_config(rope_parameters={"rope_type": "default", "rope_theta": 0}), "rope_theta"),
        (edit_config(rms_norm_eps=-1.0), "rms_eps"),
        (edit_config(layer_types=["sliding_attention"] * 3), "layer_types"),
        (edit_config(num_hidden_layers=2), "layers.2"),
        (edit_config(num_hidden_layers=2.9), "whole number"),
        (edit_config(max_position_embeddings=0), "context_length"),
        (edit_config(eos_token_id=-1), "unexpected"),
        (edit_config(eos_token_id=10**30), "unexpected"),
        (lambda f: (f / "tokenizer_config.json").write_text('{"chat_template": [{"name": []}]}'), "model"),
        (lambda f: first_shard(f).unlink(), "missing"),
        (lambda f: first_shard(f).write_bytes(b""), "damaged or truncated"),
        (lambda f: first_shard(f).write_bytes(first_shard(f).read_bytes()[:-100]), "damaged or truncated"),
        (lambda f: first_shard(f).write_bytes(b"\xff" * 900), "damaged or truncated"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    ],
)
def test_damaged_folders_say_what_is_wrong(change, words, checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    change(folder)
    with pytest.raises(ModelLoadError) as e:
        load_model(folder, device="cpu")
    assert words in str(e.value) and str(folder) in str(e.value) and "\n" not in str(e.value)


def test_a_bias_that_would_be_left_out_is_refused(checkpoint, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    tensors = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
    for file in folder.glob("model*"):
        file.unlink()
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(48)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias has no place"):
        load_model(folder, device="cpu")


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(["config.json", "tokenizer_config.json", "generation_config.json"]), st.data())
def test_any_json_value_in_any_setting_loads_or_says_why(checkpoint, tmp_path_factory, file, data):
    folder = tmp_path_factory.mktemp("odd") / "model"
    shutil.copytree(checkpoint, folder)
    raw = json.loads((folder / file).read_text())
    odd = st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=3)
    key = data.draw(st.sampled_from(sorted(raw)))
    raw[key] = data.draw(odd | st.lists(odd, max_size=2) | st.dictionaries(st.text(max_size=3), odd, max_size=2))
    (folder / file).write_text(json.dumps(raw))
    try:
        load_model(folder, device="cpu", dtype="float32")
    except ModelLoadError as e:
        assert "\n" not in str(e) and str(folder) in str(e)
    finally:
        shutil.rmtree(folder)
