"""The engine in a thread of its own: requests from any thread in, events out, until it is stopped.

Only this thread touches the engine. Whoever submits gives a function that takes the events; it is called here and must
be quick: a server hands them to its event loop. A reader that is slow or gone costs text in a queue, at most
`max_tokens` small pieces, and never the engine's time.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cs336_infer.engine.llm import LLM
from cs336_infer.engine.sequence import Sequence
from cs336_infer.types import NO_TOKEN, Completion, FinishReason, InferError, SamplingParams, TokenEvent

log = logging.getLogger(__name__)


class Stopped(InferError):
    """The engine has been stopped, or is stopping and takes no new requests."""


@dataclass(eq=False)
class Ticket:
    """A submitted request. `index` of its events is the number of the answer, from 0."""

    ids: list[int]
    params: SamplingParams
    n: int
    salt: str | None
    priority: int
    timeout_s: float | None
    deliver: Callable[[TokenEvent], None]
    refused: Callable[[InferError], None]
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def completions(self) -> list[Completion]:
        """What its answers are by now; complete when every one has a finish reason."""
        return [s.completion for s in self.sequences]


class Runner:
    """Runs an `LLM` with paged KV memory.

    Args:
        on_end: called in the engine's thread with every answer that is over, whyever.

    Attributes:
        failures: steps that raised something unexpected; the sequences that ran then ended with an error.
    """

    def __init__(self, llm: LLM, on_end: Callable[[Completion], None] | None = None) -> None:
        self.llm, self.engine = llm, llm.engine
        self._on_end = on_end or (lambda _: None)
        self.failures = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, tuple[Ticket, int]] = {}
        self._state = "new"
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        self._state = "running"
        self._thread.start()

    @property
    def accepting(self) -> bool:
        return self._state == "running" and self._thread.is_alive()

    @property
    def requests(self) -> int:
        """Answers on their way."""
        return len(self._tickets)

    def submit(
        self,
        ids: list[int],
        params: SamplingParams,
        deliver: Callable[[TokenEvent], None],
        refused: Callable[[InferError], None],
        *,
        n: int = 1,
        salt: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Ticket:
        """A request. `deliver` gets its events, `refused` the reason when the engine does not take it. The rest is as
        for `Engine.add`; the seconds of `timeout_s` begin when the engine's thread takes it.

        Raises:
            Stopped: no requests are taken any more.
        """
        if not self.accepting:
            raise Stopped("the engine is stopping and takes no new requests")
        ticket = Ticket(ids, params, n, salt, priority, timeout_s, deliver, refused)
        self._inbox.put(lambda: self._add(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End what is left of a request; its KV blocks are free before the next step."""
        self._inbox.put(lambda: self._cancel(ticket))

    def stop(self, drain_s: float = 30.0) -> bool:
        """Take no new requests, finish those that are on their way, and end the thread.

        Returns:
            False when `drain_s` seconds were not enough and the rest was cancelled.
        """
        if self._state == "new":
            self._state = "stopped"
            return True
        self._state = "draining"
        self._inbox.put(lambda: None)
        self._thread.join(drain_s)
        drained = not self._thread.is_alive()
        self._state = "stopped"
        self._inbox.put(lambda: None)
        self._thread.join()
        return drained

    def _work(self) -> None:
        while True:
            self._read_inbox(wait=not self.engine.busy and self._state == "running")
            if self._state == "stopped":
                for ticket, _ in list(self._tickets.values()):
                    self._cancel(ticket)
                return
            if self.engine.busy:
                self._step()
            elif self._state == "draining" and self._inbox.empty():
                return

    def _read_inbox(self, *, wait: bool) -> None:
        try:
            self._inbox.get(block=wait)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _step(self) -> None:
        try:
            events = self.engine.step()
        except Exception as error:  # one bad step must not end the service; its sequences cannot be trusted any more
            self.failures += 1
            log.exception("a step of the engine failed")
            reason = InferError(f"the engine failed: {type(error).__name__}")
            events = [self.engine.fail(sequence, reason) for sequence in list(self.engine.running)]
        for event in events:
            ticket, answer = self._tickets.get(event.index, (None, 0))
            if event.finish_reason is not None:
                self._tickets.pop(event.index, None)
            if ticket is not None:
                self._deliver(ticket, replace(event, index=answer))

    def _add(self, ticket: Ticket) -> None:
        try:
            ticket.sequences = self.engine.add(
                ticket.ids,
                ticket.params,
                self.llm.root(ticket.salt),
                n=ticket.n,
                priority=ticket.priority,
                timeout_s=ticket.timeout_s,
            )
        except InferError as error:
            ticket.refused(error)
            return
        for answer, sequence in enumerate(ticket.sequences):
            self._tickets[sequence.number] = ticket, answer

    def _cancel(self, ticket: Ticket) -> None:
        for answer, sequence in enumerate(ticket.sequences):
            if not sequence.ended:
                self.engine.cancel(sequence)
                self._tickets.pop(sequence.number, None)
                self._deliver(ticket, TokenEvent(answer, NO_TOKEN, "", FinishReason.CANCELLED))

    def _deliver(self, ticket: Ticket, event: TokenEvent) -> None:
        try:
            if event.finish_reason is not None:
                self._on_end(ticket.completions[event.index])
            ticket.deliver(event)
        except Exception:  # its reader is gone, for example with its event loop
            log.debug("an event had no reader", exc_info=True)
