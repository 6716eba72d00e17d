"""Safety checks: what may not be asked and what may not be shown. A socket, and two checks that fit into it.

A check judges the prompt once, and an answer while it is produced: text that it has not judged yet is held back, text
that it refuses is never shown, and the answer ends there. It stands last before the reader, behind the detokeniser and
the stop strings, because only then does it judge what is shown: a stop that cuts "classics" to "class" makes a word
that was not in the text before. For the same reason log-probabilities are refused where answers are checked: they name
tokens before their text was judged, and others that were never chosen.

A check that raises ends the answer with an error and shows nothing more. `token_ids` of a completion are the engine's
record and hold what was produced; `text` and the texts of events hold what was allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from cs336_infer.types import InferError, InvalidRequest, PromptRefused, SamplingParams, check_integer, short


class SafetyStream(Protocol):
    """The judgement of one answer.

    Attributes:
        reason: why the answer was ended; None while nothing was found.
    """

    reason: str | None

    def push(self, text: str, /) -> str:
        """Take more text, return what may be shown by now. Nothing after `reason` was set."""
        ...

    def flush(self) -> str:
        """The answer is over: judge what is held, return what may be shown of it."""
        ...


@runtime_checkable
class SafetyCheck(Protocol):
    """What `LLM(safety=...)` takes."""

    def refuses(self, prompt: str, /) -> str | None:
        """Why this prompt is not answered; None when it is."""
        ...

    def watch(self, prompt: str, /) -> SafetyStream:
        """The state for one answer to this prompt."""
        ...


class SafetyFailed(InferError):
    """A safety check raised. Nothing is answered then."""


class AllOf:
    """Several checks, one behind the other: each sees what the ones before it let through."""

    def __init__(self, checks: Sequence[SafetyCheck]) -> None:
        self.checks = tuple(checks)

    def refuses(self, prompt: str) -> str | None:
        return next((reason for check in self.checks if (reason := check.refuses(prompt)) is not None), None)

    def watch(self, prompt: str) -> SafetyStream:
        return _Chain([check.watch(prompt) for check in self.checks])


class _Chain:
    def __init__(self, streams: list[SafetyStream]) -> None:
        self._streams = streams
        self.reason: str | None = None

    def push(self, text: str) -> str:
        return self._through(text, last=False)

    def flush(self) -> str:
        return self._through("", last=True)

    def _through(self, text: str, *, last: bool) -> str:
        if self.reason is not None:
            return ""
        for stream in self._streams:
            text = stream.push(text)
            if last and stream.reason is None:
                text += stream.flush()
            if stream.reason is not None:  # what it let through is the end of the text for those behind it
                self.reason, last = stream.reason, True
        return text


class Classifier:
    """A judge of your own, for example a small model. It sees the prompt and the answer so far.

    Args:
        judge: called as judge(prompt, "") for a prompt; for an answer at every multiple of `every` characters and at
            its end, with all of its text up to there. Returns None, or a reason to end. It runs in the engine's
            thread: what it takes, every running answer waits.
        every: characters between two calls. Text is held until it was judged.
    """

    def __init__(self, judge: Callable[[str, str], str | None], *, every: int = 64) -> None:
        check_integer("every", every, 1, None)
        self._judge, self._every = judge, every

    def refuses(self, prompt: str) -> str | None:
        return self.judge(prompt, "")

    def watch(self, prompt: str) -> SafetyStream:
        return _Judged(self, prompt, self._every)

    def judge(self, prompt: str, answer: str) -> str | None:
        verdict = self._judge(prompt, answer)
        if verdict is not None and not (isinstance(verdict, str) and verdict):
            raise SafetyFailed(f"a judge returns None or a reason, not {short(verdict)}")
        return verdict


class _Judged:
    def __init__(self, classifier: Classifier, prompt: str, every: int) -> None:
        self._classifier, self._prompt, self._every = classifier, prompt, every
        self._text = ""
        self._judged = 0  # so many characters were allowed, and shown
        self.reason: str | None = None

    def push(self, text: str) -> str:
        if self.reason is not None:
            return ""
        self._text += text
        return self._up_to(len(self._text) // self._every * self._every)

    def flush(self) -> str:
        return "" if self.reason is not None else self._up_to(len(self._text))

    def _up_to(self, end: int) -> str:
        start = self._judged
        while self._judged < end and self.reason is None:
            to = min(end, self._judged + self._every)
            self.reason = self._classifier.judge(self._prompt, self._text[:to])
            if self.reason is None:
                self._judged = to
        return self._text[start : self._judged]


def as_check(safety: SafetyCheck | Sequence[SafetyCheck] | None) -> SafetyCheck | None:
    """One check, or several as one.

    Raises:
        InvalidRequest: something is no check.
    """
    if safety is None or isinstance(safety, SafetyCheck):
        return safety
    if not isinstance(safety, list | tuple) or not safety or not all(isinstance(c, SafetyCheck) for c in safety):
        raise InvalidRequest(f"safety must be a SafetyCheck or a list of them, not {short(safety)}")
    return AllOf(safety)


def check_prompt(safety: SafetyCheck, prompt: str) -> None:
    """Judge a prompt.

    Raises:
        PromptRefused: it is not answered. SafetyFailed: the check raised.
    """
    try:
        reason = safety.refuses(prompt)
    except Exception as error:
        raise SafetyFailed(f"a safety check failed: {type(error).__name__}") from error
    if reason is not None:
        raise PromptRefused(reason)


def check_params(params: SamplingParams) -> None:
    """Raise `InvalidRequest` for what cannot be given where answers are checked."""
    if params.logprobs is not None:
        raise InvalidRequest("logprobs would name tokens before their text was judged: not where answers are checked")
