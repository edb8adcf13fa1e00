"""The scheduler's side of bubble accounting: stamps every batch with what the ranks cannot know.

A busy period starts when a batch with prefill work is issued while no such batch is in flight, and ends when
the last such batch settles. Decode-only batches never start or prolong one: issued inside a period they belong
to it, outside they carry period 0 and the ranks' waiting around them counts as idle. Time in front of a batch
is split at the moment its work was ready to be issued: before it the pipeline had nothing to do (idle), after
it the scheduler and the driver were at work (host). Work is ready at the latest of: its arrival, the last
settled batch (which freed a slot or brought a token), the last issue.
"""

from __future__ import annotations

from collections.abc import Iterable

from prefill_runtime.telemetry.events import Chunk, Stamp


class SchedulerClock:
    """Pure: the caller brings the time. Calls must come in time order."""

    def __init__(self, now: float) -> None:
        self._batch = 0
        self._period = 0
        self._prefills: set[int] = set()
        self._empty_since = now
        self._free_since = now
        self._ready_since: float | None = None

    def on_ready(self, now: float) -> None:
        """A request came in. Without this, waiting for it would look like host time."""
        if self._ready_since is None:
            self._ready_since = now

    def on_issue(self, now: float, chunks: Iterable[Chunk]) -> Stamp:
        """The scheduler has composed a batch; the stamp belongs on its SchedulerOutput."""
        chunks = tuple(chunks)
        self._batch += 1
        stamp = Stamp(batch=self._batch, chunks=chunks)
        prefill = any(chunk.prefill for chunk in chunks)
        ready = self._free_since if self._ready_since is None else max(self._free_since, self._ready_since)
        if self._prefills or prefill:
            stamp.host_seconds = max(0.0, now - ready)
        if not self._prefills:
            stamp.first = prefill
            stamp.idle_before = max(0.0, (ready if prefill else now) - self._empty_since)
        if stamp.first:
            self._period += 1
        if prefill:
            self._prefills.add(stamp.batch)
            self._ready_since = None
        stamp.period = self._period if self._prefills else 0
        self._free_since = now
        return stamp

    def on_issued(self, now: float) -> None:
        """The executor has taken the batch; only from here on is the next one late."""
        self._free_since = max(self._free_since, now)

    def on_settle(self, now: float, batch: int) -> int | None:
        """A batch's result is back. Returns the busy period's number if this was its end, else None."""
        self._free_since = max(self._free_since, now)
        if batch not in self._prefills:
            return None
        self._prefills.remove(batch)
        if self._prefills:
            return None
        self._empty_since = now
        return self._period
