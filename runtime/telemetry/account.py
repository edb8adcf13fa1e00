"""Where a rank's time goes: seconds by state, from its own events on its own clock.

The classification. A rank is always in a gap (it has no batch), waiting (it has a batch but not its input) or running
a pass. Running is ``compute``. What follows until the output is sent is ``transfer`` as far as this rank has ever
sent that much in that time; a blocking send that takes longer waits for its receiver, which is ``bubble_imbalance``
like any wait for a peer. Waiting is ``bubble_fill`` for the rank's first pass of a busy period if that is the
period's first batch, else ``bubble_imbalance``. A gap is understood only when it ends, by the stamp of the batch that
ends it. Read backwards from that batch, its last ``hostSeconds`` are ``host`` (the work was ready, nobody had issued
it); within one period the rest is ``bubble_imbalance``; between two periods the ``idleBefore`` seconds in front of
that are ``idle`` and what remains, the time after this rank's last pass in which the old period still ran elsewhere,
is its ``bubble_drain``. A batch takes a while from the scheduler to the rank: where the leader's word says when the
pipeline was empty, that way is known and counts as waiting for the batch. If no batch comes, the leader's word that
the pipeline is empty closes the gap: drain until that moment, idle from then on. Outside busy periods (period 0:
nothing but decode steps in the pipeline) all waiting is idle. Every second is classified exactly once, so the states
add up to wall time.

What is published is a counter, so it must never fall, yet must add up to wall time while the current gap is
not understood. Up to ``_SLACK`` of the wall time of such a gap is held back; beyond that it is published as
imbalance. If that turns out wrong, the excess is paid back: the state that has too much stands still while
those that have too little get the new seconds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from prefill_runtime.telemetry.events import Call, Event, Pass, Stamp, Start


class State(StrEnum):
    COMPUTE = "compute"
    TRANSFER = "transfer"
    FILL = "bubble_fill"
    IMBALANCE = "bubble_imbalance"
    DRAIN = "bubble_drain"
    HOST = "host"
    IDLE = "idle"


BUBBLES = (State.FILL, State.IMBALANCE, State.DRAIN)

_SLACK = 0.005
WINDOW_SECONDS = 60.0
"""A busy period that does not end has its bubble ratio told this often; under a backlog none ends for hours."""
SETTLE_SECONDS = 0.2
"""How long the leader's word waits for passes that are still on their way through another socket."""
_MAX_SEGMENTS = 4096
_MAX_WINDOWS = 64


def bubble_ratio(seconds: Mapping[State, float]) -> float | None:
    """(fill + imbalance + drain) / everything except idle; None if there was nothing but idle time."""
    busy = sum(value for state, value in seconds.items() if state is not State.IDLE)
    return sum(seconds.get(state, 0.0) for state in BUBBLES) / busy if busy > 0 else None


class Segment(NamedTuple):
    """A stretch of a rank's time, on the rank's clock. ``batch`` is 0 where there was none."""

    state: State
    start: float
    end: float
    period: int
    batch: int = 0
    stage: int = -1
    kind: str = ""


@dataclass(slots=True)
class Window:
    """One busy period as one rank saw it. ``segments`` is bounded, ``seconds`` is not: see ``truncated``."""

    period: int
    seconds: dict[State, float] = field(default_factory=dict)
    recent: dict[State, float] = field(default_factory=dict)
    """Of ``seconds``, those since the last ``turn``."""
    earlier: dict[State, float] = field(default_factory=dict)
    """Those between the last two of them."""
    segments: deque[Segment] = field(default_factory=lambda: deque(maxlen=_MAX_SEGMENTS))
    through: int = 0
    """The last batch that is through with this rank."""
    truncated: bool = False

    def add(self, segment: Segment) -> None:
        for seconds in (self.seconds, self.recent):
            seconds[segment.state] = seconds.get(segment.state, 0.0) + segment.end - segment.start
        self.truncated = self.truncated or len(self.segments) == _MAX_SEGMENTS
        self.segments.append(segment)

    def turn(self) -> None:
        self.earlier, self.recent = self.recent, {}

    def lately(self) -> dict[State, float]:
        """All of a short period; the last one to two ``WINDOW_SECONDS`` of a long one."""
        return {state: self.earlier.get(state, 0.0) + self.recent.get(state, 0.0) for state in State}


