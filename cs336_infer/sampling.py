"""From logits to the next token, one rule at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from cs336_infer.distribution import probabilities
from cs336_infer.types import InvalidRequest, NonFiniteLogits, SamplingParams

NEG_INF = float("-inf")


class Sampler:
    """Chooses the next token of every row of a batch, each row by its own parameters and its own random stream.

    A row's tokens depend on its logits, parameters and seed only, never on its neighbours.

    Args:
        params: one per row.
        prompts: token ids per row; the repetition penalty looks at them.
        vocab_size: width of the logits.
        eos_ids: tokens that end an answer; `min_tokens` keeps them away.

    Raises:
        InvalidRequest: a token id of `logit_bias` is not in the vocabulary.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        eos_ids: Iterable[int] = (),
    ) -> None:
        eos = torch.tensor(sorted(eos_ids), dtype=torch.long)
        self.rows = [_Row(p, ids, vocab_size, eos) for p, ids in zip(params, prompts, strict=True)]
        self._plain = all(p.greedy and not p.changes_logits for p in params)

    def __call__(self, logits: torch.Tensor) -> list[int]:
        """logits: float32 [batch, vocab]. Returns one id per row, and remembers it for the penalties.

        Raises:
            NonFiniteLogits: argmax of a NaN would be a token like any other, and the answer a row of "!!!!".
        """
        # One sum finds every NaN and infinity; it is far cheaper than asking each logit, and is only wrong by overflow.
        if not bool(logits.sum().isfinite()) and not bool(logits.isfinite().all()):
            raise NonFiniteLogits("the model produced NaN or infinite logits: its weights are damaged or overflow")
        if self._plain:
            return logits.argmax(-1).tolist()
        return [row.next(x) for row, x in zip(self.rows, logits.cpu(), strict=True)]

    def remember(self, tokens: Sequence[int]) -> None:
        """Every row has produced these tokens already, chosen by somebody else: for the penalties."""
        for row in self.rows:
            for token in tokens:
                row.remember(token)


class _Row:
    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, eos: torch.Tensor) -> None:
        self.params, self.eos, self.produced = params, eos, 0
        bias = params.logit_bias or {}
        if bias and max(bias) >= vocab_size:
            raise InvalidRequest(f"token id {max(bias)} of logit_bias is not in the vocabulary of {vocab_size}")
        self.biased = torch.tensor(list(bias), dtype=torch.long)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        self.generator = torch.Generator()
        if params.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(params.seed)
        if params.has_penalties:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool)
            self.seen[torch.tensor(list(prompt), dtype=torch.long)] = True
            self.counts = torch.zeros(vocab_size)

    def next(self, logits: torch.Tensor) -> int:
        if self.params.logit_bias:
            logits = logits.index_add(0, self.biased, self.bias)
        if self.produced < self.params.min_tokens:
            logits = logits.index_fill(0, self.eos, NEG_INF)
        if self.params.has_penalties:
            logits = apply_penalties(logits, self.seen, self.counts, self.params)
        token = int(logits.argmax()) if self.params.greedy else draw(probabilities(logits, self.params), self.generator)
        self.remember(token)
        return token

    def remember(self, token: int) -> None:
        self.produced += 1
        if self.params.has_penalties:
            self.seen[token] = True
            self.counts[token] += 1


def apply_penalties(
    logits: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor, params: SamplingParams
) -> torch.Tensor:
    """Make repetition less likely.

    Args:
        logits: [vocab]. seen: [vocab] bool, tokens of prompt and output. counts: [vocab], times produced.

    Returns:
        New logits [vocab].
    """
    r = params.repetition_penalty
    punished = torch.where(logits > 0, logits / r, logits * r)
    logits = torch.where(seen, punished, logits)
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def draw(p: torch.Tensor, generator: torch.Generator) -> int:
    """Inverse of the cumulative distribution at one uniform number: one draw, one number of the stream."""
    u = torch.rand((), generator=generator, dtype=torch.float64)
    cumulative = p.cumsum(-1)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return min(index, int(p.nonzero()[-1]))
