"""Memory that a KV cache reserves and never fills: blocks against one contiguous piece for each sequence.

A paged sequence wastes the unused slots of its last block, whatever its length: (block_size - 1) / 2 slots on average.
A contiguous one is reserved before its length is known (PagedAttention, Kwon et al. 2023, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from cs336_infer.kv.pool import BlockPool
from cs336_infer.kv.replay import UNLIMITED
from cs336_infer.types import InvalidRequest, check_integer


class Lengths(Protocol):
    """Prompt and answer of a request, in tokens."""

    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...


@dataclass(frozen=True)
class Waste:
    """Slots for tokens, summed over all sequences, each at its full length."""

    block_size: int
    sequences: int
    tokens: int  # slots that hold something
    longest: int  # tokens of the longest sequence
    paged_slots: int  # allocated by the block pool
    formula_wasted: int  # sum of (-length) mod block_size
    formula_slots: int  # sum of ceil(length / block_size) * block_size
    power_of_two_slots: int  # contiguous, each sequence in the next power of two

    @property
    def paged(self) -> float:
        """Share of the pool's slots that nothing is in, 0 to 1."""
        return _share(self.paged_slots, self.tokens)

    @property
    def formula(self) -> float:
        """The same from lengths alone."""
        return self.formula_wasted / self.formula_slots if self.formula_slots else 0.0

    @property
    def contiguous_longest(self) -> float:
        """Each sequence reserves the longest one's length."""
        return _share(self.longest * self.sequences, self.tokens)

    @property
    def contiguous_power_of_two(self) -> float:
        """Each sequence reserves the next power of two, as if its length were known up to that."""
        return _share(self.power_of_two_slots, self.tokens)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "paged_waste": self.paged,
            "formula_waste": self.formula,
            "contiguous_longest_waste": self.contiguous_longest,
            "contiguous_power_of_two_waste": self.contiguous_power_of_two,
        }


def measure_waste(requests: Iterable[Lengths], block_size: int) -> Waste:
    """Let every sequence grow in a real block pool: its prompt at once, then block by block as tokens are produced.

    Raises:
        InvalidRequest: block_size is not a positive integer.
    """
    check_integer("block_size", block_size, 1, 1 << 20)
    pool = BlockPool(UNLIMITED, caching=False)
    sequences = tokens = longest = paged = formula_wasted = formula_slots = powers = 0
    for request in requests:
        length = request.input_tokens + request.output_tokens
        held = pool.allocate(-(-request.input_tokens // block_size))
        while len(held) * block_size < length:
            held += pool.allocate(1)
        paged += pool.live * block_size
        pool.release(held)
        sequences += 1
        tokens += length
        longest = max(longest, length)
        formula_wasted += -length % block_size
        formula_slots += -(-length // block_size) * block_size
        powers += 1 << (length - 1).bit_length() if length else 0
    if not tokens:
        raise InvalidRequest("no request has a token: there is nothing to measure")
    return Waste(block_size, sequences, tokens, longest, paged, formula_wasted, formula_slots, powers)


def _share(slots: int, used: int) -> float:
    return (slots - used) / slots if slots else 0.0
