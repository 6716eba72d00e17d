"""What /openapi.json says of the answers: statuses, bodies, and the one form that every error has."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]


class ErrorDetail(BaseModel):
    """`param` names the field at fault, where there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error, in OpenAI's form."""

    error: ErrorDetail


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerBody(BaseModel):
    """A completion or chat completion; what a choice holds depends on which."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage


ERRORS: Responses = {
    "4XX": {"model": ErrorBody, "description": "The request is not obeyed; the text says why"},
    "5XX": {"model": ErrorBody, "description": "The engine is stopping, or failed"},
}
HEALTH: Responses = {
    200: {"description": "Requests are taken"},
    503: {"description": "The engine is stopping, or has stopped"},
}
ANSWER: Responses = {
    200: {
        "model": AnswerBody,
        "description": "The answer; with `stream`, its chunks as events, the last of which is [DONE]",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
