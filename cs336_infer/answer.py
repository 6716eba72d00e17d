"""From chosen tokens to an answer: detokenising, stop strings, and why it ended. Every way of generating ends here."""

from __future__ import annotations

import logging
from functools import cached_property

from cs336_infer.models.load import LoadedModel
from cs336_infer.text import StopStrings, StreamDetokenizer
from cs336_infer.text.drift import DriftMonitor
from cs336_infer.text.loops import LoopDetector
from cs336_infer.text.safety import SafetyCheck, SafetyStream, check_params
from cs336_infer.types import NO_TOKEN, Completion, FinishReason, InvalidRequest, SamplingParams, TokenEvent

log = logging.getLogger(__name__)


class Answer:
    """The parameters of a sequence, its text on the way out, and what became of it.

    Args:
        ids: the prompt. completion: where the answer is written.
        safety: what judges the text before it is shown.

    Attributes:
        room: tokens that may be produced, by `max_tokens` and by the model's context.

    Raises:
        InvalidRequest: max_tokens exceeds the context, or logprobs are asked for where text is judged.
    """

    def __init__(
        self,
        model: LoadedModel,
        ids: list[int],
        params: SamplingParams,
        completion: Completion,
        safety: SafetyCheck | None = None,
    ) -> None:
        context = model.config.context_length
        if params.max_tokens > context:
            raise InvalidRequest(f"max_tokens={params.max_tokens} is more than the model's context of {context} tokens")
        if safety is not None:
            check_params(params)
        self.room = min(params.max_tokens, context - len(ids))
        self.params, self.completion = params, completion
        self._eos = frozenset() if params.ignore_eos else model.tokenizer.eos_ids
        self._detokenizer = StreamDetokenizer(model.tokenizer)
        self._stops = StopStrings(params.stop)
        self._loops = None if params.loops is None else LoopDetector(params.loops)
        self._tokenizer, self._safety = model.tokenizer, safety

    def accept(self, index: int, token: int, elapsed: float) -> TokenEvent:
        """Take the next token, `elapsed` seconds after the start, and say what may be shown of it."""
        done = self.completion
        done.token_ids.append(token)
        if len(done.token_ids) == 1:
            done.ttft_s = elapsed
        else:
            done.tpot_s = (elapsed - done.ttft_s) / (len(done.token_ids) - 1)
        text = "" if token in self._eos else self._detokenizer.push(token)
        self._look_for_drift(text)
        if len(done.token_ids) > self.params.min_tokens:
            text = self._stops.push(text)
        done.finish_reason = self._finish_reason(token)
        if done.finish_reason is not None:
            text += self._held_back()
        return self._event(index, token, text)

    def close(self, index: int, reason: FinishReason) -> TokenEvent:
        """No token comes any more: what was held back, and why it ended."""
        self.completion.finish_reason = reason
        return self._event(index, NO_TOKEN, self._held_back())

    def _event(self, index: int, token: int, text: str) -> TokenEvent:
        done = self.completion
        done.stop_reason = self._stops.matched
        if self._safety is not None:
            text = self._allowed(text)
        done.text += text
        return TokenEvent(index, token, text, done.finish_reason, done.stop_reason)

    def _allowed(self, text: str) -> str:
        """What of `text`, and of what waits, may be shown. The check may end the answer; so does a check that fails."""
        done = self.completion
        try:
            shown = self._judge.push(text)
            if done.finish_reason is not None and self._judge.reason is None:
                shown += self._judge.flush()
            done.filtered = self._judge.reason
        except Exception as error:
            log.exception("a safety check failed")
            done.error = f"a safety check failed: {type(error).__name__}"
            done.finish_reason, done.stop_reason = FinishReason.ERROR, None
            return ""
        if done.filtered is not None:
            done.finish_reason, done.stop_reason = FinishReason.FILTERED, None
        return shown

    @cached_property
    def _judge(self) -> SafetyStream:
        assert self._safety is not None
        return self._safety.watch(self._prompt)

    @cached_property
    def _drift(self) -> DriftMonitor:
        assert self.params.drift is not None
        return DriftMonitor(self.params.drift, lambda: self._prompt)

    @cached_property
    def _prompt(self) -> str:
        return self._tokenizer.decode(self.completion.prompt_token_ids)

    def _look_for_drift(self, text: str) -> None:
        if text and self.params.drift is not None:
            done, alarm = self.completion, self._drift.push(text)
            done.letters, done.foreign_letters = self._drift.letters, self._drift.foreign
            if alarm and done.drifted_at is None:
                done.drifted_at = len(done.token_ids)

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
        if self.params.drift is not None and self.params.drift.ends and self.completion.drifted_at is not None:
            return FinishReason.DRIFT
        if len(self.completion.token_ids) < self.room:
            return None
        return FinishReason.LENGTH if self.room == self.params.max_tokens else FinishReason.CONTEXT
