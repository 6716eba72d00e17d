"""Readers of traces, line by line and with errors for people, and the generator against the published statistics."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from cs336_infer.kv.policy import LRU
from cs336_infer.kv.replay import UNLIMITED, replay
from cs336_infer.simulate import synthetic
from cs336_infer.simulate.sources import open_source
from cs336_infer.simulate.trace import TraceError, TraceRequest, read_trace
from cs336_infer.types import InvalidRequest

TRACES = os.environ.get("CS336_TRACES")
needs_traces = pytest.mark.skipif(not TRACES, reason="CS336_TRACES is not set: the published traces are not here")

MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 7]}
"""
CODING = """{"session":"a","turn":0,"t":0.0,"think":0,"api":1,"input_length":200,"output_length":9,\
"blocks":[[1,2],[9,1]],"block_size":64,"tool_tokens":10,"system_tokens":5}
{"session":"b","turn":0,"t":1.5,"input_length":70,"output_length":1,"blocks":[[1,1]],"block_size":64}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.9799600,34,12
"""


def read(tmp_path: Path, text: str | bytes) -> list[TraceRequest]:
    path = tmp_path / "t.trace"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return list(read_trace(path))


def test_mooncake(tmp_path: Path) -> None:
    assert read(tmp_path, MOONCAKE) == [
        TraceRequest(0.0, 600, 5, [0, 1], 512),
        TraceRequest(3.0, 1024, 0, [0, 7], 512),
    ]


def test_coding_agent_keys_belong_to_their_session(tmp_path: Path) -> None:
    first, second = read(tmp_path, CODING)
    assert first == TraceRequest(0.0, 200, 9, [("a", 1), ("a", 2), ("a", 9)], 64, "a")
    assert second == TraceRequest(1.5, 70, 1, [("b", 1)], 64, "b")


def test_azure_has_lengths_only(tmp_path: Path) -> None:
    assert read(tmp_path, AZURE) == [TraceRequest(0.0, 4808, 10), TraceRequest(2.0, 34, 12)]
    assert read(tmp_path, "\ufeff" + AZURE.replace("\n", "\r\n")) == read(tmp_path, AZURE)


@pytest.mark.parametrize("text", [MOONCAKE, CODING, AZURE])
def test_gzip_and_blank_lines_change_nothing(tmp_path: Path, text: str) -> None:
    plain = read(tmp_path, text)
    assert read(tmp_path, gzip.compress(text.encode())) == plain
    assert read(tmp_path, "\n" + text.replace("\n", "\n\n")) == plain


def test_a_request_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        read(tmp_path, MOONCAKE)[0].input_tokens = 1  # type: ignore[misc]


