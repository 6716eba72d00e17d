"""transformers on the same weights, as what our engine is compared with. Needs transformers, which developers have.

Its ways to run many requests on a CPU: `generate` on padded batches, and its continuous batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cs336_infer.measure.workload import Work
from cs336_infer.models.zoo import embedded_path
from cs336_infer.types import InferError

PAGE = 32  # tokens of a page of transformers' continuous batching; its default of 256 wastes most of one here
STEP_TOKENS = 512


def load_peer(dtype: torch.dtype = torch.float32) -> Any:
    """The embedded model, read by transformers' own GGUF loader."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = embedded_path()
    if path is None:
        raise InferError("the embedded model is not installed")
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval().to(dtype)


def _settings(max_new_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)


def generate_batches(model: Any, work: Sequence[Work], size: int, key: Any) -> list[list[int]]:
    """Greedy ids of every request by `generate` on left-padded batches of `size`, in the order of `key`.

    A batch ends when its longest output is complete; what the others produce after their end is not counted.
    """
    ids: list[list[int]] = [[] for _ in work]
    order = sorted(range(len(work)), key=lambda i: key(work[i]))
    for first in range(0, len(order), size):
        rows = order[first : first + size]
        longest = max(len(work[i].prompt) for i in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        seen = torch.zeros_like(tokens)
        for row, i in enumerate(rows):
            tokens[row, longest - len(work[i].prompt) :] = torch.tensor(work[i].prompt)
            seen[row, longest - len(work[i].prompt) :] = 1
        settings = _settings(max(work[i].output for i in rows))
        model.generation_config = settings
        with torch.inference_mode():
            out = model.generate(tokens, attention_mask=seen, generation_config=settings)
        for row, i in enumerate(rows):
            ids[i] = out[row, longest : longest + work[i].output].tolist()
    return ids


def generate_continuously(model: Any, work: Sequence[Work], size: int) -> list[list[int]]:
    """Greedy ids of every request by transformers' continuous batching, at most `size` requests at once."""
    from transformers import ContinuousBatchingConfig

    most = max(len(w.prompt) + w.output for w in work)
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=(size + 1) * (-(-most // PAGE) + 1),
        max_batch_tokens=STEP_TOKENS,
        max_requests_per_batch=size,
        allow_block_sharing=False,
    )
    settings = _settings(most)
    settings.eos_token_id = -1  # it asks for one; no token has this id
    ids: list[list[int]] = [[] for _ in work]
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=config, warmup=False
        ) as manager,
    ):
        names = [manager.add_request(w.prompt, max_new_tokens=w.output) for w in work]
        left = {name: i for i, name in enumerate(names)}
        while left:
            result = manager.get_result(timeout=60)
            if result is None or result.error:
                raise InferError(f"transformers' continuous batching stopped: {getattr(result, 'error', 'no answer')}")
            if result.is_finished():
                ids[left.pop(result.request_id)] = list(result.generated_tokens)
    return ids
