"""The command line: one JSON object, one-line errors with exit code 2, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tiny import write_model

from cs336_infer.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_model(path)
    return path


@pytest.fixture(autouse=True)
def quick_bandwidth(monkeypatch):
    """512 MiB of memory are read for a real figure; here a small buffer does."""
    from cs336_infer import measure
    from cs336_infer.measure import report

    real = measure.read_bandwidth

    def quick(device):
        return real(device, size_bytes=1 << 22, repeats=1)

    monkeypatch.setattr(measure, "read_bandwidth", quick)
    monkeypatch.setattr(report, "read_bandwidth", quick)


def run(capsys, *args):
    try:
        code = main([str(a) for a in args])
    except SystemExit as e:
        code = e.code
    out, err = capsys.readouterr()
    return code, out, err


def test_generate_prints_one_json_object(capsys, folder):
    code, out, err = run(
        capsys, "generate", "the capital", "--model", folder, "--max-tokens", 6, "--ignore-eos", "--json"
    )
    assert (code, err) == (0, "")
    done = json.loads(out)
    assert len(done["token_ids"]) == 6 and done["finish_reason"] == "length"
    assert done["ttft_s"] > 0 and done["tpot_s"] > 0 and done["bandwidth_fraction"] > 0
    assert "kv=contiguous" in done["path"] and "kernels=" in done["path"]
    size = 2 if "bfloat16" in done["path"] else 4
    from cs336_infer import load_model

    config = load_model(folder).config
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
    context = len(done["prompt_token_ids"]) + 5 // 2
    embedding_rows = config.hidden_size * size  # untied: one row of the input table, all of the head
    weights = (config.num_params - config.embedding_params) * size + embedding_rows
    assert done["bytes_per_token"] == weights + per_token * (context + 1)


def test_text_output_is_the_text_and_the_speed_goes_to_stderr(capsys, folder):
    args = ("generate", "the capital", "--model", folder, "--max-tokens", 6, "--dtype", "float32")
    _, out, err = run(capsys, *args)
    _, js, _ = run(capsys, *args, "--json")
    assert out == json.loads(js)["text"] + "\n"
    assert "tok/s" in err and "ended by" in err and len(err.splitlines()) == 1


def test_one_token_has_no_decode_speed(capsys, folder):
    _, out, _ = run(capsys, "generate", "a", "--model", folder, "--max-tokens", 1, "--json")
    done = json.loads(out)
    assert done["tpot_s"] is None and done["bandwidth_fraction"] is None
    code, _, err = run(capsys, "generate", "a", "--model", folder, "--max-tokens", 1)
    assert code == 0 and "no decode step" in err


def test_options_reach_the_engine(capsys, folder):
    base = ("generate", "the", "--model", folder, "--max-tokens", 12, "--ignore-eos", "--json", "--dtype", "float32")
    greedy = json.loads(run(capsys, *base)[1])
    hot = [json.loads(run(capsys, *base, "--temperature", 5, "--seed", s)[1])["token_ids"] for s in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2] and hot[0] != greedy["token_ids"]
    narrowed = json.loads(run(capsys, *base, "--temperature", 5, "--seed", 1, "--top-k", 1)[1])
    assert narrowed["token_ids"] == greedy["token_ids"]
    penalised = json.loads(run(capsys, *base, "--frequency-penalty", 2, "--repetition-penalty", 3)[1])
    assert penalised["token_ids"] != greedy["token_ids"]
    plain = json.loads(run(capsys, *base, "--kv", "none", "--kernels", "reference", "--threads", 1)[1])
    assert plain["token_ids"] == greedy["token_ids"]
    assert "kv=none kernels=reference" in plain["path"] and "threads=1" in plain["path"]
    chat = json.loads(run(capsys, *base, "--chat")[1])
    assert len(chat["prompt_token_ids"]) > len(greedy["prompt_token_ids"])
    piece = greedy["text"][3:5]
    stopped = json.loads(run(capsys, *base, "--stop", piece)[1])
    assert stopped["stop_reason"] == piece and stopped["text"] == greedy["text"][: greedy["text"].index(piece)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["a", "--max-tokens", "0"], "--max-tokens"),
        (["a", "--max-tokens", "-5"], "--max-tokens"),
        (["a", "--max-tokens", "1000000000000"], "--max-tokens"),
        (["a", "--max-tokens", "ten"], "ten"),
        (["a", "--temperature", "nan"], "--temperature"),
        (["a", "--temperature", "-1"], "--temperature"),
        (["a", "--top-p", "0"], "--top-p"),
        (["a", "--top-p", "2"], "--top-p"),
        (["a", "--top-k", "0"], "--top-k"),
        (["a", "--min-p", "-1"], "--min-p"),
        (["a", "--seed", str(2**64)], "--seed"),
        (["a", "--stop", ""], "--stop"),
        (["a", "--stop", "bad \udcff bytes"], "--stop has a lone surrogate"),
        (["a", "--top-p", "0"], "--top-p must be a number above 0"),
        (["a", "--max-tokens", "0"], "--max-tokens must be an integer >= 1, not 0"),
        (["", "--max-tokens", "3"], "empty"),
        (["a " * 400], "context"),
        (["a", "--no-such-option"], "--no-such-option"),
        (["a", "--dtype", "int3"], "int3"),
        (["a", "--device", "tpu"], "tpu"),
        (["a", "--device", "cuda:7"], "cuda:7"),
        (["a", "--kernels", "fast"], "fast"),
        (["a", "--kernels", "packed", "--dtype", "float16"], "packed"),
        (["a", "--threads", "0"], "--threads"),
        (["a", "--threads", "3000000000"], "--threads"),
        (["a", "--max-tok", "3"], "--max-tok"),
        (["a", "--repetition-penalty", "1e-40"], "--repetition-penalty"),
        (["a", "--kv", "paged"], "paged"),
        ([], "prompt"),
        (["bad \udcff bytes"], "surrogate"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, folder, args, words):
    model = [] if "--model" in args else ["--model", folder]
    code, out, err = run(capsys, "generate", *args, *model)
    assert code == 2 and out == ""
    assert len(err.splitlines()) == 1 and words in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "a", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "a", "--stop", "\udcff"], "--stop"),
        (["generate", "bad \udcff bytes"], "surrogate"),
        (["generate", "a", "--threads", "0"], "--threads"),
        (["measure", "--prompt-tokens", "0"], "--prompt-tokens must be an integer >= 1, not 0"),
        (["measure", "--batch", "0"], "--batch must be an integer >= 1, not 0"),
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_loaded(capsys, monkeypatch, args, words):
    monkeypatch.setattr("cs336_infer.cli.load_model", lambda *a, **k: pytest.fail("the model was loaded"))
    code, out, err = run(capsys, *args)
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and words in err


@pytest.mark.parametrize("tokens", [256, 100_000])
def test_a_prompt_to_measure_fits_the_context(capsys, folder, tokens):
    code, _, err = run(capsys, "measure", "--prompt-tokens", tokens, "--model", folder)
    assert code == 2 and err == f"cs336-infer: --prompt-tokens must be an integer from 1 to 255, not {tokens}\n"


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["dance"],
        ["measure", "--batch", "0"],
        ["measure", "--prompt-tokens", "256"],
        ["measure", "--batch", "1000000000000"],
    ],
)
def test_bad_commands_too(capsys, folder, args):
    if args[:1] == ["measure"]:
        args = [*args, "--model", folder]
    code, _, err = run(capsys, *args)
    assert code == 2 and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.gguf", None, "no model at"),
        ("empty.gguf", b"", "empty"),
        ("garbage.gguf", b"\x00\xff" * 500, "not a GGUF"),
        ("truncated.gguf", b"GGUF\x03\x00\x00\x00", "truncated"),
        ("emptyfolder/", None, "config.json"),
        ("not a model", None, "no model at"),
        ("x" * 5000, None, "no model at"),
    ],
)
def test_bad_models_are_named(capsys, tmp_path, name, content, words):
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    for command in (["generate", "a", "--model", path], ["models", path]):
        code, out, err = run(capsys, *command)
        assert code == 2 and out == "" and len(err.splitlines()) == 1
        assert words in err and name.strip("/")[:50] in err


def test_the_home_of_nobody_is_not_a_model(capsys):
    code, _, err = run(capsys, "models", "~no-such-user/x")
    assert code == 2 and len(err.splitlines()) == 1 and "no model at" in err


def test_models_lists_the_embedded_one_and_reads_headers_only(capsys, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, out, _ = run(capsys, "models", "--json")
    assert code == 0
    (embedded,) = [m for m in json.loads(out) if m["name"] == "smollm2-135m-instruct"]
    assert embedded["params"] == 134515008 and embedded["context_length"] == 8192
    code, out, _ = run(capsys, "models", folder)
    assert code == 0 and "llama" in out and str(folder) in out


def test_doctor_and_measure_print_json(capsys, folder):
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 0 and {"ok", "warn", "no"} >= {c["status"] for c in json.loads(out)["checks"]}
    code, out, _ = run(capsys, "measure", "--model", folder, "--prompt-tokens", 32, "--batch", 2, "--json")
    facts = json.loads(out)
    assert code == 0 and [p["name"] for p in facts["phases"]] == ["prefill", "decode"]
    for phase in facts["phases"]:
        assert phase["median_s"] > 0 and phase["fraction"] > 0
        assert phase["intensity"] == pytest.approx(phase["flops"] / phase["bytes"])


def test_the_installed_command_survives_a_closed_pipe(folder):
    command = f"{sys.executable} -m cs336_infer.cli generate the --model {folder} --max-tokens 50 --ignore-eos | true"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=env, check=False)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_bad_bytes_on_the_command_line_and_on_stdin(folder):
    command = [sys.executable, "-m", "cs336_infer.cli", "generate", "--model", str(folder)]
    for args, stdin in [([b"bad \xff byte"], None), (["-"], b"bad \xff byte")]:
        done = subprocess.run([*command, *args], input=stdin, capture_output=True, check=False)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("redirect", "code", "words"),
    [("> /dev/full", 1, "cannot write"), ("<&-", 2, "standard input")],
)
def test_broken_streams_are_one_line(folder, redirect, code, words):
    prompt = "-" if "<" in redirect else "a"
    command = f"{sys.executable} -m cs336_infer.cli generate {prompt} --model {folder} --max-tokens 3 --json {redirect}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr


def test_a_terminal_of_another_encoding_shows_escapes(folder):
    command = [sys.executable, "-m", "cs336_infer.cli", "generate", "한국어", "--model", str(folder)]
    command += ["--max-tokens", "40", "--temperature", "3", "--seed", "1", "--ignore-eos"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False)
    assert done.returncode == 0, done.stderr
    assert b"\\u" in done.stdout


@pytest.mark.parametrize(("program", "code", "said"), [("cs336-infer", 130, "interrupted"), ("other", 1, "Traceback")])
def test_ctrl_c_while_torch_is_imported(program: str, code: int, said: str) -> None:
    source = f"""
import os, signal, sys
sys.argv[0] = "/bin/{program}"
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "torch": os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
import cs336_infer.cli
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    if program == "cs336-infer":
        assert (done.returncode, done.stderr) == (code, f"cs336-infer: {said}\n")
    else:
        assert done.returncode != 0 and said in done.stderr
