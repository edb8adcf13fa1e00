"""Everything an agent knows about its ranks, in one object: events in, metrics, timeline and passes out.

Each agent accounts for the ranks whose workers are in its pod and exports those. The leader also follows the
other ranks: it gets their passes with the heartbeat and accounts for them a second time, on their own clocks,
for the timeline and the chunk times only.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prefill_runtime.profiling.document import CalibrationDocument
from prefill_runtime.scheduler.cost import StageModel
from prefill_runtime.telemetry import account, svg
from prefill_runtime.telemetry.account import RankAccount, State
from prefill_runtime.telemetry.events import (
    Decoder,
    Event,
    Finish,
    Hello,
    Idle,
    Issue,
    Pass,
    Queue,
    Request,
    Served,
    WorkerEvent,
    to_wire,
)  # fmt: skip
from prefill_runtime.telemetry.first_tokens import FirstTokens
from prefill_runtime.telemetry.floor import FloorMeter
from prefill_runtime.telemetry.metrics import CalibrationCollector, LeaderMetrics, RankCollector, exposition
from prefill_runtime.telemetry.timeline import Period, Timeline
from prometheus_client import CollectorRegistry

_UNSENT_PASSES = 4096
_BEAT_CHUNKS = 16384
"""More would make a beat that its receiver takes for garbage."""
_KNOWN_REQUESTS = 65536
GRACE_SECONDS = 5.0
"""How long an ended busy period waits for passes of other ranks: some heartbeats."""


class Hub:
    """Passive: it has no timers and does its upkeep when it is fed or asked.

    ``rank`` is the pod's first pipeline rank, ``ranks`` the pipeline's size, ``least_chunk`` the smallest chunk that it
    may cut. Remote events carry the sending host's clock; leader time = remote time + ``clock_offset``. ``on_pass``
    gets the passes of all ranks known here, each with how far its clock, the rank's own, is ahead of this one.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        leader: bool,
        *,
        least_chunk: int = 1,
        on_pass: Callable[[Pass, float], None] = lambda *_: None,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._rank, self._ranks, self._leader = rank, ranks, leader
        self._on_pass, self._now = on_pass, now
        self._local: dict[int, RankAccount] = {}
        self._remote: dict[int, RankAccount] = {}
        self._offsets: dict[int, float] = {}
        self._timeline = Timeline(ranks)
        self._unsent: deque[Pass] = deque()
        self._idle: tuple[int, float] | None = None
        self._requests: OrderedDict[str, None] = OrderedDict()
        self._first_tokens = FirstTokens()
        self._waiting: int | None = None
        self._lost = 0
        self.decoder = Decoder()
        """Give it to the socket server, so that what it cannot read is counted here."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(RankCollector(self._totals, self._ratios, self._dropped))
        self._floor = FloorMeter(ranks, least_chunk)
        self._calibration = CalibrationCollector(lambda: self._floor.value, wall)
        self._metrics: LeaderMetrics | None = None
        if leader:
            self._registry.register(self._calibration)
            self._metrics = LeaderMetrics(self._registry)

    # -- events in

    def feed(self, event: Event) -> None:
        """An event of an engine process of this pod."""
        self._lost += event.dropped
        match event:
            case Hello(role="worker"):
                self._account(event.rank)
            case Hello(role="scheduler"):
                self._waiting = 0
            case WorkerEvent():
                self._worker(event)
            case _:
                self._scheduler(event)

    def feed_remote(self, rank: int, events: Sequence[Mapping[str, Any]], clock_offset: float) -> None:
        """Leader: what the agent whose first rank is ``rank`` got from ``drain_for_leader``."""
        for wire in events:
            event = self.decoder.wire(wire)
            if not isinstance(event, Pass):
                continue
            if event.rank < 0:
                event.rank = rank
            if event.rank not in self._remote:
                self._remote[event.rank] = RankAccount(event.call - event.stamp.host_seconds)
            self._offsets[event.rank] = clock_offset
            self._remote[event.rank].feed(event)
            self._on_pass(event, -clock_offset)
            if self._metrics is not None:
                self._metrics.feed(event)
        self._upkeep()

    def set_pipeline_idle(self, period: int, idle_seconds: float) -> None:
        """Follower: the leader says that busy period ``period`` ended ``idle_seconds`` ago."""
        now = self._now()
        for rank in self._local.values():
            rank.pipeline_idle(period, now - idle_seconds, now)

    def set_calibration(self, document: CalibrationDocument | None) -> None:
        """The calibration that is in force from now on."""
        self._calibration.document = document
        self._floor.stages = stages = () if document is None else tuple(map(StageModel.of, document.stages))
        if self._metrics is not None:
            self._metrics.predict_with(stages)

    def set_drift(self, ratio: float | None) -> None:
        """Median relative error of the calibration over the recent passes."""
        self._calibration.drift = ratio

    # -- out

    def drain_for_leader(self) -> list[dict[str, Any]]:
        """Follower: what happened since the last call, ready for JSON; what is too much for one beat comes with the
        next."""
        events, chunks = [], 0
        while self._unsent and chunks < _BEAT_CHUNKS:
            event = self._unsent.popleft()
            chunks += len(event.stamp.chunks)
            events.append(to_wire(event))
        return events

    def pipeline_idle(self) -> tuple[int, float] | None:
        """Leader: arguments for the followers' ``set_pipeline_idle``, or None while a prefill is in flight."""
        return None if self._idle is None else (self._idle[0], max(0.0, self._now() - self._idle[1]))

    def metrics_text(self) -> bytes:
        self._upkeep()
        return exposition(self._registry)

    def timeline(self) -> dict[str, Any]:
        """Leader: the document described in ``timeline.py``."""
        return self.timeline_snapshot()()

    def timeline_snapshot(self) -> Callable[[], dict[str, Any]]:
        """Makes the document of this moment, in any thread: that of a long period takes a while."""
        self._upkeep()
        accounts = [(rank, a, 0.0) for rank, a in self._local.items()]
        accounts += [(rank, a, self._offsets[rank]) for rank, a in self._remote.items()]
        return self._timeline.snapshot({r: (a.current, offset) for r, a, offset in accounts if a.current is not None})

    def timeline_svg(self) -> str:
        return svg.render(self.timeline())

    def running_requests(self) -> int | None:
        """Requests that wait or run in the engine; None when its scheduler does not report here."""
        return None if self._waiting is None else len(self._requests) + self._waiting

    # -- inside

    def _account(self, rank: int) -> RankAccount:
        if rank not in self._local:
            self._local[rank] = RankAccount(self._now())
        return self._local[rank]

    def _worker(self, event: WorkerEvent) -> None:
        if event.rank < 0:
            event.rank = self._rank
        self._account(event.rank).feed(event)
        if not isinstance(event, Pass):
            return
        self._on_pass(event, 0.0)
        if self._metrics is not None:
            self._metrics.feed(event)
        elif event.stamp.period:  # of no other does the leader keep anything
            if len(self._unsent) >= _UNSENT_PASSES:
                self._unsent.popleft()
                self._lost += 1
            self._unsent.append(replace(event, stamp=event.stamp.folded()))

    def _scheduler(self, event: Event) -> None:
        match event:
            case Issue():
                if event.stamp.period:
                    self._idle = None
                self._timeline.issue(event)
                self._floor.issue(event)
                for chunk in event.stamp.chunks:
                    self._requests[chunk.request] = None
                while len(self._requests) > _KNOWN_REQUESTS:
                    self._requests.popitem(last=False)
            case Idle():
                self._idle = (event.period, event.at)
                self._timeline.idle(event, self._now())
                self._floor.idle(event)
                for rank in self._local.values():
                    rank.pipeline_idle(event.period, event.at, self._now())
            case Request():
                self._timeline.request(event)
                self._served(self._first_tokens.request(event))
            case Served():
                self._served(self._first_tokens.served(event))
            case Finish():
                self._requests.pop(event.request, None)
            case Queue():
                self._waiting = event.waiting
            case _:
                pass
        if self._metrics is not None:
            self._metrics.feed(event)

    def _served(self, first_tokens: list[tuple[int, float]]) -> None:
        for prompt_tokens, ttft in first_tokens:
            if self._metrics is not None:
                self._metrics.first_token(prompt_tokens, ttft)

    def _upkeep(self) -> None:
        """Complete what can be completed: each ended period, as soon as all its passes are here."""
        now = self._now()
        for period in self._timeline.unfinished():
            late = period.ended_heard is not None and now - period.ended_heard > GRACE_SECONDS
            for rank, local in self._local.items():
                self._finish(period, rank, local, 0.0, late)
            for rank, remote in self._remote.items():
                self._finish(period, rank, remote, self._offsets[rank], late)
            period.closed = late
        for local in self._local.values():
            local.settle(now)
        self._collect()

    def _finish(self, period: Period, rank: int, ranks: RankAccount, offset: float, late: bool) -> None:
        current = ranks.current
        if current is None or current.period != period.number or period.end is None:
            return
        if late or current.through >= period.last_batch:
            ranks.pipeline_idle(period.number, period.end - offset, self._now())
            ranks.settle(self._now(), grace=0.0)
            self._collect()

    def _collect(self) -> None:
        for rank, local in self._local.items():
            for window in local.completed():
                self._timeline.window(rank, window, 0.0)
        for rank, remote in self._remote.items():
            for window in remote.completed():
                self._timeline.window(rank, window, self._offsets[rank])

    def _totals(self) -> dict[int, dict[State, float]]:
        now = self._now()
        return {rank: a.totals(now) for rank, a in sorted(self._local.items())}

    def _ratios(self) -> dict[int, float]:
        ratios = {}
        for rank, a in sorted(self._local.items()):
            ratio = account.bubble_ratio(a.busy)
            if ratio is not None:
                ratios[rank] = ratio
        return ratios

    def _dropped(self) -> int:
        return self._lost + self.decoder.malformed + self.decoder.unknown
