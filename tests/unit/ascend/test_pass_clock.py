"""Passes on a device that works on its own, with a clock of its own: what is told is what it did, and nothing waits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_runtime.engine import guard
from prefill_runtime.engine.pass_clock import OUTSTANDING, DeviceTimer, HostTimer
from prefill_runtime.telemetry.account import RankAccount, State
from prefill_runtime.telemetry.events import Call, Event, Hello, Pass, Stamp, Start
from prefill_runtime.telemetry.sender import Sender

from tests.unit.telemetry.conftest import Prompt, run_pipeline


class Device:
    """One stream, worked on in order. ``now`` is true time, which is the host's; ``rate`` is the device clock's."""

    def __init__(self, rate: float = 1.0) -> None:
        self.now, self.rate = 100.0, rate
        self.busy_until = 0.0
        self.broken = False
        self.recorded = 0

    def host(self) -> float:
        return self.now

    def queue(self, seconds: float = 0.0, not_before: float = 0.0) -> float:
        self.busy_until = max(self.busy_until, self.now, not_before) + seconds
        return self.busy_until

    def event(self) -> DeviceEvent:
        return DeviceEvent(self)


class DeviceEvent:
    """Knows no way to wait; asking for a time that is not there yet is an error."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, math.nan

    def record(self) -> None:
        self.device.recorded += 1
        self.at = self.device.queue()

    def query(self) -> bool:
        if self.device.broken:
            raise RuntimeError("device lost")
        return self.at <= self.device.now

    def elapsed_time(self, end: DeviceEvent) -> float:
        assert self.query()
        assert end.query(), "would have to be waited for"
        milliseconds = (end.at - self.at) * self.device.rate * 1000
        return round(milliseconds, 4)  # single precision, of seconds


class Told(Sender):
    def __init__(self) -> None:
        super().__init__(None, Hello(role="worker", rank=0))
        self.events: list[Event] = []
        self.passes: list[Pass] = []

    def send(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Pass):
            self.passes.append(event)


class Rank:
    """What a worker does around a pass; returns when the pass really starts and ends."""

    def __init__(self, device: Device, first: bool = True) -> None:
        self.device, self.first, self.told = device, first, Told()
        self.timer = DeviceTimer(self.told, 0, device.event, device.host)
        self.batch = 0

    def launch(self, seconds: float, arrives: float = 0.0, stamp: Stamp | None = None) -> tuple[float, float]:
        self.batch += 1
        self.timer.called(stamp or Stamp(batch=self.batch, period=1))
        self.timer.entered()
        start = self.device.queue(not_before=arrives)
        self.timer.input_ready(None if self.first else 0.0)
        end = self.device.queue(seconds)
        self.timer.ended()
        self.timer.sent()
        return start, end


@pytest.fixture(autouse=True)
def nothing_was_hidden() -> Iterator[None]:
    """Failures of telemetry are only logged, so ask whether there were any."""
    guard._reported.clear()
    yield
    assert not guard._reported


@st.composite
def traffic(draw: st.DrawFn) -> dict[str, Any]:
    tenths = st.integers(1, 40).map(lambda n: n / 10)
    ranks = draw(st.integers(1, 4))
    chunk = st.lists(tenths, min_size=ranks, max_size=ranks)
    prompt = st.builds(Prompt, st.integers(0, 600).map(lambda n: n / 10), st.lists(chunk, min_size=1, max_size=6))
    return {
        "ranks": ranks,
        "prompts": draw(st.lists(prompt, min_size=1, max_size=5, unique_by=lambda p: p.arrival)),
        "limit": draw(st.integers(1, ranks)),
        "host": draw(st.sampled_from([0.0, 0.01, 0.3])),
    }


