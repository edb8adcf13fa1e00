"""From settings to a chunker; whatever is wrong with a calibration ends in Fixed chunks and a reason."""

from __future__ import annotations

import json
from dataclasses import dataclass

from prefill_runtime.engine.errors import SettingsError
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.profiling.document import CalibrationDocument, CalibrationError, load_calibration
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


@dataclass(frozen=True)
class Choice:
    """The chunker in force. ``fallback`` says why it is Fixed although another was asked for."""

    chunker: Chunker
    policy: str
    fallback: str | None = None


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
            quantum=chunk_quantum(limits.block_tokens, limits.tensor),
        )
    except ParameterError as error:
        raise SettingsError(
            f"additional_config.prefill: {error} (KV block: {limits.block_tokens} tokens, tensor: {limits.tensor})"
        ) from None


def choose(settings: PrefillSettings, limits: EngineLimits) -> Choice:
    """The chunker that ``settings`` ask for, or Fixed with the reason why not."""
    bounds = bounds_of(settings, limits)
    if settings.policy == "Fixed":
        return Choice(Fixed(bounds), "Fixed")
    try:
        document = _calibration(settings, limits)
        model = QuadraticModel.from_calibration(document)
        chunker = Dynamic(bounds, model, document.base_tokens, settings.smoothing_factor)
    except (CalibrationError, ParameterError) as error:
        return fixed(bounds, str(error))
    return Choice(chunker, "Dynamic")


def fixed(bounds: Bounds, reason: str) -> Choice:
    return Choice(Fixed(bounds), "Fixed", reason)


def _calibration(settings: PrefillSettings, limits: EngineLimits) -> CalibrationDocument:
    if settings.calibration is None:
        raise CalibrationError("no calibration")
    if not isinstance(settings.calibration, dict):
        raise CalibrationError(f"calibration is a {type(settings.calibration).__name__}, expected an object")
    # The agent has matched the key; here it can only be compared with itself.
    document = load_calibration(json.dumps(settings.calibration), str(settings.calibration.get("key")))
    if len(document.stages) != limits.pipeline:
        raise CalibrationError(f"calibration has {len(document.stages)} stages, the engine {limits.pipeline}")
    return document
