"""The NPU worker on stand-ins of the shape that the contracts find: an NPU and its libraries exist nowhere here."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prefill_runtime.engine.errors import SettingsError, UnsupportedEngineError
from prefill_runtime.telemetry.events import Pass, Stamp

from tests.unit.ascend.test_pass_clock import Device, Told

SETTINGS: dict[str, Any] = {"policy": "Fixed", "maxTokens": 512, "minTokens": 128, "smoothingFactor": 1.0}


class Received:
    """vLLM's AsyncIntermediateTensors: whoever touches the tensors waits for them, on the stream."""

    def __init__(self, device: Device, at: float) -> None:
        self._comm_handles = [SimpleNamespace(wait=lambda: device.queue(not_before=at))]

    def wait_for_comm(self) -> None:
        for handle in self._comm_handles:
            handle.wait()


class Runner:
    def __init__(self, device: Device, last: bool) -> None:
        self.device, self.last = device, last

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        self.device.now += 0.25  # preparation
        if intermediate_tensors is not None:
            intermediate_tensors.wait_for_comm()
        self.device.queue(scheduler_output.seconds)
        return None if self.last else "tensors"

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.device.queue(0.5)
        return "tokens" if self.last else None


class StockWorker:
    def __init__(self, vllm_config: Any, local_rank: int, rank: int) -> None:
        self.vllm_config, self.rank = vllm_config, rank
        self.sends: list[str] = []

    def init_device(self) -> None:
        self.model_runner = Runner(self.vllm_config.device, last=self.rank == 1)

    def execute_model(self, scheduler_output: Any) -> Any:
        received = None
        if self.rank and scheduler_output.seconds:
            received = Received(self.vllm_config.device, scheduler_output.arrives)
        output = self.model_runner.execute_model(scheduler_output, received)
        if output == "tensors":
            self.sends.append(output)
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.model_runner.sample_tokens(grammar_output)


class Group(SimpleNamespace):
    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == 1


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Which of two pipeline ranks this is, and its device; ``make`` gives its worker."""
    device, rank, told = Device(), Group(rank_in_group=0), Told()
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.23.0"},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            "get_pp_group": lambda: rank,
            "get_tp_group": lambda: SimpleNamespace(rank_in_group=0),
        },
        # Whose stages are folded needs vLLM; tests/engine/test_foldback.py has the real ones.
        "prefill_runtime.engine.fold_stages": {"FoldedStages": type("FoldedStages", (), {})},
        "vllm_ascend": {},
        "vllm_ascend.worker": {},
        "vllm_ascend.worker.worker": {"NPUWorker": StockWorker},
        "torch": {"npu": SimpleNamespace(Event=lambda enable_timing: device.event())},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    versions = {"vllm-ascend": "0.23.0.post1"}
    ours = ("prefill_runtime.engine.passes", "prefill_runtime.engine.worker_ascend")
    for name in ours:
        sys.modules.pop(name, None)
    module = importlib.import_module(ours[1])
    monkeypatch.setattr(module, "version", versions.__getitem__)
    monkeypatch.setattr(sys.modules[ours[0]], "Sender", lambda *_: told)
    monkeypatch.setattr(module, "DeviceTimer", functools.partial(module.DeviceTimer, now=device.host))

    def make(**settings: Any) -> Any:
        config = SimpleNamespace(additional_config={"prefill": SETTINGS | settings}, device=device)
        worker = module.PrefillNPUWorker(config, local_rank=0, rank=rank.rank_in_group)
        worker.init_device()
        return worker

    yield SimpleNamespace(device=device, rank=rank, told=told, make=make, versions=versions)
    for name in ours:
        sys.modules.pop(name, None)


def batch(number: int, seconds: float, arrives: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(prefill_stamp=Stamp(batch=number, period=1), seconds=seconds, arrives=arrives)


def times(passes: list[Pass]) -> list[tuple[float, ...]]:
    return [(p.call, p.start, p.end, p.sent) for p in passes]


def test_first_rank(machine: SimpleNamespace) -> None:
    worker = machine.make()
    assert worker.execute_model(batch(1, 4.0)) is None
    assert worker.execute_model(batch(2, 4.0)) is None
    assert worker.sample_tokens(None) is None  # every rank is asked; only the last has something to sample
    assert worker.sends == ["tensors", "tensors"]
    machine.device.now = 120.0
    worker.execute_model(SimpleNamespace(seconds=0.0))
    # Preparation counts as work, as it does on the host: the first pass starts where the runner was entered.
    assert times(machine.told.passes) == [
        pytest.approx((100.0, 100.0, 104.25, 104.25)),
        pytest.approx((104.25, 104.25, 108.25, 108.25)),
    ]


def test_last_rank(machine: SimpleNamespace) -> None:
    machine.rank.rank_in_group = 1
    worker = machine.make()
    assert worker.execute_model(batch(1, 2.0, arrives=103.0)) is None
    assert worker.sample_tokens(None) == "tokens"
    machine.device.now = 120.0
    worker.execute_model(SimpleNamespace(seconds=0.0))
    # Waiting for the input ends on the stream, and sampling belongs to the pass.
    assert times(machine.told.passes) == [pytest.approx((100.0, 103.0, 105.5, 105.5))]


def test_other_versions_are_refused(machine: SimpleNamespace) -> None:
    machine.versions["vllm-ascend"] = "0.23.0"
    with pytest.raises(UnsupportedEngineError, match=r"vllm-ascend 0\.23\.0 on vLLM 0\.23\.0"):
        machine.make()
    machine.make(allowUntestedEngine=True)


def test_emulation_is_refused(machine: SimpleNamespace) -> None:
    with pytest.raises(SettingsError, match="emulate is for CPU engines"):
        machine.make(emulate={"model": {}})
