"""Every fault of `faults` against every detector: who sees what."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from cs336_infer.course import faults
from cs336_infer.course.poison import poisoned
from cs336_infer.engine.llm import LLM
from cs336_infer.generate import generate
from cs336_infer.models.load import LoadedModel
from cs336_infer.types import DriftRule, LoopRule, SamplingParams

OPENING = "The president of the council said on Monday that"
CALM = "The lighthouse was"
COMPANY = ["Water boils at 100 degrees because", "To bake a good loaf of bread, you"]
ENGLISH = (
    "The lighthouse stands on a rock above the sea. Every evening the keeper climbs the stairs, lights the lamp and "
    "looks out over the water. In the morning he walks down to the village, buys bread and milk"
)
RUSSIAN = "Москва является столицей России, и в ней живёт много людей. Город стоит на реке. " * 3
QUESTION = "Q: What is the capital of France?\nA: Paris\n\nQ: What is the capital of Italy?\nA:"
STOP = " the capital of"
FAULTS: dict[str, tuple[tuple[Callable[[], Any], ...], float]] = {
    "healthy": ((), 0.0),
    "stuck positions": ((faults.stuck_positions,), 0.0),
    "unwritten element": ((faults.unwritten_element,), 0.0),
    "colliding keys": ((faults.colliding_keys,), 0.0),
    "NaN, blind sampler": ((faults.unwritten_element, faults.blind_sampler), math.nan),
    "NaN": ((faults.unwritten_element,), math.nan),
    "shared random numbers": ((faults.shared_random_numbers,), 0.0),
    "leaking stop": ((faults.leaking_stop,), 0.0),
}
"""Name -> what is broken, and what KV memory holds where nobody wrote."""


def loops(model: LoadedModel, fill: float) -> bool:
    """Loop detector, with a short rule, on an answer whose healthy form does not loop."""
    params = SamplingParams(max_tokens=56, ignore_eos=True, loops=LoopRule(min_tokens=32))
    return _run(model, [CALM], params, fill)[0].finish_reason == "loop"


def drift(model: LoadedModel, fill: float) -> bool:
    """Script-drift monitor, with a short window, on an English prompt that comes after a Russian one."""
    llm, ids = LLM(model, kv_tokens=2048, fill=fill), model.tokenizer.encode(ENGLISH)[:48]
    llm.generate(RUSSIAN, SamplingParams(max_tokens=1))
    params = SamplingParams(max_tokens=20, ignore_eos=True, drift=DriftRule(window=32))
    return llm.generate([*ids, *model.tokenizer.encode("\n")], params)[0].drifted_at is not None


def finite(model: LoadedModel, fill: float) -> bool:
    """Finite check of the sampler."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return any(done.finish_reason == "error" for done in _run(model, [OPENING], params, fill))


def fills(model: LoadedModel, fill: float) -> bool:
    """Three fills of unused memory, compared bit for bit; where nothing is sampled and nothing is shared."""
    ids = [model.tokenizer.encode(text) for text in (OPENING, COMPANY[0])]
    return poisoned(model, ids, tokens=3) != "clean"


def oracle(model: LoadedModel, fill: float) -> bool:
    """Greedy ids against a run without the engine and its memory."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    want = generate(model, [OPENING], params, kv="none")[0].token_ids
    return _run(model, [OPENING], params, fill)[0].token_ids != want


def company(model: LoadedModel, fill: float) -> bool:
    """A seeded request alone, among others, and after another one with the prefix cache on."""
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=5)
    alone = _run(model, [ENGLISH], params, fill)[0].token_ids
    if _run(model, [ENGLISH, *COMPANY], params, fill)[0].token_ids != alone:
        return True
    llm = LLM(model, kv_tokens=2048, fill=fill)
    llm.generate(RUSSIAN, SamplingParams(max_tokens=1))
    return llm.generate(ENGLISH, params)[0].token_ids != alone


def stream(model: LoadedModel, fill: float) -> bool:
    """What a stream has shown against the answer's text up to the stop string."""
    params = SamplingParams(max_tokens=16, stop=(STOP,), ignore_eos=True)
    llm = LLM(model, kv_tokens=2048, prefix_cache=False, fill=fill)
    shown = "".join(event.text for event in llm.stream(QUESTION, params))
    whole = _run(model, [QUESTION], SamplingParams(max_tokens=params.max_tokens, ignore_eos=True), fill)[0].text
    return shown != whole.partition(STOP)[0]


DETECTORS: dict[str, Callable[[LoadedModel, float], bool]] = {
    "loop detector": loops,
    "drift monitor": drift,
    "finite check": finite,
    "three fills": fills,
    "no-cache oracle": oracle,
    "in company": company,
    "stream = text": stream,
}


def examine(model: LoadedModel) -> dict[str, dict[str, bool]]:
    """Fault -> detector -> whether it sees the fault. `model` must be float32, so that batches do not move ids."""
    table: dict[str, dict[str, bool]] = {}
    for name, (broken, fill) in FAULTS.items():
        table[name] = {}
        for detector, sees in DETECTORS.items():
            with ExitStack() as stack:
                for fault in broken:
                    stack.enter_context(fault())
                table[name][detector] = sees(model, fill)
    return table


def _run(model: LoadedModel, prompts: list[str], params: SamplingParams, fill: float) -> list[Any]:
    return LLM(model, kv_tokens=2048, prefix_cache=False, fill=fill).generate(prompts, params)
