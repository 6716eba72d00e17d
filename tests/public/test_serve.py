"""The server over real HTTP, with OpenAI's own client. Answers of a tiny model are compared with the oracle."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import tiny
import uvicorn

from cs336_infer import LLM, LoadedModel, SamplingParams, generate, load_model
from cs336_infer.serve.api import create_app

KEY = "sesame"
NAME = "tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.write_model(folder)
    return load_model(folder, dtype="float32", kernels="reference")


class Served:
    """A server in a thread of this process."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self.llm = llm
        self.app = create_app(llm, NAME, api_key=KEY, **options)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        config = uvicorn.Config(self.app, host="127.0.0.1", port=self.port, log_level="warning")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.port}"
        until(lambda: self.server.started)

    def post(self, path: str, body: Any, *, key: str | None = KEY) -> httpx.Response:
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(self.url + path, content=content, headers=headers, timeout=120)

    def idle(self) -> None:
        """Wait until nothing runs; every block has been given back then."""
        until(lambda: self.app.state.runner.requests == 0 and not self.llm.engine.busy)
        assert self.llm.kv.pool.live == 0
        self.llm.kv.pool.check()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def served(model: LoadedModel) -> Iterator[Served]:
    served = Served(LLM(model, block_size=4, kv_tokens=2048, debug=True, fill=float("nan"), step_tokens=64))
    yield served
    served.idle()
    served.close()


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=120)


def want(model: LoadedModel, prompt: Any, **params: Any) -> Any:
    return generate(model, prompt, SamplingParams(**({"max_tokens": 12} | params)), kv="none")[0]


def chat_ids(model: LoadedModel, text: str) -> list[int]:
    return model.tokenizer.encode_chat([{"role": "user", "content": text}])


# The official client


def test_models_are_listed(client):
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_completions_and_their_usage(client, model):
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    for _ in range(2):
        got = client.completions.create(model=NAME, prompt=prompt, max_tokens=12, temperature=0)
    expected = want(model, prompt)
    assert got.choices[0].text == expected.text
    assert got.choices[0].finish_reason == ("stop" if expected.finish_reason == "eos" else "length")
    assert got.usage.prompt_tokens == 9 and got.usage.completion_tokens == len(expected.token_ids)
    assert got.usage.prompt_tokens_details.cached_tokens == 8  # the second time


def test_several_prompts_and_choices(client, model):
    prompts = [[5, 6, 7], [8, 9]]
    got = client.completions.create(model=NAME, prompt=prompts, n=2, max_tokens=6, temperature=0.9, seed=3)
    for i, choice in enumerate(got.choices):
        assert choice.index == i
        assert choice.text == want(model, prompts[i // 2], max_tokens=6, temperature=0.9, seed=3 + i % 2).text
    assert got.usage.prompt_tokens == 5


def test_chat(client, model):
    got = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "fib"}], max_tokens=12, temperature=0
    )
    assert got.choices[0].message.content == want(model, chat_ids(model, "fib")).text
    assert got.choices[0].message.role == "assistant"


def test_three_seeded_choices(client, model):
    ask = dict(model=NAME, messages=[{"role": "user", "content": "fib"}], max_tokens=8, temperature=0.9, seed=11, n=3)
    first, second = (client.chat.completions.create(**ask) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in second.choices]
    assert texts == [
        want(model, chat_ids(model, "fib"), max_tokens=8, temperature=0.9, seed=11 + i).text for i in range(3)
    ]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_joined_is_the_whole(client, model, n):
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "fib"}],
        max_tokens=12,
        temperature=0,
        n=n,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usage = [""] * n, [None] * n, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    expected = want(model, chat_ids(model, "fib"))
    assert texts == [expected.text] * n and set(reasons) <= {"stop", "length"}
    assert usage.completion_tokens == n * len(expected.token_ids)


def test_a_stop_string_ends_the_text_and_never_shows(client, model):
    text = want(model, [5, 6, 7], max_tokens=30, ignore_eos=True).text
    stop = text[8:11]
    cut = text[: text.index(stop)]
    ask = dict(model=NAME, prompt=[5, 6, 7], max_tokens=30, temperature=0, stop=stop, extra_body={"ignore_eos": True})
    whole = client.completions.create(**ask)
    assert whole.choices[0].text == cut and whole.choices[0].finish_reason == "stop"
    pieces = [c.choices[0].text for c in client.completions.create(**ask, stream=True)]
    assert "".join(pieces) == cut


def test_logprobs(client, model):
    got = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "fib"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    content = got.choices[0].logprobs.content
    ids = want(model, chat_ids(model, "fib"), max_tokens=4).token_ids
    assert [bytes(p.bytes) for p in content] == [model.tokenizer.token_bytes(t) for t in ids]
    for p in content:
        assert len(p.top_logprobs) == 3 and p.logprob == p.top_logprobs[0].logprob <= 0
        assert [t.logprob for t in p.top_logprobs] == sorted((t.logprob for t in p.top_logprobs), reverse=True)
    plain = client.completions.create(model=NAME, prompt=[5, 6], max_tokens=3, temperature=0, logprobs=2)
    assert len(plain.choices[0].logprobs.token_logprobs) == plain.usage.completion_tokens
    assert plain.choices[0].logprobs.text_offset[0] == 0


