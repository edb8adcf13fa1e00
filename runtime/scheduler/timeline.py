"""What a simulated run looked like: segments per rank, and the seconds of each rank by state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from prefill_runtime.scheduler.layout import Layout

STATES = ("compute", "transfer", "bubble_fill", "bubble_imbalance", "bubble_drain", "host", "idle")


@dataclass(frozen=True, slots=True)
class Segment:
    """One thing that one rank did."""

    rank: int
    start: float
    end: float
    kind: Literal["compute", "transfer"]
    request: int
    chunk: int
    stage: int


@dataclass
class Timeline:
    """Everything a run tells. Times are seconds on the arrivals' clock.

    histories: cached tokens of each request.
    periods: [start, end] of each busy period, from a chunk into an empty pipeline to an empty pipeline again.
    log: (what, request, chunk, stage) of all runs (R) and hand-overs to another rank (S) in the order in which they
    happened; times alone do not tell what came first when they are equal but for rounding.
    """

    layout: Layout
    arrivals: list[float]
    histories: list[int]
    segments: list[Segment] = field(default_factory=list)
    periods: list[list[float]] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)
    chunks: list[list[int]] = field(default_factory=list)
    log: list[tuple[Literal["R", "S"], int, int, int]] = field(default_factory=list)

    @property
    def ttft(self) -> list[float]:
        """Seconds from each request's arrival to the end of its last chunk's last stage."""
        return [end - arrival for end, arrival in zip(self.finish, self.arrivals, strict=True)]

    @property
    def start(self) -> float:
        return min(self.arrivals)

    @property
    def makespan(self) -> float:
        """From the first arrival to the last finish."""
        return max(self.finish) - self.start

    @property
    def busy(self) -> float:
        """Rank-seconds of computing and of exposed transfers."""
        return sum(s.end - s.start for s in self.segments)

    @property
    def bubble_ratio(self) -> float:
        """1 - sum busy / (P makespan); waiting for requests counts, too."""
        span = self.layout.ranks * self.makespan
        return 1 - self.busy / span if span > 0 else 0.0

    def lanes(self) -> list[list[Segment]]:
        """Segments of each rank in time."""
        lanes: list[list[Segment]] = [[] for _ in range(self.layout.ranks)]
        for segment in self.segments:
            lanes[segment.rank].append(segment)
        for lane in lanes:
            lane.sort(key=lambda s: s.start)
        return lanes

    def rank_state_seconds(self) -> list[dict[str, float]]:
        """Seconds of every rank in each of ``STATES``; a rank's sum is the makespan."""
        return [self._states(lane) for lane in self.lanes()]

    def _states(self, lane: list[Segment]) -> dict[str, float]:
        seconds = dict.fromkeys(STATES, 0.0)
        at, previous = 0, self.start
        for start, end in self.periods:
            seconds["idle"] += start - previous
            clock, state = start, "bubble_fill"
            while at < len(lane) and lane[at].start <= end and lane[at].end <= end + 1e-6 * max(1.0, end):
                segment = lane[at]
                seconds[state] += max(segment.start - clock, 0.0)
                seconds[segment.kind] += segment.end - segment.start
                clock, state, at = segment.end, "bubble_imbalance", at + 1
            seconds["bubble_drain"] += max(end - clock, 0.0)
            previous = end
        return seconds
