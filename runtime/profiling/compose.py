"""From fits to the calibration document of a whole pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from prefill_runtime.profiling.document import (
    CalibrationDocument,
    PublishedCoefficients,
    PublishedForms,
    Refusal,
    StageAttention,
    StageCalibration,
    StageCoefficients,
)
from prefill_runtime.profiling.fitting import Fit, Sample, fit_history, fit_quadratic, fit_stages
from prefill_runtime.scheduler.cost import NO_WINDOW, Attention, QuadraticModel, StageModel


@dataclass(frozen=True)
class Origin:
    """What a calibration belongs to. attention: what the model's configuration says of sliding windows."""

    key: str
    model: str
    base_tokens: int
    engine_version: str
    runtime_version: str
    attention: Attention = NO_WINDOW


def fit_document(
    samples_by_stage: Mapping[int, Sequence[Sample]],
    origin: Origin,
    now: datetime,
    *,
    pass_overhead_seconds: float = 0.0,
) -> CalibrationDocument | Refusal:
    """The calibration of a whole pipeline; the first stage that cannot be fitted refuses all of it.

    ``samples_by_stage`` has one entry per stage (at most MAX_STAGES), empty where a stage reported nothing.
    """
    fits: list[Fit] = []
    stages = range(max(samples_by_stage, default=0) + 1)
    for stage, fit in enumerate(fit_stages([samples_by_stage.get(stage, ()) for stage in stages], origin.attention)):
        if isinstance(fit, Refusal):
            message = f"stage {stage}: {fit.message}"[:1024]
            return Refusal(reason=fit.reason, message=message, stage=stage)
        fits.append(fit)
    pace = samples_by_stage[slowest(fits, origin.base_tokens)]
    return compose(
        fits,
        fit_quadratic(pace),
        fit_history(pace),
        origin,
        now,
        source="Profile",
        pass_overhead_seconds=pass_overhead_seconds,
    )


def slowest(fits: Sequence[Fit], tokens: int) -> int:
    """The stage that takes longest for ``tokens`` tokens: it sets the pace."""
    return _slowest([model_of(fit) for fit in fits], tokens)


def _slowest(models: Sequence[StageModel], tokens: int) -> int:
    return max(range(len(models)), key=lambda stage: models[stage].pass_seconds(float(tokens), 0.0))


def model_of(fit: Fit) -> StageModel:
    return StageModel(**fit.coefficients, attention=fit.attention)


def compose(
    fits: Sequence[Fit],
    quadratic: Fit | Refusal,
    history: Fit | Refusal,
    origin: Origin,
    now: datetime,
    *,
    source: Literal["Profile", "Online"],
    target_seconds: float | None = None,
    pass_overhead_seconds: float = 0.0,
) -> CalibrationDocument:
    """``quadratic`` and ``history`` are the published forms of the slowest stage.

    A refused quadratic is read off the stage's own model; the target is its f(base) - f(0) when none is given.
    """
    pace = model_of(fits[slowest(fits, origin.base_tokens)]).quadratic()
    form = QuadraticModel(**quadratic.coefficients) if isinstance(quadratic, Fit) else pace
    return CalibrationDocument(
        key=origin.key,
        model=origin.model,
        source=source,
        created_at=_timestamp(now),
        runtime_version=origin.runtime_version,
        engine_version=origin.engine_version,
        base_tokens=origin.base_tokens,
        target_seconds=_digits(target_seconds or form.chunk_seconds(float(origin.base_tokens), 0.0)),
        pass_overhead_seconds=_digits(pass_overhead_seconds),
        published=PublishedForms(
            quadratic=PublishedCoefficients(a=_digits(form.a), b=_digits(form.b), c=_digits(form.c)),
            history=PublishedCoefficients(**_rounded(history)) if isinstance(history, Fit) else None,
        ),
        stages=[_stage(stage, fit) for stage, fit in enumerate(fits)],
    )


def rescaled(
    document: CalibrationDocument,
    ratios: Sequence[float],
    errors: Sequence[Sequence[float] | NDArray[np.float64]],
    now: datetime,
    *,
    full: bool,
    pass_overhead_seconds: float,
) -> CalibrationDocument:
    """``document`` with stage s taking ``ratios[s]`` times as long; ``errors``: relative, of what that was found on.

    full: the target follows. R^2 stays, for the shape of the curves does.
    """
    stages = [
        stage.model_copy(
            update={
                "coefficients": StageCoefficients(**_scaled(stage.coefficients, ratio)),
                "sample_count": len(missed),
                "relative_error_p50": _digits(float(np.quantile(missed, 0.5)), 3),
                "relative_error_p90": _digits(float(np.quantile(missed, 0.9)), 3),
            }
        )
        for stage, ratio, missed in zip(document.stages, ratios, errors, strict=True)
    ]
    pace = ratios[_slowest([StageModel.of(stage) for stage in stages], document.base_tokens)]
    history = document.published.history
    return document.model_copy(
        update={
            "source": "Online",
            "created_at": _timestamp(now),
            "target_seconds": _digits(document.target_seconds * (pace if full else 1.0)),
            "pass_overhead_seconds": _digits(pass_overhead_seconds),
            "published": PublishedForms(
                quadratic=PublishedCoefficients(**_scaled(document.published.quadratic, pace)),
                history=PublishedCoefficients(**_scaled(history, pace)) if history is not None else None,
            ),
            "stages": stages,
        }
    )


def _scaled(coefficients: StageCoefficients | PublishedCoefficients, ratio: float) -> dict[str, float]:
    return {name: _digits(ratio * value) for name, value in coefficients.model_dump().items()}


def _timestamp(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _stage(stage: int, fit: Fit) -> StageCalibration:
    return StageCalibration(
        stage=stage,
        coefficients=StageCoefficients(**_rounded(fit)),
        attention=StageAttention(**asdict(fit.attention)) if fit.attention.window else None,
        r2=_digits(fit.r2, 5),
        sample_count=fit.sample_count,
        relative_error_p50=_digits(fit.relative_error_p50, 3),
        relative_error_p90=_digits(fit.relative_error_p90, 3),
    )


def _rounded(fit: Fit) -> dict[str, float]:
    return {name: _digits(value) for name, value in fit.coefficients.items()}


def _digits(value: float, digits: int = 6) -> float:
    """Significant digits enough for any use, few enough for many stages in one document."""
    return float(f"{value:.{digits}g}")
