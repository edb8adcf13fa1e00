"""What the metrics say, against what the processes of a real pipeline reported and against vLLM's own figures."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefill_runtime.telemetry.events import Event, Idle, Issue, Pass, Request, Served

from tests.documents import calibration
from tests.engine.harness import Server, finished, issued, prompt

pytestmark = pytest.mark.timed

PREFILL: dict[str, Any] = {"policy": "Dynamic", "maxTokens": 512, "minTokens": 128, "smoothingFactor": 1.0}
STATES = ("compute", "transfer", "bubble_fill", "bubble_imbalance", "bubble_drain", "host", "idle")
METRICS = {
    "prefill_rank_state_seconds_total", "prefill_bubble_ratio", "prefill_bubble_ratio_floor", "prefill_ttft_seconds",
    "prefill_queue_seconds", "prefill_compute_seconds", "prefill_chunk_tokens", "prefill_chunk_seconds",
    "prefill_chunk_prediction_error_ratio", "prefill_prompt_tokens_total", "prefill_requests_total",
    "prefill_policy_fallback_total", "prefill_calibration_info", "prefill_calibration_r2_ratio",
    "prefill_calibration_age_seconds", "prefill_calibration_drift_ratio", "prefill_inflight_batches",
    "prefill_waiting_requests", "prefill_waiting_tokens", "prefill_telemetry_dropped_total",
}  # fmt: skip
"""All that docs/observability.md promises of a rank."""
Span = tuple[float, float]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Started without a calibration; the agent makes one while it serves."""
    server = Server(
        model, tmp_path_factory.mktemp("server"), PREFILL, "--enable-prefix-caching", "--max-model-len", "16384"
    )
    try:
        server.wait_ready()
        server.agent.hub.set_calibration(calibration(r2=0.97, created_at="2020-01-01T00:00:00Z"))
        server.agent.hub.set_drift(0.25)
        yield server
    finally:
        server.close()


def scrape(server: Server) -> dict[str, float]:
    """Each series with its labels as exported."""

    def series(_: list[Event]) -> dict[str, float]:
        lines = server.agent.hub.metrics_text().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    found: dict[str, float] = server.agent.wait(series)
    return found


def total(series: dict[str, float], name: str, **labels: str) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(v for k, v in series.items() if k.partition("{")[0] == name and all(label in k for label in wanted))


