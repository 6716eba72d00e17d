"""One HTTP request on its way through the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

from cs336_infer.engine.async_llm import Request
from cs336_infer.engine.runner import Runner, Stopped
from cs336_infer.serve.errors import RequestError
from cs336_infer.serve.protocol import Sampling
from cs336_infer.types import FinishReason, InferError, SamplingParams, TokenEvent


class Call(Request):
    """The answers to one HTTP request; what goes wrong with them becomes an HTTP error."""

    def __init__(
        self,
        runner: Runner,
        prompts: list[list[int]],
        params: SamplingParams,
        body: Sampling,
        timeout_s: float | None = None,
    ) -> None:
        each = [params] * len(prompts)
        options = {"salt": body.cache_salt, "priority": body.priority, "timeout_s": timeout_s}
        super().__init__(runner, prompts, each, body.choices, **options)

    async def __aiter__(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """(choice, event) until every choice has ended.

        Raises:
            RequestError: the engine refused the request, or could not finish it.
        """
        try:
            async for index, event in super().__aiter__():
                if event.finish_reason is FinishReason.ERROR:
                    raise RequestError(self.completions[index].error or "the engine failed", status=500)
                if event.finish_reason is FinishReason.CANCELLED:
                    raise RequestError("the server is shutting down", status=503)
                yield index, event
        except RequestError:
            raise
        except InferError as error:
            raise RequestError(str(error), status=503 if isinstance(error, Stopped) else 400) from None
