"""Settings, versions and the choice of a policy: what is refused, and with which words."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import vllm
from prefill_runtime.engine import chunk_list, plugin
from prefill_runtime.engine.errors import SettingsError, UnsupportedEngineError
from prefill_runtime.engine.guard import harmless
from prefill_runtime.engine.options import check_options
from prefill_runtime.engine.passes import TimedPasses
from prefill_runtime.engine.policy import EngineLimits, choose, recalibrated
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.engine.versions import check_engine
from prefill_runtime.scheduler.chunkers import Bounds, Chunker, Dynamic, Fixed, TokenThrottle
from prefill_runtime.scheduler.cost import QuadraticModel
from prefill_runtime.scheduler.cutters import Seq1F1B, TeraPipe
from prefill_runtime.scheduler.planner import Auto, Planned

from tests.engine.harness import calibration

GIVEN: dict[str, Any] = {"policy": "Dynamic", "maxTokens": 1024, "minTokens": 128, "smoothingFactor": 1.0}
FREE = [x | {"coefficients": {"k0": 0.01, "k1": 0, "k2": 0}} for x in calibration(1e-7, 1e-4)["stages"]]
NO_COST = {"quadratic": {"a": 0, "b": 0, "c": 1}}
LIMITS = EngineLimits(step_tokens=1040, sequences=16, max_model_len=8192, block_tokens=128, tensor=1, pipeline=2)


def settings(**change: Any) -> PrefillSettings:
    return PrefillSettings.of(SimpleNamespace(additional_config={"prefill": GIVEN | change}))  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [{}, {"other": 1}, object()])
def test_missing_settings_say_what_to_pass(config: object) -> None:
    with pytest.raises(SettingsError, match=r"pass --additional-config .*or start vLLM without --scheduler-cls"):
        PrefillSettings.of(SimpleNamespace(additional_config=config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "Best"}, "policy: Input should be 'Auto', 'Planned', 'Dynamic', "),
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
    with pytest.raises(UnsupportedEngineError, match=r"tested: 0\.23\.0, 0\.28\.0.*allowUntestedEngine"):
        check_engine(version, allow_untested=False)
    check_engine(version, allow_untested=True)


@pytest.mark.parametrize("version", ["0.23.0", "0.28.0", "0.28.0+cpu"])
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
        (calibration(1e-7, 1e-4) | {"schemaVersion": 1}, "InvalidCalibration", "schemaVersion"),
        (calibration(1e-7, 1e-4) | {"passOverheadSeconds": math.nan}, "InvalidCalibration", "finite number"),
        (calibration(1e-7, 1e-4) | {"published": NO_COST}, "InvalidCalibration", "some cost per token must be > 0"),
        (calibration(1e-7, 1e-4) | {"stages": FREE}, "InvalidCalibration", "cost of a token is 0.0"),
        (calibration(1e-7, 1e-4, base=2048), "InvalidCalibration", "base is 2048, allowed: 1 to max_tokens = 1024"),
        (calibration(1e-7, 1e-4, stages=4), "WrongStages", "document has 4 stages, this pipeline has 2: profile again"),
    ],
)
def test_a_calibration_that_cannot_be_used_means_fixed(document: object, reason: str, words: str) -> None:
    choice = choose(settings(calibration=document), LIMITS)
    assert (choice.policy, choice.fallback) == ("Fixed", reason)
    assert words in choice.message
    assert choice.chunker.cut(2100) == [1024, 1024, 52]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Auto", Auto),
        ("Planned", Planned),
        ("Dynamic", Dynamic),
        ("Fixed", Fixed),
        ("TokenThrottle", TokenThrottle),
        ("TeraPipe", TeraPipe),
        ("Seq1F1B", Seq1F1B),
    ],
)
def test_each_policy_has_its_chunker(name: str, kind: type[Chunker]) -> None:
    choice = choose(settings(policy=name, calibration=calibration(1e-7, 1e-4)), LIMITS)
    assert (type(choice.chunker), choice.policy, choice.fallback) == (kind, name, None)
    calibrated = name not in ("Fixed", "TokenThrottle")
    assert (choice.budget.cost is not None) == (choice.key is not None) == calibrated
    chunks = choice.chunker.cut(8000)
    assert sum(chunks) == 8000
    without = choose(settings(policy=name), LIMITS)
    assert without.policy == ("Fixed" if calibrated else name)
    assert without.fallback == ("NoCalibration" if calibrated else None)


@pytest.mark.parametrize("document", [None, calibration(1e-7, 1e-4, stages=1), "text"])
def test_auto_on_one_stage_is_fixed_and_that_is_no_fallback(document: object) -> None:
    choice = choose(settings(policy="Auto", calibration=document), replace(LIMITS, pipeline=1))
    assert (choice.policy, choice.fallback) == ("Fixed", None)
    assert recalibrated(settings(policy="Auto"), replace(LIMITS, pipeline=1), document, None) is None


def test_planned_on_one_stage_needs_a_calibration_as_anywhere() -> None:
    assert choose(settings(policy="Planned"), replace(LIMITS, pipeline=1)).fallback == "NoCalibration"


def test_the_last_stage_has_its_own_cost() -> None:
    document = calibration(1e-7, 1e-4)
    document["stages"][1]["coefficients"]["k0"] = 0.05
    choice = choose(settings(policy="Auto", calibration=document | {"passOverheadSeconds": 0.002}), LIMITS)
    assert choice.budget.cost is not None
    assert choice.budget.cost.stage_seconds(2, 0.0, 0.0) == pytest.approx([0.012, 0.052])
    assert choice.budget.fixed == pytest.approx(0.064)


def test_a_later_calibration_must_be_as_good_and_of_the_same_pipeline() -> None:
    auto, good = settings(policy="Auto"), calibration(1e-7, 1e-4)
    choice = recalibrated(auto, LIMITS, good, None)
    assert choice is not None
    assert (choice.policy, choice.fallback) == ("Auto", None)
    assert recalibrated(auto, LIMITS, good, good["key"]) == replace(choice, chunker=ANY)
    bad = [
        (
            good | {"key": "f" * 16},
            "InvalidCalibration",
            "has key ffffffffffffffff, this pipeline needs 0123456789abcdef",
        ),
        ("text", "InvalidCalibration", "calibration is a str"),
        (None, "InvalidCalibration", "calibration is a NoneType"),
        (good | {"stages": FREE}, "InvalidCalibration", "cost of a token"),
        (calibration(1e-7, 1e-4, stages=3), "WrongStages", "3 stages"),
    ]
    for document, reason, words in bad:
        choice = recalibrated(auto, LIMITS, document, good["key"])
        assert choice is not None
        assert choice.fallback == reason
        assert words in choice.message
    assert recalibrated(settings(policy="Fixed"), LIMITS, good, None) is None


def test_an_engine_whose_decodes_leave_no_room_for_a_chunk_is_refused() -> None:
    limits = replace(LIMITS, step_tokens=1024, sequences=898)
    with pytest.raises(SettingsError, match=r"holds 1024 tokens, of which 897 .*batched-tokens to 1025 or more"):
        choose(settings(), limits)
    assert choose(settings(policy="Fixed"), replace(limits, sequences=897)).policy == "Fixed"


ASCEND = "additional_config.scheduler_config"


@pytest.mark.parametrize(
    ("additional", "name"),
    [
        ({"enable_balance_scheduling": True}, "additional_config.enable_balance_scheduling"),
        ({"recompute_scheduler_enable": True}, "additional_config.recompute_scheduler_enable"),
        ({"profiling_chunk_config": {"enabled": True}}, "additional_config.profiling_chunk_config"),
        ({"SLO_limits_for_dynamic_batch": 50}, "additional_config.SLO_limits_for_dynamic_batch"),
        ({"short_request_first_config": {"enabled": True}}, "additional_config.short_request_first_config"),
        ({"scheduler_config": {"enable_balance_scheduling": True}}, f"{ASCEND}.enable_balance_scheduling"),
        ({"scheduler_config": {"short_request_first_config": {"enabled": True}}}, f"{ASCEND}.short_request_first"),
        ({"scheduler_config": {"batch_job_sched_config": {"enabled": True}}}, f"{ASCEND}.batch_job_sched_config"),
        ({"scheduler_config": {"dyntra_lb_config": {"enabled": True}}}, f"{ASCEND}.dyntra_lb_config"),
    ],
)
def test_options_that_replace_the_scheduler_are_refused_by_name(additional: dict[str, Any], name: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"{re.escape(name)}.* replaces the scheduler .*: remove it, or start without"
    ):
        check_options(vllm_config(additional))


def test_the_environment_may_turn_balance_scheduling_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ASCEND_BALANCE_SCHEDULING", "1")
    with pytest.raises(SettingsError, match="the environment variable VLLM_ASCEND_BALANCE_SCHEDULING"):
        check_options(vllm_config({}))
    check_options(vllm_config({"enable_balance_scheduling": False}))  # the key wins


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"async_scheduling": True}, "needs --no-async-scheduling"),
        ({"enable_chunked_prefill": False}, "needs --enable-chunked-prefill"),
        ({"max_num_partial_prefills": 2}, "--max-num-partial-prefills is 2"),
    ],
)
def test_engine_flags_that_do_not_go_with_chunks_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        check_options(vllm_config({}, **change))


@pytest.mark.parametrize(
    "additional",
    [
        {},
        {"enable_balance_scheduling": False, "SLO_limits_for_dynamic_batch": -1},
        {"profiling_chunk_config": {"enabled": False}, "scheduler_config": {"recompute_scheduler_enable": False}},
        {"enable_cpu_binding": True, "scheduler_config": None},
    ],
)
def test_other_options_are_left_alone(additional: dict[str, Any]) -> None:
    check_options(vllm_config(additional))


def vllm_config(additional: dict[str, Any], **scheduler: Any) -> Any:
    flags = {"async_scheduling": False, "enable_chunked_prefill": True} | scheduler
    return SimpleNamespace(additional_config=additional, scheduler_config=SimpleNamespace(**flags))


def test_chunks_larger_than_a_step_are_refused_with_both_numbers() -> None:
    with pytest.raises(SettingsError, match=r"maxTokens is 4096.*1040 tokens: raise --max-num-batched-tokens"):
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
