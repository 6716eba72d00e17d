"""A name -> requests that can be read again and again: a file, a published trace, or the generator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cs336_infer.simulate.synthetic import generate
from cs336_infer.simulate.trace import TraceError, TraceRequest, read_trace
from cs336_infer.types import check_integer

FOLDER_VARIABLE = "CS336_TRACES"
GENERATED = "generated"
NAMED = {
    "conversation": "mooncake_conversation_trace.jsonl",
    "synthetic": "mooncake_synthetic_trace.jsonl",
    "coding-agent": "kvct_coding_agent_sample.jsonl",
    "azure-code": "azure_AzureLLMInferenceTrace_code.csv",
    "azure-conv": "azure_AzureLLMInferenceTrace_conv.csv",
}


@dataclass(frozen=True)
class Source:
    """Requests of a trace.

    Attributes:
        path: of the file; None for the generator. limit: only so many requests. block_size: instead of the trace's.
    """

    name: str
    path: Path | None
    limit: int | None = None
    block_size: int | None = None

    def requests(self) -> Iterator[TraceRequest]:
        """From the beginning, one at a time."""
        found = read_trace(self.path) if self.path else generate()
        for request in islice(found, self.limit):
            yield request if self.block_size is None else request.with_block_size(self.block_size)


def open_source(name: str, *, limit: int | None = None, block_size: int | None = None) -> Source:
    """The trace called `name`: one of `NAMED` in the folder CS336_TRACES, "generated", or a file.

    Raises:
        TraceError: there is no such trace; says where it was looked for.
    """
    if limit is not None:
        check_integer("limit", limit, 1, None)
    if block_size is not None:
        check_integer("block_size", block_size, 1, 1 << 20)
    if name == GENERATED:
        return Source(name, None, limit, block_size)
    path = Path(name)
    if name in NAMED:
        folder = os.environ.get(FOLDER_VARIABLE)
        if not folder:
            raise TraceError(
                f"trace {name} is looked for in the folder {FOLDER_VARIABLE}, which is not set: set it, or use "
                f"{GENERATED}, which needs no file"
            )
        path = Path(folder) / NAMED[name]
    if not path.exists():
        known = ", ".join([*NAMED, GENERATED])
        raise TraceError(f"there is no trace {path}: give a file or one of {known}")
    return Source(name, path, limit, block_size)
