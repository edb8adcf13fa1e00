"""Everything an agent knows about its ranks, in one object: events in, metrics, timeline and passes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prefill_runtime.profiling.document import CalibrationDocument
from prefill_runtime.telemetry.events import Event, Pass


class Hub:
    """Passive: it has no timers and does its upkeep when it is fed or asked.

    ``rank`` is the pod's first pipeline rank, ``ranks`` the pipeline's size. Remote events carry the sending
    host's clock; leader time = remote time + ``clock_offset``.
    """

    def __init__(self, rank: int, ranks: int, leader: bool, *, now: Callable[[], float] = time.monotonic) -> None: ...

    def feed(self, event: Event) -> None:
        """An event of an engine process of this pod."""

    def feed_remote(self, rank: int, events: Sequence[Mapping[str, Any]], clock_offset: float) -> None:
        """Leader: what a follower's ``drain_for_leader`` returned."""

    def drain_for_leader(self) -> list[dict[str, Any]]:
        """Follower: what happened since the last call, ready for JSON."""
        return []

    def set_pipeline_idle(self, period: int, idle_seconds: float) -> None:
        """Follower: the leader says that busy period ``period`` ended ``idle_seconds`` ago."""

    def pipeline_idle(self) -> tuple[int, float] | None:
        """Leader: arguments for the followers' ``set_pipeline_idle``, or None while a prefill is in flight."""
        return None

    def metrics_text(self) -> bytes:
        return b""

    def timeline(self) -> dict[str, Any]:
        return {}

    def timeline_svg(self) -> str:
        return ""

    def passes(self) -> list[Pass]:
        """The most recent passes of all ranks known here, oldest first."""
        return []

    def set_calibration(self, document: CalibrationDocument | None) -> None: ...

    def running_requests(self) -> int:
        """Requests that wait or run in the engine."""
        return 0
