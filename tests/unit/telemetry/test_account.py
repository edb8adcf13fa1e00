from __future__ import annotations

import heapq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_runtime.telemetry.account import WINDOW_SECONDS, RankAccount, State, bubble_ratio
from prefill_runtime.telemetry.clock import SchedulerClock
from prefill_runtime.telemetry.events import Call, Chunk, Pass, Stamp, Start

TENTHS = st.integers(1, 40).map(lambda n: n / 10)


@st.composite
def traffic(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.integers(1, 5))
    chunk = st.lists(TENTHS, min_size=ranks, max_size=ranks)
    prompts = draw(
        st.lists(st.tuples(st.integers(0, 600).map(lambda n: n / 10), st.lists(chunk, min_size=1, max_size=6)),
                 min_size=1, max_size=5, unique_by=lambda p: p[0])
    )  # fmt: skip
    return {
        "ranks": ranks,
        "prompts": prompts,
        "limit": draw(st.integers(1, ranks)),
        "host": draw(st.sampled_from([0.0, 0.01, 0.3])),
        "transfer": draw(st.sampled_from([0.0, 0.05])),
        "offsets": draw(st.lists(st.floats(-1e5, 1e5), min_size=ranks, max_size=ranks)),
    }


def simulate(pipeline: Any, prompt: Any, case: dict[str, Any]) -> Any:
    return pipeline(
        case["ranks"],
        [prompt(arrival, seconds) for arrival, seconds in case["prompts"]],
        limit=case["limit"],
        host=case["host"],
        transfer=case["transfer"],
        offsets=case["offsets"],
    )


def assert_close(actual: dict[State, float], expected: dict[State, float], tolerance: float = 1e-6) -> None:
    wrong = {s: (actual[s], expected[s]) for s in State if abs(actual[s] - expected[s]) > tolerance}
    assert not wrong


@given(traffic())
@settings(max_examples=150, deadline=None)
def test_seconds_are_the_true_ones_on_any_clock(pipeline: Any, prompt: Any, case: dict[str, Any]) -> None:
    run = simulate(pipeline, prompt, case)
    until = run.end + 5
    for rank in range(run.ranks):
        offset = run.offsets[rank]
        account = RankAccount(offset)
        for _, event in run.worker_events(rank):
            account.feed(event)
        period, empty = run.empties[-1]
        account.pipeline_idle(period, empty + offset, until + offset)
        account.settle(until + offset, grace=0.0)
        truth = run.truth(rank, until)
        assert_close(account.totals(until + offset), truth)
        # Every busy period is in exactly one window, and they hold all that is not idle.
        windows = account.completed()
        assert [w.period for w in windows] == [p for p, _ in run.empties]
        summed = {s: sum(w.seconds.get(s, 0.0) for w in windows) for s in State}
        assert_close(summed, truth | {State.IDLE: 0.0})
        for w in windows:
            assert sum(s.end - s.start for s in w.segments) == pytest.approx(sum(w.seconds.values()))


@given(traffic(), st.lists(st.floats(0, 1), max_size=30), st.floats(0, 0.5))
@settings(max_examples=150, deadline=None)
def test_counters_never_fall_and_add_up_to_wall_time_at_any_scrape(
    pipeline: Any, prompt: Any, case: dict[str, Any], scrapes: list[float], delay: float
) -> None:
    run = simulate(pipeline, prompt, case)
    until = run.end + 5
    for rank in range(run.ranks):
        offset = run.offsets[rank]
        account = RankAccount(offset)
        steps = [(t, 0, e) for t, e in run.worker_events(rank)]
        steps += [(t + delay, 1, (period, t)) for period, t in run.empties]
        steps += [(x * until, 2, None) for x in scrapes] + [(until, 2, None)]
        before = account.totals(offset)
        for t, what, payload in sorted(steps, key=lambda s: s[:2]):
            if what == 0:
                account.feed(payload)
            elif what == 1:
                account.pipeline_idle(payload[0], payload[1] + offset, t + offset)
            else:
                account.settle(t + offset)
                totals = account.totals(t + offset)
                assert all(totals[s] >= before[s] for s in State)
                assert sum(totals.values()) == pytest.approx(t, rel=0.01, abs=1e-6)
                before = totals
        assert_close(account.seconds | {State.IDLE: 0.0}, run.truth(rank, until) | {State.IDLE: 0.0})


