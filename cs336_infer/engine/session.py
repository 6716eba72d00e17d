"""A conversation that can be put to sleep and woken up later, also in another process.

The history is kept as the ids that the model read and produced, not as text: tokenising a reply again can give other
ids ("\\n" + "\\n" is not "\\n\\n"), and then nothing after that place is found in the prefix cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cs336_infer.engine.llm import LLM
from cs336_infer.files import replace_bytes
from cs336_infer.types import Completion, FinishReason, InferError, InvalidRequest, SamplingParams

FORMAT, VERSION = "cs336-infer session", 1


class SessionError(InferError):
    """A session's file cannot be read or written, or belongs to another model."""


class Session:
    """Turns of a user and of the model.

    Args:
        llm: what answers. system: the message before the first turn, if any. salt: of the prefix cache.

    Attributes:
        messages: roles and contents. tokens: the ids of the whole conversation.
        reencoded: turns at which the model's chat template changed earlier text, so that all of it was tokenised anew.
    """

    def __init__(self, llm: LLM, *, system: str | None = None, salt: str | None = None) -> None:
        self.llm, self.salt = llm, salt
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.tokens: list[int] = []
        self.reencoded = 0
        self._opening = ""  # the text up to the model's last reply

    def say(self, text: str, params: SamplingParams | None = None) -> Completion:
        """One turn: the user's text, the model's answer.

        Raises:
            InvalidRequest: the text or a parameter cannot be obeyed, or the context is full. The session is as before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        opening = self.llm.model.tokenizer.apply_chat_template(messages)
        ids = self._with_turn(opening)
        reencoded = bool(self.tokens) and ids[: len(self.tokens)] != self.tokens
        completion = self.llm.generate(ids, params, salt=self.salt)[0]
        if completion.finish_reason is FinishReason.ERROR:
            raise InvalidRequest(str(completion.error))
        self.messages = [*messages, {"role": "assistant", "content": completion.text}]
        self.tokens, self._opening = ids + completion.token_ids, opening
        self.reencoded += reencoded
        if completion.finish_reason in (FinishReason.STOP, FinishReason.FILTERED):  # the ids hold more than the text
            self._opening = ""
        return completion

    def sleep(self, file: Path | str) -> int:
        """Write the conversation to `file`, and its KV blocks to the disk tier if there is one.

        Returns:
            How many of its tokens need not be computed when it wakes up; 0 without a disk tier.

        Raises:
            SessionError: the file cannot be written.
        """
        stored = self.llm.kv.persist(self.tokens, self.llm.root(self.salt)) if self.llm.kind == "paged" else 0
        state = {
            "format": FORMAT,
            "version": VERSION,
            "root": self.llm.root(self.salt).hex(),
            "salt": self.salt,
            "messages": self.messages,
            "tokens": self.tokens,
            "opening": self._opening,
        }
        content = json.dumps(state, ensure_ascii=False).encode()
        try:
            replace_bytes(Path(file), content, mode=0o600, durable=True)  # only the owner reads what was said
        except OSError as e:
            raise SessionError(f"{file}: cannot be written: {e.strerror}") from None
        return stored

    @classmethod
    def wake(cls, llm: LLM, file: Path | str) -> Session:
        """The conversation that `sleep` wrote.

        Raises:
            SessionError: there is none in `file`, or another model or another block size wrote it.
        """
        try:
            state = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise SessionError(f"{file}: no session can be read here ({_reason(e)})") from None
        if not isinstance(state, dict) or state.get("format") != FORMAT or state.get("version") != VERSION:
            raise SessionError(f"{file}: not a session of this version")
        session = cls(llm, salt=_typed(state, "salt", (str, type(None)), file))
        if state.get("root") != llm.root(session.salt).hex():
            raise SessionError(f"{file}: written with another model, dtype, kernels or block size")
        session.messages = _typed(state, "messages", list, file)
        session.tokens = _typed(state, "tokens", list, file)
        session._opening = _typed(state, "opening", str, file)
        vocab = llm.model.config.vocab_size
        if not all(type(t) is int and 0 <= t < vocab for t in session.tokens):
            raise SessionError(f"{file}: its tokens are not those of this model")
        return session

    def _with_turn(self, opening: str) -> list[int]:
        """The ids of the conversation up to `opening`: the old ids and those of the new text, where that can be."""
        tokenizer = self.llm.model.tokenizer
        if self.tokens and self._opening:
            said = self._opening + self.messages[-1]["content"]
            rest = opening[len(said) :] if opening.startswith(said) else ""
            if self.tokens[-1] in tokenizer.eos_ids:
                end = tokenizer.decode(self.tokens[-1:], skip_special=False)
                rest = rest.removeprefix(end) if rest.startswith(end) else ""
            if rest:
                return self.tokens + tokenizer.encode(rest, add_special=False)
        return tokenizer.encode(opening, add_special=False)


def _typed(state: dict[str, Any], name: str, kind: Any, file: Any) -> Any:
    if name not in state or not isinstance(state[name], kind):
        raise SessionError(f"{file}: its {name!r} is missing or damaged")
    return state[name]


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else "not JSON"
