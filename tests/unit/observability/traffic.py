"""A leader's hub after some traffic, so that each of its metrics has a series."""

from __future__ import annotations

from prefill_runtime.telemetry.events import (
    Chunk,
    Fallback,
    Finish,
    Hello,
    Idle,
    Issue,
    Pass,
    Queue,
    Request,
    Served,
    Stamp,
)
from prefill_runtime.telemetry.hub import Hub

from tests.documents import calibration


def busy_hub() -> Hub:
    clock = [0.0]
    hub = Hub(0, 2, leader=True, now=lambda: clock[0])
    hub.set_calibration(calibration())
    hub.set_drift(0.02)
    hub.feed(Hello(role="scheduler", rank=0))
    for rank in (0, 1):
        hub.feed(Hello(role="worker", rank=rank))
    stamp = Stamp(batch=1, period=1, first=True, chunks=(Chunk("a", 0, 1000, 1000),))
    hub.feed(Issue(stamp=stamp, at=1.0, policy="Planned"))
    for rank in (0, 1):
        clock[0] = start = 1.0 + rank
        hub.feed(Pass(stamp=stamp, stage=rank, rank=rank, call=1.0, start=start, end=start + 0.9, sent=start + 1))
    clock[0] = 3.0
    hub.feed(Idle(period=1, at=3.0))
    hub.feed(Request(request="a", prompt_tokens=1000, ttft=2.0, queue=0.1, at=3.0, arrival=1e9))
    hub.feed(Served(arrival=1e9, ttft=2.0))
    hub.feed(Finish(request="a", outcome="stop"))
    hub.feed(Queue(waiting=1, waiting_tokens=1000, inflight=1, at=3.0))
    hub.feed(Fallback(reason="NoCalibration"))
    clock[0] = 20.0
    return hub
