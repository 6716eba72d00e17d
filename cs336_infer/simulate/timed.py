"""The true engine in a simulated clock: a network that computes nothing and takes a stated time.

    net = TimedNet(model, fixed_s=0.04, token_s=0.002)
    llm = LLM(replace(model, net=net))
    llm.engine.clock = net.clock

Scheduler, KV accounting, samplers and deadlines are the engine's own, and every time it reports is simulated seconds.
So what a policy does to waiting times can be shown in milliseconds of work and without noise.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from cs336_infer.models.load import LoadedModel
from cs336_infer.types import InvalidRequest, check_number


class TimedNet:
    """Stands where a model's network stands.

    A step takes `fixed_s + token_s * tokens` seconds. The next token after position p of any sequence is
    `1 + p % (vocab_size - 1)` in its scores, so that answers can be told from prompts.

    Attributes:
        now_s: seconds so far.

    Raises:
        InvalidRequest: a time is negative or not finite, or both are 0.
    """

    path = "simulated"

    def __init__(self, model: LoadedModel, *, fixed_s: float, token_s: float) -> None:
        for name, value in (("fixed_s", fixed_s), ("token_s", token_s)):
            check_number(name, value, 0.0, math.inf, "a number of seconds, at least 0")
        if not fixed_s + token_s:
            raise InvalidRequest("a step must take time: fixed_s and token_s are both 0")
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.fixed_s, self.token_s, self.now_s = fixed_s, token_s, 0.0

    def clock(self) -> float:
        return self.now_s

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, kv: Any, *, at: torch.Tensor, last_only: bool = True
    ) -> torch.Tensor:
        """As `Llama.forward` on a flat batch [1, tokens]: float32 scores [1, len(at), vocab]."""
        self.now_s += self.fixed_s + self.token_s * tokens.shape[1]
        vocab = self.config.vocab_size
        chosen = 1 + positions[0, at] % (vocab - 1)
        return torch.zeros(1, len(at), vocab).scatter_(2, chosen.view(1, -1, 1), 1.0)
