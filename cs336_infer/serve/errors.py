"""Errors of the server, every one in OpenAI's form and with a text of one line."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cs336_infer.serve.protocol import Sampling
from cs336_infer.text.safety import SafetyFailed
from cs336_infer.types import InferError, InvalidRequest, PromptRefused

FIELDS = {*Sampling.model_fields, "logprobs", "top_logprobs"}  # that the text of an error may name


class RequestError(InferError):
    """A request that is not obeyed. `status` is HTTP's, `param` the field at fault."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_body(error: RequestError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def add_error_handlers(app: FastAPI) -> None:
    """Every error in OpenAI's form, on one line."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = [str(p) for p in first["loc"] if p != "body"]
        field = place[0] if place else None
        if first["type"] == "extra_forbidden":
            text = f"{'.'.join(place)} is not supported by this server"
        elif first["type"] == "json_invalid":
            text, field = f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
        else:
            text = f"{field or 'the body'}: {first['msg']}"
        return respond(RequestError(" ".join(text.split())[:400], param=field))

    @app.exception_handler(InvalidRequest)
    async def refused(_: Request, error: InvalidRequest) -> JSONResponse:
        words = re.findall(r"\w+", str(error))
        param = next((w for w in words if w in FIELDS), None)
        code = "content_filter" if isinstance(error, PromptRefused) else None
        return respond(RequestError(str(error), param=param, code=code))

    @app.exception_handler(InferError)
    async def failed(_: Request, error: InferError) -> JSONResponse:
        status = 500 if isinstance(error, SafetyFailed) else 400
        return respond(error if isinstance(error, RequestError) else RequestError(str(error), status=status))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        return respond(RequestError(str(error.detail), status=error.status_code))

    def respond(error: RequestError) -> JSONResponse:
        return JSONResponse(error_body(error), status_code=error.status)
