"""The open task of assignment 3: a policy that answers by message does what it does in the same process, and one that
answers with nonsense, or not at all, ends its own run."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cs336_infer.course import a3_open_task as task
from cs336_infer.course.ask import local_ask
from cs336_infer.course.assignment import read_assignment
from cs336_infer.course.grade import grade_one, open_course
from cs336_infer.course.sandbox import Limits
from cs336_infer.simulate import serving
from cs336_infer.simulate.serving_policies import make_policy

REPO = Path(__file__).resolve().parents[2]
SOURCE = REPO / "solutions" / "a3_serving" / "a3_serving.py"
NAMES = ("import copy", "def schedule_step", "class MyScheduler")


def code() -> str:
    """The cells of the solution that the open task needs."""
    cells = [c.source for c in read_assignment(SOURCE).cells if c.kind == "code" and any(n in c.source for n in NAMES)]
    return "\n\n\n".join(cell for cell in cells if "check_public(" not in cell).replace(
        "from cs336_infer.course.a3_serving import check_public\n", ""
    )


def solution() -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "student"}
    exec(compile(code(), "solution", "exec"), namespace)
    return namespace


def by_message(policy: serving.Policy) -> Any:
    """An `answer` over a policy of the package, which sees only what the messages tell."""
    flights: dict[int, serving.Flight] = {}
    last = [serving.Schedule()]

    def answer(server: Any, now: float, come: list[Any], gone: list[int]) -> list[Any]:
        for number in last[0].preempt:
            flights[number].stored = 0
        for number, new in last[0].compute.items():
            flight = flights[number]
            flight.stored += new
            if flight.remaining == 0:
                flight.produced += 1
                flight.first_s = now if flight.produced == 1 else flight.first_s
        for number in (*last[0].drop, *gone):
            del flights[number]
        for row in come:
            demand = serving.Demand(
                row["id"], row["arrived"], row["prompt"], 10**9, row["class"], row["ttft"], row["tpot"]
            )
            flights[row["id"]] = serving.Flight(demand)
        last[0] = policy.schedule(now, list(flights.values()))
        return [[[n, new] for n, new in last[0].compute.items()], list(last[0].preempt), list(last[0].drop)]

    return local_ask({"answer": answer})


def test_the_yardsticks_are_those_of_the_package():
    demands = task.traffic(task.NOTEBOOK_SEED)
    got = []
    for name in ("first-come", "on-time"):
        policy = make_policy(name, task.CAPACITY, task.COST)
        got.append(serving.goodput(serving.run(serving.Server(task.COST, task.CAPACITY, policy), demands)))
    assert tuple(got) == task.YARDSTICK and got[0] < 0.25 and got[1] > 0.85


def test_the_students_start_is_first_come_first_served():
    result = task.score(local_ask(solution()), 7)
    assert result["ok"] and result["message"] == ""
    assert result["goodput"] == result["first_come"] < result["on_time"]
    assert {"live", "chat", "report"} < set(result) and result["live"] < result["report"]
    said = task.goodput(solution()["answer"])
    assert said.startswith("goodput 0.205 (live") and "to beat 0.890" in said


def test_the_better_policy_by_message_is_the_better_policy():
    result = task.score(by_message(make_policy("on-time", task.CAPACITY, task.COST)), 1)
    assert result["ok"] and result["goodput"] == result["on_time"] > 4 * result["first_come"]


def test_messages_tell_no_answer_length():
    seen: list[Any] = []

    def answer(server: Any, now: float, come: Any, gone: Any) -> Any:
        seen.append((server, come))
        return [[], [], [row["id"] for row in come]]

    result = task.score(local_ask({"answer": answer}), 0)
    assert result["ok"] and result["goodput"] == 0.0
    assert {key for _, come in seen for row in come for key in row} == {
        "id",
        "class",
        "arrived",
        "prompt",
        "ttft",
        "tpot",
    }
    assert [server is not None for server, _ in seen] == [True] + [False] * (len(seen) - 1)
    assert set(seen[0][0]) == {"kv_tokens", "step_tokens", "max_batch", "fixed_s", "prefill_s", "decode_s", "kv_s"}


WRONG: dict[str, tuple[str, str]] = {
    "garbage": ("return 'run all of them'", "a step is [[[id, tokens], ...]"),
    "nothing": ("return None", "a step is [[[id, tokens], ...]"),
    "two parts": ("return [[], []]", "a step is [[[id, tokens], ...]"),
    "no pairs": ("return [[r['id'] for r in come], [], []]", "a pair [id, tokens] of whole numbers"),
    "floats": ("return [[[r['id'], 1.0] for r in come], [], []]", "a pair [id, tokens] of whole numbers"),
    "truth": ("return [[[r['id'], True] for r in come], [], []]", "a pair [id, tokens] of whole numbers"),
    "ids of text": ("return [[], ['0'], []]", "an id is a whole number"),
    "unknown ids": ("return [[[10**6, 1]], [], []]", "request 1000000 is not there"),
    "unknown drops": ("return [[], [], [-1]]", "request -1 is not there"),
    "negative tokens": ("return [[[r['id'], -5] for r in come], [], []]", "tokens to compute, not -5"),
    "more than is missing": ("return [[[r['id'], 10**9] for r in come], [], []]", "to compute, not 1000000000"),
    "over the budget": ("return [[[r['id'], r['prompt']] for r in come], [], []]", "tokens in one step, 2048 at most"),
    "named twice": ("return [[[r['id'], 1] for r in come] * 2, [], []]", "is named twice"),
    "computes and drops": ("return [[[r['id'], 1] for r in come], [], [r['id'] for r in come]]", "is named twice"),
    "everybody waits": ("return [[], [], []]", "and none computes"),
    "an exception": ("return 1 / 0", "ZeroDivisionError"),
    "a huge number": ("return [[[10**200, 1]], [], []]", "cannot be graded"),
    "an endless loop": ("while True: pass", "no answer in time"),
    "a step too large to send": ("return [[[0, 1]] * 10**6, [], []]", "more than 1000000 items|larger than"),
    "leaves": ("import os; os._exit(0)", "ended with exit code 0"),
}  # fmt: skip


@pytest.mark.skipif(
    shutil.which("bwrap") is None and os.environ.get("CI") != "true", reason="no bubblewrap: the grader needs it"
)
@pytest.mark.parametrize("name", WRONG)
def test_a_step_that_cannot_be_run_ends_the_run_in_the_sandbox(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(task, "REQUESTS", 30)
    body, words = WRONG[name]
    result = graded(tmp_path, f"def answer(server, now, come, gone):\n    {body}\n")
    assert not result["ok"] and result["goodput"] is None and result["live"] is None
    assert any(word in result["message"] for word in words.split("|")), result["message"]
    assert result["message"].isprintable() and result["first_come"] <= result["on_time"]


@pytest.mark.skipif(
    shutil.which("bwrap") is None and os.environ.get("CI") != "true", reason="no bubblewrap: the grader needs it"
)
def test_the_start_in_the_sandbox(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(task, "REQUESTS", 60)
    result = graded(tmp_path, code())
    assert result["ok"] and result["goodput"] == result["first_come"], result["message"]


@pytest.mark.skipif(
    shutil.which("bwrap") is None and os.environ.get("CI") != "true", reason="no bubblewrap: the grader needs it"
)
def test_the_solution_notebook_gets_all_points_from_the_grader(monkeypatch: Any) -> None:
    """Names of its later cells, which use the engine, must not be taken for those of the exercises."""
    monkeypatch.setattr(task, "REQUESTS", 30)
    result = grade_one(open_course(REPO, "a3"), SOURCE.with_suffix(".ipynb"), seed=3, limits=Limits(), sandbox=True)
    assert [c["message"] for c in result["checks"] if c["message"]] == []
    assert result["score"] == result["max_score"] > 60 and result["open_task"]["ok"]


def graded(folder: Path, source: str) -> dict[str, Any]:
    """What the grader says of the open task of a submission."""
    (folder / "a3.py").write_text(f"# %%\n{source}\n", encoding="utf-8")
    course = dataclasses.replace(open_course(REPO, "a3"), public=(), hidden=())
    limits = Limits(wall_s_per_question=3, memory_bytes=512 * 2**20)
    return grade_one(course, folder / "a3.py", seed=3, limits=limits, sandbox=True)["open_task"]


def test_the_module_is_found_by_the_grader():
    assert importlib.util.find_spec("cs336_infer.course.a3_open_task") and callable(task.score)
