"""A leader's hub that gets one prompt after the other, so that each of its metrics has a series that moves."""

from __future__ import annotations

from prefill_runtime.telemetry.events import (
    Chunk,
    Event,
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

TOKENS = 1000


class Traffic:
    """Two ranks in one pod; a prompt of one chunk takes 2 s of the hub's own clock, and 1 s passes before the next."""

    def __init__(self) -> None:
        self._now, self._prompts = 0.0, 0
        self.hub = Hub(0, 2, leader=True, now=lambda: self._now)
        self.hub.set_calibration(calibration())
        self.hub.set_drift(0.02)
        self.hub.feed(Hello(role="scheduler", rank=0))
        for rank in (0, 1):
            self.hub.feed(Hello(role="worker", rank=rank))
        self.prompt()

    def prompt(self) -> None:
        self._prompts += 1
        number, name, began = self._prompts, f"prompt-{self._prompts}", self._now + 1
        stamp = Stamp(
            batch=number, period=number, first=True, idle_before=1.0, chunks=(Chunk(name, 0, TOKENS, TOKENS),)
        )
        self._at(began, Issue(stamp=stamp, at=began, policy="Planned"))
        for rank, start in enumerate((began, began + 1)):
            times = {"call": began, "start": start, "end": start + 0.9, "sent": start + 0.95}
            self._at(start + 1, Pass(stamp=stamp, stage=rank, rank=rank, **times))
        end, arrival = began + 2, 1e9 + began
        self._at(end, Idle(period=number, at=end))
        self._at(end, Request(request=name, prompt_tokens=TOKENS, ttft=2.0, queue=0.1, at=end, arrival=arrival))
        self._at(end, Served(arrival=arrival, ttft=2.0))
        self._at(end, Finish(request=name, outcome="stop"))
        self._at(end, Queue(waiting=1, waiting_tokens=TOKENS, inflight=1, at=end))

    def _at(self, time: float, event: Event) -> None:
        self._now = time
        self.hub.feed(event)
