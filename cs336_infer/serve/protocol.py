"""The requests of OpenAI's completions and chat interfaces, as far as they are obeyed; the rest is refused by name.

Fields that OpenAI does not have are called as vLLM calls them: top_k, min_p, repetition_penalty, min_tokens,
ignore_eos, priority, cache_salt. `user` and `metadata` label a request and ask for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from cs336_infer.types import InvalidRequest, SamplingParams


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Tokens = Annotated[list[StrictInt], Field(max_length=1 << 20)]
MOST_CHOICES = 128
MOST_STOPS = 16


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(Strict):
    include_usage: StrictBool = False


class Sampling(Strict):
    """What both interfaces share."""

    model: StrictStr
    max_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=MOST_STOPS)] | None = None
    seed: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=1024)] | None = None
    user: StrictStr | None = None
    metadata: dict[str, Any] | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    priority: StrictInt = 0
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=256)] | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    def params(self, most: int, logprobs: int | None) -> SamplingParams:
        """As the engine takes them. OpenAI's defaults: temperature 1, no penalties.

        Args:
            most: `max_tokens` where the request has none.

        Raises:
            InvalidRequest: a value is out of its range; the text names it.
        """
        given = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k in (-1, 0) else self.top_k,  # vLLM: no limit
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": None if self.seed is None else self.seed % 2**64,  # OpenAI's seeds may be negative
            "stop": self.stop,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "logit_bias": None if not self.logit_bias else {_token(k): v for k, v in self.logit_bias.items()},
            "logprobs": logprobs,
        }
        return SamplingParams(max_tokens=most, **{name: v for name, v in given.items() if v is not None})


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: StrictStr | Tokens | Annotated[list[StrictStr], Field(max_length=1024)] | list[Tokens]
    logprobs: Annotated[StrictInt, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    suffix: None = None
    best_of: None = None

    def prompts(self) -> list[Any]:
        prompt = self.prompt
        several = isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int))
        return list(prompt) if several else [prompt]


class TextPart(Strict):
    type: Literal["text"]
    text: StrictStr


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: StrictStr | Annotated[list[TextPart], Field(max_length=1024)]
    name: StrictStr | None = None

    def plain(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ResponseFormat(Strict):
    type: Literal["text"]


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    def asked_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs is not None:
                raise InvalidRequest("top_logprobs needs logprobs to be true")
            return None
        return self.top_logprobs or 0


class TokenizeRequest(Strict):
    """POST /tokenize: one of `prompt` and `messages`."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[Message] | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: Tokens


def _token(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise InvalidRequest(f"logit_bias: {text[:40]!r} is not a token id")
    return int(text)
