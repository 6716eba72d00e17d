"""Checks of an assignment, written once: the student's notebook, the hidden checks and the grader run the same ones.

    @check("causal_attention", points=2, title="no query sees the future")
    def no_future(ask: Ask, rng: np.random.Generator) -> None:
        weights = ask("causal_attention", rng.normal(size=(5, 8)))
        if weights[3, 4] != 0:
            fail("row 3 attends to position 4, which is after it")

    check_public = make_check(__name__)      # in a notebook: check_public(causal_attention)

A check never calls the student's function itself: it asks by name. In a notebook the answer comes from this process
(`local_ask`), in the grader from a sandbox. Both hand over copies, so neither side can change what the other holds.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

import numpy as np

from cs336_infer.course.ask import LONGEST, NOT_DONE, Ask, AskError, describe, globals_of, local_ask, one_line
from cs336_infer.course.expect import CheckFailed, expect_close, expect_equal, expect_shape, fail, listed
from cs336_infer.types import InferError

__all__ = [
    "ALL_PASSED", "NOT_DONE", "Ask", "AskError", "Check", "CheckDeclarationError", "CheckFailed", "NotPassed",
    "Outcome", "Report", "Result", "check", "checks_of", "expect_close", "expect_equal", "expect_shape", "fail",
    "listed", "local_ask", "make_check", "notebook_check", "run",
]  # fmt: skip

CheckFunction = Callable[[Ask, np.random.Generator], None]

ALL_PASSED = "public checks passed; hidden checks not run"


class CheckDeclarationError(InferError, ValueError):
    """A check is declared wrongly, or there is none where one was asked for."""


class NotPassed(InferError):
    """Public checks of a notebook cell did not pass. A notebook shows its one line instead of a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_DONE = "not done"
    CHECK_ERROR = "check error"  # the check itself is at fault


@dataclass(frozen=True)
class Check:
    exercise: str
    title: str
    points: float
    function: CheckFunction


@dataclass(frozen=True)
class Result:
    """What one check said. `message` is one line, empty when it passed."""

    exercise: str
    title: str
    points: float
    score: float
    outcome: Outcome
    message: str = ""


@dataclass(frozen=True)
class Report:
    results: tuple[Result, ...]

    @property
    def score(self) -> float:
        return sum(r.score for r in self.results)

    @property
    def max_score(self) -> float:
        """Points of all checks, those with a check error too: a crash of a check must not be worth anything."""
        return sum(r.points for r in self.results)

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(r.outcome is Outcome.PASSED for r in self.results)

    def to_dict(self) -> dict[str, Any]:
        checks = [{**asdict(r), "outcome": r.outcome.value} for r in self.results]
        return {"score": self.score, "max_score": self.max_score, "checks": checks}

    @property
    def text(self) -> str:
        """For a notebook: the checks of each exercise, then one line that sums up."""
        lines: list[str] = []
        for exercise in dict.fromkeys(r.exercise for r in self.results):
            own = [r for r in self.results if r.exercise == exercise]
            lines.append(f"{exercise}: {sum(r.score for r in own):g} of {sum(r.points for r in own):g} points")
            for r in own:
                lines.append(f"  {r.outcome:<11} {r.title}" + (f": {r.message}" if r.message else ""))
        count = sum(r.outcome is Outcome.PASSED for r in self.results)
        part = f"{count} of {len(self.results)} public checks passed, {self.score:g} of {self.max_score:g} points"
        return "\n".join([*lines, ALL_PASSED if self.passed else f"{part}; hidden checks not run"])


def check(exercise: str, *, points: float, title: str) -> Callable[[CheckFunction], CheckFunction]:
    """Add the decorated function to the `CHECKS` of its module.

    Raises:
        CheckDeclarationError: a title is empty or taken, or `points` is not a finite number >= 0.
    """
    if not exercise.strip() or not title.strip() or "\n" in title:
        raise CheckDeclarationError(f"a check needs an exercise and a title of one line, not {exercise!r}, {title!r}")
    if not (math.isfinite(points) and points >= 0):
        raise CheckDeclarationError(f"the points of {title!r} must be a finite number >= 0, not {points!r}")

    def register(function: CheckFunction) -> CheckFunction:
        known: list[Check] = function.__globals__.setdefault("CHECKS", [])
        new = Check(exercise, title, points, function)
        for place, old in enumerate(known):
            if old.title == title:
                if _place(old.function) != _place(function):
                    raise CheckDeclarationError(f"two checks have the title {title!r}; give each its own")
                known[place] = new  # the module was loaded again
                return function
        known.append(new)
        return function

    return register


