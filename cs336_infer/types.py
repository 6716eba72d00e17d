"""The vocabulary of the engine: what a user asks for, what comes back, and how things go wrong.

This module imports nothing of ours, so that every other module may import it.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class InferError(Exception):
    """Base of every error a user can cause. Its text is one line: what, which value, what to do."""


class ModelLoadError(InferError):
    """A model file is missing, damaged or of a kind this engine does not run."""


class InvalidRequest(InferError, ValueError):
    """A prompt or a sampling parameter cannot be obeyed."""


class PromptRefused(InvalidRequest):
    """A safety check refuses the prompt. `reason` is what it said; the text does not repeat it to who asked."""

    def __init__(self, reason: str) -> None:
        super().__init__("the prompt is refused by the content filter")
        self.reason = reason


class NonFiniteLogits(InferError):
    """The model produced NaN or infinite logits: damaged weights, or numbers too large for the dtype."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    EOS = "eos"  # the model produced an end-of-sequence token
    STOP = "stop"  # one of the caller's stop strings appeared
    LENGTH = "length"  # `max_tokens` were produced
    CONTEXT = "context"  # the model's context window is full
    LOOP = "loop"  # it repeated itself (`SamplingParams.loops`)
    DRIFT = "drift"  # it slid into another writing system (`SamplingParams.drift`)
    FILTERED = "filtered"  # a safety check refused what came next (`LLM(safety=...)`)
    CANCELLED = "cancelled"  # the caller gave up on it
    TIMEOUT = "timeout"  # its time was over; what it had said by then stays
    ERROR = "error"  # it could not be finished; `Completion.error` says why


@dataclass(frozen=True)
class LoopRule:
    """When repetition at the end of an answer is a doom loop: at least `min_tokens` tokens in a row that consist of at
    least `min_copies` copies of a unit of `min_period` to `max_period` tokens."""

    max_period: int = 64
    min_period: int = 1
    min_copies: int = 4
    min_tokens: int = 64

    def __post_init__(self) -> None:
        check_integer("min_period", self.min_period, 1, 2048)
        check_integer("max_period", self.max_period, self.min_period, 2048)
        check_integer("min_copies", self.min_copies, 2, 1024)
        check_integer("min_tokens", self.min_tokens, 1, 1 << 20)


