"""Settings, versions and the choice of a policy: what is refused, and with which words."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from prefill_runtime.engine import chunk_list, plugin
from prefill_runtime.engine.errors import SettingsError, UnsupportedEngineError
from prefill_runtime.engine.guard import harmless
from prefill_runtime.engine.passes import TimedPasses
from prefill_runtime.engine.policy import EngineLimits, choose
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.engine.versions import check_engine
from prefill_runtime.scheduler.chunkers import Bounds, Dynamic, Fixed
from prefill_runtime.scheduler.cost import QuadraticModel

from tests.engine.harness import calibration

GIVEN: dict[str, Any] = {"policy": "Dynamic", "maxTokens": 1024, "minTokens": 128, "smoothingFactor": 1.0}
LIMITS = EngineLimits(step_tokens=1024, max_model_len=8192, block_tokens=128, tensor=1, pipeline=2)


def settings(**change: Any) -> PrefillSettings:
    return PrefillSettings.of(SimpleNamespace(additional_config={"prefill": GIVEN | change}))  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [{}, {"other": 1}, object()])
def test_missing_settings_say_what_to_pass(config: object) -> None:
    with pytest.raises(SettingsError, match=r"pass --additional-config .*or start vLLM without --scheduler-cls"):
        PrefillSettings.of(SimpleNamespace(additional_config=config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "Best"}, "policy: Input should be 'Fixed' or 'Dynamic', got 'Best'"),
        ({"maxTokens": 0}, "maxTokens: Input should be greater than 0, got 0"),
        ({"smoothingFactor": 1.5}, "smoothingFactor: Input should be less than or equal to 1, got 1.5"),
        ({"chunk": 1}, "chunk: Extra inputs are not permitted"),
    ],
)
def test_wrong_settings_name_the_field_and_the_value(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings(**change)
    assert words in str(caught.value)


@pytest.mark.parametrize("version", ["0.27.1", "0.28.1", "0.28.0rc1", "0.29.0+cpu", "dev"])
def test_an_untested_engine_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=r"tested: 0\.28\.0.*allowUntestedEngine"):
        check_engine(version, allow_untested=False)
    check_engine(version, allow_untested=True)


@pytest.mark.parametrize("version", ["0.28.0", "0.28.0+cpu"])
def test_a_tested_engine_is_accepted_whatever_its_build(version: str) -> None:
    check_engine(version, allow_untested=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it is imported
def test_worker_and_scheduler_refuse_an_untested_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefill_runtime.engine.scheduler import PrefillScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    config = SimpleNamespace(additional_config={"prefill": GIVEN})
    with pytest.raises(UnsupportedEngineError, match=r"9\.9\.9"):
        TimedPasses(config)
    monkeypatch.setattr(Scheduler, "__init__", lambda self: setattr(self, "vllm_config", config))
    with pytest.raises(UnsupportedEngineError, match=r"9\.9\.9"):
        PrefillScheduler()


def test_the_plugin_is_quiet_in_a_process_that_does_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    plugin.register()
    plugin.register()


def test_a_good_calibration_gives_dynamic_chunks() -> None:
    choice = choose(settings(calibration=calibration(1e-7, 1e-4)), LIMITS)
    assert (choice.policy, choice.fallback) == ("Dynamic", None)
    bounds = Bounds(1024, 128, max_model_len=8192, quantum=128)
    assert choice.chunker.cut(8000) == Dynamic(bounds, QuadraticModel(1e-7, 1e-4)).cut(8000)
    assert choice.chunker.cut(8000) != Fixed(bounds).cut(8000)


@pytest.mark.parametrize(
    ("document", "reason", "words"),
    [
        (None, "NoCalibration", "without a calibration"),
        ("text", "InvalidCalibration", "calibration is a str"),
        ({}, "InvalidCalibration", "Field required"),
        (calibration(1e-7, 1e-4) | {"schemaVersion": 2}, "InvalidCalibration", "schemaVersion"),
        (calibration(1e-7, math.nan), "InvalidCalibration", "finite number"),
        (calibration(0.0, 0.0) | {"targetSeconds": 1}, "InvalidCalibration", "some cost per token must be > 0"),
        (calibration(1e-7, 1e-4, base=2048), "InvalidCalibration", "base is 2048, allowed: 1 to max_tokens = 1024"),
        (calibration(1e-7, 1e-4, stages=4), "WrongStages", "calibration has 4 stages, the engine 2"),
    ],
)
def test_a_calibration_that_cannot_be_used_means_fixed(document: object, reason: str, words: str) -> None:
    choice = choose(settings(calibration=document), LIMITS)
    assert (choice.policy, choice.fallback) == ("Fixed", reason)
    assert words in choice.message
    assert choice.chunker.cut(2100) == [1024, 1024, 52]


def test_chunks_larger_than_a_step_are_refused_with_both_numbers() -> None:
    with pytest.raises(SettingsError, match=r"maxTokens is 4096.*1024 tokens: raise --max-num-batched-tokens"):
        choose(settings(maxTokens=4096), LIMITS)


def test_chunks_smaller_than_a_kv_block_are_possible() -> None:
    assert choose(settings(policy="Fixed", maxTokens=48, minTokens=16), LIMITS).chunker.cut(100) == [48, 48, 4]


@pytest.mark.parametrize("text", ["", "1,,2", "0", "-5", "1.5", "a", "512;256", 512, ["512"], None])
def test_a_bad_chunk_list_is_told(text: object) -> None:
    with pytest.raises(ValueError, match=r"prefill_chunks is .* expected"):
        chunk_list.parse(text)


def test_a_chunk_list_is_followed_from_any_history() -> None:
    sizes = chunk_list.parse(" 100, 50,200 ")
    assert [chunk_list.next_size(sizes, history, 1000) for history in (0, 60, 100, 149, 150, 350, 400)] == [
        100, 40, 50, 1, 200, 1000, 1000,
    ]  # fmt: skip
    assert chunk_list.next_size(sizes, 0, 30) == 30


def test_failing_telemetry_is_logged_once_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    @harmless
    def broken(what: str) -> None:
        raise RuntimeError(what)

    broken("first")
    broken("second")
    assert [record.exc_text is not None and "first" in record.exc_text for record in caplog.records] == [True]


def test_settings_survive_the_command_line() -> None:
    text = json.dumps({"prefill": GIVEN | {"calibration": calibration(1e-7, 1e-4)}})
    assert settings(calibration=calibration(1e-7, 1e-4)) == PrefillSettings.of(
        SimpleNamespace(additional_config=json.loads(text))  # type: ignore[arg-type]
    )
