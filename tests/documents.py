"""The calibration document of the tests, made by hand as the profile step would leave it."""

from __future__ import annotations

from typing import Any

from prefill_runtime.profiling.document import (
    CalibrationDocument,
    PublishedCoefficients,
    PublishedForms,
    StageCalibration,
    StageCoefficients,
)


def calibration(
    k0: float = 0.003,
    k1: float = 2e-5,
    k2: float = 2e-9,
    *,
    stages: int = 2,
    base_tokens: int = 1024,
    key: str = "0123456789abcdef",
    r2: float = 0.999,
    **more: Any,
) -> CalibrationDocument:
    """Equal stages that take k0 + k1 C + k2 C (H + C/2) seconds each; ``more`` are fields of the document."""
    stage = StageCalibration(
        stage=0,
        coefficients=StageCoefficients(k0=k0, k1=k1, k2=k2),
        r2=r2,
        sample_count=64,
        relative_error_p50=0.01,
        relative_error_p90=0.03,
    )
    fields: dict[str, Any] = {
        "key": key,
        "model": "toy",
        "source": "Profile",
        "created_at": "2030-01-01T00:00:00Z",
        "runtime_version": "0.1.0",
        "engine_version": "0.28.0",
        "base_tokens": base_tokens,
        "target_seconds": base_tokens * (k1 + k2 * base_tokens / 2),
        "published": PublishedForms(quadratic=PublishedCoefficients(a=k2 / 2, b=k1, c=k0)),
        "stages": [stage.model_copy(update={"stage": number}) for number in range(stages)],
    }
    return CalibrationDocument(**fields | more)