def _place(function: CheckFunction) -> tuple[str, str, int]:
    code = inspect.unwrap(function).__code__
    return function.__qualname__, code.co_filename, code.co_firstlineno


def checks_of(module: ModuleType | str) -> tuple[Check, ...]:
    """The checks that `module` defines, in order."""
    module = importlib.import_module(module) if isinstance(module, str) else module
    return tuple(getattr(module, "CHECKS", ()))


def run(checks: ModuleType | str | Iterable[Check], ask: Ask, *, seed: int) -> Report:
    """Run each check with random numbers that depend on `seed` and its title only.

    Whatever `ask` raises is the student's failure (`KeyboardInterrupt` and its like excepted); what else a check
    raises is an error of that check.
    """
    chosen = checks_of(checks) if isinstance(checks, ModuleType | str) else checks
    return Report(tuple(_run_one(c, ask, seed) for c in chosen))


def _run_one(one: Check, ask: Ask, seed: int) -> Result:
    def guarded(name: str, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return ask(name, *args, **kwargs)
        except AskError:
            raise
        except (Exception, SystemExit) as error:
            raise AskError(describe(error), type(error).__name__) from None

    def result(outcome: Outcome, message: str = "", share: float = 0) -> Result:
        return Result(one.exercise, one.title, one.points, one.points * share, outcome, one_line(message))

    digest = hashlib.sha256(f"{seed}\n{one.title}".encode()).digest()
    try:
        one.function(guarded, np.random.default_rng(int.from_bytes(digest)))
    except CheckFailed as failed:
        return result(Outcome.FAILED, str(failed), failed.share)
    except AskError as error:
        return result(Outcome.NOT_DONE if str(error) == NOT_DONE else Outcome.FAILED, str(error))
    except Exception as error:
        said = one_line(f"{type(error).__name__}: {error}", LONGEST - 80)
        return result(Outcome.CHECK_ERROR, f"{said}; the check itself is at fault, not your code: please report it")
    return result(Outcome.PASSED, share=1)


def notebook_check(
    module: ModuleType | str, functions: Mapping[str, Any] | Iterable[Any], exercise: str | None = None, seed: int = 0
) -> None:
    """What a notebook cell calls: run the public checks, print the report.

    Args:
        functions: the student's functions, whose names choose the exercises, or a namespace such as `globals()`.
        exercise: the one to check, where its name is not that of a function.

    Raises:
        NotPassed: a check failed or its function is not done yet.
        CheckDeclarationError: there is no check for what was given.
    """
    checks = checks_of(module)
    if isinstance(functions, Mapping):
        wanted, found = {c.exercise for c in checks}, functions
    else:
        own = {str(getattr(f, "__name__", f)): f for f in functions}
        wanted, found = set(own), ChainMap(own, *map(globals_of, own.values()))
    wanted = {exercise} if exercise is not None else wanted
    chosen = [c for c in checks if c.exercise in wanted]
    if not chosen:
        have = ", ".join(dict.fromkeys(c.exercise for c in checks)) or "nothing"
        raise CheckDeclarationError(
            f"no check for {', '.join(sorted(wanted)) or 'nothing'}; there are some for: {have}"
        )
    report = run(chosen, local_ask(found), seed=seed)
    print(report.text)
    missed = sum(r.outcome in (Outcome.FAILED, Outcome.NOT_DONE) for r in report.results)
    if missed:
        raise NotPassed(f"{missed} of {len(report.results)} public checks did not pass")


def make_check(module_name: str) -> Callable[..., None]:
    """The `check(function, ...)` that an assignment's module offers to its notebook; see `notebook_check`."""

    def check_functions(*functions: Any, exercise: str | None = None) -> None:
        notebook_check(module_name, functions, exercise)

    return check_functions
