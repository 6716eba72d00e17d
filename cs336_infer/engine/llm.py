"""`LLM`: the class users call. Many prompts at once, paged KV memory, prefix cache and tiers behind one `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from cs336_infer.engine.engine import Engine
from cs336_infer.engine.roster import Rank, first_come
from cs336_infer.engine.sequence import Sequence
from cs336_infer.generate import generate, stream
from cs336_infer.kv.manager import KVManager
from cs336_infer.kv.paged import ATTENTION, PagedKV
from cs336_infer.kv.policy import EvictionPolicy
from cs336_infer.kv.prefix import root_key
from cs336_infer.kv.tier_options import TierOptions
from cs336_infer.models.fingerprint import fingerprint
from cs336_infer.models.load import LoadedModel, load_model
from cs336_infer.models.zoo import EMBEDDED
from cs336_infer.prompts import as_batch, as_params, encode
from cs336_infer.text.safety import SafetyCheck, as_check
from cs336_infer.types import (
    Completion,
    InvalidRequest,
    Prompt,
    SamplingParams,
    TokenEvent,
    check_integer,
    short,
)  # fmt: skip

KINDS = ("paged", "contiguous")
DEFAULT_CONTEXTS = 8  # KV memory for so many full contexts, where nothing else is said
SHARE_OF_MEMORY = 0.5  # of what is free now, at most


class LLM:
    """A model and everything that serves it.

    Args:
        model: loaded, or the name or path of one. kv: "paged" is the engine; "contiguous" is `generate`, with
            one padded batch for each call and none of the options below.
        block_size: tokens per KV block. kv_tokens: tokens that KV memory holds, rounded down to blocks; by default
            8 contexts, or half of the free memory if that is less.
        prefix_cache: keep the blocks of finished sequences and find them again.
        policy: which cached block is given up first; LRU by default.
        tiers: host memory and disk below the device (`TierOptions`).
        max_batch: sequences that run at once. step_tokens: tokens computed in one step; longer prompts go in chunks.
        rank: which sequence goes first, see `engine.roster`.
        preemption: what becomes of a sequence that gives up its blocks: "recompute", or "swap" to the host tier.
        safety: what judges prompts and answers: a check or several (`text.safety`).
        debug: check the accounting of KV memory after every operation. fill: what unused KV slots are filled with.

    Raises:
        InvalidRequest: an option cannot be obeyed.
    """

    def __init__(
        self,
        model: LoadedModel | str | Path = EMBEDDED,
        *,
        kv: str = "paged",
        block_size: int = 16,
        kv_tokens: int | None = None,
        prefix_cache: bool = True,
        policy: EvictionPolicy | None = None,
        tiers: TierOptions | None = None,
        max_batch: int = 64,
        step_tokens: int = 2048,
        rank: Rank = first_come,
        preemption: str = "recompute",
        safety: SafetyCheck | ListOf[SafetyCheck] | None = None,
        debug: bool = False,
        fill: float | None = None,
    ) -> None:
        if kv not in KINDS:
            raise InvalidRequest(f"unknown kv {short(kv)} ({', '.join(KINDS)})")
        if kv == "contiguous" and (policy or tiers or kv_tokens or safety is not None):
            raise InvalidRequest("kv='contiguous' is `generate`: kv_tokens, policy, tiers and safety need kv='paged'")
        if tiers is not None and not prefix_cache:
            raise InvalidRequest("tiers keep what the prefix cache knows: they need prefix_cache=True")
        self.model = model if isinstance(model, LoadedModel) else load_model(model)
        self.kind = kv
        self.tiers: Any = None
        if kv == "contiguous":
            return
        config = self.model.config
        check_integer("block_size", block_size, 1, config.context_length)
        extras: dict[str, Any] = {"dtype": str(self.model.dtype), "kernels": self.model.net.path}
        self._extras = extras | {"model": fingerprint(self.model.source), "block_size": block_size, "adapter": None}
        memory = PagedKV(
            config,
            num_blocks=self._num_blocks(block_size, kv_tokens),
            block_size=block_size,
            dtype=self.model.dtype,
            device=self.model.device,
            fill=fill,
            attention=ATTENTION.get(self.model.net.path, "torch"),
        )
        if tiers is not None:
            self.tiers = tiers.open(block_bytes=memory.block_bytes, fingerprint=self.root())
        self.kv = KVManager(
            memory,
            tiers=self.tiers,
            write=tiers.write if tiers is not None else "through",
            policy=policy,
            caching=prefix_cache,
            debug=debug,
        )
        path = self.model.describe_path(f"paged/{block_size}" + ("" if prefix_cache else " prefix_cache=off"))
        self.engine = Engine(
            self.model,
            self.kv,
            path=path,
            max_batch=max_batch,
            step_tokens=step_tokens,
            rank=rank,
            preemption=preemption,
            safety=as_check(safety),
        )
        if self.model.net.path == "graph":
            from cs336_infer.engine.graphs import Graphs  # Triton has wheels for Linux only

            self.engine.forward = Graphs(self.model.net, config.context_length).forward

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is on its way to a tier and end its threads."""
        if self.tiers is not None:
            self.kv.flush()
            self.tiers.close()
            self.tiers = self.kv.tiers = None

    def stats(self) -> dict[str, dict[str, float]]:
        """What KV memory did so far: "device" always, "host" and "disk" with tiers. Tokens, blocks, bytes, seconds."""
        if self.kind == "contiguous":
            return {}
        pool, kv = self.kv.pool, self.kv
        device: dict[str, float] = {
            "blocks": pool.total,
            "free": pool.free,
            "cached": pool.cached,
            "live": pool.live,
            "bytes": kv.memory.data.nbytes,
            "tokens_looked_up": self.engine.scheduler.looked_up,
            "tokens_hit": self.engine.scheduler.hits,
            "promote_seconds": kv.promote_s,
            "evictions": pool.evictions,
            "preemptions": self.engine.scheduler.preemptions,
            "tokens_recomputed": self.engine.scheduler.recomputed,
            "steps": self.engine.steps,
        }
        lower = {} if self.tiers is None else self.tiers.stats()
        return {"device": device, **{name: asdict(stats) for name, stats in lower.items()}}

    def root(self, salt: str | None = None) -> bytes:
        """What the KV keys of a request start from. Requests with different salts share nothing."""
        return root_key(**self._extras, salt=salt)

    def generate(
        self,
        prompts: Prompt | ListOf[Prompt],
        params: SamplingParams | ListOf[SamplingParams] | None = None,
        *,
        n: int = 1,
        salt: str | None = None,
        timeout_s: float | None = None,
    ) -> list[Completion]:
        """Complete every prompt, `n` times each; the completions in order, those of one prompt together.

        A prompt that needs more KV memory than there is gets a completion with the finish reason "error".

        Args:
            n: answers to each prompt; with a seed, answer i draws with seed + i.
            salt: separates prefix caches, for example of different customers.
            timeout_s: seconds from now after which an answer ends as it is, with the finish reason "timeout".

        Raises:
            InvalidRequest: a prompt or parameter cannot be obeyed; nothing was computed.
        """
        check_integer("n", n, 1, 1024)
        if self.kind == "contiguous":
            if n != 1 or salt is not None or timeout_s is not None:
                raise InvalidRequest("kv='contiguous' answers once, to the end: n, salt and timeout_s need kv='paged'")
            return generate(self.model, prompts, params)
        sequences = self._add(prompts, params, n, salt, timeout_s)
        for _ in self._run(sequences):
            pass
        return [s.completion for s in sequences]

    def stream(
        self,
        prompts: Prompt | ListOf[Prompt],
        params: SamplingParams | ListOf[SamplingParams] | None = None,
        *,
        salt: str | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[TokenEvent]:
        """Like `generate`, but yields each token as it is chosen; `index` is the place of the prompt. Bad input raises
        here. Who stops reading ends the sequences."""
        if self.kind == "contiguous":
            if salt is not None or timeout_s is not None:
                raise InvalidRequest(
                    "kv='contiguous' shares nothing and ends at the end: salt and timeout_s need kv='paged'"
                )
            return stream(self.model, prompts, params)
        return self._run(self._add(prompts, params, 1, salt, timeout_s))

    def _add(self, prompts: Any, params: Any, n: int, salt: str | None, timeout_s: float | None) -> list[Sequence]:
        ids = [encode(self.model, p) for p in as_batch(prompts)]
        if not ids:
            raise InvalidRequest("no prompt was given")
        root = self.root(salt)
        each = list(zip(ids, as_params(params, len(ids)), strict=True))
        added: list[Sequence] = []
        try:
            for one, its in each:
                added += self.engine.add(one, its, root, n=n, timeout_s=timeout_s)
        except BaseException:
            for sequence in added:
                self.engine.cancel(sequence)
            raise
        return added

    def _run(self, sequences: list[Sequence]) -> Iterator[TokenEvent]:
        """Steps until these have ended; events of others are not theirs to see."""
        mine = {s.number: i for i, s in enumerate(sequences)}
        try:
            while not all(s.ended for s in sequences):
                for event in self.engine.step():
                    if event.index in mine:
                        yield replace(event, index=mine[event.index])
        finally:
            for sequence in sequences:
                self.engine.cancel(sequence)

    def _num_blocks(self, block_size: int, kv_tokens: int | None) -> int:
        config, dtype = self.model.config, self.model.dtype
        if kv_tokens is not None:
            check_integer("kv_tokens", kv_tokens, block_size, None)
            return kv_tokens // block_size
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        free = psutil.virtual_memory().available
        if self.model.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.model.device)[0]
        tokens = min(DEFAULT_CONTEXTS * config.context_length, int(SHARE_OF_MEMORY * free / per_token))
        return max(1, tokens // block_size)
