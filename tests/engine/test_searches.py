"""Searches beside the scheduling path: answers, order, and every way in which they can end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from prefill_runtime.engine import searches as module
from prefill_runtime.engine.searches import Searches
from prefill_runtime.scheduler.chunkers import Bounds
from prefill_runtime.scheduler.cost import PipelineCost, StagedModel, StageModel
from prefill_runtime.scheduler.grid import RATIO, Wanted
from prefill_runtime.scheduler.layout import Linear
from prefill_runtime.scheduler.planner import Planned, Planner

BOUNDS = Bounds(1024, 128, max_model_len=16_384, quantum=128)
PLANNER = Planner(Linear(2), PipelineCost(StagedModel((StageModel(0.003, 2e-5, 2e-9),) * 2)), BOUNDS)


class Watched(Planned):
    """Tells when it has learnt something, and in which order."""

    def __init__(self) -> None:
        super().__init__(BOUNDS, PLANNER, ratio=RATIO)
        self.learnt: list[Wanted] = []
        self.news = threading.Condition()

    def learn(self, wanted: Wanted, chunks: object) -> None:
        super().learn(wanted, chunks)  # type: ignore[arg-type]
        with self.news:
            self.learnt.append(wanted)
            self.news.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(until, timeout=60)


@pytest.fixture
def planned() -> Watched:
    return Watched()


@pytest.fixture
def searches(planned: Watched) -> Iterator[Searches]:
    made = Searches(planned)
    yield made
    made.close()
    assert not made._thread.is_alive()


def test_every_length_is_planned_ahead_while_nobody_asks(planned: Watched, searches: Searches) -> None:
    ahead = planned.grid.ahead()
    planned.wait(lambda: len(planned.learnt) == len(ahead))
    assert planned.learnt == ahead
    for tokens in (300, 1000, 5000, 16_000):
        shared = planned.grid.nearest(Wanted(tokens))
        assert planned.cut(tokens) == PLANNER.scaled(PLANNER.plan(*shared).chunks, Wanted(tokens))
    assert len(planned.learnt) == len(ahead), "a planned length was searched again"
    assert searches.problem == ""


def test_a_busy_pipeline_gets_only_what_prompts_ask_for(planned: Watched, searches: Searches) -> None:
    searches.pipeline_is(idle=False)
    with planned.news:
        before = len(planned.learnt)  # one may be on its way
    asked = planned.grid.nearest(Wanted(9000, 3000))
    seed = planned.cut(9000, 3000)
    assert seed == PLANNER.seed(9000, 3000)
    planned.wait(lambda: asked in planned.learnt)
    assert len(planned.learnt) <= before + 2
    assert planned.cut(9000, 3000) == PLANNER.scaled(PLANNER.plan(*asked).chunks, Wanted(9000, 3000))


def test_questions_are_bounded_and_dropped_ones_may_be_asked_again(
    planned: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Searches, "_run", lambda self: None)  # nobody answers
    searches = Searches(planned)
    lengths = [planned.grid.nearest(Wanted(9000, history)) for history in range(0, 8000, 50)]
    distinct = list(dict.fromkeys(lengths))
    assert len(distinct) > module._WAITING
    for wanted in distinct:
        planned.next_chunk(wanted.history, wanted.tokens - wanted.history, request=wanted)
    assert list(searches._asked) == distinct[-module._WAITING :]
    assert planned._asked == set(distinct[-module._WAITING :])


def test_a_dead_search_process_is_told(planned: Watched, searches: Searches) -> None:
    planned.wait(lambda: bool(planned.learnt))
    assert searches._process is not None
    searches._process.kill()
    searches._thread.join(timeout=60)
    assert searches.problem == "no plans can be searched: the search process ended with -9"
    assert sum(planned.cut(9000, 17)) == 9000 - 17  # seeds go on


def test_an_interpreter_that_does_not_start_is_told(planned: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "executable", "/nowhere/python")
    searches = Searches(planned)
    searches._thread.join(timeout=60)
    assert "no plans can be searched" in searches.problem


def test_the_process_is_gone_after_close_and_gives_way_before(planned: Watched, searches: Searches) -> None:
    planned.wait(lambda: bool(planned.learnt))
    assert searches._process is not None
    number = searches._process.pid
    assert os.getpriority(os.PRIO_PROCESS, number) == 19
    searches.close()
    assert not searches._thread.is_alive()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
    assert searches.problem == ""


def test_closing_at_once_leaves_nothing(planned: Watched) -> None:
    searches = Searches(planned)
    searches.close()
    searches._thread.join(timeout=30)
    assert searches._process is None or searches._process.poll() is not None


def test_the_scheduling_path_never_searches(planned: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches take longer than the path may wait; seeds and scaled plans are bounded in steps, not searched."""
    monkeypatch.setattr(Searches, "_run", lambda self: None)
    Searches(planned)
    monkeypatch.setattr(Planner, "plan", lambda *args: pytest.fail("searched on the scheduling path"))
    began = time.process_time()
    for tokens in range(500, 16_000, 500):
        assert sum(planned.cut(tokens)) == tokens
    assert (time.process_time() - began) / 31 < 0.1  # many times over; only a change of kind fails
