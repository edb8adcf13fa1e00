"""Calibration while serving, in rank 0's agent."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.request
from datetime import datetime
from typing import Any

import pytest
from prefill_runtime.agent.online import Refiner, make_refiner
from prefill_runtime.agent.settings import Places, Settings, read_settings
from prefill_runtime.profiling.compose import Origin
from prefill_runtime.profiling.document import CalibrationDocument, load_calibration
from prefill_runtime.profiling.online import OnlineCalibration
from prefill_runtime.scheduler.layout import Linear
from prefill_runtime.telemetry.events import Chunk, Pass, Stamp

from tests.documents import calibration
from tests.unit.agent.harness import KEY, Rank, Site, until

AUTO: dict[str, Any] = {"chunking__policy": "Auto", "profiling": None, "onlineWindow": 64}
LENGTHS = (8000, 3000, 4700, 700, 6345, 5000)


def ask(rank: Rank, tokens: int) -> None:
    url = f"http://127.0.0.1:{rank.config['group']['enginePort']}/v1/completions"
    body = json.dumps({"prompt": [1] * tokens}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as response:
        assert response.status == 200


def found(rank: Rank) -> CalibrationDocument | None:
    code, text = rank.get("/calibration")
    return load_calibration(text, KEY, 2) if code == 200 else None


def test_a_replica_without_a_calibration_finds_one(site: Site) -> None:
    rank = site.rank(0, pods=1, **AUTO).start("serve").until_phase("Ready")
    assert found(rank) is None
    for tokens in LENGTHS:
        ask(rank, tokens)
    document = until("a calibration", lambda: found(rank))
    assert document.source == "Online"
    for stage in document.stages:
        assert stage.coefficients.k2 == pytest.approx((stage.stage + 1) * 4e-8, rel=0.01)
        assert stage.coefficients.k1 == pytest.approx((stage.stage + 1) * 1e-5, rel=0.02)
        assert stage.sample_count <= 30
    until("it is told", lambda: ask(rank, 10) or "fake scheduler was told" in rank.log())
    told = next(line for line in rank.log().splitlines() if line.startswith("fake scheduler was told"))
    assert CalibrationDocument.model_validate(json.loads(told.partition("told ")[2])["calibration"]) == document
    assert rank.status()["calibrated"] is True
    metrics = rank.get("/metrics")[1]
    assert 'source="Online"} 1.0' in metrics
    assert "\nprefill_calibration_drift_ratio " in metrics
    assert load_calibration((rank.state / "calibration.json").read_text(), KEY, 2) == document


@pytest.mark.parametrize(
    ("embedded", "calibrated"),
    [("", False), (calibration(key=KEY).to_json(), True), (calibration(key="f" * 16).to_json(), False),
     (calibration(key=KEY, stages=3).to_json(), False), ("{broken", False)],
    ids=["none", "valid", "foreign", "other stages", "malformed"],
)  # fmt: skip
def test_without_profiling_the_embedded_calibration_counts_if_it_is_valid(
    site: Site, embedded: str, calibrated: bool
) -> None:
    rank = site.rank(0, pods=1, calibration=embedded, **AUTO)
    assert rank.start("profile").exit_code() == 0
    rank.start("serve").until_phase("Ready")
    assert rank.status()["calibrated"] is calibrated
    assert ('"key":"00112233445566ff"' in rank.log()) is calibrated  # on the engine's command line


def settings(site: Site, rank: int = 0, **changes: Any) -> Settings:
    made = site.rank(rank, **AUTO | changes)
    places = Places(config=made.files, state=made.state, termination=made.termination)
    return read_settings(places, {"PREFILL_RANK": str(rank)})


@pytest.mark.parametrize(
    ("rank", "changes", "refines"),
    [
        (0, {}, True),
        (1, {}, False),
        (0, {"onlineWindow": None}, False),
        (0, {"chunking__policy": "Fixed"}, False),
        (0, {"pods": 1, "engine__pipeline": 1}, False),
        (0, {"pods": 1, "engine__pipeline": 19}, False),
    ],
)
async def test_where_it_runs(site: Site, rank: int, changes: dict[str, Any], refines: bool) -> None:
    made = make_refiner(settings(site, rank, **changes), None, lambda _: None, lambda _: None)
    assert (made is not None) is refines


class Pipeline:
    """Passes of two stages, on clocks of their own, and what a refiner makes of them."""

    def __init__(self, document: CalibrationDocument | None) -> None:
        origin = Origin(key=KEY, model="m", base_tokens=1024, engine_version="v", runtime_version="r")
        self.found: asyncio.Queue[CalibrationDocument] = asyncio.Queue()
        self.drifts: asyncio.Queue[float | None] = asyncio.Queue()
        self.refiner = Refiner(
            OnlineCalibration(origin, Linear(2), 64, document, 8192),
            self.found.put_nowait,
            self.drifts.put_nowait,
            pause=0.0,
        )
        self.batch = 0

    def run(self, tokens: int, seconds: float = 1.0, decodes: int = 0) -> None:
        for at in range(0, tokens, 1024):
            self.batch += 1
            size = min(1024, tokens - at)
            chunks = [Chunk("r", at, size, tokens)] + [Chunk("", 0, decodes, 0)] * bool(decodes)
            stamp = Stamp(batch=self.batch, period=1, chunks=tuple(chunks))
            for stage, ahead in enumerate((0.0, 1000.0)):
                end = ahead + seconds * (0.003 + 2e-5 * size + 2e-9 * size * (at + size / 2))
                record = Pass(stamp=stamp, stage=stage, call=ahead, start=ahead, end=end, sent=end)
                self.refiner.passed(record, ahead)


async def test_a_document_in_force_is_replaced_once_passes_contradict_it() -> None:
    pipeline = Pipeline(calibration(key=KEY))
    task = asyncio.create_task(pipeline.refiner.run())
    for tokens in LENGTHS * 3:
        pipeline.run(tokens)
    assert await asyncio.wait_for(pipeline.drifts.get(), 60) == pytest.approx(0, abs=1e-6)
    assert pipeline.found.empty()
    for tokens in LENGTHS * 3:
        pipeline.run(tokens, seconds=2.0)
    document = await asyncio.wait_for(pipeline.found.get(), 60)
    assert document.stages[1].coefficients.k1 == pytest.approx(4e-5, rel=0.01)
    drift = await asyncio.wait_for(pipeline.drifts.get(), 60)
    assert drift == pytest.approx(0, abs=1e-3)
    task.cancel()


async def test_steps_with_decodes_teach_nothing() -> None:
    pipeline = Pipeline(None)
    for tokens in LENGTHS:
        pipeline.run(tokens, decodes=7)
    assert pipeline.refiner.calibration.ignored == 2 * pipeline.batch
    assert not pipeline.refiner.calibration.due


async def test_a_failing_refit_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(None)
    works, failed, loop = pipeline.refiner.calibration.refine, asyncio.Event(), asyncio.get_running_loop()

    def fails(now: datetime) -> None:
        monkeypatch.setattr(pipeline.refiner.calibration, "refine", works)
        loop.call_soon_threadsafe(failed.set)
        raise ArithmeticError("SVD did not converge")

    monkeypatch.setattr(pipeline.refiner.calibration, "refine", fails)
    task = asyncio.create_task(pipeline.refiner.run())
    for tokens in LENGTHS:
        pipeline.run(tokens)
    await asyncio.wait_for(failed.wait(), 60)
    pipeline.run(4000)
    assert math.isfinite((await asyncio.wait_for(pipeline.found.get(), 60)).target_seconds)
    task.cancel()
