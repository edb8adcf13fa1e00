"""From settings to a chunker; whatever is wrong with a calibration ends in Fixed chunks and a reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

from prefill_runtime.engine.errors import SettingsError
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.profiling.document import CalibrationError, load_calibration
from prefill_runtime.scheduler.chunkers import Bounds, Chunker, Dynamic, Fixed, chunk_quantum
from prefill_runtime.scheduler.cost import QuadraticModel
from prefill_runtime.scheduler.errors import ParameterError


@dataclass(frozen=True)
class EngineLimits:
    """What the engine itself allows."""

    step_tokens: int
    max_model_len: int
    block_tokens: int
    tensor: int
    pipeline: int


class Reason(StrEnum):
    """Few words, because they label a metric; the details are in the engine's log."""

    NO_CALIBRATION = "NoCalibration"
    INVALID_CALIBRATION = "InvalidCalibration"
    WRONG_STAGES = "WrongStages"
    POLICY_FAILED = "PolicyFailed"


@dataclass(frozen=True)
class Choice:
    """The chunker in force. ``fallback`` and ``message`` say why it is Fixed although another was asked for."""

    chunker: Chunker
    policy: str
    fallback: Reason | None = None
    message: str = ""


def bounds_of(settings: PrefillSettings, limits: EngineLimits) -> Bounds:
    if settings.max_tokens > limits.step_tokens:
        raise SettingsError(
            f"additional_config.prefill.maxTokens is {settings.max_tokens}, but one engine step holds "
            f"{limits.step_tokens} tokens: raise --max-num-batched-tokens or lower maxTokens"
        )
    try:
        return Bounds(
            max_tokens=settings.max_tokens,
            min_tokens=settings.min_tokens,
            max_model_len=limits.max_model_len,
            # Whole KV blocks where a chunk can hold one.
            quantum=min(chunk_quantum(limits.block_tokens, limits.tensor), settings.max_tokens),
        )
    except ParameterError as error:
        raise SettingsError(f"additional_config.prefill: {error}") from None


def choose(settings: PrefillSettings, limits: EngineLimits) -> Choice:
    """The chunker that ``settings`` ask for, or Fixed with the reason why not."""
    bounds = bounds_of(settings, limits)
    if settings.policy == "Fixed":
        return Choice(Fixed(bounds), "Fixed")
    calibration = settings.calibration
    if calibration is None:
        return fixed(bounds, Reason.NO_CALIBRATION, "the engine was started without a calibration")
    try:
        if not isinstance(calibration, dict):
            raise CalibrationError(f"calibration is a {type(calibration).__name__}, expected an object")
        # The agent has compared the key with the pipeline's; here there is nothing else to compare it with.
        document = load_calibration(json.dumps(calibration), str(calibration.get("key")))
        if len(document.stages) != limits.pipeline:
            message = f"calibration has {len(document.stages)} stages, the engine {limits.pipeline}: profile again"
            return fixed(bounds, Reason.WRONG_STAGES, message)
        model = QuadraticModel.from_calibration(document)
        chunker = Dynamic(bounds, model, document.base_tokens, settings.smoothing_factor)
    except (CalibrationError, ParameterError) as error:
        return fixed(bounds, Reason.INVALID_CALIBRATION, str(error))
    return Choice(chunker, "Dynamic")


def fixed(bounds: Bounds, fallback: Reason, message: str) -> Choice:
    return Choice(Fixed(bounds), "Fixed", fallback, message)
