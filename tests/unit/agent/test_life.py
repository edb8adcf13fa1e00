"""How a rank group lives and dies: real agents, real signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.unit.agent.harness import Rank, Site, alive, until


def gone(*ranks: Rank) -> bool:
    return not any(alive(pid) for rank in ranks for pid in rank.engine_pids())


def test_a_pair_gets_ready_serves_its_endpoints_and_drains(site: Site) -> None:
    leader, follower = site.ready_pair()
    assert leader.get("/readyz") == (200, "ready\n")
    assert follower.get("/readyz") == (200, "ready\n")
    assert leader.get("/healthz")[0] == 200
    assert leader.get("/calibration")[0] == 404
    assert leader.get("/timeline")[0] == 200
    assert follower.get("/timeline")[0] == 404
    assert leader.get("/metrics")[0] == 200
    first, second = leader.status(), follower.status()
    assert first["session"] == second["session"] != ""
    assert set(first["peers"]) == {"1"}
    assert set(second["peers"]) == {"0"}
    assert first["enginePid"] == leader.engine_pids()[0]
    until("clock offset", lambda: leader.status()["peers"]["1"]["clockOffsetSeconds"] is not None)
    assert abs(leader.status()["peers"]["1"]["clockOffsetSeconds"]) < 0.5

    for rank in (follower, leader):
        rank.process.terminate()
    assert leader.exit_code() == 0
    assert follower.exit_code() == 0
    assert not leader.termination.exists()
    assert gone(leader, follower)


def test_one_pod_needs_no_group(site: Site) -> None:
    alone = site.rank(0, pods=1).start().until_phase("Ready")
    assert alone.get("/readyz")[0] == 200
    alone.process.terminate()
    assert alone.exit_code() == 0


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_agent_ends_the_other(site: Site, victim: int, number: int) -> None:
    pair = site.ready_pair()
    lost, left = pair[victim], pair[1 - victim]
    lost.process.send_signal(number)
    assert left.exit_code() == 1
    words = left.last_words()
    assert words["reason"] == "PeerLost"
    assert words["rank"] == 1 - victim
    assert f"rank {victim} was lost" in words["message"]
    assert ("silent" in words["message"]) == (number == signal.SIGSTOP)
    assert gone(left)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_engine_ends_both(site: Site, victim: int) -> None:
    pair = site.ready_pair()
    os.kill(pair[victim].engine_pids()[0], signal.SIGKILL)
    assert pair[victim].exit_code() == 1
    assert pair[1 - victim].exit_code() == 1
    words = pair[victim].last_words()
    assert words["reason"] == "EngineExited"
    assert "signal SIGKILL" in words["message"]
    other = pair[1 - victim].last_words()
    assert other["reason"] == "PeerLost"
    assert f"rank {victim} ended: EngineExited" in other["message"]
    assert gone(*pair)


def test_an_engine_that_fails_to_start_is_quoted(site: Site) -> None:
    leader, follower = site.rank(0).start(FAKE_FAIL="1"), site.rank(1).start()
    assert leader.exit_code() == 1
    assert follower.exit_code() == 1
    message = leader.last_words()["message"]
    cause = "the engine ended by itself (exit code 0): ValueError: the fake has no such head size"
    assert message.startswith(f"{cause}; the engine's last output:\n")
    assert follower.last_words()["message"] == f"rank 0 ended: EngineExited: {cause}"
    assert message.endswith("line 59 that only points back")
    assert len(message) <= 3000


def test_an_engine_that_ignores_sigterm_is_killed_with_its_workers(site: Site) -> None:
    alone = site.rank(0, pods=1).start(FAKE_IGNORE_TERM="1").until_phase("Ready")
    alone.process.terminate()
    assert alone.exit_code() == 0
    assert gone(alone)


def test_never_ready(site: Site) -> None:
    alone = site.rank(0, pods=1, startupSeconds=3).start(FAKE_NEVER_READY="1")
    assert alone.exit_code() == 1
    assert alone.last_words()["reason"] == "EngineNeverReady"
    assert "fake engine" in alone.last_words()["message"]


def test_a_rank_that_never_comes(site: Site) -> None:
    leader = site.rank(0, startupSeconds=2).start()
    assert leader.exit_code() == 1
    assert leader.last_words()["reason"] == "PeerLost"
    assert "rank 1 did not join within 2 s" in leader.last_words()["message"]


def test_missing_model(site: Site, tmp_path: Path) -> None:
    missing = site.rank(0, pods=1, engine__modelPath=str(tmp_path / "nowhere")).start()
    assert missing.exit_code() == 1
    assert missing.last_words()["reason"] == "ModelNotFound"
    assert "nowhere does not exist" in missing.last_words()["message"]


def test_bad_configuration(site: Site) -> None:
    bad = site.rank(0, pods=1, engine__tensor=0).start()
    assert bad.exit_code() == 1
    assert bad.last_words()["reason"] == "BadConfiguration"
    assert "engine.tensor" in bad.last_words()["message"]


def test_another_incarnation_is_refused_and_the_leader_goes_on(site: Site) -> None:
    leader = site.rank(0).start().until_phase("Joining")
    stale = site.rank(1, incarnation="life-0").start()
    assert stale.exit_code() == 1
    assert stale.last_words()["reason"] == "IncarnationChanged"
    assert "life-0" in stale.last_words()["message"]
    site.rank(1).start().until_phase("Ready")
    assert leader.get("/readyz")[0] == 200


def test_a_third_rank_is_refused_after_the_launch(site: Site) -> None:
    leader, _ = site.ready_pair()
    late = site.rank(1).start()
    assert late.exit_code() == 1
    assert "came too late" in late.last_words()["message"]
    assert leader.get("/readyz")[0] == 200


def test_a_second_leader_on_the_same_host_is_told_about_the_port(site: Site) -> None:
    site.ready_pair()
    second = site.rank(0).start()
    assert second.exit_code() == 1
    assert second.last_words()["reason"] == "BadConfiguration"
    assert "group port" in second.last_words()["message"]


def test_a_follower_may_come_and_go_before_the_launch(site: Site) -> None:
    leader = site.rank(0, pods=3).start()
    first = site.rank(1, pods=3).start()
    until("joined", lambda: "1" in leader.status().get("peers", {}))
    first.process.kill()
    until("forgotten", lambda: leader.status()["peers"] == {})
    again, third = site.rank(1, pods=3).start(), site.rank(2, pods=3).start()
    for rank in (leader, again, third):
        rank.until_phase("Ready")


def test_the_leader_waits_for_running_requests(site: Site, tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.touch()
    leader = site.rank(0).start(FAKE_BUSY_FILE=str(busy))
    follower = site.rank(1).start()
    for rank in (leader, follower):
        rank.until_phase("Ready")
    follower.process.terminate()
    until("draining", lambda: leader.status().get("phase") == "Draining")
    assert leader.get("/readyz") == (503, "phase Draining\n")
    leader.process.terminate()
    assert alive(leader.engine_pids()[0])
    assert alive(follower.engine_pids()[0])
    busy.unlink()
    assert leader.exit_code() == 0
    assert follower.exit_code() == 0


def test_a_follower_that_is_ended_alone_breaks_the_group_after_the_drain(site: Site) -> None:
    leader, follower = site.ready_pair()
    follower.process.terminate()
    assert leader.exit_code() == 1
    assert follower.exit_code() == 0
    assert leader.last_words()["reason"] == "PeerLost"
    assert "rank 1 was asked to end" in leader.last_words()["message"]


def test_orphans_are_reaped(site: Site) -> None:
    """A worker that outlives its parent comes to the agent, which must not collect zombies as PID 1."""
    alone = site.rank(0, pods=1).start().until_phase("Ready")
    engine, worker = alone.engine_pids()
    os.kill(engine, signal.SIGKILL)
    assert alone.exit_code() == 1
    assert not Path(f"/proc/{worker}").exists()
