from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_runtime.agent.group import LINE_LIMIT
from prefill_runtime.telemetry import timeline
from prefill_runtime.telemetry.account import State
from prefill_runtime.telemetry.events import (
    Call,
    Chunk,
    Decoder,
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
from prefill_runtime.telemetry.hub import GRACE_SECONDS, Hub
from prefill_runtime.telemetry.metrics import prompt_class

from tests.documents import calibration

BEAT = 1.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Group:
    """A pipeline's agents on one true clock: each hub sees its host's, heartbeats run once a second."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.clocks = [Clock() for _ in range(run.ranks)]
        self.hubs = [Hub(r, run.ranks, r == 0, now=self.clocks[r]) for r in range(run.ranks)]
        self.set(0.0)
        for rank, hub in enumerate(self.hubs):
            hub.feed(Hello(role="worker", rank=rank))

    def set(self, t: float) -> None:
        for clock, offset in zip(self.clocks, self.run.offsets, strict=True):
            clock.now = t + offset

    def beat(self) -> None:
        leader, *followers = self.hubs
        idle = leader.pipeline_idle()
        for rank, hub in enumerate(followers, 1):
            events = json.loads(json.dumps(hub.drain_for_leader()))
            leader.feed_remote(rank, events, self.run.offsets[0] - self.run.offsets[rank])
            if idle is not None:
                hub.set_pipeline_idle(*idle)

    def play(self, extra: list[tuple[float, Event]] = []) -> None:  # noqa: B006
        """Scheduler times are the leader's host's: shift them by its offset."""
        steps: list[tuple[float, int, int, Any]] = []
        for t, event in [*self.run.scheduler, *extra]:
            if hasattr(event, "at"):
                event.at = t + self.run.offsets[0]
            steps.append((t, 0, 0, event))
        for rank in range(self.run.ranks):
            steps += [(t, 1, rank, e) for t, e in self.run.worker_events(rank)]
        steps += [(n * BEAT, 2, 0, None) for n in range(int(self.run.end / BEAT) + 3)]
        for t, what, rank, event in sorted(steps, key=lambda s: s[:3]):
            self.set(t)
            if what == 2:
                self.beat()
            else:
                self.hubs[rank].feed(event)


def scrape(hub: Hub, name: str) -> dict[str, float]:
    lines = hub.metrics_text().decode().splitlines()
    found = (re.fullmatch(rf"{name}({{.*}})? (\S+)", line) for line in lines)
    return {m[1] or "": float(m[2]) for m in found if m}


def example(pipeline: Any, prompt: Any) -> Any:
    chunks = [[1.0, 1.2, 0.9], [1.0, 1.1, 1.0], [0.5, 0.6, 0.4]]
    offsets = [50.0, -300.0, 7e4]
    return pipeline(3, [prompt(1.0, chunks), prompt(1.5, chunks[:2]), prompt(20.0, chunks)], host=0.01, offsets=offsets)


def test_scraped_ratio_of_every_rank_agrees_with_the_timeline(pipeline: Any, prompt: Any) -> None:
    group = Group(example(pipeline, prompt))
    group.play()
    document = json.loads(json.dumps(group.hubs[0].timeline()))
    assert [p["period"] for p in document["periods"]] == [1, 2]
    assert all(p["complete"] for p in document["periods"])
    ratios = timeline.bubble_ratio(document)
    assert sorted(ratios) == [0, 1, 2]
    for rank, hub in enumerate(group.hubs):
        scraped = scrape(hub, "prefill_bubble_ratio")
        assert scraped == {f'{{rank="{rank}"}}': pytest.approx(ratios[rank], abs=1e-6)}
        states = scrape(hub, "prefill_rank_state_seconds_total")
        assert len(states) == len(State)
        assert sum(states.values()) == pytest.approx(group.clocks[rank].now - group.run.offsets[rank])


def test_segments_lie_where_they_were_on_the_leaders_clock(pipeline: Any, prompt: Any) -> None:
    group = Group(example(pipeline, prompt))
    group.play()
    zero = group.run.offsets[0]
    [_, period] = group.hubs[0].timeline()["periods"]
    for rank in period["ranks"]:
        segments = rank["segments"]
        for a, b in itertools.pairwise(segments):
            assert a["end"] == b["start"]
        compute = [s for s in segments if s["state"] == "compute"]
        batches = [b for b in group.run.batches if b.stamp.period == 2]
        assert [s["batch"] for s in compute] == [b.stamp.batch for b in batches]
        for s, b in zip(compute, batches, strict=True):
            assert s["start"] + rank["clockOffset"] == pytest.approx(b.passes[rank["rank"]][1] + zero, abs=1e-6)
        assert segments[-1]["end"] + rank["clockOffset"] == pytest.approx(group.run.end + zero, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 4)), min_size=1, max_size=5, unique_by=lambda p: p[0]))
@settings(max_examples=40, deadline=None)
def test_leader_and_follower_agree_for_any_traffic(pipeline: Any, prompt: Any, traffic: list[tuple[int, int]]) -> None:
    prompts = [prompt(t / 2, [[0.4, 0.7]] * n) for t, n in traffic]
    group = Group(pipeline(2, prompts, host=0.02, transfer=0.01, offsets=[10.0, 2000.0]))
    group.play()
    document = group.hubs[0].timeline()
    assert all(p["complete"] for p in document["periods"])
    last = timeline.bubble_ratio(document)
    for rank, hub in enumerate(group.hubs):
        [scraped] = scrape(hub, "prefill_bubble_ratio").values()
        assert scraped == pytest.approx(last[rank], abs=1e-6)
    assert len(document["periods"]) <= timeline.KEEP


def test_a_lost_follower_leaves_an_incomplete_period_and_nothing_waits_for_it(pipeline: Any, prompt: Any) -> None:
    group = Group(example(pipeline, prompt))
    leader = group.hubs[0]
    for t, event in group.run.scheduler:
        event.at = t + group.run.offsets[0]
        leader.feed(event)
    for _, event in group.run.worker_events(0):
        leader.feed(event)
    group.set(group.run.end + GRACE_SECONDS + 1)
    leader.timeline()
    group.set(group.run.end + 2 * GRACE_SECONDS + 2)
    document = leader.timeline()
    assert [(p["complete"], len(p["ranks"])) for p in document["periods"]] == [(False, 1), (False, 1)]
    assert timeline.bubble_ratio(document) == {}
    assert list(timeline.bubble_ratio(document, 2)) == [0]


def test_one_agent_may_host_several_ranks(pipeline: Any, prompt: Any) -> None:
    run = pipeline(2, [prompt(1.0, [[1.0, 1.0]] * 3)])
    clock = Clock()
    passes: list[Pass] = []
    hub = Hub(0, 2, True, on_pass=lambda record, _: passes.append(record), now=clock)
    for rank in range(2):
        hub.feed(Hello(role="worker", rank=rank))
    events = [*run.scheduler, *run.worker_events(0), *run.worker_events(1)]
    for t, event in sorted(events, key=lambda e: e[0]):
        clock.now = t
        hub.feed(event)
    clock.now = run.end + 1
    assert scrape(hub, "prefill_bubble_ratio") == {'{rank="0"}': 0.25, '{rank="1"}': 0.25}
    assert timeline.bubble_ratio(hub.timeline()) == {0: 0.25, 1: 0.25}
    assert [(p.rank, p.stamp.batch) for p in passes] == [(0, 1), (0, 2), (1, 1), (0, 3), (1, 2), (1, 3)]
    assert hub.drain_for_leader() == []


def test_pipeline_idle_is_what_followers_need() -> None:
    clock = Clock()
    hub = Hub(0, 1, True, now=clock)
    assert hub.pipeline_idle() is None
    hub.feed(Issue(stamp=Stamp(batch=1, period=1, first=True), at=0.0))
    assert hub.pipeline_idle() is None
    hub.feed(Idle(period=1, at=2.0))
    clock.now = 5.0
    assert hub.pipeline_idle() == (1, 3.0)
    hub.feed(Issue(stamp=Stamp(batch=2), at=5.0))  # a decode step alone
    assert hub.pipeline_idle() == (1, 3.0)
    hub.feed(Issue(stamp=Stamp(batch=3, period=2, first=True), at=5.0))
    assert hub.pipeline_idle() is None


def served() -> Hub:
    hub = Hub(0, 1, True, now=Clock(), wall=lambda: 1_700_000_100.0)
    hub.feed(Hello(role="worker", rank=0))
    assert hub.running_requests() is None  # its scheduler has not been heard
    hub.feed(Hello(role="scheduler", rank=0))
    chunks = (Chunk("a", 0, 2048, 8192), Chunk("b", 100, 1, 100))
    hub.feed(Issue(stamp=Stamp(batch=1, period=1, first=True, chunks=chunks), at=0.0, policy="Dynamic"))
    hub.feed(Queue(waiting=2, waiting_tokens=9000, inflight=1, at=0.0))
    hub.feed(Request(request="a", prompt_tokens=8192, ttft=2.0, queue=0.25, at=2.0, arrival=1.7e9, dropped=3))
    hub.feed(Finish(request="b", outcome="stop"))
    hub.feed(Finish(request="zzz", outcome="id-4711"))
    hub.feed(Served(arrival=1_700_000_000.0, ttft=2.25))
    hub.set_calibration(calibration(stages=1, r2=0.987, model="m", created_at="2023-11-14T22:13:20Z"))
    return hub


def test_leader_metrics_have_their_values() -> None:
    hub = served()
    assert scrape(hub, "prefill_chunk_tokens_sum") == {'{policy="Dynamic"}': 2048.0}
    assert scrape(hub, "prefill_ttft_seconds_sum") == {'{prompt_class="le_16k"}': 2.25}
    assert scrape(hub, "prefill_queue_seconds_sum") == {'{prompt_class="le_16k"}': 0.25}
    assert scrape(hub, "prefill_compute_seconds_sum") == {'{prompt_class="le_16k"}': 1.75}
    assert scrape(hub, "prefill_prompt_tokens_total") == {"": 8192.0}
    outcomes = scrape(hub, "prefill_requests_total")
    assert outcomes == {f'{{outcome="{o}"}}': n for o, n in
                        [("stop", 1), ("length", 0), ("abort", 0), ("error", 0), ("other", 1)]}  # fmt: skip
    assert scrape(hub, "prefill_waiting_tokens") == {"": 9000.0}
    assert scrape(hub, "prefill_inflight_batches") == {"": 1.0}
    assert scrape(hub, "prefill_telemetry_dropped_total") == {"": 3.0}
    assert scrape(hub, "prefill_calibration_info") == {'{key="0123456789abcdef",model="m",source="Profile"}': 1.0}
    assert scrape(hub, "prefill_calibration_r2_ratio") == {"": 0.987}
    assert scrape(hub, "prefill_calibration_age_seconds") == {"": 100.0}
    assert hub.running_requests() == 1 + 2


def test_a_replaced_calibration_leaves_no_series_behind() -> None:
    hub = served()
    hub.set_calibration(None)
    assert scrape(hub, "prefill_calibration_info") == {}
    assert scrape(hub, "prefill_calibration_age_seconds") == {}


def test_followers_export_only_what_they_know() -> None:
    hub = Hub(3, 4, False, now=Clock())
    hub.feed(Hello(role="worker", rank=3))
    hub.feed(Call(stamp=Stamp(batch=1, period=1), at=0.0))
    names = set(re.findall(r"^# TYPE (\S+)", hub.metrics_text().decode(), re.M))
    assert names == {
        "prefill_rank_state_seconds_total", "prefill_bubble_ratio", "prefill_telemetry_dropped_total",
    }  # fmt: skip


def test_promtool_finds_nothing_to_complain_about() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=served().metrics_text(), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(1, "le_4k"), (4096, "le_4k"), (4097, "le_16k"), (65536, "le_64k"), (131072, "le_128k"), (262144, "le_256k"),
     (524288, "le_512k"), (524289, "gt_512k")],
)  # fmt: skip
def test_prompt_classes(tokens: int, name: str) -> None:
    assert prompt_class(tokens) == name


def test_picture_has_a_lane_per_rank_and_says_the_same_as_the_document(pipeline: Any, prompt: Any) -> None:
    group = Group(example(pipeline, prompt))
    name = '<request> & "more"'
    last = group.run.batches[-1]
    last.stamp.chunks = (Chunk(name, 2, 1, 3),)
    end = group.run.end
    group.play([(end, Request(request=name, prompt_tokens=3, ttft=3.25, queue=0.1, at=end))])
    document = group.hubs[0].timeline()
    picture = ElementTree.fromstring(group.hubs[0].timeline_svg())
    texts = ["".join(t.itertext()) for t in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0", "rank 1", "rank 2", "TTFT 3.25 s"} <= set(texts)
    for ratio in timeline.bubble_ratio(document).values():
        assert f"{ratio:.1%}" in texts
    titles = [t.text or "" for t in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert any(f"{name}: 1 tokens after 2 of 3" in t for t in titles)
    # Widths are durations: the lanes' compute blocks are as long as the document says.
    blocks = [r for r in picture.iter("{http://www.w3.org/2000/svg}rect") if "compute" in (r.get("class") or "")]
    seconds = [s["end"] - s["start"] for r in document["periods"][-1]["ranks"] for s in r["segments"] if s["stage"] >= 0
               and s["state"] == "compute"]  # fmt: skip
    drawn = [float(b.get("width") or 0) for b in blocks if b.get("height") == "36"]
    scale = (drawn[0] + 0.8) / seconds[0]
    assert drawn == [pytest.approx(s * scale - 0.8, abs=0.1) for s in seconds]


def test_mixed_batches_stay_small_in_memory_and_on_the_beat() -> None:
    """A long prompt beside hundreds of decoding requests: their names are neither kept nor sent on."""
    leader, follower = Hub(0, 2, True, now=Clock()), Hub(1, 2, False, now=Clock())
    leader.feed(Hello(role="scheduler", rank=0))
    decodes = tuple(Chunk(f"cmpl-{i:032x}", 900, 1, 900) for i in range(255))
    for batch in range(1, 101):
        chunks = (Chunk("long", 512 * (batch - 1), 512, 51_200), *decodes)
        stamp = Stamp(batch=batch, period=1, first=batch == 1, chunks=chunks)
        at = 0.01 * batch
        leader.feed(Issue(stamp=stamp, at=at, policy="Dynamic"))
        follower.feed(Pass(stamp=stamp, stage=1, rank=1, call=at, start=at, end=at + 0.01, sent=at + 0.01))
    follower.feed(Pass(stamp=Stamp(batch=101, chunks=decodes), stage=1, rank=1, call=2, start=2, end=2.1, sent=2.1))
    assert leader.running_requests() == 256
    line = json.dumps(follower.drain_for_leader())
    beat = json.loads(line)
    assert len(beat) == 100
    assert len(line) < 40_000
    assert [c.tokens for c in Decoder().wire(beat[5]).stamp.chunks] == [512, 255]  # type: ignore[union-attr]
    leader.feed_remote(1, beat, 0.0)
    leader.feed(Idle(period=1, at=1.01))
    [period] = leader.timeline()["periods"]
    assert period["batches"][-1]["chunks"] == [
        {"request": "long", "history": 512 * 99, "tokens": 512, "promptTokens": 51_200},
        {"request": "", "history": 0, "tokens": 255, "promptTokens": 0},
    ]


def test_too_much_for_one_beat_comes_with_the_next() -> None:
    follower = Hub(1, 2, False, now=Clock())
    chunks = tuple(Chunk(f"prompt-{i}", 0, 32, 32) for i in range(512))
    for batch in range(1, 101):
        stamp = Stamp(batch=batch, period=1, chunks=chunks)
        follower.feed(Pass(stamp=stamp, stage=1, rank=1, call=batch, start=batch, end=batch + 0.5, sent=batch + 0.5))
    beats = list(iter(follower.drain_for_leader, []))
    assert [wire["batch"] for beat in beats for wire in beat] == list(range(1, 101))
    assert len(beats) == 4
    assert max(len(json.dumps(beat)) for beat in beats) < LINE_LIMIT / 4


def test_a_first_token_belongs_to_the_period_that_worked_on_its_prompt() -> None:
    hub = Hub(0, 1, True, now=Clock())
    for batch, (period, name) in enumerate([(1, "a"), (1, "b"), (2, "a"), (2, "c")], 1):
        stamp = Stamp(batch=batch, period=period, chunks=(Chunk(name, 0, 8, 8),))
        hub.feed(Issue(stamp=stamp, at=float(batch), policy="Fixed"))
    for name in ("a", "b", "nobody"):  # a client may use an id again: it means the latest
        hub.feed(Request(request=name, prompt_tokens=8, ttft=1.0, queue=0.0, at=5.0))
    assert [[r["request"] for r in p["requests"]] for p in hub.timeline()["periods"]] == [["b"], ["a"]]


def test_the_document_of_a_moment_survives_what_comes_later(pipeline: Any, prompt: Any) -> None:
    """It is made in a thread while events go on."""
    group = Group(example(pipeline, prompt))
    group.play()
    leader = group.hubs[0]
    before, make = leader.timeline(), leader.timeline_snapshot()
    stamp = Stamp(batch=99, period=99, first=True, chunks=(Chunk("x", 0, 1, 1),))
    for hub in group.hubs:
        hub.feed(Issue(stamp=stamp, at=1e6))
        hub.feed(Call(stamp=stamp, at=1e6))
    leader.feed(Request(request="x", prompt_tokens=1, ttft=1.0, queue=0.0, at=1e6))
    assert make() == before
    assert json.loads(timeline.to_json(before)) == json.loads(json.dumps(before))
    assert leader.timeline() != before


def test_picture_of_nothing() -> None:
    assert "No busy period recorded yet" in Hub(0, 1, True).timeline_svg()


def test_trace_for_perfetto(pipeline: Any, prompt: Any) -> None:
    group = Group(example(pipeline, prompt))
    group.play()
    document = group.hubs[0].timeline()
    trace = json.loads(json.dumps(timeline.chrome_trace(document)))["traceEvents"]
    blocks = [e for e in trace if e["ph"] == "X"]
    assert len(blocks) == sum(len(r["segments"]) for p in document["periods"] for r in p["ranks"])
    first = min((b for b in blocks if b["name"] == "compute"), key=lambda b: b["ts"])
    assert first["ts"] == pytest.approx((group.run.batches[0].passes[0][1] + group.run.offsets[0]) * 1e6)
    assert first["tid"] == 0