def test_what_was_guessed_wrongly_is_paid_back() -> None:
    account = RankAccount(0.0)
    stamp = Stamp(batch=1, period=1, first=True)
    account.feed(Pass(stamp=stamp, stage=0, call=10.0, start=10.0, end=11.0, sent=11.0))
    guessed = account.totals(21.0)  # ten seconds that nobody has explained yet
    assert guessed[State.IMBALANCE] == pytest.approx(10 - 0.005 * 21)
    account.pipeline_idle(1, 12.0, 21.0)
    account.settle(21.5)
    assert account.seconds[State.DRAIN] == pytest.approx(1.0)
    later = account.totals(32.0)
    assert sum(later.values()) == pytest.approx(32.0)
    assert later[State.IMBALANCE] == guessed[State.IMBALANCE]
    assert later[State.DRAIN] <= 1.0
    # The next true imbalance finds its excess already published, so in the end all are exact.
    stamp = Stamp(batch=2, period=2, first=True, idle_before=28.0)
    account.feed(Pass(stamp=stamp, stage=0, call=40.0, start=40.0, end=41.0, sent=41.0))
    account.feed(Call(stamp=Stamp(batch=3, period=2), at=41.0))
    assert_close(account.totals(61.0), account.seconds | {State.IMBALANCE: 20.0})


def test_field_case_causes_differ_by_rank(pipeline: Any, prompt: Any) -> None:
    run = pipeline(4, [prompt(0.0, [[1.0] * 4] * 4)])
    for rank in range(4):
        truth = run.truth(rank, run.end)
        assert (truth[State.FILL], truth[State.DRAIN], truth[State.IMBALANCE]) == (rank, 3 - rank, 0)


@given(traffic(), st.randoms())
@settings(max_examples=80, deadline=None)
def test_lost_and_late_events_never_break_the_sum(
    pipeline: Any, prompt: Any, case: dict[str, Any], random: Any
) -> None:
    run = simulate(pipeline, prompt, case)
    account = RankAccount(run.offsets[0])
    events = [e for _, e in run.worker_events(0) if random.random() > 0.3]
    for i in range(len(events) - 1):
        if random.random() < 0.1:
            events[i], events[i + 1] = events[i + 1], events[i]
    for event in events:
        account.feed(event)
        assert sum(account.seconds.values()) == pytest.approx(account.covered - account.start, abs=1e-6)
    now = run.offsets[0] + run.end
    assert sum(account.totals(now).values()) == pytest.approx(run.end, rel=0.01, abs=1e-6)


def test_open_time_is_attributed_at_once() -> None:
    account = RankAccount(0.0)
    assert account.totals(5.0)[State.IDLE] == 5.0
    account.feed(Call(stamp=Stamp(batch=1, period=1, first=True, idle_before=6.0, host_seconds=0.5), at=7.0))
    assert account.totals(9.0) == dict.fromkeys(State, 0.0) | {State.IDLE: 6.5, State.HOST: 0.5, State.FILL: 2.0}
    account.feed(Start(batch=1, at=10.0))
    totals = account.totals(14.0)
    assert (totals[State.FILL], totals[State.COMPUTE]) == (3.0, 4.0)


def test_a_decode_step_outside_a_period_waits_idly() -> None:
    account = RankAccount(0.0)
    account.feed(Pass(stamp=Stamp(batch=1, period=1, first=True, idle_before=1.0), stage=0,
                      call=1.0, start=1.0, end=2.0, sent=2.0))  # fmt: skip
    # The period ended at 3.0; its request decodes alone from then on, one round of the pipeline per token.
    account.feed(Pass(stamp=Stamp(batch=2, idle_before=0.1), stage=0, call=3.1, start=3.1, end=3.2, sent=3.2))
    account.feed(Pass(stamp=Stamp(batch=3, idle_before=0.6), stage=0, call=3.6, start=3.7, end=3.8, sent=3.8))
    window = account.completed()[0]
    assert window.seconds == pytest.approx({State.COMPUTE: 1.0, State.DRAIN: 1.0})
    totals = account.totals(4.0)
    assert totals[State.COMPUTE] == pytest.approx(1.2)
    assert totals[State.IDLE] == pytest.approx(1.8)


