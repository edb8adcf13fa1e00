"""From settings to a chunker; whatever is wrong with a calibration ends in Fixed chunks and a reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from prefill_runtime.engine.errors import SettingsError
from prefill_runtime.engine.settings import PrefillSettings
from prefill_runtime.profiling.document import CalibrationDocument, CalibrationError, WrongStagesError, load_calibration
from prefill_runtime.scheduler.budget import StepBudget
from prefill_runtime.scheduler.chunkers import Bounds, Chunker, Dynamic, Fixed, TokenThrottle, chunk_quantum
from prefill_runtime.scheduler.cost import PipelineCost, QuadraticModel
from prefill_runtime.scheduler.costfile import from_calibration
from prefill_runtime.scheduler.cutters import Seq1F1B, TeraPipe
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.grid import RATIO
from prefill_runtime.scheduler.layout import Layout, layout_of
from prefill_runtime.scheduler.planner import Auto, Planned, Planner
from prefill_runtime.telemetry.events import FallbackReason

DOUBT = 0.01
"""What a good calibration is off by."""


@dataclass(frozen=True)
class EngineLimits:
    """What the engine itself allows. sequences: --max-num-seqs."""

    step_tokens: int
    sequences: int
    max_model_len: int
    block_tokens: int
    tensor: int
    pipeline: int
    virtual: int = 1
    lag: int = 0

    @property
    def layout(self) -> Layout:
        return layout_of(self.pipeline, self.virtual)


@dataclass(frozen=True)
class Choice:
    """The chunker in force.

    budget: how prompts share a step. key: of the calibration in use. fallback and message: why it is Fixed although
    another policy was asked for.
    """

    chunker: Chunker
    policy: str
    budget: StepBudget
    key: str | None = None
    fallback: FallbackReason | None = None
    message: str = ""


def bounds_of(settings: PrefillSettings, limits: EngineLimits) -> Bounds:
    if settings.max_tokens > limits.step_tokens:
        raise SettingsError(
            f"additional_config.prefill.maxTokens is {settings.max_tokens}, but one engine step holds "
            f"{limits.step_tokens} tokens: raise --max-num-batched-tokens or lower maxTokens"
        )
    try:
        bounds = Bounds(
            max_tokens=settings.max_tokens,
            min_tokens=settings.min_tokens,
            max_model_len=limits.max_model_len,
            # Whole KV blocks where a chunk can hold one.
            quantum=min(chunk_quantum(limits.block_tokens, limits.tensor), settings.max_tokens),
        )
    except ParameterError as error:
        raise SettingsError(f"additional_config.prefill: {error}") from None
    needed = bounds.quantum + limits.sequences - 1
    if limits.step_tokens < needed:
        raise SettingsError(
            f"one engine step holds {limits.step_tokens} tokens, of which {limits.sequences - 1} running decodes would "
            f"leave a prompt less than the smallest chunk of {bounds.quantum}: raise --max-num-batched-tokens to "
            f"{needed} or more, or lower --max-num-seqs"
        )
    return bounds


def choose(settings: PrefillSettings, limits: EngineLimits) -> Choice:
    """The chunker that ``settings`` ask for, or Fixed with the reason why not."""
    bounds = bounds_of(settings, limits)
    if settings.policy == "Fixed" or (settings.policy == "Auto" and limits.pipeline == 1):
        # One stage has no neighbour to be balanced with.
        return Choice(Fixed(bounds), "Fixed", StepBudget(bounds, limits.layout.stages))
    if settings.policy == "TokenThrottle":
        return Choice(TokenThrottle(bounds), "TokenThrottle", StepBudget(bounds, limits.layout.stages))
    if settings.calibration is None:
        return fixed(bounds, FallbackReason.NO_CALIBRATION, "the engine was started without a calibration")
    return _calibrated(settings, limits, bounds, None)


def recalibrated(
    settings: PrefillSettings, limits: EngineLimits, calibration: object, key: str | None
) -> Choice | None:
    """What a calibration that came while serving makes of it; None where the policy has no use for one.

    key: what the document must have; None takes any.
    """
    without = choose(settings.model_copy(update={"calibration": None}), limits)
    if without.fallback is None:
        return None
    settings = settings.model_copy(update={"calibration": calibration})
    return _calibrated(settings, limits, without.chunker.bounds, key)


def _calibrated(settings: PrefillSettings, limits: EngineLimits, bounds: Bounds, key: str | None) -> Choice:
    try:
        document = _document(settings.calibration, key, limits.layout.stages)
        cost = from_calibration(document)
        chunker = _chunker(settings, limits, bounds, document, cost)
    except WrongStagesError as error:
        return fixed(bounds, FallbackReason.WRONG_STAGES, f"{error}: profile again")
    except (CalibrationError, ParameterError) as error:
        return fixed(bounds, FallbackReason.INVALID_CALIBRATION, str(error))
    return Choice(chunker, settings.policy, StepBudget(bounds, limits.layout.stages, cost), document.key)


def _document(calibration: Any, key: str | None, stages: int) -> CalibrationDocument:
    if not isinstance(calibration, dict):
        raise CalibrationError(f"calibration is a {type(calibration).__name__}, expected an object")
    # At the start there is nothing to compare with; the agent has compared the key with the pipeline's.
    return load_calibration(json.dumps(calibration), str(calibration.get("key")) if key is None else key, stages)


def _chunker(
    settings: PrefillSettings, limits: EngineLimits, bounds: Bounds, document: CalibrationDocument, cost: PipelineCost
) -> Chunker:
    planner = Planner(
        limits.layout, cost, bounds, orders=(limits.lag,), doubt=DOUBT
    )  # refuses a cost that does not grow
    if settings.policy == "Dynamic":
        model = QuadraticModel.from_calibration(document)
        return Dynamic(bounds, model, document.base_tokens, settings.smoothing_factor)
    if settings.policy == "TeraPipe":
        return TeraPipe(bounds, cost, limits.layout.stages)
    if settings.policy == "Seq1F1B":
        return Seq1F1B(bounds, cost.model)
    planner.seed(bounds.max_model_len)  # what numpy loads at its first use is not for a request to wait for
    return (Auto if settings.policy == "Auto" else Planned)(bounds, planner, ratio=RATIO)


def fixed(bounds: Bounds, fallback: FallbackReason, message: str) -> Choice:
    return Choice(Fixed(bounds), "Fixed", StepBudget(bounds, 1), fallback=fallback, message=message)