@given(traffic(), st.sampled_from([1.0, 1.0001, 0.9999]))
@settings(max_examples=60, deadline=None)
def test_rank_states_are_the_true_ones(case: dict[str, Any], rate: float) -> None:
    run = run_pipeline(**case)
    until = run.end + 5
    for rank in range(run.ranks):
        device = Device(rate)
        device.now = 0.0
        worker = Rank(device, first=rank == 0)
        steps: list[tuple[float, Any]] = [(b.issue, b) for b in run.batches] + [(at, None) for _, at in run.empties]
        for at, batch in sorted(steps, key=lambda step: step[0]):
            device.now = at
            if batch is None:
                worker.timer.called(None)
                continue
            _, start, end, _ = batch.passes[rank]
            arrives = batch.passes[rank - 1][3] if rank else 0.0
            assert worker.launch(end - start, arrives, batch.stamp) == (pytest.approx(start), pytest.approx(end))
        assert len(worker.told.passes) == len(run.batches)
        account = RankAccount(0.0)
        for event in worker.told.events:
            account.feed(event)
        period, empty = run.empties[-1]
        account.pipeline_idle(period, empty, until)
        account.settle(until, grace=0.0)
        told, truth = account.totals(until), run.truth(rank, until)
        assert sum(told.values()) == pytest.approx(until)
        wrong = {s: (told[s], truth[s]) for s in State if abs(told[s] - truth[s]) > abs(rate - 1) * until + 1e-3}
        assert not wrong


def test_a_pass_is_told_with_the_first_step_after_its_end() -> None:
    device = Device()
    rank = Rank(device)
    ends = []
    for _ in range(40):  # the host is three passes ahead
        ends.append(rank.launch(0.5)[1])
        if len(ends) > 3:
            device.now = ends[-3] + 0.01
        done = sum(end <= device.now for end in ends)
        rank.timer.called(None)
        assert len(rank.told.passes) == done
        assert done >= len(ends) - 3
    durations = [event.end - event.start for event in rank.told.passes]
    assert durations == pytest.approx([0.5] * len(durations))


def test_the_last_pass_comes_with_the_step_without_tokens() -> None:
    device = Device()
    rank = Rank(device)
    start, end = rank.launch(2.0)
    assert [type(event) for event in rank.told.events] == [Call, Start]  # a lone pass on the first rank is seen at once
    rank.timer.called(None)
    assert not rank.told.passes
    device.now = end + 0.2
    rank.timer.called(None)
    (told,) = rank.told.passes
    assert (told.call, told.start, told.end, told.sent) == pytest.approx((100.0, start, end, end))


def test_waiting_for_input_on_the_stream_is_no_work() -> None:
    device = Device()
    rank = Rank(device, first=False)
    rank.launch(1.0, arrives=device.now + 3)
    device.now += 3.5
    rank.timer.called(None)  # the input is there, the pass is not done
    (call, start) = rank.told.events
    assert (type(call), type(start)) == (Call, Start)
    assert (call.at, start.at) == pytest.approx((100.0, 103.0))
    device.now += 1
    rank.timer.called(None)
    assert [(e.call, e.start, e.end) for e in rank.told.passes] == [pytest.approx((100.0, 103.0, 104.0))]


def test_a_batch_the_host_got_early_is_called_when_the_pass_before_ends() -> None:
    device = Device()
    rank = Rank(device)
    rank.launch(1.0)
    rank.launch(2.0)
    assert [type(event) for event in rank.told.events] == [Call, Start]
    device.now += 1.5
    rank.timer.called(None)
    kinds = [type(event) for event in rank.told.events]
    assert kinds == [Call, Start, Pass, Call, Start]
    assert [rank.told.events[3].at, rank.told.events[4].at] == pytest.approx([101.0, 101.0])
    device.now += 2
    rank.timer.called(None)
    assert [(e.call, e.start, e.end) for e in rank.told.passes][1] == pytest.approx((101.0, 101.0, 103.0))


def test_an_event_that_never_completes_costs_its_own_pass_only() -> None:
    device = Device()
    rank = Rank(device)
    real = []
    for number in range(6):
        real.append(rank.launch(0.5))
        if number == 2:
            rank.timer._flights[-1].end.event.at = math.inf
        device.now += 0.6
    rank.timer.called(None)
    assert [event.stamp.batch for event in rank.told.passes] == [1, 2, 4, 5, 6]
    assert rank.told.dropped == 1
    del real[2]
    assert [(event.start, event.end) for event in rank.told.passes] == [pytest.approx(pass_) for pass_ in real]


