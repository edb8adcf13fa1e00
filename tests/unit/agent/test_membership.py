"""The rules of a rank group, with time as an argument."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefill_runtime.agent.config import EndReason
from prefill_runtime.agent.membership import (
    ClockOffset,
    Members,
    Refusal,
    RefusedError,
    Silence,
    refused,
    said_bye,
)


def join(rank: object = 1, incarnation: object = "life-1", step: str = "serve") -> dict[str, Any]:
    return {"type": "join", "rank": rank, "incarnation": incarnation, "step": step}


def members(pods: int = 3) -> Members:
    return Members("life-1", pods, "serve", now=0.0)


def test_a_group_is_complete_when_every_other_rank_has_joined() -> None:
    group = members()
    assert group.missing == [1, 2]
    assert group.admit(join(2), 1.0) == 2
    assert (group.complete, group.missing) == (False, [1])
    group.admit(join(1), 2.0)
    assert group.complete


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        (join(incarnation="life-0"), Refusal.INCARNATION),
        (join(0), Refusal.RANK),
        (join(3), Refusal.RANK),
        (join(step="profile"), Refusal.STEP),
        (join("1"), Refusal.MALFORMED),
        (join(incarnation=None), Refusal.MALFORMED),
        ({"type": "beat"}, Refusal.MALFORMED),
        ({}, Refusal.MALFORMED),
    ],
)
def test_refusals(message: dict[str, Any], refusal: Refusal) -> None:
    group = members()
    with pytest.raises(RefusedError) as error:
        group.admit(message, 1.0)
    assert error.value.refusal == refusal
    assert group.peers == {}


def test_a_rank_joins_once_and_not_after_the_launch() -> None:
    group = members(pods=2)
    group.admit(join(), 1.0)
    with pytest.raises(RefusedError, match="already joined as rank 1") as error:
        group.admit(join(), 1.0)
    assert error.value.refusal == Refusal.TAKEN
    group.forget(1)
    group.admit(join(), 2.0)
    group.launch()
    group.forget(1)
    with pytest.raises(RefusedError, match="too late"):
        group.admit(join(), 3.0)


def test_silence_is_counted_from_the_last_word() -> None:
    silence = Silence(0.0)
    silence.heard(1, 0.0)
    silence.heard(2, 0.0)
    for now in range(1, 6):
        silence.heard(2, float(now))
        assert silence.overdue(float(now)) == []
    assert silence.overdue(5.5) == [1]
    silence.forget(1)
    assert silence.overdue(6.0) == []


def test_a_late_check_blames_nobody() -> None:
    """After this process was stopped for a minute the peers' beats are still unread; from then on it counts again,
    even if every check comes late."""
    silence = Silence(0.0)
    silence.heard(1, 0.5)
    assert silence.overdue(1.0) == []
    assert silence.overdue(61.0) == []
    assert [now for now in range(62, 70) if silence.overdue(float(now))] == [65, 66, 67, 68, 69]
    slow = Silence(0.0)
    slow.heard(1, 0.0)
    assert [now for now in range(3, 30, 3) if slow.overdue(float(now))] == [18, 21, 24, 27]


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=20))
def test_the_clock_offset_errs_by_half_the_quickest_round_trip(ahead: float, ways: list[tuple[float, float]]) -> None:
    clock, now = ClockOffset(), 0.0
    for there, back in ways:
        clock.observe(now, now + there + ahead, now + there + 0.5 + ahead, now + there + 0.5 + back)
        now += 1.0
    quickest = min(there + back for there, back in ways)
    assert clock.seconds is not None
    assert abs(clock.seconds - ahead) <= quickest / 2 + 1e-6


def test_an_old_clock_offset_gives_way_to_a_slower_but_newer_one() -> None:
    clock = ClockOffset()
    clock.observe(0.0, 100.0, 100.0, 0.0)
    clock.observe(30.0, 131.0, 131.0, 32.0)
    assert clock.seconds == 100.0
    clock.observe(70.0, 172.0, 172.0, 72.0)
    assert clock.seconds == 101.0


def test_what_a_refused_rank_does() -> None:
    def answer(refusal: Refusal, step: str = "") -> dict[str, Any]:
        return RefusedError(refusal, "text", step).to_message()

    assert refused(answer(Refusal.STEP, "profile")) is None  # the leader still profiles: try again
    assert refused(answer(Refusal.TAKEN)) is None  # by our own connection that broke: it will be missed soon
    for message, reason in (
        (answer(Refusal.STEP, "serve"), EndReason.PEER_LOST),
        (answer(Refusal.INCARNATION), EndReason.INCARNATION_CHANGED),
        (answer(Refusal.LAUNCHED), EndReason.PEER_LOST),
    ):
        end = refused(message)
        assert end is not None
        assert (end.reason, end.message) == (reason, "text")


def test_a_bye_names_the_cause() -> None:
    end = said_bye(2, {"reason": "EngineExited", "message": "out of memory"})
    assert (end.reason, end.message) == (EndReason.PEER_LOST, "rank 2 ended: EngineExited: out of memory")
