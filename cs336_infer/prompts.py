"""What callers give: one prompt or several, text or token ids, parameters for all or for each. Checked here, once."""

from __future__ import annotations

import numbers
from typing import Any

from cs336_infer.models.load import LoadedModel
from cs336_infer.types import InvalidRequest, SamplingParams, short


def as_batch(prompts: Any) -> list[Any]:
    """One prompt or several. Only strings and lists, tuples or one-dimensional arrays are prompts: a dict or bytes
    would iterate too, and mean something else."""
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple | range):
        raise InvalidRequest(f"a prompt is a string or a list of token ids, not {short(prompts)}")
    if len(prompts) > 0 and not isinstance(_plain(prompts[0]), str | list | tuple | range):
        return [prompts]
    return list(prompts)


def _plain(value: Any) -> Any:
    """numpy arrays and tensors as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def as_params(params: Any, rows: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * rows
    if not isinstance(params, list | tuple) or not all(isinstance(p, SamplingParams) for p in params):
        raise InvalidRequest(f"params must be SamplingParams, or one for each prompt, not {short(params)}")
    if len(params) != rows:
        raise InvalidRequest(f"{rows} prompts and {len(params)} sampling parameters: give one, or one for each")
    return list(params)


def encode(model: LoadedModel, prompt: Any) -> list[int]:
    vocab, context = model.config.vocab_size, model.config.context_length
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        if len(prompt) > context * model.tokenizer.longest_token:  # refused before it is tokenised
            raise InvalidRequest(f"the prompt of {len(prompt):,} characters is over the model's context of {context}")
        ids = model.tokenizer.encode(prompt)
    elif isinstance(prompt, list | tuple | range):
        ids = [_token_id(i, vocab) for i in prompt]
    else:
        raise InvalidRequest(f"a prompt is a string or a list of token ids, not {short(prompt)}")
    if not ids:
        raise InvalidRequest("the prompt is empty: there is no token to continue")
    if len(ids) >= context:
        raise InvalidRequest(f"the prompt has {len(ids)} tokens; the model's context of {context} leaves no room")
    return ids


def _token_id(value: Any, vocab: int) -> int:
    token = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else -1
    if not 0 <= token < vocab:
        raise InvalidRequest(f"token id {short(value)} is not in the vocabulary of {vocab}")
    return token
