"""What the server tells Prometheus. The names are those of vLLM, with the prefix `cs336:` in place of `vllm:`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cs336_infer.engine.llm import LLM
from cs336_infer.engine.runner import Runner
from cs336_infer.types import Completion

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """Counters and histograms of one server.

    Args:
        name: of the model, a label of every metric.
    """

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, llm: LLM, name: str) -> None:
        self.started = int(time.time())
        self.runner: Runner | None = None
        self._registry = CollectorRegistry()
        self._labels = {"model_name": name}
        labels = tuple(self._labels)

        def histogram(metric: str, about: str) -> Histogram:
            made = Histogram(f"cs336:{metric}", about, labels, registry=self._registry, buckets=SECONDS)
            return made.labels(**self._labels)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token")
        self._tpot = histogram("request_time_per_output_token_seconds", "Mean time per token after the first")
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token")
        self._ended = Counter(
            "cs336:request_success", "Answers that ended", (*labels, "finished_reason"), registry=self._registry
        )
        self._tokens = Counter("cs336:generation_tokens", "Tokens produced", labels, registry=self._registry)
        self._prompt = Counter(
            "cs336:prompt_tokens", "Prompt tokens of answers that ended", labels, registry=self._registry
        )
        self._drifts = Counter(
            "cs336:script_drift", "Answers that slid into another writing system", labels, registry=self._registry
        )
        self._letters = Counter("cs336:letters", "Letters produced", labels, registry=self._registry)
        self._foreign = Counter(
            "cs336:foreign_letters", "Letters of scripts the prompt gave no reason for", labels, registry=self._registry
        )
        self._registry.register(_Live(llm, self))

    def ended(self, done: Completion) -> None:
        """An answer is over."""
        reason = "" if done.finish_reason is None else done.finish_reason.value
        self._ended.labels(**self._labels, finished_reason=reason).inc()
        self._tokens.labels(**self._labels).inc(len(done.token_ids))
        self._prompt.labels(**self._labels).inc(len(done.prompt_token_ids))
        self._drifts.labels(**self._labels).inc(done.drifted_at is not None)
        self._letters.labels(**self._labels).inc(done.letters)
        self._foreign.labels(**self._labels).inc(done.foreign_letters)
        if done.token_ids:
            rest = len(done.token_ids) - 1
            self._ttft.observe(done.ttft_s)
            self._e2e.observe(done.ttft_s + (rest * done.tpot_s if rest else 0.0))
            if rest:
                self._tpot.observe(done.tpot_s)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Live(Collector):
    """Read when somebody asks."""

    def __init__(self, llm: LLM, metrics: Metrics) -> None:
        self._llm, self._metrics = llm, metrics

    def collect(self) -> Iterator[Metric]:
        llm, scheduler, labels = self._llm, self._llm.engine.scheduler, self._metrics._labels
        pool = llm.kv.pool
        gauges = {
            "num_requests_running": (len(scheduler.running), "Answers in the batch"),
            "num_requests_waiting": (len(scheduler.waiting), "Requests not yet admitted"),
            "kv_cache_usage_perc": (pool.live / pool.total, "Part of the KV blocks that somebody uses, 0 to 1"),
            "kv_cache_cached_perc": (pool.cached / pool.total, "Part of the KV blocks that only the cache holds"),
        }
        counters = {
            "num_preemptions": (scheduler.preemptions, "Sequences that gave up their blocks"),
            "prefix_cache_queries": (scheduler.looked_up, "Tokens looked up in the prefix cache"),
            "prefix_cache_hits": (scheduler.hits, "Tokens found in the prefix cache"),
            "engine_steps": (llm.engine.steps, "Forward passes"),
            "prompts_refused": (llm.engine.refused, "Prompts that the safety check did not let in"),
            "engine_failures": (self._metrics.runner.failures if self._metrics.runner else 0, "Steps that failed"),
        }
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (value, about) in rows.items():
                family = kind(f"cs336:{name}", about, labels=list(labels))
                family.add_metric(list(labels.values()), value)
                yield family
