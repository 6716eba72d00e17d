"""Requests made up from /openapi.json by schemathesis, right and wrong ones: no answer may be a server error, and every
answer is one that the document announces. FUZZ_EXAMPLES is how many for each operation in a round (default 8),
FUZZ_SECONDS for how long new rounds begin (default 0: one round)."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from test_serve import KEY, Served, model

from cs336_infer import LLM

__all__ = ["model"]
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))


@pytest.fixture(scope="module")
def fuzzed(model: Any) -> Any:
    llm = LLM(model, block_size=4, kv_tokens=2048, debug=True, fill=float("nan"), step_tokens=64)
    served = Served(llm, timeout_s=0.2)  # some ask for 128 long answers
    yield served
    served.idle()
    served.close()


def test_no_request_breaks_the_server(fuzzed: Served) -> None:
    document = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    operations = [result.ok() for result in document.get_all_operations()]
    assert len(operations) >= 7
    statuses: Counter[int] = Counter()
    end, rounds = time.monotonic() + SECONDS, itertools.count()
    while (number := next(rounds)) == 0 or time.monotonic() < end:
        for operation, mode in itertools.product(operations, schemathesis.GenerationMode):

            @seed(number)
            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                response = case.call(headers={"authorization": f"Bearer {KEY}"}, timeout=120)
                statuses[response.status_code] += 1
                case.validate_response(response, checks=list(CHECKS))

            try:
                ask()
            except Unsatisfiable:  # nothing can be wrong with a request that has no parameters
                assert not operation.body and mode is schemathesis.GenerationMode.NEGATIVE
    print(f"{number} rounds, {statuses.total()} requests: {dict(statuses)}")
    assert statuses[200] and statuses[400], statuses


def test_the_document_announces_the_errors_as_they_are(fuzzed: Served) -> None:
    import httpx

    found = httpx.get(f"{fuzzed.url}/openapi.json").json()
    for path, operations in found["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], f"{path}: what is not valid gets a 400"
            assert {"4XX", "5XX"} <= set(operation["responses"])
    answer = found["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(answer) == {"application/json", "text/event-stream"}
