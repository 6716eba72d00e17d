"""`AsyncLLM`: one engine for many tasks of an event loop.

    async with AsyncLLM(llm) as engine:
        async for event in engine.stream("Once upon a time"):
            print(event.text, end="")

The engine runs in its own thread (`Runner`) and batches whatever the tasks ask for. A task that is cancelled, or stops
reading, ends its request: the KV blocks are free before the next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as ListOf
from dataclasses import replace
from typing import Any

from cs336_infer.engine.llm import LLM
from cs336_infer.engine.runner import Runner, Ticket
from cs336_infer.prompts import as_batch, as_params, encode
from cs336_infer.types import Completion, InferError, InvalidRequest, Prompt, SamplingParams, TokenEvent, check_integer


class Request:
    """Prompts on their way. Iterate once, in the loop that made it: (index, event) until every answer has ended; the
    answers to one prompt have consecutive indices.

    Attributes:
        events: what came and was not read.
    """

    def __init__(
        self, runner: Runner, prompts: ListOf[list[int]], params: ListOf[SamplingParams], n: int = 1, **options: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        self.runner = runner
        self.events: asyncio.Queue[tuple[int, TokenEvent | InferError]] = asyncio.Queue()
        self.tickets: list[Ticket] = []
        self._open = len(prompts) * n
        for number, (ids, its) in enumerate(zip(prompts, params, strict=True)):

            def put(item: TokenEvent | InferError, first: int = number * n) -> None:
                index = first + (item.index if isinstance(item, TokenEvent) else 0)
                loop.call_soon_threadsafe(self.events.put_nowait, (index, item))

            self.tickets.append(runner.submit(ids, its, put, put, n=n, **options))

    async def __aiter__(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """Raises what the engine raised when it did not take the request."""
        while self._open:
            index, event = await self.events.get()
            if isinstance(event, InferError):
                raise event
            self._open -= event.finish_reason is not None
            yield index, event

    @property
    def completions(self) -> list[Completion]:
        return [c for ticket in self.tickets for c in ticket.completions]

    def cancel(self) -> None:
        """End what is left of it."""
        for ticket in self.tickets:
            self.runner.cancel(ticket)


class AsyncLLM:
    """The engine of `llm`, for an event loop. Use it as an asynchronous context manager, or `start` and `stop`.

    Args:
        llm: nobody else may use its engine meanwhile.
        drain_s: seconds that running requests get to finish when it stops.
    """

    def __init__(self, llm: LLM, *, drain_s: float = 30.0) -> None:
        if llm.kind == "contiguous":
            raise InvalidRequest("kv='contiguous' has no engine: AsyncLLM needs kv='paged'")
        self.llm, self.drain_s = llm, drain_s
        self.runner = Runner(llm)

    def start(self) -> None:
        self.runner.start()

    async def stop(self) -> bool:
        """Finish what is on its way. False: `drain_s` was not enough, and the rest was cancelled."""
        return await asyncio.to_thread(self.runner.stop, self.drain_s)

    async def __aenter__(self) -> AsyncLLM:
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def submit(
        self,
        prompts: ListOf[list[int]],
        params: ListOf[SamplingParams],
        *,
        n: int = 1,
        salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Request:
        """Encoded prompts; see `Engine.add`. What the engine refuses is raised when the request is read.

        Raises:
            Stopped: no requests are taken any more.
        """
        return Request(self.runner, prompts, params, n, salt=salt, priority=priority, timeout_s=timeout_s)

    async def generate(
        self,
        prompts: Prompt | ListOf[Prompt],
        params: SamplingParams | ListOf[SamplingParams] | None = None,
        *,
        n: int = 1,
        **options: Any,
    ) -> list[Completion]:
        """Like `LLM.generate`; options are those of `submit`."""
        request = await self._request(prompts, params, n, options)
        try:
            async for _ in request:
                pass
            return request.completions
        finally:
            request.cancel()

    async def stream(
        self,
        prompts: Prompt | ListOf[Prompt],
        params: SamplingParams | ListOf[SamplingParams] | None = None,
        **options: Any,
    ) -> AsyncIterator[TokenEvent]:
        """Like `LLM.stream`: the tokens as they are chosen; `index` is the place of the prompt."""
        request = await self._request(prompts, params, 1, options)
        try:
            async for index, event in request:
                yield replace(event, index=index)
        finally:
            request.cancel()

    async def _request(self, prompts: Any, params: Any, n: int, options: dict[str, Any]) -> Request:
        check_integer("n", n, 1, 1024)
        ids = await asyncio.to_thread(lambda: [encode(self.llm.model, p) for p in as_batch(prompts)])
        if not ids:
            raise InvalidRequest("no prompt was given")
        each = as_params(params, len(ids))
        for one, its in zip(ids, each, strict=True):
            self.llm.engine.check(one, its)
        return self.submit(ids, each, n=n, **options)
