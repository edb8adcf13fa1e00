"""What the scheduler tells the agent: batches, requests, the queue. Nothing here can block or fail a request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prefill_runtime.engine.finished import names_of
from prefill_runtime.engine.guard import harmless
from prefill_runtime.scheduler.load import Load
from prefill_runtime.telemetry.clock import SchedulerClock
from prefill_runtime.telemetry.events import (
    Chunk,
    Fallback,
    Finish,
    Hello,
    Idle,
    Issue,
    Queue,
    Request,
    Settle,
)
from prefill_runtime.telemetry.sender import Sender

STAMP = "prefill_stamp"
QUEUE_SECONDS = 0.25  # counting a long queue is not free


@dataclass(slots=True)
class _Open:
    """A request that has not finished."""

    arrival: float
    prompt_tokens: int
    queue: float = 0.0
    scheduled: bool = False
    answered: bool = False


class Journal:
    """Times are taken here, so each method is called at the moment it describes."""

    def __init__(self, socket: str | None, engine_version: str) -> None:
        self._sender = Sender(socket, Hello(role="scheduler", rank=0, engine_version=engine_version))
        self._socket = socket
        if socket is not None:
            self._sender.flush()  # says hello
        now = time.monotonic()
        self._clock, self.load = SchedulerClock(now), Load(now)
        self._open: dict[str, _Open] = {}
        self._inflight = 0
        self._handing_over = False
        self._queue_at = 0.0
        self._busy = False, False

    @harmless
    def fell_back(self, reason: str) -> None:
        self._sender.send(Fallback(reason=reason))

    @harmless
    def arrived(self, request: Any) -> None:
        now = self._now()
        self._clock.on_ready(now)
        self.load.arrived()
        self._open.setdefault(request.request_id, _Open(request.arrival_time, request.num_prompt_tokens))

    @harmless
    def asked(self) -> None:
        """The engine asks for a batch, so the executor has taken the one before."""
        self._now()

    @harmless
    def issued(self, output: Any, requests: Mapping[str, Any], policy: str) -> None:
        """``output`` is composed; computed tokens of its requests have been advanced already."""
        if not output.num_scheduled_tokens:
            return
        chunks = []
        for name, tokens in output.num_scheduled_tokens.items():
            request = requests[name]
            chunks.append(Chunk(name, request.num_computed_tokens - tokens, tokens, request.num_prompt_tokens))
            opened = self._open.get(name)
            if opened is not None and not opened.scheduled:
                opened.scheduled, opened.queue = True, max(0.0, time.time() - opened.arrival)
        now = time.monotonic()
        stamp = self._clock.on_issue(now, chunks)
        setattr(output, STAMP, stamp)
        if stamp.period:
            self.load.changed(now, busy=True)
        self._inflight += 1
        self._handing_over = True
        self._sender.send(Issue(stamp=stamp, at=now, policy=policy))

    @harmless
    def returned(self, output: Any) -> None:
        """A batch's result is back."""
        now = self._now()
        stamp = getattr(output, STAMP, None)
        if stamp is None:
            return
        self._inflight -= 1
        ended = self._clock.on_settle(now, stamp.batch)
        self._sender.send(Settle(batch=stamp.batch, at=now))
        if ended is not None:
            self.load.changed(now, busy=False)
            self._sender.send(Idle(period=ended, at=now))

    @harmless
    def answered(self, outputs: Mapping[int, Any]) -> None:
        """Tokens are on their way to the clients."""
        now, wall = time.monotonic(), time.time()
        for group in outputs.values():
            for output in group.outputs:
                opened = self._open.get(output.request_id)
                if opened is not None and output.new_token_ids and not opened.answered:
                    opened.answered = True
                    self._sender.send(
                        Request(
                            request=output.request_id,
                            prompt_tokens=opened.prompt_tokens,
                            ttft=max(0.0, wall - opened.arrival),
                            queue=opened.queue,
                            at=now,
                            arrival=opened.arrival,
                        )
                    )
                if output.finish_reason is not None:
                    self._close(output.request_id, str(output.finish_reason))

    @harmless
    def ended(self, finished: Iterable[Any] | None, outcome: str) -> None:
        """Requests ended from outside: aborted by the client, or failed."""
        for name in names_of(finished):
            self._close(name, outcome)

    @harmless
    def queued(self, queues: Iterable[Iterable[Any]]) -> None:
        """Tells the queue's length and the batches in flight, at once when one of them reaches or leaves zero and
        else at most every QUEUE_SECONDS.
        """
        now = time.monotonic()
        busy = any(queues), self._inflight > 0
        if busy == self._busy and (now < self._queue_at or not any(busy)):
            return
        self._queue_at, self._busy = now + QUEUE_SECONDS, busy
        waiting = [request.num_tokens - request.num_computed_tokens for queue in queues for request in queue]
        self._sender.send(Queue(waiting=len(waiting), waiting_tokens=sum(waiting), inflight=self._inflight, at=now))

    def heard(self) -> list[dict[str, Any]]:
        """What the agent has said since the last call; never waits."""
        return self._sender.received()

    @harmless
    def close(self) -> None:
        if self._socket is not None:
            self._sender.flush(timeout=0.2)
        self._sender.close()

    def _close(self, name: str, outcome: str) -> None:
        if self._open.pop(name, None) is not None:  # an end is told once
            self._sender.send(Finish(request=name, outcome=outcome))

    def _now(self) -> float:
        """The first call after a batch was issued also says that the executor has taken it."""
        now = time.monotonic()
        if self._handing_over:
            self._handing_over = False
            self._clock.on_issued(now)
        return now
