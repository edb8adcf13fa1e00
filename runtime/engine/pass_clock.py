"""When a model pass runs, by the host's clock or by a device's; no device is ever synchronised for it.

``called``: the rank has the batch (None: a step without tokens, of which there is nothing to tell). ``input_ready``:
its input is there. ``ended``: the pass, on the last rank with sampling, is done. ``sent``: its output was handed on.

On a device the host only launches, and runs ahead. Events are recorded on the stream instead, and read when the next
step is called: by then the stream has mostly reached them, and little is queued behind (torch_npu's ``elapsed_time``
lets the launch queue run empty). What is not complete is asked again a step later; vLLM has a step without tokens
after the last request, which brings the last passes. A stream works in order, hence

- the start event lies behind the receive on the stream: it comes when both the input and the pass before are there;
- passes never overlap: a batch that the host got earlier counts as called when the pass before has ended;
- an event that is not complete although a later one is will never be: its pass is dropped and counted.

The way to the host's clock: an event recorded while nothing is on the stream happens at once, so it is worth the
host's time of its recording; from there on elapsed times add up until the stream is empty again. Clocks drift, so a
pass is moved to where it is possible at all: after the recording of its events and the pass before, before it was seen.
What sends take on a device is not seen; the next pass waits for it on the stream, as it does for its input.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from prefill_runtime.engine.guard import harmless
from prefill_runtime.telemetry.events import Call, Pass, Stamp, Start
from prefill_runtime.telemetry.sender import Sender

OUTSTANDING = 64
"""Passes that may be on the stream unread: many more than batches in flight."""


class PassTimer(Protocol):
    """Called by a worker around each pass, in this order, in its one thread."""

    def called(self, stamp: Stamp | None, stage: int | None = None, kind: str = "stage") -> None:
        """``stage``: None for the only one of this rank."""

    def entered(self) -> None: ...
    def input_ready(self, blocked: float | None = None) -> None:
        """``blocked``: the host waited so long for a lazily received input; None: it was there at the start."""

    def ended(self) -> None: ...
    def sent(self) -> None: ...


class HostTimer:
    """Where the host computes, or waits for what does."""

    def __init__(self, sender: Sender, rank: int, now: Callable[[], float] = time.monotonic) -> None:
        self._sender, self._rank, self._now = sender, rank, now
        self._stamp: Stamp | None = None
        self._place = rank, "stage"
        self._call = self._entered = self._blocked = self._end = 0.0

    @harmless
    def called(self, stamp: Stamp | None, stage: int | None = None, kind: str = "stage") -> None:
        self._stamp = stamp
        self._place = self._rank if stage is None else stage, kind
        if stamp is not None:
            self._call = self._now()
            self._sender.send(Call(stamp=stamp, at=self._call))

    @harmless
    def entered(self) -> None:
        self._entered, self._blocked = self._now(), 0.0

    @harmless
    def input_ready(self, blocked: float | None = None) -> None:
        self._blocked = blocked or 0.0
        if self._stamp is not None:
            self._sender.send(Start(batch=self._stamp.batch, at=self._now()))

    @harmless
    def ended(self) -> None:
        self._end = self._now()

    @harmless
    def sent(self) -> None:
        if self._stamp is None:
            return
        event = Pass(
            stamp=self._stamp,
            stage=self._place[0],
            kind=self._place[1],
            call=self._call,
            start=self._entered + self._blocked,
            end=self._end,
            sent=self._now(),
        )
        self._stamp = None
        self._sender.send(event)


class DeviceEvent(Protocol):
    """What torch.cuda.Event and torch.npu.Event (with enable_timing) have."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: DeviceEvent, /) -> float: ...  # milliseconds


class _Mark(NamedTuple):
    event: DeviceEvent
    at: float
    """Host time: of its recording, or when it happened once that is known."""


@dataclass(slots=True)
class _Flight:
    stamp: Stamp
    call: float
    place: tuple[int, str]
    anchor: _Mark | None = None
    """Recorded at the call, if nothing else was on the stream."""
    start: _Mark | None = None
    end: _Mark | None = None
    call_told: bool = False
    start_told: bool = False


