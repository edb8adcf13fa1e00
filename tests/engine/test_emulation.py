"""An emulated device: real engine, modelled passes. Times are only ever compared with the model from below."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from prefill_runtime.engine.emulation import EmulatedPasses, Link, emulated_cost, pieces, sleep_at_once
from prefill_runtime.engine.errors import SettingsError
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.scheduler.cost import PipelineCost, StageModel, TransferModel
from prefill_runtime.scheduler.costfile import parse_cost
from prefill_runtime.telemetry.events import Pass
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from localcluster import models
from tests.engine.harness import ENVIRONMENT, Engine, finished, prompt
from tests.engine.shm import SHM

pytestmark = pytest.mark.timed

STAGES = 4
HALF_A_MILLION = 512 * 1024 + 256
MEBIBYTES = 16
"""Of a slot in the ring: VLLM_MQ_MAX_CHUNK_BYTES_MB."""
SHARES = [0.1, 0.2, 0.3, 0.4]
COST: dict[str, Any] = {
    "form": "stage",
    "model": {"k0": 0.1, "k1": 1e-4, "k2": 1e-8},
    "pass_overhead_s": 0.01,
    "shares": SHARES,
    "transfer": {"latency_s": 0.05, "seconds_per_token": 0.0},
}
FIXED: dict[str, Any] = {"policy": "Fixed", "maxTokens": 1024, "minTokens": 128, "smoothingFactor": 1.0}


def settings(emulate: object) -> PrefillSettings:
    return PrefillSettings.model_validate(FIXED | {"emulate": emulate})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"form": "cubic"}, "form"),
        ({"model": {"k0": 0.1, "k1": 1e-4}}, r"model\.k2"),
        ({"model": {"k0": -1, "k1": 1e-4, "k2": 0}}, "k0"),
        ({"shares": [0.5, 0.5]}, "number of shares"),
        ({"speed": 2}, r"speed.*unknown"),
    ],
)
def test_a_malformed_cost_file_is_refused_with_its_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=rf"additional_config\.prefill\.emulate: .*{words}"):
        emulated_cost(settings(COST | change), STAGES)


def test_real_devices_are_the_default() -> None:
    assert emulated_cost(settings(None), STAGES) is None


def test_every_request_of_a_batch_counts_with_its_history() -> None:
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=256)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["old", "older"], num_computed_tokens=[512, 4096]),
        num_scheduled_tokens={"old": 1, "new": 128, "older": 1024},
    )
    assert pieces(output) == [(1, 512), (128, 256), (1024, 4096)]


class Sends:
    def fold_send(self, tokens: int, step: int) -> None:
        self.sent = tokens, step


class EmulatedSends(EmulatedPasses, Sends):
    emulates = True

    def __init__(self, link: Link, *, blocking: bool) -> None:
        self._links, self.fold_settings = {1: link}, SimpleNamespace(fold_blocking=blocking)


@pytest.mark.parametrize("blocking", [True, False])
def test_only_a_blocking_sender_waits_for_its_transfer(blocking: bool) -> None:
    cost = PipelineCost(StageModel(0.0, 1e-4, 0.0), transfer=TransferModel(0.1, 1e-4))
    engine = uuid.uuid4().hex
    sender, receiver = Link(cost, engine, "down", 0, 1), Link(cost, engine, "down", 1, 1)
    began = time.monotonic()
    worker = EmulatedSends(sender, blocking=blocking)
    with sender._socket, receiver._socket:
        worker.fold_send(1000, 1)
        sent = time.monotonic() - began
        receiver.wait()
        received = time.monotonic() - began
    assert worker.sent == (1000, 1)
    assert (sent >= 0.2) == blocking
    assert received >= 0.2


def test_a_message_right_after_another_is_not_slept_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its notification is lost, and vLLM looks by itself after five seconds only."""
    for name in ("__init__", "wait"):  # to be put back
        monkeypatch.setattr(SpinCondition, name, getattr(SpinCondition, name))
    sleep_at_once()
    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    read: SimpleQueue[int] = SimpleQueue()

    def receive() -> None:
        reader.wait_until_ready()
        with contextlib.suppress(TimeoutError):
            for _ in range(40):
                read.put(reader.dequeue(timeout=4))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    writer.wait_until_ready()
    try:
        for number in range(40):
            writer.enqueue(number)
            assert read.get(timeout=4) == number
    finally:
        thread.join(5)
        for end in (writer, reader):
            end.local_socket.context.destroy(0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND", "nobind")  # more ranks than cores
        engine = Engine(
            models.ensure("emu"), tmp_path_factory.mktemp("engine"), FIXED | {"emulate": COST}, dtype="bfloat16",
            pipeline_parallel_size=STAGES, max_model_len=HALF_A_MILLION, max_num_seqs=4, enable_prefix_caching=False,
        )  # fmt: skip
    yield engine
    engine.close()


def test_a_pod_of_four_stages_has_a_ring_for_six_batches(engine: Engine) -> None:
    core = psutil.Process(engine.process.pid)
    mapped = {m.path for process in (core, *core.children(recursive=True)) for m in process.memory_maps()}
    sizes = [os.stat(path).st_size for path in mapped if path.startswith(f"{SHM}/psm_")]
    assert 12 * ((MEBIBYTES << 20) + 1 + STAGES) in sizes, sizes  # a byte per slot for the writer and for each reader


def passes(engine: Engine, prompts: list[list[int]]) -> list[Pass]:
    since = engine.agent.mark()
    tokens = engine.tokens(prompts, max_tokens=2)
    assert [len(answer) for answer in tokens] == [2] * len(prompts)
    engine.agent.wait(finished(len(prompts)), since)

    def complete(events: list[Any]) -> list[Pass]:
        found = [event for event in events if isinstance(event, Pass)]
        last = [event for event in found if event.stage == STAGES - 1]
        return found if last and len(found) == STAGES * len(last) else []

    found: list[Pass] = engine.agent.wait(complete, since)
    return found


def test_every_pass_takes_its_modelled_time(engine: Engine) -> None:
    found = passes(engine, [prompt(5000)])
    chunks = [(e.stamp.chunks[0].tokens, e.stamp.chunks[0].history) for e in found if e.stage == 0]
    assert chunks[:5] == [(1024, 0), (1024, 1024), (1024, 2048), (1024, 3072), (904, 4096)]
    for event in found:
        tokens, history = event.stamp.chunks[0].tokens, event.stamp.chunks[0].history
        modelled = SHARES[event.stage] * (0.1 + tokens * (1e-4 + 1e-8 * (history + tokens / 2))) + 0.01
        assert event.end - event.start >= modelled


def test_a_packed_batch_takes_the_time_of_all_its_chunks(engine: Engine) -> None:
    cost = parse_cost(json.dumps(COST))
    found = passes(engine, [prompt(2048 + 300), prompt(500), prompt(200)])
    packed = [event for event in found if sum(chunk.prefill for chunk in event.stamp.chunks) > 1]
    assert len({event.stage for event in packed}) == STAGES
    for event in packed:
        modelled = cost.batch_seconds(STAGES, [(c.tokens, c.history) for c in event.stamp.chunks])[event.stage]
        assert event.end - event.start >= modelled


def test_a_stage_starts_when_pass_and_transfer_of_the_one_before_are_over(engine: Engine) -> None:
    modelled = parse_cost(json.dumps(COST)).batch_seconds(STAGES, [(700, 0)])
    found = passes(engine, [prompt(700)])
    start = {event.stage: event.start for event in found if event.stamp.chunks[0].tokens == 700}
    for stage in range(1, STAGES):
        assert start[stage] - start[stage - 1] >= modelled[stage - 1] + COST["transfer"]["latency_s"]


def test_the_log_says_that_nothing_is_computed(engine: Engine) -> None:
    assert engine.log.read_text(errors="replace").count("EMULATED DEVICE") == STAGES