def test_what_is_outstanding_is_bounded_and_what_is_lost_is_counted() -> None:
    device = Device()
    rank = Rank(device)
    for _ in range(OUTSTANDING + 36):
        rank.launch(10.0)
    assert len(rank.timer._flights) == OUTSTANDING
    assert rank.told.dropped == 36
    device.now = device.busy_until
    rank.timer.called(None)
    assert [event.stamp.batch for event in rank.told.passes] == list(range(37, OUTSTANDING + 37))
    assert [event.end - event.start for event in rank.told.passes] == pytest.approx([10.0] * OUTSTANDING)


def test_a_lost_device_costs_what_was_in_flight_and_no_request() -> None:
    device = Device()
    rank = Rank(device)
    rank.launch(1.0)
    rank.launch(1.0)
    device.broken, device.now = True, 110.0
    rank.timer.called(Stamp(batch=3, period=1))
    assert guard._reported == {"DeviceTimer.called"}
    guard._reported.clear()
    assert rank.told.dropped == 2
    device.broken = False
    rank.timer.called(None)
    start, end = rank.launch(1.0)
    device.now = 112.0
    rank.timer.called(None)
    assert [(event.start, event.end) for event in rank.told.passes] == [pytest.approx((start, end))]


@pytest.mark.parametrize("rate", [1.0002, 0.9998])
def test_clocks_that_drift_apart_for_an_hour(rate: float) -> None:
    """0.72 s apart in the end; a pass may be off by what they drift within the busy period."""
    device = Device(rate)
    rank = Rank(device)
    while device.now < 3700:
        truth = [rank.launch(0.5) for _ in range(4)]
        device.now += 3.0
        rank.timer.called(None)
        for told, (start, end) in zip(rank.told.passes[-4:], truth, strict=True):
            assert (told.start, told.end) == pytest.approx((start, end), abs=2.0 * abs(rate - 1) + 1e-5)


@pytest.mark.parametrize("rate", [1.0002, 0.9998])
def test_clocks_that_drift_apart_without_a_pause(rate: float) -> None:
    """Never an empty stream for an hour: nothing is told to have ended after it was seen, or long before it did."""
    device = Device(rate)
    rank = Rank(device, first=False)
    ends = [rank.launch(0.5)[1]]
    told = 0
    while device.now < 3700:
        ends.append(rank.launch(0.5)[1])
        device.now = ends[-2] + 0.01
        rank.timer.called(None)
        for event in rank.told.passes[told:]:
            assert event.end == pytest.approx(ends[event.stamp.batch - 1], abs=0.5)
            assert event.end - event.start == pytest.approx(0.5, rel=3e-4)
            assert event.end <= device.now + 1e-9
        told = len(rank.told.passes)
    assert told > 7000
    starts = [event.start for event in rank.told.passes]
    assert all(later >= event.end - 1e-9 for event, later in zip(rank.told.passes, starts[1:], strict=False))


def test_a_pass_takes_no_more_than_three_events() -> None:
    device = Device()
    rank = Rank(device)
    for _ in range(10):
        rank.launch(0.5)
        device.now += 1
    assert device.recorded == 30
    rank.timer.called(None)
    assert device.recorded == 30


def test_on_the_host_times_are_those_of_the_calls() -> None:
    told = Told()
    timer, stamp = HostTimer(told, 3, iter([1.0, 2.0, 3.5, 5.0, 6.0, 6.25]).__next__), Stamp(batch=9, period=1)
    timer.called(stamp)
    timer.entered()
    timer.input_ready(1.25)
    timer.ended()
    timer.ended()  # sampling
    timer.sent()
    assert told.events == [
        Call(stamp=stamp, at=1.0),
        Start(batch=9, at=3.5),
        Pass(stamp=stamp, stage=3, call=1.0, start=3.25, end=6.0, sent=6.25),
    ]
    timer.called(None)
    timer.sent()
    assert len(told.events) == 3
