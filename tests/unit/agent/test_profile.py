"""The profile step: reuse, measuring, refusals."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from prefill_runtime.agent import measure
from prefill_runtime.agent.settings import Places, read_settings
from prefill_runtime.profiling.document import ProfileResult, Refusal, RefusalReason, load_calibration
from prefill_runtime.scheduler.cost import NO_WINDOW, Attention

from tests.documents import calibration
from tests.unit.agent.harness import KEY, Rank, Site, until

GOOD = calibration(key=KEY).to_json()
DYNAMIC = {"chunking__policy": "Dynamic"}


def result(rank: Rank) -> ProfileResult:
    return ProfileResult.model_validate_json(rank.termination.read_text())


@pytest.mark.parametrize("number", [0, 1])
def test_a_valid_calibration_is_reused_without_asking_anybody(site: Site, number: int) -> None:
    rank = site.rank(number, calibration=GOOD, **DYNAMIC).start("profile")
    assert rank.exit_code() == 0
    assert result(rank).outcome == "Reused"
    assert load_calibration((rank.state / "calibration.json").read_text(), KEY, 2).to_json() == GOOD


@pytest.mark.parametrize(("reuse", "outcome"), [("IfValid", None), ("Always", "Reused")])
def test_a_poor_calibration_is_reused_only_when_asked_to(site: Site, reuse: str, outcome: str | None) -> None:
    poor = GOOD.replace('"r2":0.999', '"r2":0.5')
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
        (calibration(key=KEY, stages=1).to_json(), "IfValid"),
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
        assert stage.coefficients.k2 == pytest.approx((stage.stage + 1) * 4e-8, rel=0.02)
        assert stage.coefficients.k1 == pytest.approx((stage.stage + 1) * 1e-5, rel=0.05)
    assert load_calibration((rank.state / "calibration.json").read_text(), KEY, 2) == measured.calibration
    assert not (rank.state / "telemetry.sock").exists()


def test_passes_with_impossible_times_are_left_out_and_counted(site: Site) -> None:
    rank = site.rank(0, pods=1, **DYNAMIC).start("profile", FAKE_JUMPS="1")
    assert rank.exit_code() == 0, rank.log()
    measured = result(rank)
    assert measured.outcome == "Measured", measured.refusal
    assert measured.calibration is not None
    assert measured.calibration.stages[1].coefficients.k2 == pytest.approx(8e-8, rel=0.02)
    assert re.search(r"[1-9]\d* passes with impossible times were left out", rank.log())


@pytest.mark.parametrize(
    ("knob", "reason", "words"),
    [
        ({"FAKE_SILENT": "1"}, "TooFewSamples", "stage 1: 0 distinct"),
        ({"FAKE_CONCAVE": "1"}, "NotGrowing", "stage 0: the data want k2 = -"),
    ],
)
def test_what_cannot_be_fitted_is_refused_and_serving_goes_on(
    site: Site, knob: dict[str, str], reason: str, words: str
) -> None:
    rank = site.rank(0, pods=1, **DYNAMIC).start("profile", **knob)
    assert rank.exit_code() == 0, rank.log()
    assert refusal(rank)[0] == reason
    assert words in refusal(rank)[1]
    assert "Refused in" in rank.log()
    rank.start("serve").until_phase("Ready")
    assert rank.status()["calibrated"] is False


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
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_refuses(site: Site, victim: int, number: int) -> None:
    pair = profile_pair(site, leader={"FAKE_NEVER_READY": "1"})
    engines_up(*pair)
    pair[victim].process.send_signal(number)
    left = pair[1 - victim]
    assert left.exit_code() == 0
    reason, message = refusal(left)
    assert reason == "RankLost"
    assert f"rank {victim} was lost" in message


def test_a_time_out_names_what_took_the_time(site: Site) -> None:
    rank = site.rank(0, pods=1, profiling__timeoutSeconds=5, **DYNAMIC).start("profile", FAKE_ANSWER="0")
    assert rank.exit_code() == 0
    reason, message = refusal(rank)
    assert reason == "TimedOut"
    assert "while prefill-warm-up 1 of 3 was running" in message


@pytest.mark.parametrize("status", ["400", "500"])
def test_an_engine_that_refuses_completions_is_quoted(site: Site, status: str) -> None:
    rank = site.rank(0, pods=1, **DYNAMIC).start("profile", FAKE_ANSWER=status)
    assert rank.exit_code() == 0
    reason, message = refusal(rank)
    assert reason == "EngineFailed"
    assert re.search(rf"completion of \d+ tokens: HTTP {status}: {{}}", message)


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"engine__pipeline": 64}, "TooManyStages", "64 stages, but a calibration has room for 18"),
        ({"engine__tensor": 65}, "TooFewSamples", "in units of 1040 tokens: base_tokens is 1024, allowed: >= 1040"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    site: Site, changes: dict[str, Any], reason: str, words: str
) -> None:
    rank = site.rank(0, **DYNAMIC, **changes).start("profile")
    assert rank.exit_code() == 0
    assert refusal(rank)[0] == reason
    assert words in refusal(rank)[1]
    assert "starting" not in rank.log()


def test_a_folder_that_cannot_be_written_gives_a_refusal_and_last_words(site: Site) -> None:
    """A crashed profile step would be started over and over, and no rank would ever serve."""
    rank = site.rank(0, pods=1, **DYNAMIC)
    rank.state.write_text("a file where the folder should be")
    assert rank.start("profile").exit_code() == 0
    found = result(rank).refusal
    assert found is not None
    assert "the agent failed: FileExistsError" in found.message
    rank.termination.unlink()
    assert rank.start("serve").exit_code() == 1
    assert rank.last_words()["reason"] == "AgentFailed"


async def test_rank_0_goes_on_beating_while_it_fits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = site.rank(0, pods=1, **DYNAMIC)
    places = Places(config=rank.files, state=rank.state, termination=rank.termination)
    profiling = measure.ProfilingRank(read_settings(places, {"PREFILL_RANK": "0"}))
    beaten = threading.Event()
    why = Refusal(reason=RefusalReason.POOR_FIT, message="")
    monkeypatch.setattr(measure, "fit_document", lambda *_, **__: why if beaten.wait(10) else None)
    fitting = asyncio.create_task(profiling._fit())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.05, beaten.set)
    assert (await fitting)[1] is why
    await profiling._api.close()


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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ({"sliding_window": 4096}, Attention(4096, 0.0)),
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 9}, Attention(128, 0.5)),
        ({"text_config": {"sliding_window": 1024, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}},
         Attention(1024, 1 / 6)),
        ({"sliding_window": 4096, "use_sliding_window": False}, NO_WINDOW),
        ({"sliding_window": None}, NO_WINDOW),
        ({"sliding_window": -1}, NO_WINDOW),
        ({"sliding_window": "many"}, NO_WINDOW),
        ({"text_config": 3}, NO_WINDOW),
        ([], NO_WINDOW),
    ],
)  # fmt: skip
def test_sliding_windows_are_read_from_the_models_configuration(tmp_path: Path, text: Any, found: Attention) -> None:
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert measure.attention_of(tmp_path) == found


def test_a_model_without_a_readable_configuration_has_no_windows(tmp_path: Path) -> None:
    assert measure.attention_of(tmp_path) == NO_WINDOW
    (tmp_path / "config.json").write_text("{")
    assert measure.attention_of(tmp_path) == NO_WINDOW