class SendFloor:
    """How long a send takes when its receiver waits for it: t <= latency + tokens * slope, the lower envelope of all
    sends seen, since the sender cannot tell moving from waiting and the clocks of two ranks cannot be compared.
    """

    def __init__(self) -> None:
        self._latency = self._slope = float("inf")

    def moving(self, seconds: float, tokens: int) -> float:
        """The part of a send's ``seconds`` in which ``tokens`` tokens of activations moved."""
        if tokens <= 0:
            return seconds
        self._latency, self._slope = min(self._latency, seconds), min(self._slope, seconds / tokens)
        return min(seconds, self._latency + self._slope * tokens)


class RankAccount:
    """Feed it one rank's ``call``, ``start`` and ``pass`` events in order; ask for ``totals`` at any time.

    Lost events cost accuracy, never the sum: time is only ever classified forward from ``covered``.
    """

    def __init__(self, start: float) -> None:
        self.start = self.covered = start
        self.seconds = dict.fromkeys(State, 0.0)
        """Classified so far; exact, and adds up to ``covered - start``."""
        self.current: Window | None = None
        """The busy period this rank is in, or whose drain is not understood yet."""
        self.last: Window | None = None
        """The last completed busy period."""
        self.busy: Mapping[State, float] = {}
        """The seconds that the bubble ratio is told of: those of the last busy period (``Window.lately``), or of the
        last ``WINDOW_SECONDS`` of one that goes on."""
        self._completed: deque[Window] = deque(maxlen=_MAX_WINDOWS)
        self._published = dict.fromkeys(State, 0.0)
        self._batch = 0
        """The batch this rank holds; 0 in a gap."""
        self._sends: defaultdict[str, SendFloor] = defaultdict(SendFloor)
        """By kind of pass: on a folded rank heads and tails go to other neighbours, or one of them nowhere."""
        self._waiting = State.IDLE
        """What the time since ``covered`` is while it waits for that batch's input."""
        self._running_since: float | None = None
        self._empty: tuple[int, float, float] | None = None
        """The leader's word: period, when its pipeline emptied, when we heard of it."""

    # -- events

    def feed(self, event: Event) -> None:
        match event:
            case Call():
                self._called(event.stamp, event.at)
            case Start() if event.batch == self._batch:
                self._running_since = event.at
            case Pass():
                self._passed(event)
            case _:
                pass

    def pipeline_idle(self, period: int, at: float, now: float) -> None:
        """The leader says that ``period`` ended at ``at`` (this rank's clock). Repeated words sharpen ``at``:
        each is late by its way here, so the earliest is the best."""
        if self._empty is None or self._empty[0] < period:
            self._empty = (period, at, now)
        elif self._empty[0] == period:
            self._empty = (period, min(at, self._empty[1]), self._empty[2])

    def settle(self, now: float, grace: float = SETTLE_SECONDS) -> None:
        """Close a gap that the leader has explained, once stragglers have had their time."""
        if self._explained and self._empty is not None and now - self._empty[2] >= grace:
            self._close(State.DRAIN, max(self._empty[1], self.covered))
            self._complete()

    def completed(self) -> list[Window]:
        """Busy periods completed since the last call."""
        windows = list(self._completed)
        self._completed.clear()
        return windows

    # -- reading

    def totals(self, now: float) -> dict[State, float]:
        """Published seconds by state: never falling, adding up to wall time (see the head of this file)."""
        target, unknown = self._target(now)
        wall = max(0.0, now - self.start)
        held = min(unknown, _SLACK * wall)
        target[State.IMBALANCE] += unknown - held
        owed = {state: max(0.0, target[state] - self._published[state]) for state in State}
        budget = wall - held - sum(self._published.values())
        if budget > 0:
            share = min(1.0, budget / max(sum(owed.values()), 1e-12))
            for state in State:
                self._published[state] += owed[state] * share
        return dict(self._published)

    def _target(self, now: float) -> tuple[dict[State, float], float]:
        """Best knowledge of the seconds at ``now``, and how many at its end are not understood."""
        target = dict(self.seconds)
        tail = max(0.0, now - self.covered)
        if self._batch:
            running = 0.0 if self._running_since is None else min(tail, max(0.0, now - self._running_since))
            target[self._waiting] += tail - running
            target[State.COMPUTE] += running
        elif self.current is None:
            target[State.IDLE] += tail
        elif self._explained and self._empty is not None:
            drain = min(tail, max(0.0, self._empty[1] - self.covered))
            target[State.DRAIN] += drain
            target[State.IDLE] += tail - drain
        else:
            return target, tail
        return target, 0.0

    @property
    def _explained(self) -> bool:
        """In a gap whose period the leader knows to be over."""
        current, empty = self.current, self._empty
        return not self._batch and current is not None and empty is not None and empty[0] == current.period

    # -- transitions

    def _called(self, stamp: Stamp, at: float) -> None:
        if self._batch:
            # Its pass event was lost; the best guess is that it did until now what it did when last heard of.
            self._close(self._waiting, at if self._running_since is None else self._running_since, self._batch)
            self._close(State.COMPUTE, at, self._batch)
        period, host = stamp.period, stamp.host_seconds if stamp.period else 0.0
        gap = max(0.0, at - self.covered)
        issued = at
        if self.current is not None and self.current.period == period:
            self._close(State.IMBALANCE, at - min(gap, host))
            first = False
        else:
            issued = at - min(gap, self._delivery(stamp, at))
            gap = max(0.0, issued - self.covered)
            host = min(gap, host)
            if self.current is not None:
                idle = min(gap - host, stamp.idle_before)
                self._close(State.DRAIN, self.covered + (gap - host - idle))
                self._complete()
            self._close(State.IDLE, issued - host)
            first = stamp.first
            self.current = self._window(period)
        self._close(State.HOST, issued, stamp.batch)
        self._batch, self._running_since = stamp.batch, None
        self._waiting = State.IDLE if not period else State.FILL if first else State.IMBALANCE
        self._close(self._waiting, at, stamp.batch)

    def _delivery(self, stamp: Stamp, at: float) -> float:
        """How long ago the batch was issued that this rank got at ``at``, if its issue can be told from when the
        period before it ended; else 0."""
        before, empty = self.current or self.last, self._empty
        if before is None or empty is None or empty[0] != before.period:
            return 0.0
        # Of no other batch does ``idle_before`` reach back to the end of that period.
        if stamp.period and not (stamp.first and stamp.period == before.period + 1):
            return 0.0
        host = stamp.host_seconds if stamp.period else 0.0
        return max(0.0, at - (empty[1] + stamp.idle_before + host))

    def _window(self, period: int) -> Window | None:
        if not period:
            return None
        if self.last is not None and self.last.period == period:
            return self.last  # closed too early: its events took longer than the leader's word
        return Window(period)

    def _passed(self, event: Pass) -> None:
        stamp = event.stamp
        if self._batch != stamp.batch:
            self._called(stamp, event.call)
        detail = (stamp.batch, event.stage, event.kind)
        self._close(self._waiting, event.start, *detail)
        self._close(State.COMPUTE, event.end, *detail)
        tokens = sum(chunk.tokens for chunk in stamp.chunks)
        moving = self._sends[event.kind].moving(max(0.0, event.sent - event.end), tokens)
        self._close(State.IMBALANCE if stamp.period else State.IDLE, event.sent - moving, *detail)
        self._close(State.TRANSFER, event.sent, *detail)
        if self.current is not None and event.kind != "head":
            self.current.through = stamp.batch
        self._batch = 0

    def _close(
        self,
        state: State,
        until: float,
        batch: int = 0,
        stage: int = -1,
        kind: str = "",
    ) -> None:
        """Classify the time from ``covered`` to ``until``."""
        if until <= self.covered:
            return
        period = self.current.period if self.current is not None and state is not State.IDLE else 0
        self.seconds[state] += until - self.covered
        if self.current is not None and state is not State.IDLE:
            self.current.add(Segment(state, self.covered, until, period, batch, stage, kind))
            if sum(self.current.recent.values()) >= WINDOW_SECONDS:
                self.busy = self.current.recent
                self.current.turn()
        self.covered = until

    def _complete(self) -> None:
        if self.current is not None:
            self.last, self.busy = self.current, self.current.lately()
            self._completed.append(self.current)
            self.current = None