@dataclass(frozen=True)
class DriftRule:
    """When an answer drifts into another writing system (`text.drift`): more than `share` of `window` letters in a row
    are of scripts that its prompt gave no reason for. The default lets a quotation of 50 letters pass. `ends`: the
    answer ends there; otherwise it is only noted."""

    window: int = 128
    share: float = 0.4
    ends: bool = False

    def __post_init__(self) -> None:
        check_integer("window", self.window, 1, 1 << 16)
        check_number("share", self.share, 0.0, 1.0, "a number from 0 to below 1")
        if self.share == 1:
            raise InvalidRequest("share must be a number from 0 to below 1: more than all letters cannot be foreign")
        if not isinstance(self.ends, bool):
            raise InvalidRequest(f"ends must be True or False, not {short(self.ends)}")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Checked on creation; wrong values raise `InvalidRequest`.

    Logits pass through: penalties, temperature, top-k, top-p, min-p, in this order.

    Args:
        max_tokens: tokens to produce at most, >= 1.
        temperature: >= 0; 0 is greedy (argmax) and ignores top_k, top_p, min_p and seed.
        top_k: keep the k most probable tokens, >= 1; None keeps all.
        top_p: keep the smallest set whose probability reaches p, 0 < p <= 1.
        min_p: drop tokens less probable than min_p times the most probable, 0 <= p <= 1.
        repetition_penalty: 0.01 to 100; positive logits of tokens seen in prompt or output are divided by it,
            negative ones multiplied (Keskar et al. 2019, CTRL, section 4.1).
        presence_penalty: subtracted once from the logit of every token already produced, -2 to 2.
        frequency_penalty: subtracted once per earlier production of the token, -2 to 2.
        seed: 0 <= seed < 2**64; the same prompt and seed give the same tokens, whatever else is in the batch (in
            float32; in bfloat16 the batch size itself moves the logits a little). None draws a fresh one.
        stop: strings that end the text; the match itself is not part of the output.
        ignore_eos: keep going past end-of-sequence tokens (for benchmarks).
        min_tokens: tokens to produce before an end-of-sequence token may be chosen or a stop string may end the text,
            0 <= min_tokens <= max_tokens. Stop strings are looked for in the text that comes after.
        logit_bias: token id -> number from -100 to 100 that is added to its logit before everything else.
        logprobs: report the log-probability of each chosen token and of so many most probable ones, 0 to 20; of the
            model's own distribution, before bias, penalties and temperature. None reports nothing. `LLM` only.
        loops: end the answer when it repeats itself by this rule; None lets it go on.
        drift: note when the answer slides into another writing system, or end it; None does not look.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    loops: LoopRule | None = None
    drift: DriftRule | None = field(default_factory=DriftRule)

    def __post_init__(self) -> None:
        check_integer("max_tokens", self.max_tokens, 1, None)
        check_number("temperature", self.temperature, 0.0, math.inf, "a finite number >= 0")
        if self.top_k is not None:
            check_integer("top_k", self.top_k, 1, None)
        check_number("top_p", self.top_p, 0.0, 1.0, "a number above 0 and at most 1", open_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "a number from 0.01 to 100")
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "a number from -2 to 2")
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number from -2 to 2")
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**64 - 1)
        check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, 20)
        if self.loops is not None and not isinstance(self.loops, LoopRule):
            raise InvalidRequest(f"loops must be a LoopRule, not {short(self.loops)}")
        if self.drift is not None and not isinstance(self.drift, DriftRule):
            raise InvalidRequest(f"drift must be a DriftRule, not {short(self.drift)}")
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"logit_bias must map token ids to numbers, not {short(self.logit_bias)}")
        for token, bias in (self.logit_bias or {}).items():
            check_integer("a token id of logit_bias", token, 0, None)
            check_number(f"logit_bias of token {token}", bias, -100.0, 100.0, "a number from -100 to 100")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos must be True or False, not {short(self.ignore_eos)}")
        if not isinstance(self.stop, str | list | tuple):
            raise InvalidRequest(f"stop must be a string or a list of strings, not {short(self.stop)}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for s in stop:
            if not isinstance(s, str) or not s:
                raise InvalidRequest(f"stop must be non-empty strings, not {short(s)}")
            check_unicode("stop", s)
        object.__setattr__(self, "stop", stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """Whether the token is chosen from other logits than the model's."""
        return self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0


NO_TOKEN = -1
"""`TokenEvent.token_id` of an answer that ended without choosing a token."""


@dataclass(frozen=True)
class TokenEvent:
    """One step of one streamed sequence.

    `text` is what may be shown now: bytes of an unfinished character and the possible start of a stop string
    are held back. The texts of all events of a sequence, joined, are exactly `Completion.text`.
    """

    index: int  # row of the batch
    token_id: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None  # the stop string that matched
    logprobs: TokenLogprobs | None = None  # where they were asked for


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most probable tokens, as many as were asked for


@dataclass
class Completion:
    """What one prompt turned into, with the times of its phases in seconds.

    Times are the engine's own: what a reader of the stream does between two tokens is not counted, nor is tokenising.
    """

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    ttft_s: float = math.nan  # time to first token: prefill and the first sample
    tpot_s: float = math.nan  # mean time per output token after the first; nan when there was only one
    path: str = ""  # which rung produced it
    cached_tokens: int = 0  # tokens of the prompt whose keys and values were found and not computed
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, where they were asked for
    letters: int = 0  # of its text, where `SamplingParams.drift` looks
    foreign_letters: int = 0  # those of writing systems that the prompt gave no reason for
    drifted_at: int | None = None  # tokens produced when they were too many for the first time
    filtered: str | None = None  # what the safety check said, with the finish reason "filtered"
    error: str | None = None  # one line, with the finish reason "error"


Prompt = str | Sequence[int]


def check_integer(name: str, value: object, low: int, high: int | None) -> None:
    """Raise `InvalidRequest` unless low <= value <= high, in integers (numpy's too); high None is no limit."""
    wanted = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    ok = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):  # type: ignore[operator]
        raise InvalidRequest(f"{name} must be {wanted}, not {short(value)}")


def check_number(name: str, value: object, low: float, high: float, wanted: str, *, open_low: bool = False) -> None:
    """Raise `InvalidRequest` unless value is finite and low <= value <= high (low < value with `open_low`)."""
    ok = isinstance(value, numbers.Real) and not isinstance(value, bool)
    high = min(high, sys.float_info.max)
    if not ok or not (low <= value <= high) or (open_low and value == low):  # type: ignore[operator]
        raise InvalidRequest(f"{name} must be {wanted}, not {short(value)}")


def check_unicode(name: str, text: str) -> None:
    """Raise `InvalidRequest` when `text` has half of a surrogate pair, as bytes that are not UTF-8 leave behind."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        half = f"a lone surrogate U+{ord(text[e.start]):04X} at index {e.start}"
        raise InvalidRequest(f"{name} has {half}, which is not valid Unicode") from None


def short(value: object) -> str:
    """`repr` on one line and at most 80 characters, for error messages."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
