"""Folded pipelines over time: a thousand requests, a rank that dies, a bubble that is what the simulator says."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefill_runtime.scheduler.costfile import parse_cost
from prefill_runtime.scheduler.layout import FoldBack, Layout, Linear
from prefill_runtime.scheduler.order import static_order, usual_lag
from prefill_runtime.scheduler.simulate import Request, simulate
from prefill_runtime.telemetry.events import Event, Idle, Pass

from localcluster import models
from tests.engine.harness import ENVIRONMENT, Engine, issued, prompt
from tests.engine.test_foldback import FIXED, NEWEST

pytestmark = pytest.mark.skipif(not NEWEST, reason="run with the newest vLLM only: it takes five minutes")

SHM = Path("/dev/shm")
STEP, STEPS, ABORTED = 100, 10, 3
BLOCKS = 256  # all of them are touched soon; after that only a leak can grow


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(
        model, tmp_path, FIXED, pipeline_parallel_size=2, enable_prefix_caching=True, num_gpu_blocks_override=BLOCKS
    )
    yield engine
    engine.close()


def workers(engine: Engine) -> list[psutil.Process]:
    found = psutil.Process(engine.process.pid).children(recursive=True)
    return sorted(
        (process for process in found if process.cmdline()[0].startswith("VLLM::Worker")), key=lambda p: p.cmdline()[0]
    )


def test_a_thousand_requests_leave_nothing_behind(engine: Engine, model: Path, tmp_path: Path) -> None:
    rng = random.Random(14)  # no two best tokens of the compared answers are nearly equal, on any CPU's kernels
    sizes = [
        [rng.choice((1, rng.randrange(2, 300), rng.randrange(300, 2000))) for _ in range(STEP)] for _ in range(STEPS)
    ]
    memory, files, answers = list[int](), list[set[str]](), list[list[list[int]]]()
    for step, lengths in enumerate(sizes):
        for number in range(ABORTED):
            engine.submit(f"leaver-{step}-{number}", prompt(3000, seed=9000 + ABORTED * step + number))
        engine.abort(f"leaver-{step}-0")
        answers.append(engine.tokens([prompt(n, seed=100 * step + k) for k, n in enumerate(lengths)], max_tokens=2))
        for number in range(1, ABORTED):
            engine.abort(f"leaver-{step}-{number}")
        memory.append(sum(process.memory_info().rss for process in workers(engine)))
        files.append({path.name for path in SHM.iterdir()})
    # Half a thousand requests: vLLM's allocators grow by 100 MiB, folded or not; one hand-over kept of each were 500.
    assert memory[-1] - memory[STEPS // 2 - 1] < 200 << 20, [m >> 20 for m in memory]
    assert files[-1] <= files[STEPS // 2]
    plain = Engine(model, tmp_path, None, enable_prefix_caching=True)
    try:
        for step in (0, STEPS - 1):
            prompts = [prompt(n, seed=100 * step + k) for k, n in enumerate(sizes[step])]
            assert answers[step] == plain.tokens(prompts, max_tokens=2)
    finally:
        plain.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_between_head_and_tail_ends_the_engine(engine: Engine, victim: int) -> None:
    since = engine.agent.mark()
    for seed in (3, 4):
        engine.submit(f"long-{seed}", prompt(16_000, seed=seed))
    engine.agent.wait(lambda events: len(issued(events)) >= 4, since)
    began = time.monotonic()
    workers(engine)[victim].send_signal(signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the engine died"):
        engine.tokens([prompt(8)])
    assert engine.others_end(10)
    assert time.monotonic() - began < 15


@pytest.mark.timed
@pytest.mark.parametrize("layout", [Linear(2), FoldBack(2)], ids=["straight", "folded"])
def test_the_bubble_is_what_the_simulator_predicts(tmp_path: Path, layout: Layout) -> None:
    stages, chunks, chunk = layout.stages, 12, 1024
    cost: dict[str, Any] = {
        "form": "stage", "model": {"k0": 0.02 * stages, "k1": 1e-4, "k2": 2e-8}, "pass_overhead_s": 0.0,
        "shares": [1 / stages] * stages, "transfer": {"latency_s": 0.005, "seconds_per_token": 0.0},
    }  # fmt: skip
    settings = FIXED | {"maxTokens": chunk, "virtualStages": layout.virtual, "emulate": cost}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND", "nobind")
        engine = Engine(
            models.ensure("emu"), tmp_path, settings, dtype="bfloat16", pipeline_parallel_size=2, max_num_seqs=4,
            enable_prefix_caching=False, hf_overrides={"num_hidden_layers": stages}, load_format="dummy",
        )  # fmt: skip
    try:
        engine.tokens([prompt(chunk * chunks, seed=1)], max_tokens=1)
        since = engine.agent.mark()
        _, before = engine.agent.states()
        engine.tokens([prompt(chunk * chunks, seed=2)], max_tokens=1)

        def told(events: list[Event]) -> bool:
            passes = sum(isinstance(event, Pass) for event in events)
            return passes == stages * chunks and any(isinstance(event, Idle) for event in events)

        engine.agent.wait(told, since)
        _, after = engine.agent.states()
        passes = [event for event in engine.agent.events[since:] if isinstance(event, Pass)]
    finally:
        engine.close()
    order = static_order(layout, chunks, usual_lag(2))
    # A folded timeline's V: tails come up between the heads that go down.
    assert [[x.stage for x in passes if x.rank == rank] for rank in (0, 1)] == [[s for *_, s in lane] for lane in order]
    request = Request(chunk * chunks, chunks=(chunk,) * chunks)
    predicted = simulate(layout, parse_cost(json.dumps(cost)), [request], order=order).rank_state_seconds()
    spent = [{state: after[rank][state] - before[rank][state] for state in after[rank]} for rank in range(2)]
    for cause in ("bubble_fill", "bubble_imbalance", "bubble_drain"):
        assert share(spent, cause) == pytest.approx(share(predicted, cause), abs=0.02), (cause, spent, predicted)


def share(ranks: list[dict[str, float]], cause: str) -> float:
    """Of the busy period, over all ranks."""
    busy = sum(seconds for rank in ranks for state, seconds in rank.items() if state != "idle")
    return sum(rank[cause] for rank in ranks) / busy
