"""One HTTP request on its way through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from cs336_infer.engine.runner import Runner, Stopped, Ticket
from cs336_infer.serve.errors import RequestError
from cs336_infer.serve.protocol import Sampling
from cs336_infer.types import Completion, FinishReason, InferError, SamplingParams, TokenEvent


class Call:
    """The tickets of one HTTP request, and the queue their events arrive in."""

    def __init__(self, runner: Runner, prompts: list[list[int]], params: SamplingParams, request: Sampling) -> None:
        loop = asyncio.get_running_loop()
        self.runner = runner
        self.events: asyncio.Queue[tuple[int, TokenEvent | InferError]] = asyncio.Queue()
        self.tickets: list[Ticket] = []
        self.open = len(prompts) * request.choices
        for number, ids in enumerate(prompts):

            def put(item: TokenEvent | InferError, first: int = number * request.choices) -> None:
                index = first + (item.index if isinstance(item, TokenEvent) else 0)
                loop.call_soon_threadsafe(self.events.put_nowait, (index, item))

            ticket = runner.submit(
                ids, params, put, put, n=request.choices, salt=request.cache_salt, priority=request.priority
            )
            self.tickets.append(ticket)

    async def __aiter__(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """(choice, event) until every choice has ended.

        Raises:
            RequestError: the engine refused the request, or could not finish it.
        """
        while self.open:
            index, event = await self.events.get()
            if isinstance(event, InferError):
                raise RequestError(str(event), status=503 if isinstance(event, Stopped) else 400)
            if event.finish_reason is FinishReason.ERROR:
                raise RequestError(self.completions[index].error or "the engine failed", status=500)
            if event.finish_reason is FinishReason.CANCELLED:
                raise RequestError("the server is shutting down", status=503)
            self.open -= event.finish_reason is not None
            yield index, event

    @property
    def completions(self) -> list[Completion]:
        return [c for ticket in self.tickets for c in ticket.completions]

    def cancel(self) -> None:
        for ticket in self.tickets:
            self.runner.cancel(ticket)
