"""The HTTP server: OpenAI's interface for one model, on FastAPI.

A request becomes tickets of the engine's thread (`Runner`); its events come back through a queue of the event loop.
When the client goes away, its tickets are cancelled and their KV blocks are free at once. A parameter is obeyed, or the
answer is a 400 that names it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from cs336_infer.engine.llm import LLM
from cs336_infer.engine.runner import Runner, Stopped
from cs336_infer.prompts import encode
from cs336_infer.serve.answers import Form
from cs336_infer.serve.call import Call
from cs336_infer.serve.errors import RequestError, add_error_handlers, error_body
from cs336_infer.serve.limits import BodyLimit
from cs336_infer.serve.metrics import Metrics
from cs336_infer.serve.openapi import ANSWER, ERRORS, HEALTH
from cs336_infer.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Sampling, TokenizeRequest
from cs336_infer.types import InvalidRequest, SamplingParams

MOST_ANSWERS = 256  # of one request: prompts times n
DEFAULT_COMPLETION_TOKENS = 16  # what OpenAI's completions take where a request has no max_tokens


def create_app(
    llm: LLM,
    name: str,
    *,
    api_key: str | None = None,
    max_body_bytes: int = 4 << 20,
    drain_s: float = 30.0,
    timeout_s: float | None = None,
) -> FastAPI:
    """The server's application; starting it starts the engine's thread.

    Args:
        name: what the model is called; `model` of a request must be it. api_key: if given, requests must carry it.
        drain_s: seconds that running answers get to finish when the server stops.
        timeout_s: seconds that a request may take; then its answers end as they are. None: as long as it takes.
    """
    metrics = Metrics(llm, name)
    runner = metrics.runner = Runner(llm, on_end=metrics.ended)
    config, tokenizer = llm.model.config, llm.model.tokenizer

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        runner.start()
        yield
        await run_in_threadpool(runner.stop, drain_s)
        await run_in_threadpool(llm.close)

    async def authorised(request: Request) -> None:
        if api_key is not None:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), api_key.encode()):
                raise RequestError("a valid API key is needed", status=401, code="invalid_api_key")

    app = FastAPI(title="CS336 Infer", lifespan=lifespan, responses=ERRORS)
    app.add_middleware(BodyLimit, most=max_body_bytes)
    app.state.runner = runner
    guard = [Depends(authorised)]

    @app.get("/health", responses=HEALTH, response_class=Response)
    async def health() -> Response:
        return Response(status_code=200 if runner.accepting else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> PlainTextResponse:
        return PlainTextResponse(metrics.text(), media_type=metrics.media_type)

    @app.get("/v1/models", dependencies=guard)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{model:path}", dependencies=guard)
    async def model(model: str) -> dict[str, Any]:
        check_model(model)
        return model_card()

    @app.post("/v1/completions", dependencies=guard, responses=ANSWER)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        check_model(body.model)
        try:
            prompts = [await run_in_threadpool(encode, llm.model, p) for p in body.prompts()]
        except InvalidRequest as error:
            raise RequestError(f"prompt: {error}", param="prompt") from None
        if not prompts:
            raise RequestError("prompt is empty", param="prompt")
        most = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        return await answer(Form(name, False, tokenizer), prompts, body.params(most, body.logprobs), body, request)

    @app.post("/v1/chat/completions", dependencies=guard, responses=ANSWER)
    async def chat(body: ChatRequest, request: Request) -> Response:
        check_model(body.model)
        text = await run_in_threadpool(tokenizer.apply_chat_template, [m.plain() for m in body.messages])
        ids = await run_in_threadpool(encode_template, text)
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        most = config.context_length - len(ids) if asked is None else asked
        return await answer(Form(name, True, tokenizer), [ids], body.params(most, body.asked_logprobs()), body, request)

    @app.post("/tokenize", dependencies=guard)
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        check_model(name if body.model is None else body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give one of prompt and messages", param="prompt")
        if body.prompt is not None:
            ids = await run_in_threadpool(tokenizer.encode, body.prompt)
        else:
            text = tokenizer.apply_chat_template([m.plain() for m in body.messages or []])
            ids = await run_in_threadpool(tokenizer.encode, text, add_special=False)
        return {"tokens": ids, "count": len(ids), "max_model_len": config.context_length}

    @app.post("/detokenize", dependencies=guard)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        check_model(name if body.model is None else body.model)
        if wrong := [t for t in body.tokens if not 0 <= t < config.vocab_size]:
            raise RequestError(f"token id {wrong[0]} is not in the vocabulary", param="tokens")
        return {"prompt": tokenizer.decode(body.tokens, skip_special=False)}

    def encode_template(chat: str) -> list[int]:
        if len(chat) > config.context_length * tokenizer.longest_token:  # refused before it is tokenised
            raise RequestError(
                f"the messages are over the model's context of {config.context_length}", param="messages"
            )
        return encode(llm.model, tokenizer.encode(chat, add_special=False))

    def model_card() -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": metrics.started, "owned_by": "cs336-infer"}
        return card | {"max_model_len": config.context_length}

    def check_model(asked: str) -> None:
        if asked != name:
            text = f"there is no model {asked[:80]!r} here, only {name!r}"
            raise RequestError(text, status=404, param="model", code="model_not_found")

    async def answer(
        form: Form, prompts: list[list[int]], params: SamplingParams, body: Sampling, request: Request
    ) -> Response:
        if len(prompts) * body.choices > MOST_ANSWERS:
            raise RequestError(f"a request may ask for {MOST_ANSWERS} answers at most", param="n")
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        try:
            for ids in prompts:  # refuse what the engine would refuse, before the first byte of an answer
                await run_in_threadpool(llm.engine.check, ids, params)
            call = Call(runner, prompts, params, body, timeout_s)
        except Stopped as error:
            raise RequestError(str(error), status=503) from None
        if body.stream:
            events = stream(form, call, body)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        gone = asyncio.ensure_future(disconnected(request))
        whole = asyncio.ensure_future(collect(call))
        try:
            await asyncio.wait({gone, whole}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                return Response(status_code=499)
            whole.result()
            return JSONResponse(form.whole(call.completions))
        finally:
            gone.cancel()
            whole.cancel()
            call.cancel()

    async def stream(form: Form, call: Call, body: Sampling) -> AsyncIterator[str]:
        try:
            if form.chat:
                for index in range(body.choices):
                    yield sse(form.opening(index))
            async for index, event in call:
                if event.text or event.finish_reason is not None or event.logprobs is not None:
                    yield sse(form.chunk(index, event))
            if body.stream_options is not None and body.stream_options.include_usage:
                yield sse(form.closing(call.completions))
        except RequestError as error:
            yield sse(error_body(error))
        finally:
            call.cancel()
        yield "data: [DONE]\n\n"

    add_error_handlers(app)
    return app


async def collect(call: Call) -> None:
    async for _ in call:
        pass


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"
