"""The open task of assignment 2: a policy that answers by message does what it does in the same process."""

from __future__ import annotations

import importlib.util
import os
from collections import OrderedDict, deque
from typing import Any

import pytest

from cs336_infer.course import a2_open_task as task
from cs336_infer.course.ask import local_ask
from cs336_infer.kv.policies import make_policy
from cs336_infer.kv.policy import LRU
from cs336_infer.kv.replay import replay
from cs336_infer.simulate.sources import GENERATED, open_source


class Patient:
    """Users think for minutes, so what was just released is not needed soon, and what is very old never again. Between
    the two it keeps what it has, and gives up the end of the newest prompt."""

    def __init__(self, blocks: int) -> None:
        self.limit, self.clock = 3 * blocks, 0
        self.since: OrderedDict[Any, int] = OrderedDict()
        self.prompts: deque[OrderedDict[Any, None]] = deque()
        self.prompt_of: dict[Any, OrderedDict[Any, None]] = {}
        self.new_prompt = True

    def released(self, key: Any) -> None:
        if self.new_prompt:
            self.prompts.append(OrderedDict())
        self.new_prompt, self.clock = False, self.clock + 1
        self.since[key], self.prompt_of[key] = self.clock, self.prompts[-1]
        self.prompts[-1][key] = None

    def reused(self, key: Any) -> None:
        self.new_prompt = True
        del self.since[key], self.prompt_of.pop(key)[key]
        while self.prompts and not self.prompts[-1]:
            self.prompts.pop()

    def evicted(self, key: Any) -> None:
        if key in self.since:
            self.reused(key)

    def victim(self) -> Any:
        oldest, since = next(iter(self.since.items()))
        return oldest if self.clock - since > self.limit else next(iter(self.prompts[-1]))


def by_message(policy: Any) -> Any:
    """The `answer` of the notebook, over `policy`."""
    mine: dict[str, Any] = {}

    def answer(events: list[Any], count: int) -> list[Any]:
        for name, value in events:
            if name == "begin":
                mine["policy"] = policy(value)
            else:
                getattr(mine["policy"], name)(value)
        victims = []
        for _ in range(count):
            victims.append(mine["policy"].victim())
            mine["policy"].evicted(victims[-1])
        return victims

    return local_ask({"answer": answer})


@pytest.mark.parametrize("name", [GENERATED, "conversation"])
def test_the_yardsticks_are_those_of_the_package(name):
    if name != GENERATED and not os.environ.get("CS336_TRACES"):
        pytest.skip("no folder of traces")
    requests = list(open_source(name, limit=task.REQUESTS).requests())
    policies = [make_policy(p, task.BLOCKS, lambda: (r.keys for r in requests)) for p in ("lru", "belady")]
    got = tuple(round(replay(requests, task.BLOCKS, policy).token_hit_rate, 4) for policy in policies)
    assert got == task.YARDSTICK[name]


def test_lru_by_message_is_lru():
    result = task.score(by_message(lambda blocks: LRU()), 5)
    assert result["ok"] and result["message"] == ""
    assert result["token_hit_rate"] == result["lru"] < result["belady"]
    assert result["messages"] < task.REQUESTS


def test_a_better_policy_is_possible():
    for seed in (0, 1):
        result = task.score(by_message(Patient), seed)
        assert result["lru"] * 1.1 < result["token_hit_rate"] < result["belady"]


def test_a_wrong_victim_is_named_and_ends_the_run():
    wrong = {
        "not in the cache": lambda events, count: [1] * count,
        "victims were asked for": lambda events, count: [],
        "the answer is": lambda events, count: ["x"] * count,
        "no more": lambda events, count: (_ for _ in ()).throw(ValueError("no more")),
    }
    for said, answer in wrong.items():
        result = task.score(local_ask({"answer": answer}), 0)
        assert not result["ok"] and result["token_hit_rate"] is None
        assert said in result["message"] and "\n" not in result["message"]


def test_keys_say_nothing_about_the_traffic():
    first, again, other = task.traffic(3), task.traffic(3), task.traffic(4)
    assert first == again
    assert not {k for r in first for k in r.keys or ()} & {k for r in other for k in r.keys or ()}


def test_the_module_is_found_by_the_grader():
    assert importlib.util.find_spec("cs336_infer.course.a2_open_task") and callable(task.score)