def own_figure(server: Server, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^vllm:{name}{{.*}} (\S+)$", server.metrics(), re.M))


def settled(server: Server, since: int) -> int:
    """The last busy period after ``since``, once all of it has been told."""

    def told(events: list[Event]) -> int:
        ended = [x.period for x in events if isinstance(x, Idle)]
        batches = {x.stamp.batch for x in events if isinstance(x, Issue) and x.stamp.period}
        passed = [{x.stamp.batch for x in events if isinstance(x, Pass) and x.rank == rank} for rank in (0, 1)]
        whole = ended and all(batches <= ranks for ranks in passed)
        opened = max((x.stamp.period for x in events if isinstance(x, Issue)), default=0)
        return ended[-1] if whole and ended[-1] == opened else 0

    period: int = server.agent.wait(told, since)
    return period


def first_tokens_told(server: Server) -> None:
    """Waits for the API server's words on every first token that the scheduler has told."""

    def told(events: list[Event]) -> bool:
        return sum(isinstance(x, Served) for x in events) >= sum(isinstance(x, Request) for x in events)

    server.agent.wait(told)


# --- a reconstruction that shares nothing with the account but the events ---


def length(spans: Iterable[Span]) -> float:
    """Of the union."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def cut(spans: Iterable[Span], to: Span) -> list[Span]:
    return [(max(a, to[0]), min(b, to[1])) for a, b in spans if min(b, to[1]) > max(a, to[0])]


def without(span: Span, holes: Iterable[Span]) -> list[Span]:
    rest, at = [], span[0]
    for start, end in sorted(cut(holes, span)):
        rest.append((at, start))
        at = max(at, end)
    return [(a, b) for a, b in [*rest, (at, span[1])] if b > a]


def reconstructed(events: list[Event], period: int, rank: int) -> float:
    """Waiting / all, from the first issue's host time to the moment the pipeline was empty or this rank was through
    with the period's batches, for a decode step among them may come last. Waiting: a batch without its input, no batch
    though none was being prepared, or a send whose receiver had not asked for it."""
    issues = [x for x in events if isinstance(x, Issue) and x.stamp.period == period]
    [idle] = [x for x in events if isinstance(x, Idle) and x.period == period]
    passes = [x for x in events if isinstance(x, Pass) and x.stamp.period == period]
    mine = [x for x in passes if x.rank == rank]
    next_rank = {x.stamp.batch: x for x in passes if x.rank == rank + 1}
    host = [(x.at - x.stamp.host_seconds, x.at) for x in issues]
    whole = (host[0][0], max(idle.at, mine[-1].sent))
    with_batch = [(x.call, x.sent) for x in mine]
    starved = [(x.call, x.start) for x in mine]
    refused = [(x.end, min(x.sent, next_rank[x.stamp.batch].call)) for x in mine if x.stamp.batch in next_rank]
    nothing = [gap for hole in without(whole, with_batch) for gap in without(hole, host)]
    waiting = cut([*starved, *refused, *nothing], whole)
    return length(waiting) / (whole[1] - whole[0])


# --- tests ---


@pytest.mark.parametrize(
    "sizes", [[3000], [6000], [700, 2500, 300, 4000], [1500] * 6], ids=lambda sizes: "+".join(map(str, sizes))
)
def test_the_bubble_is_what_the_events_of_both_ranks_add_up_to(server: Server, sizes: list[int]) -> None:
    since = server.agent.mark()
    began, before = server.agent.states()
    connections = [server.request(prompt(size, seed=10 + k + len(sizes)), max_tokens=4) for k, size in enumerate(sizes)]
    server.agent.wait(finished(len(sizes)), since)
    for connection in connections:
        with contextlib.closing(connection):
            assert connection.getresponse().status == 200
    period = settled(server, since)
    ended, after = server.agent.states()
    events = server.agent.events[since:]
    series = scrape(server)
    for rank in (0, 1):
        ratio = total(series, "prefill_bubble_ratio", rank=str(rank))
        assert ratio == pytest.approx(reconstructed(events, period, rank), abs=0.01)
        spent = {state: after[rank][state] - before[rank][state] for state in STATES}
        assert min(spent.values()) >= 0
        assert sum(spent.values()) == pytest.approx(ended - began, rel=0.01)
    floor, mean = series["prefill_bubble_ratio_floor"], total(series, "prefill_bubble_ratio") / 2
    assert 0 < floor < 1
    if sum(sizes) > 4000:  # of less, the engine's own time is a good part
        assert floor <= mean + 0.01


def test_every_metric_is_there_and_moves(server: Server) -> None:
    server.complete(prompt(700, seed=40))
    settled(server, 0)
    first_tokens_told(server)
    types = set(re.findall(r"^# TYPE (\S+)", server.agent.hub.metrics_text().decode(), re.M))
    assert types == METRICS
    before = scrape(server)
    shared = prompt(2048, seed=41)
    since = server.agent.mark()
    server.complete(shared + prompt(1900, seed=42))  # prefill and decode
    server.agent.wait(finished(1), since)
    since_hit = server.agent.mark()
    server.complete(shared + prompt(3000, seed=43))
    server.agent.wait(finished(1), since_hit)
    assert issued(server.agent.events[since_hit:])[0][0] == 2048, "the prefix was not cached"
    since_queue = server.agent.mark()
    connections = [server.request(prompt(4000, seed=50 + k)) for k in range(3)]
    leaver = server.request(prompt(16_000, seed=53))
    gauges = ("prefill_waiting_requests", "prefill_waiting_tokens", "prefill_inflight_batches")
    for gauge in gauges:
        server.agent.wait(lambda _, gauge=gauge: scrape(server)[gauge] > 0, since_queue)
    # Its client hangs up far from the end: no other prompt has so long a history.
    server.agent.wait(lambda events: any(history > 6000 for history, _ in issued(events)), since_queue)
    leaver.close()
    for connection in connections:
        with contextlib.closing(connection):
            assert connection.getresponse().read()
    server.agent.wait(finished(4), since_queue)
    settled(server, since_queue)
    first_tokens_told(server)
    server.agent.wait(lambda _: not any(scrape(server)[gauge] for gauge in gauges))  # told after the ends
    after = scrape(server)

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    assert grown("prefill_requests_total", outcome="length") == 5
    assert grown("prefill_requests_total", outcome="abort") == 1
    assert grown("prefill_prompt_tokens_total") == 3948 + 5048 + 3 * 4000
    assert grown("prefill_chunk_tokens_sum", policy="Fixed") >= 3948 + 5048 - 2048 + 3 * 4000
    for name in ("ttft", "queue", "compute"):
        assert grown(f"prefill_{name}_seconds_count", prompt_class="le_4k") == 4
        assert grown(f"prefill_{name}_seconds_count", prompt_class="le_16k") == 1
        assert grown(f"prefill_{name}_seconds_sum") > 0
    assert grown("prefill_queue_seconds_sum") + grown("prefill_compute_seconds_sum") <= grown(
        "prefill_ttft_seconds_sum"
    )
    for stage in ("0", "1"):
        # Passes of nothing but prefill are compared with the calibration.
        assert grown("prefill_chunk_seconds_count", stage=stage) >= 8 + 6 + 3 * 8
        compared = grown("prefill_chunk_prediction_error_ratio_count", stage=stage)
        assert 0 < compared <= grown("prefill_chunk_seconds_count", stage=stage)
        for state in STATES:
            assert grown("prefill_rank_state_seconds_total", rank=stage, state=state) > 0, state
        assert grown("prefill_bubble_ratio", rank=stage) != 0
    assert after["prefill_bubble_ratio_floor"] != before["prefill_bubble_ratio_floor"]
    assert after['prefill_policy_fallback_total{reason="NoCalibration"}'] == 1
    assert after['prefill_policy_fallback_total{reason="PolicyFailed"}'] == 0
    assert total(after, "prefill_calibration_info", source="Profile", model="toy") == 1
    assert after["prefill_calibration_r2_ratio"] == 0.97
    assert after["prefill_calibration_drift_ratio"] == 0.25
    assert after["prefill_calibration_age_seconds"] > before["prefill_calibration_age_seconds"]
    assert after["prefill_telemetry_dropped_total"] == 0
    assert after["prefill_waiting_requests"] == after["prefill_inflight_batches"] == 0


def test_ttft_is_vllms_own_even_of_a_client_that_hangs_up_after_it(server: Server) -> None:
    first_tokens_told(server)
    since = server.agent.mark()
    before = scrape(server)
    connection = server.request(prompt(900, seed=60), max_tokens=4000, stream=True)
    with contextlib.closing(connection):
        assert connection.getresponse().readline().startswith(b"data: ")
    assert server.agent.wait(finished(1), since) == ["abort"]
    assert [x.prompt_tokens for x in server.agent.events[since:] if isinstance(x, Request)] == [900]
    first_tokens_told(server)
    after = scrape(server)
    assert total(after, "prefill_ttft_seconds_count") == total(before, "prefill_ttft_seconds_count") + 1
    assert total(after, "prefill_ttft_seconds_count") == own_figure(server, "time_to_first_token_seconds_count")
    own = own_figure(server, "time_to_first_token_seconds_sum")
    assert total(after, "prefill_ttft_seconds_sum") == pytest.approx(own, rel=1e-6)
