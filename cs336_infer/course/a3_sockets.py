"""Where the functions and classes of assignment 3 sit in the engine: the scheduler, stop strings, the loop detector.

    plug_serving(schedule_step=schedule_step, StopFilter=StopFilter, watch_loops=watch_loops)

Nothing here does what an exercise asks for: students have this file too. What comes back from a student's code is
looked at before the engine uses it, and a fault is named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as ListOf
from typing import Any

from cs336_infer.course.plug import plug, plugged
from cs336_infer.course.sockets import SOCKETS, describe_path
from cs336_infer.engine.roster import OutOfCapacity, Roster
from cs336_infer.engine.sequence import Sequence
from cs336_infer.kv.pool import OutOfBlocks
from cs336_infer.types import InferError, InvalidRequest, LoopRule, short


def plug_serving(**functions: Callable[..., Any]) -> plug:
    """As `plug`; the names of assignment 3 have places too. An `LLM` takes the scheduler that is plugged in when it is
    made."""
    return plug(**functions)


# The scheduler --------------------------------------------------------------------------------------------------------

PARTS = ("admit", "compute", "preempt", "fail")
Failed = list[tuple[Sequence, InferError]]


class PluggedScheduler(Roster):
    """As the package's `Scheduler`, by the student's `schedule_step`.

    A request that comes in may find some of its tokens in KV memory, which is known only when it has come in: then the
    function is asked a second time, with nobody waiting, for the step itself.
    """

    def next(self) -> tuple[list[tuple[Sequence, int]], Failed]:
        """The next step: how many tokens each sequence computes, with room for them reserved; and who cannot go on.

        Raises:
            InferError: what `schedule_step` returned cannot be done, or leads nowhere.
        """
        failed: Failed = []
        if not self.waiting and not self.running:
            return [], failed
        step = self._ask(self.waiting)
        if self._let_in(step["admit"], failed):
            step = self._ask([])
        while True:
            for sequence in step["fail"]:
                failed.append((sequence, OutOfCapacity("KV memory is too small for it, even alone")))
                self.drop(sequence)
            for sequence in step["preempt"]:
                self.preempt(sequence)
            plan = step["compute"]
            if not plan and not failed:
                still = f"{len(self.running)} requests run, {len(self.waiting)} wait"
                raise InferError(f"schedule_step computes nothing, and {still}")
            if self._reserved(plan):
                return plan, failed
            if not step["preempt"]:
                asked = [[sequence.number, new] for sequence, new in plan]
                raise InferError(f"schedule_step computes more than fits into KV memory: {short(asked)}")
            step = self._ask([])  # blocks that others share did not come free with those who gave way

    def _let_in(self, admitted: list[Sequence], failed: Failed) -> bool:
        """They begin. Whether something is different from what the function was told."""
        changed = False
        for sequence in admitted:
            try:
                self.begin(sequence)
            except InferError as error:
                failed.append((sequence, error))
                self.drop(sequence)
                changed = True
            else:
                self.enter(sequence)
                changed = changed or sequence.stored > 0
        return changed

    def _reserved(self, plan: list[tuple[Sequence, int]]) -> bool:
        """Whether the step has room."""
        for sequence, new in plan:
            assert sequence.kv is not None
            try:
                self.kv.reserve(sequence.kv, new)
            except OutOfBlocks:
                return False
        return True

    def _ask(self, waiting: list[Sequence]) -> dict[str, Any]:
        """The student's step, with sequences instead of ids."""
        order = sorted((*waiting, *self.running), key=self.rank)
        rows = {s.number: self._values(s, place) for place, s in enumerate(order)}
        given = [[rows[s.number] for s in each] for each in (waiting, self.running)]
        size, free = self.kv.memory.block_size, self.kv.pool.available
        answer = plugged("schedule_step")(*given, free, size, self.step_tokens, self.max_batch)
        if not isinstance(answer, dict) or any(not isinstance(answer.get(part), list) for part in PARTS):
            raise InferError(f"schedule_step returned {short(answer)} to the engine, which expects lists {PARTS}")
        return _checked(answer, {s.number: s for s in waiting}, {s.number: s for s in self.running}, self.step_tokens)

    def _values(self, s: Sequence, place: int) -> dict[str, int]:
        """What the function is given. A last block that is shared does not count as held: it will be copied."""
        one_more = -(-(s.stored + 1) // self.kv.memory.block_size)
        blocks = one_more - self.kv.missing(s.kv, 1) if s.kv is not None else 0
        return {"id": s.number, "rank": place, "total": s.total, "stored": s.stored, "blocks": blocks}


def _checked(
    answer: dict[str, Any], waiting: dict[int, Sequence], running: dict[int, Sequence], step_tokens: int
) -> dict[str, Any]:
    """A student's step with sequences instead of ids.

    Raises:
        InferError: it names somebody in a place where they cannot be, or tokens that nobody has.
    """

    def named(part: str, number: Any, among: dict[int, Sequence]) -> Sequence:
        if type(number) is not int or number not in among:
            raise InferError(f"schedule_step: {part} names {short(number)}, not one of {short(sorted(among))}")
        return among.pop(number)

    step: dict[str, Any] = {"admit": [named("admit", number, dict(waiting)) for number in answer["admit"]]}
    runs = running | {s.number: s for s in step["admit"]}
    for part in ("preempt", "fail"):
        step[part] = [named(part, number, runs) for number in answer[part]]
    step["compute"] = []
    for pair in answer["compute"]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InferError(f"schedule_step: compute holds {short(pair)}, which is no [id, tokens]")
        sequence, new = named("compute", pair[0], runs), pair[1]
        if type(new) is not int or not 0 < new <= sequence.remaining:
            raise InferError(f"schedule_step: {short(pair)} of a request with {sequence.remaining} tokens to compute")
        step["compute"].append((sequence, new))
    if (total := sum(new for _, new in step["compute"])) > step_tokens:
        raise InferError(f"schedule_step computes {total} tokens, step_tokens is {step_tokens}")
    return step


# Text -----------------------------------------------------------------------------------------------------------------


class PluggedStops:
    """As the package's `StopStrings`, by the student's `StopFilter`. Without stop strings there is nothing to ask."""

    def __init__(self, stops: ListOf[str]) -> None:
        stops = [stops] if isinstance(stops, str) else list(stops)
        self._filter = plugged("StopFilter")(stops) if stops else None
        self._unshown = ""
        self.matched: str | None = None

    @property
    def held(self) -> str:
        """The text held back now."""
        return self._unshown if self.matched is None else ""

    def push(self, text: str) -> str:
        """Take more text, return what may be shown."""
        if self._filter is None or self.matched is not None:
            return text if self.matched is None else ""
        self._unshown += text
        shown = self._shown("push", self._filter.push(text))
        self.matched = self._filter.matched
        if self.matched is not None and not self._unshown.startswith(self.matched):
            raise InferError(f"StopFilter matched {short(self.matched)}, but the text goes on {short(self._unshown)}")
        return shown

    def flush(self) -> str:
        """The text held back when generation ended for another reason."""
        if self._filter is None or self.matched is not None:
            return ""
        return self._shown("flush", self._filter.flush())

    def _shown(self, method: str, text: Any) -> str:
        if not isinstance(text, str) or not self._unshown.startswith(text):
            raise InferError(f"StopFilter.{method} gave {short(text)}, the text goes on {short(self._unshown)}")
        self._unshown = self._unshown[len(text) :]
        return text


class PluggedLoops:
    """As the package's `LoopDetector`, by the student's `watch_loops`."""

    def __init__(self, rule: LoopRule, separators: Collection[int] = ()) -> None:
        if separators:
            raise InvalidRequest("watch_loops knows no separators: leave them out")
        self.rule, self._state = rule, None

    def push(self, token: int) -> Any:
        """Take the next token. The loop that it completes, or None."""
        from cs336_infer.text.loops import Loop

        rule = self.rule
        limits = (rule.max_period, rule.min_period, rule.min_copies, rule.min_tokens)
        answer = plugged("watch_loops")(self._state, [token], *limits)
        if not isinstance(answer, list | tuple) or len(answer) != 2 or not isinstance(answer[1], list):
            raise InferError(f"watch_loops returned {short(answer)} to the engine, which expects (state, periods)")
        self._state, found = answer
        if len(found) != 1 or type(found[0]) is not int or not 0 <= found[0] <= rule.max_period:
            raise InferError(f"watch_loops found {short(found)} after one token, which is no period")
        return Loop(found[0], max(rule.min_tokens, rule.min_copies * found[0])) if found[0] else None


_PATH: dict[str, Callable[..., Any]] = {"cs336_infer.models.load:LoadedModel.describe_path": describe_path}
SOCKETS.update(
    {
        "schedule_step": {"cs336_infer.engine.scheduler:Scheduler": PluggedScheduler, **_PATH},
        "StopFilter": {"cs336_infer.text.stop:StopStrings": PluggedStops, **_PATH},
        "watch_loops": {"cs336_infer.text.loops:LoopDetector": PluggedLoops, **_PATH},
    }
)
