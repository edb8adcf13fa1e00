import functools
import itertools
import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefill_runtime.scheduler.actions import from_timeline, parse, to_text, validate
from prefill_runtime.scheduler.bound import prompt_bound, run_bound
from prefill_runtime.scheduler.chunkers import Bounds, Chunker, Fixed, Queue
from prefill_runtime.scheduler.cost import PipelineCost, StageModel, TransferModel
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.layout import FoldBack, Layout, Linear
from prefill_runtime.scheduler.order import static_order
from prefill_runtime.scheduler.simulate import Request, Rules, simulate
from prefill_runtime.scheduler.timeline import STATES, Timeline

from tests.unit.scheduler.pipelines import all_chunkers, bounds, costs, layouts

ONE_SECOND = PipelineCost(StageModel(0.0, 1 / 64, 0.0))  # a 64-token chunk takes 1 s of the whole model


def check(line: Timeline, requests: list[Request], cost: PipelineCost, inflight: int | None = None) -> None:
    """What is true of every run, whatever the policy."""
    layout = line.layout
    for states in line.rank_state_seconds():
        assert set(states) == set(STATES)
        assert min(states.values()) >= -1e-9
        assert sum(states.values()) == pytest.approx(line.makespan, rel=1e-6)
    waits = sum(v for s in line.rank_state_seconds() for k, v in s.items() if k not in ("compute", "transfer"))
    assert line.busy + waits == pytest.approx(layout.ranks * line.makespan, rel=1e-6)
    for lane in line.lanes():
        for before, after in itertools.pairwise(lane):
            assert after.start >= before.end - 1e-6 * max(1, before.end)
    assert line.makespan >= run_bound(layout, cost, requests, line.chunks) * (1 - 1e-9)
    schedule = from_timeline(line)
    validate(layout, schedule, [len(c) for c in line.chunks], inflight)
    assert parse(to_text(schedule)) == schedule


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_policy_on_every_pipeline(data: st.DataObject) -> None:
    layout = data.draw(layouts)
    cost, limits = data.draw(costs(layout)), data.draw(bounds)
    prompt = data.draw(st.integers(1, 12 * limits.max_tokens))
    cached = data.draw(st.integers(0, prompt - 1))
    for chunker in all_chunkers(layout, cost, limits):
        chunks = chunker.cut(prompt, cached)
        assert sum(chunks) == prompt - cached, type(chunker)
        assert all(c % limits.quantum == 0 and c >= limits.lowest for c in chunks[:-1]), (type(chunker), chunks)
        assert all(0 < c <= limits.max_tokens for c in chunks), (type(chunker), chunks)
        request = Request(prompt, history=cached)
        line = simulate(layout, cost, [request], chunker)
        assert sum(line.chunks[0]) == prompt - cached
        check(line, [request], cost, layout.inflight)
        assert line.makespan >= prompt_bound(layout, cost, prompt, cached, limits) * (1 - 1e-9), type(chunker)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_several_requests_under_every_rule(data: st.DataObject) -> None:
    layout = data.draw(layouts)
    cost = data.draw(costs(layout))
    requests = [
        Request(tokens, arrival, tokens // 3 if hit else 0)
        for tokens, arrival, hit in data.draw(
            st.lists(
                st.tuples(st.integers(3, 8000), st.sampled_from([0.0, 0.0, 1.0, 50.0]), st.booleans()),
                min_size=1,
                max_size=5,
            )
        )
    ]
    rules = Rules(
        transfer=data.draw(st.sampled_from(["async", "blocking"])),
        packing=data.draw(st.booleans()),
        order=data.draw(st.sampled_from(["oldest", "feed-first"])),
        inflight=data.draw(st.sampled_from([None, 1, 2, 20])),
        kv_tokens=data.draw(st.sampled_from([None, 8000, 20_000])),
    )
    line = simulate(layout, cost, requests, Fixed(Bounds(1024)), rules)
    check(line, requests, cost, rules.inflight or layout.inflight)
    assert min(line.ttft) > 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_static_order_runs_and_validates(data: st.DataObject) -> None:
    layout = data.draw(layouts)
    cost = data.draw(costs(layout))
    chunks = tuple(data.draw(st.lists(st.integers(1, 4000), min_size=1, max_size=20)))
    request = Request(sum(chunks), chunks=chunks)
    order = static_order(layout, len(chunks), data.draw(st.sampled_from([0, 1])))
    transfer = data.draw(st.sampled_from(["async", "blocking"]))
    line = simulate(layout, cost, [request], rules=Rules(transfer=transfer), order=order)
    check(line, [request], cost, layout.inflight)


@pytest.mark.parametrize(
    ("layout", "inflight", "bubble"), [(Linear(4), 1, 0.75), (Linear(4), None, 3 / 7), (FoldBack(4), None, 3 / 7)]
)
def test_waiting_is_never_counted_as_work(layout: Layout, inflight: int | None, bubble: float) -> None:
    """Four equal chunks on four ranks; a stage's time is its own, not what passed since its neighbour started."""
    line = simulate(layout, ONE_SECOND, [Request(256)], Fixed(Bounds(64)), Rules(inflight=inflight))
    assert line.bubble_ratio == pytest.approx(bubble)


def test_fill_drain_and_imbalance_are_told_apart() -> None:
    line = simulate(Linear(2), ONE_SECOND, [Request(64 * 3 + 128, chunks=(64, 128, 64, 64))])
    # rank 0: 0.5 1 0.5 0.5, rank 1 starts at 0.5 and waits for the double chunk from 1.0 to 1.5
    first, second = line.rank_state_seconds()
    assert (first["bubble_fill"], first["bubble_drain"]) == pytest.approx((0, 0.5))
    assert (second["bubble_fill"], second["bubble_imbalance"], second["bubble_drain"]) == pytest.approx((0.5, 0.5, 0))
    assert first["bubble_imbalance"] == pytest.approx(0.5)  # two in flight: the fourth chunk waits for the second


def test_feed_first_starves_the_drain() -> None:
    cost = PipelineCost(StageModel(0.1, 1e-4, 1e-8))
    rules = {order: Rules(order=order, inflight=20) for order in ("oldest", "feed-first")}  # type: ignore[arg-type]
    two = [Request(32_000)] * 2
    oldest, feed = (simulate(FoldBack(2), cost, two, Fixed(Bounds(2048)), rules[o]) for o in rules)
    assert feed.ttft[0] > 1.3 * oldest.ttft[0]
    assert feed.makespan >= oldest.makespan


def test_packing_fills_the_drain_with_the_next_prompt() -> None:
    cost = PipelineCost(StageModel(0, 2e-4, 1e-8))
    apart, packed = (
        simulate(FoldBack(2), cost, [Request(32_000)] * 3, Fixed(Bounds(4096)), Rules(packing=p, inflight=5))
        for p in (False, True)
    )
    alone = simulate(FoldBack(2), cost, [Request(32_000)], Fixed(Bounds(4096)))
    assert apart.makespan == pytest.approx(3 * alone.makespan)
    assert packed.makespan < 0.96 * apart.makespan


def test_blocking_transfers_hold_both_sides_and_async_ones_only_the_chunk() -> None:
    cost = PipelineCost(StageModel(0, 1 / 64, 0), transfer=TransferModel(latency_s=0.25))
    requests = [Request(256)]
    waiting = simulate(Linear(2), cost, requests, Fixed(Bounds(64)), Rules(transfer="async"))
    assert waiting.makespan == pytest.approx(2 + 0.5 + 0.25 * 2)  # two in flight: every second chunk waits for a hop
    blocking = simulate(Linear(2), cost, requests, Fixed(Bounds(64)), Rules(transfer="blocking"))
    assert [s["transfer"] for s in blocking.rank_state_seconds()] == pytest.approx([1.0, 1.0])
    assert blocking.makespan > waiting.makespan


def test_two_ranks_that_send_to_each_other_exchange() -> None:
    cost = PipelineCost(StageModel(0, 1 / 64, 1e-6), transfer=TransferModel(latency_s=0.1))
    line = simulate(FoldBack(2), cost, [Request(640)], Fixed(Bounds(64)), Rules(transfer="blocking"))
    hops = sum(1 for s in line.segments if s.kind == "transfer") / 2
    assert 10 <= hops < 20  # 20 messages, some of them in one exchange


def test_a_full_cache_makes_the_next_prompt_wait() -> None:
    requests = [Request(640), Request(640)]
    free = simulate(Linear(2), ONE_SECOND, requests, Fixed(Bounds(64)))
    full = simulate(Linear(2), ONE_SECOND, requests, Fixed(Bounds(64)), Rules(kv_tokens=1000))
    assert full.ttft[0] == pytest.approx(5.5)
    assert full.ttft[1] == pytest.approx(11.0)
    assert free.ttft[1] < 11.0
    with pytest.raises(ParameterError, match="prompt tokens is 640, allowed: <= kv_tokens = 600"):
        simulate(Linear(2), ONE_SECOND, requests, Fixed(Bounds(64)), Rules(kv_tokens=600))


def test_decodes_that_ride_along_make_every_pass_longer() -> None:
    cost = PipelineCost(StageModel(0.5, 1 / 64, 0))
    line = simulate(Linear(1), cost, [Request(640)], Fixed(Bounds(64)), Rules(decodes=(32, 1000)))
    assert line.makespan == pytest.approx(10 * (0.5 + 1 + 0.5))


def test_a_late_request_leaves_the_pipeline_idle() -> None:
    line = simulate(Linear(2), ONE_SECOND, [Request(64), Request(64, arrival=10)], Fixed(Bounds(64)))
    assert functools.reduce(operator.iadd, line.periods, []) == pytest.approx([0, 1, 10, 11])
    assert [s["idle"] for s in line.rank_state_seconds()] == pytest.approx([9, 9])


def test_chunkers_see_the_queue_as_it_is() -> None:
    seen: list[Queue] = []

    class Watching(Fixed):
        def observe(self, queue: Queue) -> None:
            seen.append(queue)

    requests = [Request(128), Request(64), Request(64, arrival=100)]
    simulate(Linear(2), ONE_SECOND, requests, Watching(Bounds(64)), Rules(kv_tokens=256))
    assert [(q.waiting_tokens, q.waiting_requests) for q in seen] == [(192, 1), (128, 1), (64, 0), (64, 0)]
    assert [q.kv_free for q in seen] == pytest.approx([0.5, 0.5, 0.25, 0.75])
    assert seen[0].load == 0
    assert seen[-1].load == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request(0), "prompt tokens is 0, allowed: >= 1"),
        (lambda: Request(10, history=10), "prompt tokens is 10, allowed: >= 11"),
        (lambda: Request(10, arrival=float("nan")), "arrival is nan"),
        (lambda: Request(10, chunks=(4, 4)), "sum of chunks is 8, allowed: 10"),
        (lambda: simulate(Linear(2), ONE_SECOND, []), "number of requests is 0"),
        (lambda: simulate(Linear(2), ONE_SECOND, [Request(64)]), "chunks is None"),
        (
            lambda: simulate(Linear(2), PipelineCost(StageModel(1, 1, 1), shares=(1.0,)), [Request(4, chunks=(4,))]),
            "number of shares is 1, allowed: 2",
        ),
        (lambda: Rules(inflight=0), "inflight is 0"),
        (lambda: Linear(0), "ranks is 0, allowed: 1 to 256"),
    ],
)
def test_impossible_values_name_field_value_and_range(make: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make()  # type: ignore[operator]


def test_an_order_that_cannot_run_is_said_to_deadlock() -> None:
    order = [[(0, 0, 0), (0, 0, 3), (0, 1, 0)], [(0, 1, 1), (0, 0, 1)]]
    with pytest.raises(ParameterError, match="deadlock"):
        simulate(FoldBack(2), ONE_SECOND, [Request(128, chunks=(64, 64))], order=order)


def test_a_chunker_of_ones_own_is_enough() -> None:
    class Halves(Chunker):
        def propose(self, history: int, remaining: int) -> float:
            return remaining / 2

    assert Halves(Bounds(4096)).cut(4096) == [2048, 1024, 512, 256, 128, 64, 64]
