"""The profile step: reuse, measuring, refusals."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pytest
from prefill_runtime.agent.profile import GOOD_R2
from prefill_runtime.profiling import fitting
from prefill_runtime.profiling.document import ProfileResult, load_calibration

from tests.unit.agent.harness import KEY, Rank, Site, until
from tests.unit.agent.test_command import CALIBRATION

STAGE = CALIBRATION.stages[0]
GOOD = CALIBRATION.model_copy(
    update={"key": KEY, "stages": [STAGE, STAGE.model_copy(update={"stage": 1})]},
).to_json()
DYNAMIC = {"chunking__policy": "Dynamic"}


def result(rank: Rank) -> ProfileResult:
    return ProfileResult.model_validate_json(rank.termination.read_text())


@pytest.mark.parametrize("number", [0, 1])
def test_a_valid_calibration_is_reused_without_asking_anybody(site: Site, number: int) -> None:
    rank = site.rank(number, calibration=GOOD, **DYNAMIC).start("profile")
    assert rank.exit_code() == 0
    assert result(rank).outcome == "Reused"
    assert load_calibration((rank.state / "calibration.json").read_text(), KEY).to_json() == GOOD


@pytest.mark.parametrize(("reuse", "outcome"), [("IfValid", None), ("Always", "Reused")])
def test_a_poor_calibration_is_reused_only_when_asked_to(site: Site, reuse: str, outcome: str | None) -> None:
    assert GOOD_R2 == fitting.MIN_R2
    poor = GOOD.replace(f'"r2":{STAGE.r2}', '"r2":0.5')
    rank = site.rank(0, calibration=poor, profiling__reuse=reuse, profiling__timeoutSeconds=1, **DYNAMIC)
    rank.start("profile", FAKE_NEVER_READY="1")
    # Alone and with this time-out, measuring cannot succeed: the outcome tells which way was taken.
    if outcome is None:
        until("it measures", lambda: "has R^2 0.500 < 0.9, measuring" in rank.log())
        rank.process.terminate()
        assert rank.exit_code() == 0
    else:
        assert rank.exit_code() == 0
        assert result(rank).outcome == outcome


def test_reuse_imports_nothing_heavy(site: Site) -> None:
    rank = site.rank(0, calibration=GOOD, **DYNAMIC)
    code = (
        "import sys; from prefill_runtime.agent.__main__ import main; assert main(sys.argv[1:]) == 0; "
        "print('HEAVY', [m for m in ('aiohttp', 'asyncio', 'numpy', 'prometheus_client', 'yaml') if m in sys.modules])"
    )
    rank.start("profile", program=[sys.executable, "-c", code])
    assert rank.exit_code() == 0
    assert "HEAVY []" in rank.log()


def test_a_policy_without_calibration_has_nothing_to_do(site: Site) -> None:
    rank = site.rank(0).start("profile")
    assert rank.exit_code() == 0
    assert not rank.termination.exists()


@pytest.mark.parametrize(
    ("calibration", "reuse"),
    [
        ("", "IfValid"),
        (GOOD, "Never"),
        (GOOD.replace(KEY, "f" * 16), "IfValid"),
        (CALIBRATION.model_copy(update={"key": KEY}).to_json(), "IfValid"),
        ("{broken", "IfValid"),
    ],
    ids=["none", "never", "foreign key", "wrong number of stages", "malformed"],
)
def test_anything_else_is_measured(site: Site, calibration: str, reuse: str) -> None:
    rank = site.rank(0, pods=1, calibration=calibration, profiling__reuse=reuse, **DYNAMIC).start("profile")
    assert rank.exit_code() == 0, rank.log()
    measured = result(rank)
    assert measured.outcome == "Measured", measured.refusal
    assert measured.calibration is not None
    assert [s.stage for s in measured.calibration.stages] == [0, 1]
    for stage in measured.calibration.stages:
        assert stage.coefficients.a == pytest.approx((stage.stage + 1) * 2e-8, rel=0.02)
        assert stage.coefficients.b == pytest.approx((stage.stage + 1) * 1e-5, rel=0.05)
    assert load_calibration((rank.state / "calibration.json").read_text(), KEY) == measured.calibration
    assert not (rank.state / "telemetry.sock").exists()


def profile_pair(site: Site, leader: dict[str, str] | None = None, **changes: Any) -> tuple[Rank, Rank]:
    first = site.rank(0, **DYNAMIC, **changes).start("profile", **(leader or {}))
    return first, site.rank(1, **DYNAMIC, **changes).start("profile")


def engines_up(*ranks: Rank) -> None:
    until("engines", lambda: all("fake engine" in rank.log() for rank in ranks))


def refusal(rank: Rank) -> tuple[str, str]:
    found = result(rank)
    assert found.outcome == "Refused"
    assert found.refusal is not None
    assert not (rank.state / "calibration.json").exists()
    return found.refusal.reason.value, found.refusal.message


def test_time_out_refuses_on_all_ranks(site: Site) -> None:
    pair = profile_pair(site, leader={"FAKE_NEVER_READY": "1"}, profiling__timeoutSeconds=2)
    assert [rank.exit_code() for rank in pair] == [0, 0]
    for rank in pair:
        reason, message = refusal(rank)
        assert reason == "TimedOut"
        assert "2 s were over while the engine was starting" in message


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_refuses(site: Site, victim: int, number: int) -> None:
    pair = profile_pair(site, leader={"FAKE_NEVER_READY": "1"})
    engines_up(*pair)
    pair[victim].process.send_signal(number)
    left = pair[1 - victim]
    assert left.exit_code() == 0
    reason, message = refusal(left)
    assert reason == "RankLost"
    assert f"rank {victim} was lost" in message


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_engine_refuses_on_all_ranks(site: Site, victim: int) -> None:
    pair = profile_pair(site, leader={"FAKE_NEVER_READY": "1"})
    engines_up(*pair)
    os.kill(pair[victim].engine_pids()[0], signal.SIGKILL)
    assert [rank.exit_code() for rank in pair] == [0, 0]
    for rank in pair:
        reason, message = refusal(rank)
        assert reason == "EngineFailed"
        assert "SIGKILL" in message


def test_a_rank_that_is_asked_to_end_leaves_no_result(site: Site) -> None:
    leader, follower = profile_pair(site, leader={"FAKE_NEVER_READY": "1"})
    engines_up(leader, follower)
    leader.process.terminate()
    assert [leader.exit_code(), follower.exit_code()] == [0, 0]
    assert not leader.termination.exists()
    assert refusal(follower)[0] == "RankLost"


def test_a_profiling_rank_meets_a_serving_leader_and_moves_on(site: Site) -> None:
    leader = site.rank(0, **DYNAMIC).start("serve").until_phase("Joining")
    late = site.rank(1, **DYNAMIC).start("profile")
    assert late.exit_code() == 0
    assert refusal(late)[0] == "RankLost"
    follower = site.rank(1, **DYNAMIC).start("serve").until_phase("Ready")
    assert leader.until_phase("Ready").status()["calibrated"] is False
    assert follower.get("/readyz")[0] == 200


def test_serving_uses_what_profiling_left(site: Site) -> None:
    rank = site.rank(0, pods=1, calibration=GOOD, **DYNAMIC).start("profile")
    assert rank.exit_code() == 0
    rank.start("serve").until_phase("Ready")
    code, text = rank.get("/calibration")
    assert (code, json.loads(text)) == (200, json.loads(GOOD))
