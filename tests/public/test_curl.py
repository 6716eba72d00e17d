"""A second client of the server that knows nothing of ours or of OpenAI's: curl, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from cs336_infer import SamplingParams, generate, load_model

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write_model(folder)
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The real command, on a free port; stopped by SIGTERM it must exit with 0."""
    command = [str(Path(sys.executable).parent / "cs336-infer"), "serve", "--model", str(folder), "--name", "tiny"]
    command += ["--port", "0", "--api-key", "sesame", "--dtype", "float32", "--kv-tokens", "4096"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"http://[\d.]+:\d+", line):
            break
    else:
        pytest.fail(f"the server ended with {server.wait()} before it named its address")
    yield found.group()
    server.send_signal(signal.SIGTERM)
    server.stdout.read()
    assert server.wait(60) == 0


def curl(
    url: str, body: dict | str | None = None, *, key: str = "sesame", options: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Status and body."""
    line = ["curl", "--silent", "--show-error", "--max-time", "120", "--write-out", "\n%{http_code}", *options]
    line += ["--header", f"authorization: Bearer {key}"]
    if body is not None:
        line += [
            "--header",
            "content-type: application/json",
            "--data",
            body if isinstance(body, str) else json.dumps(body),
        ]
    done = subprocess.run([*line, url], capture_output=True, text=True, check=True, timeout=150)
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text


def test_list_complete_chat_and_errors(url: str, folder: Path) -> None:
    status, text = curl(f"{url}/v1/models")
    assert status == 200 and [m["id"] for m in json.loads(text)["data"]] == ["tiny"]

    model = load_model(folder, dtype="float32")
    want = generate(model, PROMPT, SamplingParams(max_tokens=10, ignore_eos=True), kv="none")[0].text
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    status, text = curl(f"{url}/v1/completions", body)
    assert status == 200 and json.loads(text)["choices"][0]["text"] == want

    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    status, text = curl(f"{url}/v1/chat/completions", chat)
    assert status == 200 and json.loads(text)["choices"][0]["message"]["role"] == "assistant"

    for bad, expected in (({**body, "top_p": 7}, 400), ({**body, "colour": "red"}, 400), ("{", 400)):
        status, text = curl(f"{url}/v1/completions", bad)
        assert status == expected and json.loads(text)["error"]["message"]
    assert curl(f"{url}/v1/models", key="wrong")[0] == 401


def test_a_stream_arrives_as_events(url: str, folder: Path) -> None:
    model = load_model(folder, dtype="float32")
    want = generate(model, PROMPT, SamplingParams(max_tokens=10, ignore_eos=True), kv="none")[0].text
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "ignore_eos": True, "stream": True}
    status, text = curl(f"{url}/v1/completions", body, options=("--no-buffer",))
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert status == 200 and events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == want
