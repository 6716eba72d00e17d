"""Requests from published traces, one line in memory at a time. The format is recognised by the first line.

    mooncake      JSONL: timestamp (ms), input_length, output_length, hash_ids: chained ids of 512-token blocks
                  (kvcache-ai/Mooncake, FAST25-release)
    coding-agent  JSONL: session, t (s), input_length, output_length, blocks: runs [first id, count] of full blocks; ids
                  are those of the session (derived from callanjfox/kv-cache-tester)
    azure         CSV: TIMESTAMP, ContextTokens, GeneratedTokens; lengths only (Azure/AzurePublicDataset)

Any of them may be compressed with gzip.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from itertools import chain, repeat
from pathlib import Path
from typing import Any, BinaryIO, cast

from cs336_infer.kv.policy import Key
from cs336_infer.types import InferError, InvalidRequest, check_integer, short

MOONCAKE_BLOCK = 512
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
MAX_LINE = 1 << 24
MAX_TOKENS = 1 << 31


class TraceError(InferError):
    """A trace cannot be read. The text names the file, the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        time_s: arrival, in seconds after the beginning of the trace; of coding-agent traces, of the session.
        keys: of the prompt's blocks from its beginning; a key names everything up to its block's end. None when the
            trace has lengths only. The last block may be partly filled (mooncake).
        block_size: tokens per block; 0 without keys.
        session: name of the conversation, where the trace tells it.
    """

    time_s: float
    input_tokens: int
    output_tokens: int
    keys: Sequence[Key] | None = None
    block_size: int = 0
    session: str | None = None

    def with_block_size(self, size: int) -> TraceRequest:
        """The same request in blocks of `size` tokens, a multiple or a divisor of its own.

        Raises:
            InvalidRequest: `size` is neither, or there are no keys.
        """
        keys, have = self.keys, self.block_size
        if keys is None:
            raise InvalidRequest("this trace has lengths only, no block keys")
        if size == have:
            return self
        check_integer("block_size", size, 1, MAX_TOKENS)
        if size % have and have % size:
            raise InvalidRequest(f"block_size must divide the trace's {have} or be a multiple of it, not {size}")
        tokens = min(len(keys) * have, self.input_tokens)
        new: Sequence[Key]
        if size > have:
            group = size // have
            new = keys[group - 1 :: group]
            if len(keys) % group and tokens == self.input_tokens:  # a partly filled last block, as the trace had one
                new = [*new, keys[-1]]
        else:
            parts = range(have // size)
            new = [(key, part) for key in keys for part in parts][: -(-tokens // size)]
        return dataclasses.replace(self, keys=new, block_size=size)


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """The requests of a trace file, in its order.

    Raises:
        TraceError: while iterating, at the first line that is wrong.
    """
    if path.is_dir():
        raise TraceError(f"{path} is a folder, not a trace: name a file in it")
    try:
        with path.open("rb") as raw:
            file = BufferedReader(raw)  # type: ignore[arg-type]
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            yield from _requests(path, cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file)
    except (EOFError, gzip.BadGzipFile) as e:
        raise TraceError(f"{path} is damaged: {e}") from None
    except OSError as e:
        raise TraceError(f"cannot read {path}: {e.strerror or e}") from None


def _requests(path: Path, file: BinaryIO) -> Iterator[TraceRequest]:
    parse: Callable[[str], TraceRequest | None] | None = None
    number = 0
    found = False
    while raw := file.readline(MAX_LINE + 1):
        number += 1
        try:
            text = _text(raw, number)
            if not text:
                continue
            if parse is None:
                parse = _recognise(text)
            request = parse(text)
        except ValueError as e:
            raise TraceError(f"{path}, line {number}: {e}") from None
        if request is not None:
            found = True
            yield request
    if not found:
        raise TraceError(f"{path} has no requests: it is empty" if number == 0 else f"{path} has no requests")


def _text(raw: bytes, number: int) -> str:
    if len(raw) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} bytes, this is not a trace")
    if b"\0" in raw:
        raise ValueError("binary data, this is not a trace")
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
    except UnicodeDecodeError:
        raise ValueError("binary data or not UTF-8, this is not a trace") from None


def _recognise(text: str) -> Callable[[str], TraceRequest | None]:
    if text.replace(" ", "") == AZURE_HEADER:
        return _Azure()
    if text.startswith("{"):
        row = _json(text)
        if "hash_ids" in row:
            return _mooncake
        if "session" in row and "blocks" in row:
            return _CodingAgent()
    raise ValueError(
        f"unknown format: {short(text)} is neither Mooncake JSONL (hash_ids), coding-agent JSONL (session, blocks) "
        f"nor Azure CSV ({AZURE_HEADER})"
    )


def _mooncake(text: str) -> TraceRequest:
    row = _json(text)
    ids = row.get("hash_ids")
    tokens = _count(row, "input_length")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"hash_ids must be a list of integers, not {short(ids)}")
    wanted = -(-tokens // MOONCAKE_BLOCK)
    if len(ids) != wanted:
        raise ValueError(f"input_length {tokens} needs {wanted} hash_ids of {MOONCAKE_BLOCK} tokens, not {len(ids)}")
    time_s = _seconds(row, "timestamp") / 1e3
    return TraceRequest(time_s, tokens, _count(row, "output_length"), ids, MOONCAKE_BLOCK)


class _CodingAgent:
    """The first row of a session may tell the block size; the rows after it have the same."""

    def __init__(self) -> None:
        self._block_size = 64

    def __call__(self, text: str) -> TraceRequest:
        row = _json(text)
        session, runs = row.get("session"), row.get("blocks")
        if not isinstance(session, str):
            raise ValueError(f"session must be a name, not {short(session)}")
        if "block_size" in row:
            self._block_size = _count(row, "block_size")
            if not self._block_size:
                raise ValueError("block_size must be positive, not 0")
        tokens, size = _count(row, "input_length"), self._block_size
        if not isinstance(runs, list) or not all(_is_run(run) for run in runs):
            raise ValueError(f"blocks must be a list of runs [first id, count], not {short(runs)}")
        have, wanted = sum(count for _, count in runs), tokens // size
        if have != wanted:
            raise ValueError(f"input_length {tokens} has {wanted} full blocks of {size} tokens, blocks holds {have}")
        ids = chain.from_iterable(range(first, first + count) for first, count in runs)
        keys = list(zip(repeat(session), ids, strict=False))
        return TraceRequest(_seconds(row, "t"), tokens, _count(row, "output_length"), keys, size, session)


class _Azure:
    """Lengths only. Times count from the first row."""

    def __init__(self) -> None:
        self._header = True
        self._start: datetime | None = None

    def __call__(self, text: str) -> TraceRequest | None:
        if self._header:
            self._header = False
            return None
        fields = text.split(",")
        if len(fields) != 3:
            raise ValueError(f"{len(fields)} fields instead of 3 ({AZURE_HEADER})")
        try:
            when = datetime.fromisoformat(fields[0].strip())
        except ValueError:
            raise ValueError(f"TIMESTAMP must be like 2023-11-16 18:17:03.979, not {short(fields[0])}") from None
        self._start = self._start or when
        names = ("ContextTokens", "GeneratedTokens")
        tokens, produced = (_digits(name, field.strip()) for name, field in zip(names, fields[1:], strict=True))
        try:
            seconds = (when - self._start).total_seconds()
        except TypeError:  # one with a time zone, one without
            raise ValueError(f"TIMESTAMP {short(fields[0])} and the first row's differ in their time zone") from None
        return TraceRequest(seconds, tokens, produced)


def _json(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as e:
        reason = e.msg if isinstance(e, json.JSONDecodeError) else str(e)
        raise ValueError(f"damaged JSON, {reason}: {short(text)}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is needed, not {short(row)}")
    return row


def _count(row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{name} must be an integer >= 0, not {short(value) if name in row else 'missing'}")
    return value


def _digits(name: str, field: str) -> int:
    try:
        return _count({name: int(field)}, name)
    except ValueError:
        raise ValueError(f"{name} must be an integer >= 0, not {short(field)}") from None


def _seconds(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number >= 0, not {short(value) if name in row else 'missing'}")
    return float(value)


def _is_run(run: object) -> bool:
    return isinstance(run, list) and len(run) == 2 and all(type(n) is int and 0 <= n <= MAX_TOKENS for n in run)
