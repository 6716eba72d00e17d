"""Requests for measurements: random token ids, lengths from a stated distribution, everything from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cs336_infer.types import InvalidRequest, check_integer, check_number

FIRST_ID = 3  # lower ids are special tokens in most vocabularies


@dataclass(frozen=True)
class Work:
    """One request: ids of the prompt, and how many tokens to produce."""

    prompt: list[int]
    output: int


def spread(mean: int, ratio: float) -> tuple[int, int]:
    """The shortest and the longest of lengths that are uniform over mean * (1 - ratio) to mean * (1 + ratio), as
    `vllm bench serve` has them.

    Raises:
        InvalidRequest: mean < 1, or the ratio is not from 0 to below 1.
    """
    check_integer("a mean length", mean, 1, 1 << 24)
    check_number("the range ratio", ratio, 0.0, 1.0, "a number from 0 to below 1")
    if ratio == 1:
        raise InvalidRequest("the range ratio must be a number from 0 to below 1, not 1")
    return max(1, int(mean * (1 - ratio))), int(mean * (1 + ratio))


def random_work(count: int, vocab_size: int, *, input_len: int, output_len: int, ratio: float, seed: int) -> list[Work]:
    """`count` requests whose lengths of prompt and output are uniform and independent (see `spread`).

    Raises:
        InvalidRequest: a number is out of its range.
    """
    check_integer("the number of requests", count, 1, 1 << 20)
    check_integer("the vocabulary", vocab_size, FIRST_ID + 1, None)
    prompts, outputs = spread(input_len, ratio), spread(output_len, ratio)
    draw = random.Random(seed)
    lengths = [(draw.randint(*prompts), draw.randint(*outputs)) for _ in range(count)]
    return [Work([draw.randrange(FIRST_ID, vocab_size) for _ in range(n)], out) for n, out in lengths]
