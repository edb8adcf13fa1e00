"""Prometheus metrics of an agent. Dashboards and alerts rely on these names, labels and meanings.

Every rank exports its own state seconds and bubble ratio; the rest has one source and only the leader exports it.
docs/observability.md says of each what it means and how it is computed. A registry of our own keeps process and
platform collectors, and other libraries' metrics, out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from prefill_runtime.profiling.document import CalibrationDocument
from prefill_runtime.scheduler.cost import StageModel
from prefill_runtime.telemetry.account import State
from prefill_runtime.telemetry.events import Event, Fallback, FallbackReason, Finish, Issue, Pass, Queue, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# Neighbours differ by at most a quarter from 1 s on, so an improvement of some percent moves a quantile, and the
# top is far above any TTFT that a user would wait for, so a quantile is never pinned to the last bucket.
TTFT_BUCKETS = (
    0.05, 0.1, 0.2, 0.35, 0.5, 0.75,
    1, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 4, 5, 6, 7.5, 9, 11, 13, 16, 20, 25, 30, 36, 45, 55, 66, 80, 100, 120,
    150, 180, 220, 270, 330, 400, 500, 600, 750, 900, 1100, 1350, 1600, 1800, 2400, 3600,
)  # fmt: skip
# Up to 8% the calibration is good, and there the buckets are fine; far beyond it only the order of magnitude counts.
ERROR_BUCKETS = (0.01, 0.02, 0.03, 0.045, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5)
QUEUE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 900, 1800)
CHUNK_TOKEN_BUCKETS = tuple(n for k in range(6, 18) for n in (2**k, 3 * 2 ** (k - 1)))
CHUNK_SECONDS_BUCKETS = (
    0.001, 0.002, 0.004, 0.007, 0.01, 0.015, 0.022, 0.033, 0.05, 0.075, 0.11, 0.16, 0.25, 0.37, 0.55, 0.8,
    1.2, 1.8, 2.7, 4, 6, 9, 13, 20, 30, 45, 70, 100,
)  # fmt: skip

OUTCOMES = ("stop", "length", "abort", "error")
_MAX_LABELS = 32
_K = 1024
_CLASSES = ((4, "le_4k"), (16, "le_16k"), (64, "le_64k"), (128, "le_128k"), (256, "le_256k"), (512, "le_512k"))


def prompt_class(tokens: int) -> str:
    return next((name for limit, name in _CLASSES if tokens <= limit * _K), "gt_512k")


class RankCollector(Collector):
    """State seconds and ratios, read from the accounts when Prometheus asks."""

    def __init__(
        self,
        totals: Callable[[], Mapping[int, Mapping[State, float]]],
        ratios: Callable[[], Mapping[int, float]],
        dropped: Callable[[], int],
    ) -> None:
        self._totals = totals
        self._ratios = ratios
        self._dropped = dropped

    def collect(self) -> Iterable[Metric]:
        seconds = CounterMetricFamily(
            "prefill_rank_state_seconds",
            "Seconds this rank spent in each state; the states add up to wall time.",
            labels=["rank", "state"],
        )
        for rank, states in self._totals().items():
            for state, value in states.items():
                seconds.add_metric([str(rank), state], value)
        yield seconds
        ratio = GaugeMetricFamily(
            "prefill_bubble_ratio",
            "Share of busy time that this rank lost to fill, imbalance and drain, in the last busy period.",
            labels=["rank"],
        )
        for rank, value in self._ratios().items():
            ratio.add_metric([str(rank)], value)
        yield ratio
        yield CounterMetricFamily(
            "prefill_telemetry_dropped",
            "Telemetry events lost on the way from the engine, or not understood.",
            value=self._dropped(),
        )


class CalibrationCollector(Collector):
    """What the calibration in use is, how far it drifted, what it says the bubble must be; no series without one."""

    def __init__(self, floor: Callable[[], float | None], now: Callable[[], float] = time.time) -> None:
        self.document: CalibrationDocument | None = None
        self.drift: float | None = None
        self._floor, self._now = floor, now

    def collect(self) -> Iterable[Metric]:
        info = GaugeMetricFamily(
            "prefill_calibration_info", "The calibration in use; always 1.", labels=["key", "model", "source"]
        )
        r2 = GaugeMetricFamily("prefill_calibration_r2_ratio", "R squared of the worst stage's fit.")
        age = GaugeMetricFamily("prefill_calibration_age_seconds", "Seconds since the calibration was measured.")
        drift = GaugeMetricFamily(
            "prefill_calibration_drift_ratio", "Median relative error of the calibration over the recent passes."
        )
        floor = GaugeMetricFamily(
            "prefill_bubble_ratio_floor",
            "The least bubble ratio that any legal chunks could have had for this traffic.",
        )
        if self.document is not None:
            created = datetime.strptime(self.document.created_at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
            info.add_metric([self.document.key, self.document.model, self.document.source], 1)
            r2.add_metric([], self.document.r2)
            age.add_metric([], max(0.0, self._now() - created.timestamp()))
        for gauge, value in ((drift, self.drift), (floor, self._floor())):
            if value is not None:
                gauge.add_metric([], value)
        yield from (info, r2, age, drift, floor)


class LeaderMetrics:
    """What the scheduler and the API server know, and how well the calibration foretold the passes of all ranks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ttft = Histogram(
            "prefill_ttft_seconds", "Time from a request's arrival to its first token in the API server.",
            ["prompt_class"],
            buckets=TTFT_BUCKETS, registry=registry,
        )  # fmt: skip
        self.queue = Histogram(
            "prefill_queue_seconds", "Time from a request's arrival to its first chunk.", ["prompt_class"],
            buckets=QUEUE_BUCKETS, registry=registry,
        )  # fmt: skip
        self.compute = Histogram(
            "prefill_compute_seconds", "Time from a request's first chunk to its first token.", ["prompt_class"],
            buckets=TTFT_BUCKETS, registry=registry,
        )  # fmt: skip
        self.chunk_tokens = Histogram(
            "prefill_chunk_tokens", "Tokens per prefill chunk.", ["policy"],
            buckets=CHUNK_TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip
        self.chunk_seconds = Histogram(
            "prefill_chunk_seconds", "Seconds of one model pass that holds prefill work.", ["stage"],
            buckets=CHUNK_SECONDS_BUCKETS, registry=registry,
        )  # fmt: skip
        self.prediction_error = Histogram(
            "prefill_chunk_prediction_error_ratio",
            "|measured / predicted - 1| of the seconds of a model pass that holds nothing but prefill work.", ["stage"],
            buckets=ERROR_BUCKETS, registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "prefill_prompt_tokens", "Prompt tokens of requests that reached their first token.", registry=registry
        )
        self.requests = Counter("prefill_requests", "Ended requests by outcome.", ["outcome"], registry=registry)
        self.fallbacks = Counter(
            "prefill_policy_fallback", "Times the chosen chunk policy could not be used and Fixed was, by reason.",
            ["reason"], registry=registry,
        )  # fmt: skip
        self.inflight = Gauge("prefill_inflight_batches", "Batches issued and not yet settled.", registry=registry)
        self.waiting = Gauge("prefill_waiting_requests", "Requests that wait for their first chunk.", registry=registry)
        self.waiting_tokens = Gauge(
            "prefill_waiting_tokens", "Prompt tokens of the waiting requests.", registry=registry
        )
        self._models: tuple[StageModel, ...] = ()
        self._reasons: set[str] = set(FallbackReason)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        for reason in FallbackReason:
            self.fallbacks.labels(reason)

    def predict_with(self, models: tuple[StageModel, ...]) -> None:
        """From now on passes are compared with these, one per stage; none: with nothing."""
        self._models = models

    def first_token(self, prompt_tokens: int, ttft: float) -> None:
        """The API server has a request's first token."""
        self.ttft.labels(prompt_class(prompt_tokens)).observe(ttft)

    def feed(self, event: Event) -> None:
        match event:
            case Issue():
                for chunk in event.stamp.chunks:
                    if chunk.prefill:
                        self.chunk_tokens.labels(event.policy).observe(chunk.tokens)
            case Pass() if any(chunk.prefill for chunk in event.stamp.chunks):
                self._passed(event)
            case Request():
                kind = prompt_class(event.prompt_tokens)
                self.queue.labels(kind).observe(event.queue)
                self.compute.labels(kind).observe(max(0.0, event.ttft - event.queue))
                self.prompt_tokens.inc(max(0, event.prompt_tokens))
            case Finish():
                self.requests.labels(event.outcome if event.outcome in OUTCOMES else "other").inc()
            case Queue():
                self.waiting.set(event.waiting)
                self.waiting_tokens.set(event.waiting_tokens)
                self.inflight.set(event.inflight)
            case Fallback():
                self.fallbacks.labels(self._bounded(event.reason)).inc()
            case _:
                pass

    def _passed(self, event: Pass) -> None:
        seconds = event.end - event.start
        self.chunk_seconds.labels(str(event.stage)).observe(seconds)
        # The calibration knows nothing of decode steps.
        if event.stage < len(self._models) and all(chunk.prefill for chunk in event.stamp.chunks):
            predicted = self._models[event.stage].batch_seconds((c.tokens, c.history) for c in event.stamp.chunks)
            if predicted > 0:
                self.prediction_error.labels(str(event.stage)).observe(abs(seconds / predicted - 1))

    def _bounded(self, reason: str) -> str:
        """A reason is one of a few words; should it ever carry a number, the series stay few."""
        if reason not in self._reasons and len(self._reasons) >= _MAX_LABELS:
            return "other"
        self._reasons.add(reason)
        return reason


def exposition(registry: CollectorRegistry) -> bytes:
    """Prometheus text format, without the creation times that the client adds as extra series."""
    lines = generate_latest(registry).decode().splitlines(keepends=True)
    return "".join(line for line in lines if not _is_created(line)).encode()


def _is_created(line: str) -> bool:
    name = line.split(" ", 3)[2] if line.startswith("#") else line.partition("{")[0].partition(" ")[0]
    return name.endswith("_created")
