"""From chosen tokens to an answer: detokenising, stop strings, and why it ended. Every way of generating ends here."""

from __future__ import annotations

from cs336_infer.models.load import LoadedModel
from cs336_infer.text import StopStrings, StreamDetokenizer
from cs336_infer.text.loops import LoopDetector
from cs336_infer.types import NO_TOKEN, Completion, FinishReason, InvalidRequest, SamplingParams, TokenEvent


class Answer:
    """The parameters of a sequence, its text on the way out, and what became of it.

    Args:
        ids: the prompt. completion: where the answer is written.

    Attributes:
        room: tokens that may be produced, by `max_tokens` and by the model's context.

    Raises:
        InvalidRequest: max_tokens exceeds the context.
    """

    def __init__(self, model: LoadedModel, ids: list[int], params: SamplingParams, completion: Completion) -> None:
        context = model.config.context_length
        if params.max_tokens > context:
            raise InvalidRequest(f"max_tokens={params.max_tokens} is more than the model's context of {context} tokens")
        self.room = min(params.max_tokens, context - len(ids))
        self.params, self.completion = params, completion
        self._eos = frozenset() if params.ignore_eos else model.tokenizer.eos_ids
        self._detokenizer = StreamDetokenizer(model.tokenizer)
        self._stops = StopStrings(params.stop)
        self._loops = None if params.loops is None else LoopDetector(params.loops)

    def accept(self, index: int, token: int, elapsed: float) -> TokenEvent:
        """Take the next token, `elapsed` seconds after the start, and say what may be shown of it."""
        done = self.completion
        done.token_ids.append(token)
        if len(done.token_ids) == 1:
            done.ttft_s = elapsed
        else:
            done.tpot_s = (elapsed - done.ttft_s) / (len(done.token_ids) - 1)
        text = "" if token in self._eos else self._detokenizer.push(token)
        if len(done.token_ids) > self.params.min_tokens:
            text = self._stops.push(text)
        done.finish_reason = self._finish_reason(token)
        if done.finish_reason is not None:
            text += self._held_back()
        done.stop_reason = self._stops.matched
        done.text += text
        return TokenEvent(index, token, text, done.finish_reason, done.stop_reason)

    def close(self, index: int, reason: FinishReason) -> TokenEvent:
        """No token comes any more: what was held back, and why it ended."""
        done = self.completion
        done.finish_reason = reason
        text = self._held_back()
        done.stop_reason = self._stops.matched
        done.text += text
        return TokenEvent(index, NO_TOKEN, text, done.finish_reason, done.stop_reason)

    def _held_back(self) -> str:
        """The text that waited for more; it may complete a stop string."""
        if self._stops.matched is not None:
            return ""
        text = self._stops.push(self._detokenizer.flush())
        if self._stops.matched is not None:
            self.completion.finish_reason = FinishReason.STOP
            return text
        return text + self._stops.flush()

    def _finish_reason(self, token: int) -> FinishReason | None:
        if self._stops.matched is not None:
            return FinishReason.STOP
        if token in self._eos:
            return FinishReason.EOS
        if self._loops is not None and self._loops.push(token) is not None:
            return FinishReason.LOOP
        if len(self.completion.token_ids) < self.room:
            return None
        return FinishReason.LENGTH if self.room == self.params.max_tokens else FinishReason.CONTEXT