class DeviceTimer:
    """Where the host launches and a device computes, on one stream."""

    def __init__(
        self,
        sender: Sender,
        rank: int,
        new_event: Callable[[], DeviceEvent],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender, self._rank, self._new_event, self._now = sender, rank, new_event, now
        self._launching: _Flight | None = None
        self._flights: deque[_Flight] = deque()
        self._known: _Mark | None = None
        """The last event of which it is known when it happened."""
        self._free = -math.inf
        """The end of the last pass that was told."""

    @harmless
    def called(self, stamp: Stamp | None, stage: int | None = None, kind: str = "stage") -> None:
        self._launching = None
        self._read()
        if stamp is None:
            return
        place = self._rank if stage is None else stage, kind
        flight = self._launching = _Flight(stamp, self._now(), place)
        if not self._flights:
            flight.anchor = self._mark()
            self._tell_call(flight)

    @harmless
    def entered(self) -> None:
        pass

    @harmless
    def input_ready(self, blocked: float | None = None) -> None:
        flight = self._launching
        if flight is None:
            return
        flight.start = self._mark()
        if blocked is None and flight.anchor is not None:
            self._tell_start(flight, flight.start.at)

    @harmless
    def ended(self) -> None:
        if self._launching is not None:
            self._launching.end = self._mark()

    @harmless
    def sent(self) -> None:
        flight, self._launching = self._launching, None
        if flight is None or flight.start is None or flight.end is None:
            return
        self._flights.append(flight)
        if len(self._flights) > OUTSTANDING:
            self._flights.popleft()
            self._sender.dropped += 1

    def _mark(self) -> _Mark:
        mark = _Mark(self._new_event(), self._now())
        mark.event.record()
        return mark

    def _read(self) -> None:
        """Tell what is complete, without waiting for anything."""
        done: deque[_Flight] = deque()
        try:
            self._move_complete(done)
            seen = self._now()
            last = done[-1].end if done else None
            while done and last is not None:
                self._tell_pass(done[0], last.event, seen)
                done.popleft()
            if self._flights:
                self._tell_progress(self._flights[0])
        except Exception:
            self._sender.dropped += len(done) + len(self._flights)
            self._flights.clear()
            self._known = None
            raise

    def _move_complete(self, done: deque[_Flight]) -> None:
        while self._flights:
            if _complete(self._flights[0].end):
                done.append(self._flights.popleft())
            elif len(self._flights) > 1 and _complete(self._flights[1].end):
                self._flights.popleft()
                self._sender.dropped += 1
            else:
                return

    def _tell_progress(self, flight: _Flight) -> None:
        """It is the first on the stream, so it is what the rank waits for or works on."""
        if not flight.call_told:
            self._tell_call(flight)
        if not flight.start_told and _complete(flight.start):
            self._tell_start(flight, min(max(self._started(flight), self._free), self._now()))

    def _tell_call(self, flight: _Flight) -> None:
        flight.call_told = True
        self._sender.send(Call(stamp=flight.stamp, at=max(flight.call, self._free)))

    def _tell_start(self, flight: _Flight, at: float) -> None:
        flight.start_told = True
        self._sender.send(Start(batch=flight.stamp.batch, at=at))

    def _tell_pass(self, flight: _Flight, last: DeviceEvent, seen: float) -> None:
        """``last`` had happened when all was ``seen``."""
        assert flight.start is not None
        assert flight.end is not None
        seconds = max(0.0, flight.start.event.elapsed_time(flight.end.event) / 1000)
        latest = seen - flight.start.event.elapsed_time(last) / 1000
        earliest = max(self._free, flight.start.at, flight.end.at - seconds)
        start = max(earliest, min(self._started(flight), latest))
        end = min(start + seconds, max(start, latest + seconds))
        call = min(max(flight.call, self._free), start)
        self._known, self._free = _Mark(flight.end.event, end), end
        stage, kind = flight.place
        self._sender.send(Pass(stamp=flight.stamp, stage=stage, kind=kind, call=call, start=start, end=end, sent=end))

    def _started(self, flight: _Flight) -> float:
        """When the start event happened, as far as the device's clock can tell."""
        known = flight.anchor or self._known
        if known is None or flight.start is None:
            return math.inf
        return known.at + known.event.elapsed_time(flight.start.event) / 1000


def _complete(mark: _Mark | None) -> bool:
    return mark is not None and mark.event.query()
