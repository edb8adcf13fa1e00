"""How well a calibration tells what it has not seen, on the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefill_runtime.profiling.compose import stage_model
from prefill_runtime.profiling.document import CalibrationDocument, ProfileResult
from prefill_runtime.profiling.sampling import MIN_ROUNDS, depth_prompt, settled
from prefill_runtime.telemetry.events import Event, Pass

from localcluster import models
from tests.documents import calibration
from tests.engine.harness import Engine, names_ended, prompt
from tests.engine.test_agent_real import STARTUP, RealSite, complete
from tests.unit.agent.harness import KEY, Rank, until

BASE, LENGTH, DEPTHS = 1024, 12_288, 3
DEEPEST = sum(depth_prompt(BASE, DEPTHS, LENGTH, 16))
ROUNDS = 12


@pytest.fixture(scope="module")
def toy() -> Path:
    """Attention costs what it does in long prompts of large models."""
    return models.ensure("toy")


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Iterator[CalibrationDocument]:
    site = RealSite(tmp_path_factory.mktemp("profile"), toy)
    pair = site.pair(profiling__samples=32, profiling__historyDepths=DEPTHS, engine__maxModelLen=LENGTH)
    try:
        site.start("profile", *pair)
        assert [rank.process.wait(STARTUP) for rank in pair] == [0, 0]
        result = ProfileResult.model_validate_json(pair[0].termination.read_text())
        assert result.calibration is not None, result.refusal
        yield result.calibration
    finally:
        for rank in pair:
            rank.clean_up()


def passes(events: list[Event], name: str) -> dict[tuple[int, int, int], float]:
    """Seconds by stage, chunk and history."""
    return {
        (event.stage, chunk.tokens, chunk.history): event.end - event.start
        for event in events
        if isinstance(event, Pass)
        for chunk in event.stamp.chunks
        if chunk.prefill and chunk.request.startswith(name)
    }


def test_depths_never_profiled_are_predicted_within_8_percent(
    profiled: CalibrationDocument, toy: Path, tmp_path: Path
) -> None:
    """The machine does much else, so a pass is its quickest repeat."""
    prefill: dict[str, Any] = {
        "policy": "Dynamic", "maxTokens": BASE, "minTokens": 64, "smoothingFactor": 1.0,
        "calibration": profiled.model_dump(mode="json", by_alias=True),
    }  # fmt: skip
    engine = Engine(toy, tmp_path, prefill, pipeline_parallel_size=2, enable_prefix_caching=False, max_model_len=LENGTH)
    quickest: dict[tuple[int, int, int], float] = {}
    try:
        for number in range(ROUNDS):
            before, name = dict(quickest), f"deep{number:02d}"
            engine.submit(name, prompt(LENGTH - 100, number), max_tokens=1)
            engine.generate([prompt(1)], max_tokens=1)
            events = engine.agent.wait(lambda e, n=name: list(e) if names_ended(e, [n]) else None, timeout=300)
            for at, seconds in passes(events, name).items():
                quickest[at] = min(seconds, quickest.get(at, seconds))
            if number >= MIN_ROUNDS and settled(before, quickest):
                break
    finally:
        engine.close()
    new = {at: seconds for at, seconds in quickest.items() if at[2] > DEEPEST}
    assert len(new) >= 16
    assert {tokens for _, tokens, _ in new} != {BASE}  # the policy's own sizes
    errors = [
        abs(stage_model(profiled.stages[stage]).pass_seconds(float(tokens), float(history)) / seconds - 1)
        for (stage, tokens, history), seconds in new.items()
    ]
    print(
        f"prediction error at depths never profiled: median {np.median(errors):.1%}, p90 {np.quantile(errors, 0.9):.1%}"
    )
    assert np.median(errors) <= 0.08


COST = {"form": "stage", "model": {"k0": 0.06, "k1": 1e-4, "k2": 2e-8}, "shares": None}
EXACT = calibration(k0=0.03, k1=5e-5, k2=1e-8, key=KEY)
ASKED = 6016
TRAFFIC = (8000, 3000, 4700, 700)  # 18 Fixed chunks
QUANTUM = 64


def emulated(site: RealSite, document: str) -> tuple[Rank, Rank]:
    return site.pair(
        document, engine__additionalConfig={"prefill": {"emulate": COST}}, engine__maxModelLen=8192,
        chunking__policy="Auto", profiling=None, onlineWindow=64,
    )  # fmt: skip


def cuts(rank: Rank, tokens: int) -> list[tuple[str, list[int]]]:
    """Policy and chunks of each prompt of that length, oldest first."""
    found: dict[str, tuple[str, list[int]]] = {}
    for period in json.loads(rank.get("/timeline")[1])["periods"]:
        for batch in period["batches"]:
            for chunk in batch["chunks"]:
                if chunk["promptTokens"] == tokens and chunk["history"] < tokens:
                    found.setdefault(chunk["request"], (batch["policy"], []))[1].append(chunk["tokens"])
    return list(found.values())


def planned(rank: Rank) -> list[int]:
    """The policy's chunks once it has had time to search."""
    for seed in range(4):
        complete(rank, prompt(ASKED, seed))
        until("the prompt in the timeline", lambda s=seed: len(cuts(rank, ASKED)) == s + 1)
    policy, chunks = cuts(rank, ASKED)[-1]
    assert policy != "Fixed", cuts(rank, ASKED)
    return chunks


def test_without_a_calibration_the_same_plans_come_within_30_batches(tmp_path: Path) -> None:
    """On an emulated device, so that both know the same costs."""
    plans = []
    for number, document in enumerate(("", EXACT.to_json())):
        folder = tmp_path / str(number)
        folder.mkdir()
        site = RealSite(folder, models.ensure("emu"))
        pair = emulated(site, document)
        try:
            site.start("serve", *pair)
            leader = pair[0].until_phase("Ready", STARTUP)
            if not document:
                for tokens in TRAFFIC:
                    complete(leader, prompt(tokens))
                    assert {policy for policy, _ in cuts(leader, tokens)} == {"Fixed"}
                until("a calibration", lambda r=leader: r.get("/calibration")[0] == 200)
                found = CalibrationDocument.model_validate_json(leader.get("/calibration")[1])
                assert found.source == "Online"
                assert max(stage.sample_count for stage in found.stages) <= 30
            plans.append(planned(leader))
        finally:
            for rank in pair:
                rank.clean_up()
    online, exact = plans
    print(f"online {online}, exact {exact}")
    assert len(online) == len(exact)
    assert max(abs(a - b) for a, b in zip(online, exact, strict=True)) <= 2 * QUANTUM
