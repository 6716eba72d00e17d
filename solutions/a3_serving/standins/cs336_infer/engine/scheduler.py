"""Who runs: your `schedule_step`, once it is plugged in. Below is what the engine asks of a scheduler."""

from __future__ import annotations

from typing import Any

from cs336_infer.engine.roster import Roster
from cs336_infer.engine.sequence import Sequence
from cs336_infer.types import InferError

Plan = list[tuple[Sequence, int]]


class Scheduler(Roster):
    """A roster that asks your function."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        from cs336_infer.course.a3_sockets import PluggedScheduler

        return PluggedScheduler(*args, **kwargs)

    def next(self) -> tuple[Plan, list[tuple[Sequence, InferError]]]: ...
