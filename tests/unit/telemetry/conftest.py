"""A pipeline whose rank states are known by construction: the reference that accounting is tested against."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from prefill_runtime.telemetry.account import State
from prefill_runtime.telemetry.clock import SchedulerClock
from prefill_runtime.telemetry.events import Call, Chunk, Event, Idle, Issue, Pass, Settle, Stamp, Start


@dataclass
class Prompt:
    """Arrives at ``arrival``; chunk k takes ``seconds[k][rank]`` on each rank."""

    arrival: float
    seconds: Sequence[Sequence[float]]


@dataclass
class Batch:
    stamp: Stamp
    release: float
    issue: float
    passes: list[tuple[float, float, float, float]]  # call, start, end, sent per rank, true time


@dataclass
class Run:
    ranks: int
    offsets: Sequence[float]
    batches: list[Batch] = field(default_factory=list)
    empties: list[tuple[int, float]] = field(default_factory=list)
    scheduler: list[tuple[float, Event]] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.empties[-1][1]

    def worker_events(self, rank: int) -> list[tuple[float, Event]]:
        """(true time, event on the rank's clock), in order."""
        offset, events = self.offsets[rank], list[tuple[float, Event]]()
        for b in self.batches:
            call, start, end, sent = b.passes[rank]
            on_clock = {"call": call + offset, "start": start + offset, "end": end + offset, "sent": sent + offset}
            events.append((call, Call(stamp=b.stamp, at=call + offset, rank=rank)))
            events.append((start, Start(batch=b.stamp.batch, at=start + offset, rank=rank)))
            events.append((sent, Pass(stamp=b.stamp, stage=rank, rank=rank, **on_clock)))
        return events

    def truth(self, rank: int, until: float) -> dict[State, float]:
        """Seconds by state from time 0, by looking at every stretch between two things that happened."""
        marks = {0.0, until, *(t for _, t in self.empties)}
        for b in self.batches:
            marks.update((b.release, b.issue, *b.passes[rank]))
        points = sorted(t for t in marks if t <= until)
        seconds = dict.fromkeys(State, 0.0)
        for a, b in itertools.pairwise(points):
            seconds[self._state(rank, (a + b) / 2)] += b - a
        return seconds

    def _state(self, rank: int, t: float) -> State:
        ahead = next((b for b in self.batches if b.passes[rank][3] > t), None)
        if ahead is not None:
            _, start, end, _ = ahead.passes[rank]
            if t >= start:
                return State.COMPUTE if t < end else State.TRANSFER
            if t >= ahead.issue:
                return State.FILL if ahead.stamp.first else State.IMBALANCE
            if t >= ahead.release:
                return State.HOST
        behind = [b for b in self.batches if b.passes[rank][3] <= t]
        if not behind:
            return State.IDLE
        if t >= dict(self.empties)[behind[-1].stamp.period]:
            return State.IDLE
        same = ahead is not None and ahead.stamp.period == behind[-1].stamp.period
        return State.IMBALANCE if same else State.DRAIN


def run_pipeline(
    ranks: int,
    prompts: Sequence[Prompt],
    *,
    limit: int | None = None,
    host: float = 0.0,
    transfer: float = 0.0,
    offsets: Sequence[float] | None = None,
) -> Run:
    """One single-threaded scheduler, ``ranks`` ranks in a row, no message delay."""
    run = Run(ranks, offsets or [0.0] * ranks)
    clock = SchedulerClock(0.0)
    arrivals = sorted(prompts, key=lambda p: p.arrival)
    work: list[tuple[Chunk, Sequence[float]]] = []
    inflight: list[Batch] = []
    free = [0.0] * ranks
    now = 0.0
    while arrivals or work or inflight:
        if work and len(inflight) < (limit or ranks):
            chunk, seconds = work.pop(0)
            release, now = now, now + host
            batch = Batch(clock.on_issue(now, [chunk]), release, now, [])
            before = now
            for rank in range(ranks):
                call = max(now, free[rank])
                start = max(call, before)
                end = start + seconds[rank]
                before = free[rank] = end + transfer
                batch.passes.append((call, start, end, before))
            run.batches.append(batch)
            inflight.append(batch)
            run.scheduler.append((now, Issue(stamp=batch.stamp, at=now, policy="Fixed")))
            continue
        settles = inflight[0].passes[-1][3] if inflight else float("inf")
        arrives = arrivals[0].arrival if arrivals else float("inf")
        now = max(now, min(settles, arrives))
        if arrives <= settles:
            prompt = arrivals.pop(0)
            clock.on_ready(now)
            total = len(prompt.seconds)
            name = f"request-{prompt.arrival:g}"
            work += [(Chunk(name, k, 1, total), s) for k, s in enumerate(prompt.seconds)]
        else:
            batch = inflight.pop(0)
            run.scheduler.append((now, Settle(batch=batch.stamp.batch, at=now)))
            if (period := clock.on_settle(now, batch.stamp.batch)) is not None:
                run.empties.append((period, now))
                run.scheduler.append((now, Idle(period=period, at=now)))
    return run


@pytest.fixture(scope="session")
def pipeline() -> Callable[..., Run]:
    return run_pipeline


@pytest.fixture(scope="session")
def prompt() -> type[Prompt]:
    return Prompt
