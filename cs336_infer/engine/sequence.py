"""One answer on its way through the engine."""

from __future__ import annotations

import math

from cs336_infer.answer import Answer
from cs336_infer.kv.manager import SequenceKV
from cs336_infer.models.load import LoadedModel
from cs336_infer.sampling import Sampler
from cs336_infer.text.safety import SafetyCheck
from cs336_infer.types import Completion, SamplingParams


class Sequence:
    """Tokens of prompt and answer, and the KV memory they hold. Whether it is in prefill or in decode is not stored:
    it computes whatever is missing (`remaining`) and chooses a token when nothing is.

    Args:
        number: its name in the engine, rising with arrival.
        ids: the prompt. root: what its KV keys start from. path: which rung runs. arrived: when, in seconds.
        safety: what judges its text.

    Attributes:
        kv: its KV memory, None while it waits.
        priority: for schedulers that look at it; higher is more urgent.
        deadline: when it ends as it is, on the clock of `arrived`.
        suspended: tokens that were stored when it was preempted, until it runs again.
        forks: other answers to the same prompt; they begin when the prompt is stored.

    Raises:
        InvalidRequest: max_tokens exceeds the context.
    """

    def __init__(
        self,
        number: int,
        model: LoadedModel,
        ids: list[int],
        params: SamplingParams,
        root: bytes,
        path: str,
        arrived: float = 0.0,
        safety: SafetyCheck | None = None,
    ) -> None:
        self.number, self.params, self.root, self.arrived = number, params, root, arrived
        self.completion = Completion(ids, path=path)
        self.answer = Answer(model, ids, params, self.completion, safety)
        self.sampler = Sampler([params], [ids], model.config.vocab_size, model.tokenizer.eos_ids)
        self.kv: SequenceKV | None = None
        self.suspended = 0
        self.forks: list[Sequence] = []
        self.priority = 0
        self.deadline = math.inf

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far."""
        return self.completion.prompt_token_ids + self.completion.token_ids

    @property
    def total(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.completion.prompt_token_ids) + len(self.completion.token_ids)

    @property
    def stored(self) -> int:
        """Tokens whose keys and values are in KV memory."""
        return self.kv.length if self.kv is not None else 0

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be chosen; 1 in decode."""
        return self.total - self.stored

    @property
    def ended(self) -> bool:
        return self.completion.finish_reason is not None

    def follow(self, other: Sequence) -> None:
        """Become what `other` is now, up to its last token; from here on with own parameters and random numbers."""
        for token in other.completion.token_ids:
            if not self.ended:  # its own max_tokens or stop strings may end it earlier
                self.answer.accept(self.number, token, 0.0)
        self.sampler.remember(other.completion.token_ids)
        self.completion.cached_tokens = other.completion.cached_tokens
        self.completion.ttft_s, self.completion.tpot_s = other.completion.ttft_s, other.completion.tpot_s