def test_an_early_word_does_not_swallow_passes_still_on_their_way() -> None:
    account = RankAccount(0.0)
    first = Pass(stamp=Stamp(batch=1, period=1, first=True), stage=0, call=1.0, start=1.0, end=2.0, sent=2.0)
    second = Pass(stamp=Stamp(batch=2, period=1), stage=0, call=2.0, start=2.0, end=3.0, sent=3.0)
    account.feed(first)
    account.pipeline_idle(1, 4.0, 4.01)
    account.settle(4.02)
    account.feed(second)
    account.settle(4.5)
    assert account.completed()[0].seconds == pytest.approx({State.COMPUTE: 2.0, State.DRAIN: 1.0})


def prefill(tokens: int = 1) -> list[Chunk]:
    return [Chunk("p", 0, tokens, 100)]


def test_clock_splits_idle_and_host() -> None:
    clock = SchedulerClock(0.0)
    clock.on_ready(4.0)
    first = clock.on_issue(4.25, prefill())
    assert (first.period, first.first, first.idle_before, first.host_seconds) == (1, True, 4.0, 0.25)
    clock.on_issued(4.5)
    second = clock.on_issue(5.0, prefill())
    assert (second.batch, second.period, second.first, second.idle_before, second.host_seconds) == (2, 1, False, 0, 0.5)
    assert clock.on_settle(6.0, 1) is None
    clock.on_ready(6.5)
    assert clock.on_settle(7.0, 2) == 1
    third = clock.on_issue(7.5, prefill())
    assert (third.period, third.first, third.idle_before, third.host_seconds) == (2, True, 0.0, 0.5)


def test_clock_keeps_decode_out_of_busy_periods() -> None:
    decode = [Chunk("d", 100, 1, 100)]
    clock = SchedulerClock(0.0)
    clock.on_ready(0.0)
    assert clock.on_issue(0.0, prefill()).period == 1
    assert clock.on_issue(1.0, decode).period == 1
    assert clock.on_settle(2.0, 1) == 1
    assert clock.on_settle(3.0, 2) is None
    alone = clock.on_issue(3.5, decode)
    assert (alone.period, alone.first, alone.idle_before, alone.host_seconds) == (0, False, 1.5, 0.0)
    clock.on_ready(4.0)
    again = clock.on_issue(5.0, prefill())
    assert (again.period, again.first, again.idle_before, again.host_seconds) == (2, True, 2.0, 1.0)


def test_merged_streams_of_all_ranks_agree_with_the_closed_form(pipeline: Any, prompt: Any) -> None:
    """Linear + Fixed with growing chunks, tau_k = (k+1) t, P = 2, N = 8: bubble 2/(N+3)."""
    run = pipeline(2, [prompt(0.0, [[float(k + 1)] * 2 for k in range(8)])])
    accounts = [RankAccount(0.0) for _ in range(2)]
    for _, _, rank, event in heapq.merge(*([(t, i, r, e) for i, (t, e) in enumerate(run.worker_events(r))]
                                           for r in range(2))):  # fmt: skip
        accounts[rank].feed(event)
    for account in accounts:
        account.pipeline_idle(1, run.end, run.end)
        account.settle(run.end, grace=0.0)
    ratios = [bubble_ratio(a.seconds) for a in accounts]
    assert ratios == [pytest.approx(2 / 11)] * 2


def test_a_send_that_waits_for_its_receiver_is_no_transfer() -> None:
    """Stock gloo blocks the sender until the next rank asks for the tensor."""
    account, at = RankAccount(0.0), 0.0
    for batch, send in enumerate([0.02, 0.02, 1.02, 0.02], start=1):
        stamp = Stamp(batch=batch, period=1, first=batch == 1, chunks=(Chunk("r", 1024 * (batch - 1), 1024, 4096),))
        account.feed(Pass(stamp=stamp, stage=0, call=at, start=at, end=at + 1.0, sent=at + 1.0 + send))
        at += 1.0 + send
    assert account.seconds[State.TRANSFER] == pytest.approx(3 * 0.02 + 0.04)  # latency and slope are both 0.02 a chunk
    assert account.seconds[State.IMBALANCE] == pytest.approx(0.98)
    assert sum(account.seconds.values()) == pytest.approx(at)


