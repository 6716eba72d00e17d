"""What a graded cell runs where nbgrader or otter executes a student's notebook: all checks of an exercise, by name.

There the student's code shares this process, so it could forge its score; `cs336-infer grade` is the grader that it
cannot forge. A check cell of the nbgrader source is

    # BEGIN HIDDEN TESTS
    from cs336_infer.course import graded_cell
    check_public = graded_cell.later
    # END HIDDEN TESTS
    check_public(rope)
    # BEGIN HIDDEN TESTS
    graded_cell.points("a1_prefill_decode", "rope", globals(), ["apply_rope"])
    # END HIDDEN TESTS

nbgrader takes the number that the last line gives for the points. A hidden check says its property and nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from cs336_infer.course.ask import Ask, AskError, local_ask
from cs336_infer.course.checks import Check, CheckFailed, Outcome, Result, checks_of, run
from cs336_infer.course.forbidden import ForbiddenCall, Guard, scan
from cs336_infer.types import InferError

HIDDEN_FOLDER = "CS336_INFER_HIDDEN_CHECKS"
"""Variable with the folder of the hidden checks; `nbgrader_config.py` sets it, and otter's zip carries the folder."""

SEED = "CS336_INFER_SEED"
"""Variable with the seed of the random inputs; `nbgrader_config.py` draws one for all students of a command."""

SECONDS = 20.0
"""For one question, as in `cs336-infer grade`."""


class HiddenChecksMissing(InferError):
    """A graded cell runs where the hidden checks are not. One line with the folder."""


def later(*functions: Any, **options: Any) -> None:
    """In place of the public check of a graded cell: `points` runs the public checks together with the hidden ones."""


def points(
    assignment: str,
    exercise: str,
    namespace: Mapping[str, Any],
    forbidden: Sequence[str] = (),
    seed: int | None = None,
) -> float:
    """Run the public and hidden checks of an exercise, print what each said, give the points reached.

    Args:
        assignment: its name, such as "a1_prefill_decode".
        namespace: the student's functions by name, `globals()` of the notebook.
        forbidden: library calls that are refused and named, as in `cs336-infer grade`.
        seed: of the random inputs; None takes the one in `SEED`, or draws a fresh one.

    Raises:
        HiddenChecksMissing: the folder of the hidden checks is not known or lacks this assignment.
    """
    public, hidden = checks_of(f"cs336_infer.course.{assignment}"), checks_of(_hidden_module(assignment))
    total = 0.0
    for checks, secret in ((public, False), (hidden, True)):
        for one in (c for c in checks if c.exercise == exercise):
            result = _result(one, _limited(namespace, forbidden), seed)
            total += result.score
            print(_line(result, secret))
    return total


def passes(
    assignment: str,
    title: str,
    namespace: Mapping[str, Any],
    forbidden: Sequence[str] = (),
    hidden: bool = False,
    seed: int | None = None,
) -> None:
    """One check, for otter: nothing when it passes.

    Raises:
        CheckFailed: one line; of a hidden check only its title.
        HiddenChecksMissing: see `points`.
    """
    module = _hidden_module(assignment) if hidden else f"cs336_infer.course.{assignment}"
    result = _result(next(c for c in checks_of(module) if c.title == title), _limited(namespace, forbidden), seed)
    if result.outcome is not Outcome.PASSED:
        raise CheckFailed(_line(result, hidden).strip())


def _result(one: Check, ask: Ask, seed: int | None) -> Result:
    if seed is None:
        seed = int(os.environ.get(SEED) or int.from_bytes(os.urandom(4)))
    return run([one], ask, seed=seed).results[0]


def _line(result: Result, secret: bool) -> str:
    if secret:
        message = result.message if result.outcome is Outcome.NOT_DONE else ""
        result = dataclasses.replace(result, message=message)
    said = f"{result.outcome:<11} {result.title}" + (f": {result.message}" if result.message else "")
    return f"{said} ({result.score:g} of {result.points:g} points{', hidden' if secret else ''})"


def _limited(namespace: Mapping[str, Any], forbidden: Sequence[str]) -> Ask:
    """Ask within `SECONDS`, without refused calls, and without what the student's code prints or shows: that would
    tell the inputs."""
    ask = local_ask(namespace)

    def limited(name: str, /, *args: Any, **kwargs: Any) -> Any:
        if found := _scanned(name, namespace, forbidden):
            raise AskError(found, "Refused")
        guard = Guard(name, forbidden)
        with _quiet(), _alarm(f"{name} took longer than {SECONDS:g} s"):
            try:
                with guard:
                    answer = ask(name, *args, **kwargs)
            except ForbiddenCall as refused:
                raise AskError(str(refused), "Refused") from None
        if guard.hit:
            raise AskError(guard.hit, "Refused")
        return answer

    return limited


def _scanned(function: str, namespace: Mapping[str, Any], forbidden: Sequence[str]) -> str | None:
    """What the cells executed so far (IPython keeps them in `_ih`) use for `function` although it is refused."""
    trees: list[ast.Module] = []
    for cell in namespace.get("_ih", []):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            trees.append(ast.parse(cell))
    return scan(trees, {function: forbidden}).get(function)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if "IPython" in sys.modules:
            from IPython.utils.capture import capture_output

            stack.enter_context(capture_output())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


@contextlib.contextmanager
def _alarm(message: str) -> Iterator[None]:
    """TimeoutError in the main thread after `SECONDS`; a call into a library is interrupted when it returns."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(message)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _hidden_module(assignment: str) -> ModuleType:
    """The hidden checks, loaded once: from the folder that was named, else `hidden/` here (otter's working folder)."""
    name = f"hidden_{assignment}"
    if name not in sys.modules:
        folder = Path(os.environ.get(HIDDEN_FOLDER, "hidden")).resolve()
        file = folder / f"{assignment}.py"
        if not file.is_file():
            raise HiddenChecksMissing(
                f"{file} is missing: run nbgrader in the folder that `make release NBGRADER=1` made"
            )
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
