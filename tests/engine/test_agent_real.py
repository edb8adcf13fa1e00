"""Two agents around real engines, one pipeline stage each: profile, serve, answer, break.

The ranks share this host's loopback, so each has a control port of its own; all else is as in two pods.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefill_runtime.profiling.document import CalibrationDocument, ProfileResult

from tests.engine.harness import prompt
from tests.unit.agent.harness import Rank, Site, until

pytestmark = pytest.mark.timed  # a profile is measured

STARTUP = 700.0  # bounds for a machine that does much else
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_LOGGING_LEVEL": "INFO"}


class RealSite(Site):
    """Ranks whose engine is vLLM, with the plugin where the init step ``runtime`` puts it."""

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(folder)
        (folder / "bin" / "vllm").unlink()
        self.runtime = folder / "opt"
        subprocess.run([sys.executable, "-m", "prefill_runtime.agent", "install", str(self.runtime)], check=True)
        self._model = model

    def pair(self, calibration: str = "", **more: Any) -> tuple[Rank, Rank]:
        changes: dict[str, Any] = {
            "engine__modelPath": str(self._model), "engine__dtype": "float32", "engine__maxModelLen": 4096,
            "engine__args": ["--max-num-seqs", "8", "--block-size", "16"],
            "chunking__policy": "Dynamic", "profiling__samples": 16,
            "profiling__timeoutSeconds": 600, "startupSeconds": 600,
        } | more  # fmt: skip
        return self.rank(0, calibration=calibration, **changes), self.rank(1, calibration=calibration, **changes)

    def clean_up(self) -> None:
        """An agent that is asked ends its engine; when it is killed, vLLM's engine processes stay."""
        running = [rank for rank in self.ranks if hasattr(rank, "process") and rank.process.poll() is None]
        for rank in running:
            rank.process.send_signal(signal.SIGTERM)
        for rank in running:
            with contextlib.suppress(AssertionError):
                rank.process.wait(30)
        for rank in self.ranks:
            rank.clean_up()

    def start(self, step: str, *ranks: Rank) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for rank in ranks:
            rank.start(step, PYTHONPATH=str(self.runtime), PATH=path, **ENVIRONMENT)


@pytest.fixture
def site(tmp_path: Path, model: Path) -> Iterator[RealSite]:
    made = RealSite(tmp_path, model)
    yield made
    made.clean_up()


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[CalibrationDocument]:
    """What the profile step of both ranks measures."""
    site = RealSite(tmp_path_factory.mktemp("profile"), model)
    pair = site.pair()
    try:
        site.start("profile", *pair)
        assert [rank.process.wait(STARTUP) for rank in pair] == [0, 0]
        results = [ProfileResult.model_validate_json(rank.termination.read_text()) for rank in pair]
        assert [r.outcome for r in results] == ["Measured", "Measured"], [r.refusal for r in results]
        assert results[0].calibration is not None
        assert results[1].calibration is None
        for rank in pair:
            text = (rank.state / "calibration.json").read_text()
            assert CalibrationDocument.model_validate_json(text) == results[0].calibration
        yield results[0].calibration
    finally:
        site.clean_up()


def test_the_profile_step_measures_every_stage(calibration: CalibrationDocument) -> None:
    assert [stage.stage for stage in calibration.stages] == [0, 1]
    for stage in calibration.stages:
        assert stage.sample_count >= 16  # points, each the quickest of its repeats
        assert stage.r2 > 0.9


def complete(rank: Rank, tokens: list[int]) -> list[int]:
    body = {"model": "m", "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    url = f"http://127.0.0.1:{rank.config['group']['enginePort']}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        found: list[int] = json.load(response)["choices"][0]["token_ids"]
        return found


def serving(site: RealSite, calibration: CalibrationDocument) -> tuple[Rank, Rank]:
    pair = site.pair(calibration.to_json())
    site.start("profile", *pair)
    assert [rank.process.wait(STARTUP) for rank in pair] == [0, 0]
    assert [ProfileResult.model_validate_json(r.termination.read_text()).outcome for r in pair] == ["Reused"] * 2
    for rank in pair:
        rank.termination.unlink()
    site.start("serve", *pair)
    for rank in pair:
        rank.until_phase("Ready", STARTUP)
    return pair


def processes_of(rank: Rank) -> list[psutil.Process]:
    engine = psutil.Process(rank.status()["enginePid"])
    return [engine, *engine.children(recursive=True)]


def test_a_calibrated_pair_serves_and_drains(site: RealSite, calibration: CalibrationDocument) -> None:
    leader, follower = serving(site, calibration)
    assert leader.get("/readyz") == follower.get("/readyz") == (200, "ready\n")
    assert len(complete(leader, prompt(3000))) == 4
    passes = 'prefill_rank_state_seconds_total{rank="%d",state="compute"}'
    for number, rank in enumerate((leader, follower)):
        line = until("compute time", lambda n=number, r=rank: metric(r, passes % n))
        assert line > 0
    timeline = json.loads(leader.get("/timeline")[1])
    assert json.dumps(timeline).count("3000") > 0
    everything = processes_of(leader) + processes_of(follower)
    for rank in (leader, follower):
        rank.process.terminate()
    assert [leader.exit_code(), follower.exit_code()] == [0, 0]
    assert not any(process.is_running() for process in everything)


def metric(rank: Rank, name: str) -> float:
    for line in rank.get("/metrics")[1].splitlines():
        if line.startswith(name):
            return float(line.rpartition(" ")[2])
    return 0.0


@pytest.mark.parametrize(("what", "victim"), [("engine", 1), ("worker", 0), ("worker", 1)])
def test_a_killed_engine_process_ends_both_ranks(
    site: RealSite, calibration: CalibrationDocument, what: str, victim: int
) -> None:
    """Stock vLLM waits for ever here."""
    pair = serving(site, calibration)
    trees = [processes_of(rank) for rank in pair]
    target = trees[victim][0] if what == "engine" else worker(trees[victim])
    target.send_signal(signal.SIGKILL)
    assert [rank.exit_code() for rank in pair] == [1, 1]
    words = [rank.last_words() for rank in pair]
    assert (words[victim]["reason"], words[1 - victim]["reason"]) == ("EngineExited", "PeerLost"), words
    assert not any(process.is_running() for tree in trees for process in tree)


def worker(tree: list[psutil.Process]) -> psutil.Process:
    (found,) = (process for process in tree if process.cmdline()[0].startswith("VLLM::Worker"))
    return found