def test_logit_bias_and_min_tokens(client, model):
    banned = want(model, [5, 6, 7], max_tokens=1).token_ids[0]
    body = {"model": NAME, "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 1, "logprobs": 0}
    free = client.completions.create(**body)
    biased = client.completions.create(**body, logit_bias={str(banned): -100})
    assert biased.choices[0].logprobs.tokens != free.choices[0].logprobs.tokens
    eos = min(model.tokenizer.eos_ids)
    ended = client.completions.create(
        model=NAME, prompt=[5, 6, 7], temperature=0, max_tokens=9, logit_bias={str(eos): 100}
    )
    assert ended.usage.completion_tokens == 1 and ended.choices[0].finish_reason == "stop"
    later = client.completions.create(
        model=NAME,
        prompt=[5, 6, 7],
        temperature=0,
        max_tokens=9,
        logit_bias={str(eos): 100},
        extra_body={"min_tokens": 4},
    )
    assert later.usage.completion_tokens == 5 and later.choices[0].finish_reason == "stop"


def test_a_reader_who_leaves_frees_the_blocks(client, served):
    stream = client.completions.create(
        model=NAME, prompt=[5, 6, 7], max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    served.idle()


def test_a_client_that_hangs_up_without_a_stream_frees_the_blocks(served):
    body = json.dumps({"model": NAME, "prompt": [5, 6, 7], "max_tokens": 240, "ignore_eos": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port)) as s:
        s.sendall(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: served.llm.engine.running)
    served.idle()


# Refusals


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "gpt-9"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": True}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "max_tokens"),
        ({"max_tokens": 1.5}, 400, "max_tokens"),
        ({"n": 0}, 400, "n"),
        ({"n": 1000}, 400, "n"),
        ({"stop": ""}, 400, "stop"),
        ({"stop": ["a"] * 100}, 400, "stop"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, 400, "logit_bias"),
        ({"logprobs": 9}, 400, "logprobs"),
        ({"presence_penalty": 3}, 400, "presence_penalty"),
        ({"min_tokens": 99, "max_tokens": 3}, 400, "min_tokens"),
        ({"echo": True}, 400, "echo"),
        ({"suffix": "x"}, 400, "suffix"),
        ({"best_of": 2}, 400, "best_of"),
        ({"tools": []}, 400, "tools"),
        ({"guided_json": {}}, 400, "guided_json"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [99999]}, 400, "prompt"),
        ({"prompt": [5] * 300}, 400, "prompt"),
        ({"prompt": "a" * 100_000}, 400, "prompt"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
    ],
)
def test_what_cannot_be_obeyed_is_named(served, change, status, param):
    response = served.post("/v1/completions", {"model": NAME, "prompt": [5, 6], "max_tokens": 2} | change)
    error = response.json()["error"]
    assert response.status_code == status, error
    assert error["param"] == param and error["message"] and "\n" not in error["message"]
    if param is not None:
        assert param in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 50_000])
def test_bodies_that_are_no_requests(served, body):
    response = served.post("/v1/chat/completions", body)
    assert response.status_code == 400 and "\n" not in response.json()["error"]["message"]


def test_bodies_and_headers_have_limits(served):
    assert served.post("/v1/completions", b" " * (5 << 20)).status_code == 413
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    pieces = (b" " * (1 << 20) for _ in range(5))  # a body whose length is not announced
    unannounced = httpx.post(f"{served.url}/v1/completions", content=pieces, headers=headers, timeout=60)
    assert (unannounced.status_code, unannounced.json()["error"]["code"]) == (413, "body_too_large")
    huge = urllib.request.Request(f"{served.url}/v1/models", headers={"x-filler": "a" * (1 << 20)})
    with pytest.raises((urllib.error.HTTPError, OSError)):
        urllib.request.urlopen(huge, timeout=20)
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_key_is_needed(served, client):
    assert served.post("/v1/completions", {"model": NAME, "prompt": "x"}, key=None).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="guess").models.list()
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_tokenize_there_and_back(served, model):
    got = served.post("/tokenize", {"model": NAME, "prompt": "fib(n) 한국어"}).json()
    assert got["tokens"] == model.tokenizer.encode("fib(n) 한국어") and got["count"] == len(got["tokens"])
    assert served.post("/detokenize", {"tokens": got["tokens"]}).json()["prompt"] == "fib(n) 한국어"
    assert served.post("/tokenize", {}).status_code == 400
    assert served.post("/detokenize", {"tokens": [-1]}).status_code == 400


def test_metrics_count(served, client):
    def read() -> dict[str, float]:
        lines = httpx.get(f"{served.url}/metrics").text.splitlines()
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("cs336:")}

    before = read()
    client.completions.create(
        model=NAME, prompt=[5, 6, 7], max_tokens=5, temperature=0, extra_body={"ignore_eos": True}
    )
    served.idle()
    after = read()
    assert after["cs336:generation_tokens_total"] - before["cs336:generation_tokens_total"] == 5
    assert after["cs336:prompt_tokens_total"] - before["cs336:prompt_tokens_total"] == 3
    assert after["cs336:time_to_first_token_seconds_count"] - before["cs336:time_to_first_token_seconds_count"] == 1
    assert after["cs336:num_requests_running"] == 0 and after["cs336:kv_cache_usage_perc"] == 0


def test_stopping_finishes_what_runs(model):
    served = Served(LLM(model, block_size=4, kv_tokens=1024))
    texts: list[str] = []

    def read() -> None:
        body = {
            "model": NAME,
            "prompt": [5, 6, 7],
            "max_tokens": 100,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=120) as r:
            for line in r.iter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line[6:])["choices"][0]["text"])

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: len(texts) > 2)
    served.close()
    reader.join(60)
    assert "".join(texts) == want(model, [5, 6, 7], max_tokens=100, ignore_eos=True).text
    assert served.llm.kv.pool.live == 0