GOOD = MOONCAKE.splitlines()[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + "\n" + GOOD[:40], "line 2: damaged JSON"),
        (GOOD.replace("600", "-600"), "line 1: input_length must be an integer >= 0, not -600"),
        (GOOD.replace('"output_length": 5', '"output_length": -1'), "output_length must be an integer >= 0, not -1"),
        (GOOD.replace("600", "6.5"), "input_length must be an integer >= 0, not 6.5"),
        (GOOD.replace("600", "true"), "input_length must be an integer >= 0, not True"),
        (GOOD.replace('"output_length": 5, ', ""), "output_length must be an integer >= 0, not missing"),
        (GOOD.replace("[0, 1]", "[0, 1, 2]"), "input_length 600 needs 2 hash_ids of 512 tokens, not 3"),
        (GOOD.replace("[0, 1]", '[0, "x"]'), "hash_ids must be a list of integers"),
        (GOOD.replace('"timestamp": 0', '"timestamp": NaN'), "timestamp must be a number >= 0"),
        (GOOD + "\n[1]", "line 2: a JSON object is needed, not [1]"),
        (GOOD + "\n" + "[" * 100_000, "line 2: damaged JSON"),
        ('{"prompt": "hello"}', "line 1: unknown format"),
        ("hello\n", "line 1: unknown format: 'hello'"),
        ("a,b,c\n1,2,3\n", "line 1: unknown format"),
        ("", "has no requests: it is empty"),
        ("\n\n", "has no requests"),
        (AZURE.splitlines()[0], "has no requests"),
        (b"\x7fELF\0\0\1", "line 1: binary data"),
        (b"\xff\xfe{", "line 1: binary data or not UTF-8"),
        (AZURE + "2023-11-16 18:17:06,12\n", "line 4: 2 fields instead of 3"),
        (AZURE + "yesterday,12,1\n", "line 4: TIMESTAMP must be like"),
        (AZURE + "2023-11-16 18:17:06,-12,1\n", "line 4: ContextTokens must be an integer >= 0, not '-12'"),
        (AZURE + "2023-11-16 18:17:06,12,x\n", "line 4: GeneratedTokens must be an integer >= 0, not 'x'"),
        (AZURE + "2023-11-16 18:17:06+00:00,12,1\n", "line 4: TIMESTAMP '2023-11-16 18:17:06+00:00' and the first"),
        (CODING.replace("[9,1]", "[9,2]"), "line 1: input_length 200 has 3 full blocks of 64 tokens, blocks holds 4"),
        (CODING.replace("[[1,2],[9,1]]", "[[1,-2]]"), "blocks must be a list of runs"),
        (CODING.replace('"block_size":64', '"block_size":0'), "block_size must be positive"),
        (CODING.replace('"a"', "17"), "session must be a name, not 17"),
        (gzip.compress(MOONCAKE.encode(), mtime=0)[:-20], "is damaged"),
    ],
)
def test_errors_are_one_line_with_file_line_and_reason(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(TraceError) as e:
        read(tmp_path, text)
    message = str(e.value)
    assert says in message and str(tmp_path / "t.trace") in message and "\n" not in message and len(message) < 500


def test_requests_before_a_damaged_line_are_still_delivered(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(MOONCAKE + "{")
    requests = read_trace(path)
    assert len([next(requests), next(requests)]) == 2
    with pytest.raises(TraceError, match="line 3"):
        next(requests)


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs336_infer.simulate.trace.MAX_LINE", 1000)
    with pytest.raises(TraceError, match="line 1: longer than 1000 bytes"):
        read(tmp_path, "{" + " " * 2000)


def test_folders_and_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="is a folder, not a trace"):
        list(read_trace(tmp_path))
    with pytest.raises(TraceError, match=r"there is no trace .*generated"):
        open_source(str(tmp_path / "none"))
    monkeypatch.delenv("CS336_TRACES", raising=False)
    with pytest.raises(TraceError, match="CS336_TRACES, which is not set: set it, or use generated"):
        open_source("conversation")
    monkeypatch.setenv("CS336_TRACES", str(tmp_path))
    with pytest.raises(TraceError, match=r"there is no trace .*mooncake_conversation_trace.jsonl"):
        open_source("conversation")


def test_other_block_sizes() -> None:
    request = TraceRequest(0.0, 2100, 1, [0, 1, 2, 3, 4], 512)
    assert request.with_block_size(512) is request
    assert request.with_block_size(1024).keys == [1, 3, 4], "the partly filled last block stays"
    assert len(request.with_block_size(64).keys or ()) == -(-2100 // 64)
    full = TraceRequest(0.0, 350, 1, [("a", n) for n in range(5)], 64, "a")
    assert full.with_block_size(128).keys == [("a", 1), ("a", 3)], "this trace has full blocks only"
    with pytest.raises(InvalidRequest, match="must divide the trace's 512 or be a multiple of it, not 500"):
        request.with_block_size(500)
    with pytest.raises(InvalidRequest, match="lengths only"):
        TraceRequest(0.0, 1, 1).with_block_size(16)


def test_generator_repeats_and_is_written_as_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    with path.open("w") as file:
        assert synthetic.write(synthetic.generate(300, 7), file) == 300
    made = list(synthetic.generate(300, 7))
    back = list(read_trace(path))
    assert [(r.input_tokens, r.output_tokens, list(r.keys or ())) for r in made] == [
        (r.input_tokens, r.output_tokens, r.keys) for r in back
    ]
    assert [r.time_s for r in made] == sorted(r.time_s for r in made)
    assert list(synthetic.generate(300, 8)) != made
    ids = [key for r in back for key in r.keys or ()]
    assert list(dict.fromkeys(ids)) == list(range(max(map(int, ids)) + 1)), "numbered as they appear"  # type: ignore[arg-type]
    for bad in ({"requests": 0}, {"requests": 1.5}, {"seed": -1}):
        with pytest.raises(InvalidRequest):
            synthetic.generate(**bad)


def test_generator_gives_the_same_requests_on_every_machine() -> None:
    rows = [(r.input_tokens, r.output_tokens, r.keys) for r in synthetic.generate(500, 0)]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == "ea839a6e2d06bc1c"


PUBLISHED = {"mean": 12_035, "p50": 6_909, "p90": 27_367, "p99": 85_401, "output": 343}
PUBLISHED_HITS = {0.25: 4.3, 1: 5.4, 3: 13.9, 10: 29.1, 50: 37.1, None: 37.4}


def test_generator_has_the_published_statistics() -> None:
    """Lengths within 3 %, LRU hits within 1.6 points of the published trace's at six capacities."""
    made = list(synthetic.generate())
    prompts = np.array([r.input_tokens for r in made])
    found = dict(zip(("p50", "p90", "p99"), np.percentile(prompts, [50, 90, 99]), strict=True))
    found |= {"mean": prompts.mean(), "output": np.mean([r.output_tokens for r in made])}
    for name, value in PUBLISHED.items():
        assert abs(found[name] / value - 1) <= 0.03, (name, found[name])
    for capacity, percent in PUBLISHED_HITS.items():
        blocks = UNLIMITED if capacity is None else int(capacity * 1e6) // 512
        assert abs(100 * replay(made, blocks, LRU()).token_hit_rate - percent) <= 1.6, capacity


@needs_traces
@pytest.mark.parametrize(
    ("name", "count", "mean", "output", "block"),
    [
        ("conversation", 12_031, 12_035, 343, 512),
        ("synthetic", 3_993, 15_325, 149, 512),
        ("azure-code", 8_819, 2_048, 27.9, 0),
        ("azure-conv", 19_366, 1_155, 211, 0),
    ],
)
def test_published_traces(name: str, count: int, mean: float, output: float, block: int) -> None:
    requests = list(open_source(name).requests())
    assert len(requests) == count and {r.block_size for r in requests} == {block}
    assert np.mean([r.input_tokens for r in requests]) == pytest.approx(mean, abs=1)
    assert np.mean([r.output_tokens for r in requests]) == pytest.approx(output, abs=0.5)


@needs_traces
def test_published_coding_agent_trace() -> None:
    requests = list(islice(open_source("coding-agent").requests(), 500))
    assert {r.block_size for r in requests} == {64} and len({r.session for r in requests}) > 1
