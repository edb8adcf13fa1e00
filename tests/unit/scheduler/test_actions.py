import pytest
from prefill_runtime.scheduler.actions import Action, ScheduleError, from_timeline, parse, to_text, validate
from prefill_runtime.scheduler.chunkers import Bounds, Fixed
from prefill_runtime.scheduler.cost import PipelineCost, StageModel
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.layout import FoldBack, Linear
from prefill_runtime.scheduler.simulate import Request, simulate

GOOD = """\
rank 0: 0R0.0 0S0.0 0R0.1 0S0.1 3V0.0 3R0.0 3V0.1 3R0.1
rank 1: 1V0.0 1R0.0 2R0.0 1V0.1 2S0.0 1R0.1 2R0.1 2S0.1"""


def check(text: str, inflight: int | None = None) -> None:
    validate(FoldBack(2), parse(text), [2], inflight)


def test_a_schedule_prints_and_parses_back() -> None:
    check(GOOD, 2)
    assert to_text(parse(GOOD)) == GOOD
    assert parse(GOOD)[0][1] == Action(0, 0, 0, 0, "S")


def test_a_simulated_run_becomes_a_schedule() -> None:
    cost = PipelineCost(StageModel(0, 1, 0))
    line = simulate(Linear(2), cost, [Request(128)], Fixed(Bounds(64)))
    assert to_text(from_timeline(line)) == "rank 0: 0R0.0 0S0.0 0R0.1 0S0.1\nrank 1: 1V0.0 1R0.0 1V0.1 1R0.1"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1R0.0 2R0.0", "2R0.0 1R0.0", "rank 1 at 2R0.0: its input is not there"),
        ("3V0.0 3R0.0", "3R0.0 3V0.0", "rank 0 at 3R0.0: its input is not there"),
        ("0R0.0 0S0.0 0R0.1", "0R0.1 0S0.0 0R0.0", "rank 0 at 0R0.1: the chunk before has not run on this stage"),
        ("3R0.1", "3R0.1 3R0.1", "rank 0 at 3R0.1: runs twice"),
        ("3R0.1", "1R0.1", "rank 0 at 1R0.1: stage 1 is not on rank 0"),
        ("3R0.1", "3R0.2", "rank 0 at 3R0.2: no such chunk"),
        (" 3V0.1 3R0.1", "", "deadlock"),
        (" 2S0.0", "", "deadlock|orders differ"),
        ("0S0.1 3V0.0", "3V0.0 0S0.1", "deadlock"),
        ("0R0.0 0S0.0", "0S0.0 0R0.0", "sends what it has not computed"),
    ],
)
def test_a_broken_schedule_is_refused_with_the_step(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ScheduleError, match=message) as error:
        check(GOOD.replace(old, new, 1))
    assert ">>" in str(error.value)


def test_both_sides_of_a_pair_must_agree_on_the_order() -> None:
    text = "rank 0: 0R0.0 0R0.1 0S0.1 0S0.0\nrank 1: 1V0.0 1R0.0 1V0.1 1R0.1"
    with pytest.raises(ScheduleError, match=r"receives 1V0.0 where rank 0 sends 0S0.1: orders differ"):
        validate(Linear(2), parse(text), [2])


def test_missing_work_is_counted() -> None:
    with pytest.raises(ScheduleError, match="8 runs, expected 12 = chunks x stages"):
        validate(FoldBack(2), parse(GOOD), [2, 1])


def test_the_outer_rank_keeps_to_the_chunks_in_flight() -> None:
    with pytest.raises(ScheduleError, match="2 chunks in flight, allowed 1"):
        check(GOOD, 1)


@pytest.mark.parametrize("text", ["rank 1: 0R0.0", "rank 0: 0X0.0", "rank 0: 0R0", "nonsense"])
def test_what_is_not_a_schedule_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="allowed"):
        parse(text)