def test_the_tails_of_rank_0_which_go_nowhere_do_not_make_its_heads_sends_a_bubble() -> None:
    account, at = RankAccount(0.0), 0.0
    for batch in (1, 2, 3):
        stamp = Stamp(batch=batch, period=1, first=batch == 1, chunks=(Chunk("r", 1024 * (batch - 1), 1024, 3072),))
        for stage, kind, send in ((0, "head", 0.25), (3, "tail", 0.0)):
            account.feed(
                Pass(stamp=stamp, stage=stage, kind=kind, call=at, start=at, end=at + 1.0, sent=at + 1.0 + send)
            )
            at += 1.0 + send
    assert account.seconds[State.TRANSFER] == pytest.approx(3 * 0.25)
    assert account.seconds[State.COMPUTE] == pytest.approx(at - 3 * 0.25)


def test_the_ratio_of_a_period_that_does_not_end_moves_on(pipeline: Any, prompt: Any) -> None:
    """Under a backlog the pipeline is never empty; the ratio must still say what the last minute was like."""
    fair, unfair = [[1.0, 1.0]] * 300, [[1.0, 0.25]] * 300
    run = pipeline(2, [prompt(0.0, [*fair, *unfair])])
    account, seen = RankAccount(0.0), list[tuple[float, float]]()
    for t, event in run.worker_events(1):
        account.feed(event)
        ratio = bubble_ratio(account.busy)
        if ratio is not None:
            seen.append((t, ratio))
    ratios = [ratio for _, ratio in seen]
    assert seen[0][0] == pytest.approx(WINDOW_SECONDS, abs=2)
    assert {round(ratio, 6) for t, ratio in seen if 2 * WINDOW_SECONDS + 2 < t < 300} == {0.0}
    assert ratios[-1] == pytest.approx(0.75, abs=0.02)
    assert account.last is None
    [(period, end)] = run.empties
    account.pipeline_idle(period, end, end)
    account.settle(end, grace=0.0)
    assert sum(account.busy.values()) <= 2 * WINDOW_SECONDS + 2
    assert bubble_ratio(account.busy) == pytest.approx(0.75, abs=0.02)
    assert account.last is not None
    assert sum(account.last.seconds.values()) == pytest.approx(end, abs=1)


def test_the_way_of_a_batch_to_its_rank_is_neither_idle_nor_drain() -> None:
    """Issued at 10.0 after 0.1 s of host time, it reaches the rank at 10.4: the pipeline was busy meanwhile."""
    account = RankAccount(0.0)
    chunk = (Chunk("r", 0, 8, 8),)
    one = Stamp(batch=1, period=1, first=True, chunks=chunk)
    account.feed(Pass(stamp=one, stage=0, call=0.0, start=0.0, end=4.0, sent=4.0))
    account.pipeline_idle(1, 5.0, 5.0)
    decode = Stamp(batch=2, idle_before=0.25)  # a step with no prefill about: its rank gets it late too
    account.feed(Call(stamp=decode, at=5.75))
    account.feed(Pass(stamp=decode, stage=0, call=5.75, start=6.0, end=7.0, sent=7.0))
    account.feed(Call(stamp=Stamp(batch=3, period=2, first=True, idle_before=4.9, host_seconds=0.1), at=10.4))
    account.feed(Start(batch=3, at=10.5))
    seconds = {state: round(value, 6) for state, value in account.seconds.items() if value}
    assert seconds == {"compute": 5.0, "bubble_drain": 1.0, "idle": 3.9, "host": 0.1, "bubble_fill": 0.4}


def test_without_the_leaders_word_the_way_of_a_batch_is_unknown_and_nothing_is_made_up() -> None:
    account = RankAccount(0.0)
    account.feed(Call(stamp=Stamp(batch=1, period=7, first=True, idle_before=1.0, host_seconds=0.1), at=10.4))
    assert account.seconds["idle"] == pytest.approx(10.3)
    assert account.seconds["host"] == pytest.approx(0.1)
    assert account.seconds["bubble_fill"] == 0.0
