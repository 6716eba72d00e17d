"""The responses of OpenAI's completions and chat interfaces, whole and as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from cs336_infer.models.tokenizer import Tokenizer
from cs336_infer.types import Completion, FinishReason, TokenEvent, TokenLogprobs

FINISH = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
    FinishReason.LOOP: "repetition",
    FinishReason.DRIFT: "script_drift",
    FinishReason.FILTERED: "content_filter",
    FinishReason.ERROR: "error",
    FinishReason.CANCELLED: "abort",
    FinishReason.TIMEOUT: "timeout",
}


@dataclass
class Form:
    """How one request is answered.

    Args:
        chat: the chat interface; else plain completions.
    """

    model: str
    chat: bool
    tokenizer: Tokenizer
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        choices = []
        for index, done in enumerate(completions):
            choice: dict[str, Any] = {"index": index, **self._finish(done.finish_reason, done.stop_reason)}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": done.text, "refusal": None}
            else:
                choice["text"] = done.text
            choice["logprobs"] = self._logprobs(done.logprobs) if done.logprobs else None
            choices.append(choice)
        return self._body(choices, chunk=False) | {"usage": usage(completions)}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat choice: who speaks."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._body([choice], chunk=True)

    def chunk(self, index: int, event: TokenEvent) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, **self._finish(event.finish_reason, event.stop_reason)}
        if self.chat:
            choice["delta"] = {"content": event.text} if event.text else {}
        else:
            choice["text"] = event.text
        choice["logprobs"] = self._logprobs([event.logprobs]) if event.logprobs else None
        return self._body([choice], chunk=True)

    def closing(self, completions: list[Completion]) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""
        return self._body([], chunk=True) | {"usage": usage(completions)}

    def _body(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    @staticmethod
    def _finish(reason: FinishReason | None, stop: str | None) -> dict[str, Any]:
        return {"finish_reason": None if reason is None else FINISH[reason], "stop_reason": stop}

    def _logprobs(self, positions: list[TokenLogprobs]) -> dict[str, Any]:
        if self.chat:
            return {"content": [self._position(p) for p in positions], "refusal": None}
        texts = [self._text(p.token_id) for p in positions]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(p.logprob) for p in positions],
            "top_logprobs": [{self._text(t): _finite(lp) for t, lp in p.top} for p in positions],
            "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
        }

    def _position(self, p: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in p.top]
        return self._token(p.token_id, p.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._text(token),
            "logprob": _finite(logprob),
            "bytes": list(self.tokenizer.token_bytes(token)),
        }

    def _text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")


def usage(completions: list[Completion]) -> dict[str, Any]:
    """Tokens of all answers; the prompts of one request's answers are counted once per prompt."""
    prompts = {id(c.prompt_token_ids): c for c in completions}.values()
    prompt = sum(len(c.prompt_token_ids) for c in prompts)
    made = sum(len(c.token_ids) for c in completions)
    cached = sum(c.cached_tokens for c in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's servers report -9999 for a token that cannot be drawn."""
    return max(logprob, -9999.0)
