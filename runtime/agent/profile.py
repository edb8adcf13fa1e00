"""The profile step: decide between reuse and measuring. This file stays light, so that reuse ends at once.

All ranks of an incarnation read the same embedded calibration, so each decides alike without asking rank 0.
Whatever happens, the step ends with exit code 0: a refusal is a result, and serving starts with Fixed chunks.
"""

from __future__ import annotations

import time

from prefill_runtime.agent.settings import Settings, leave_message, write_atomically
from prefill_runtime.profiling.document import (
    GOOD_R2,
    CalibrationDocument,
    CalibrationError,
    ProfileResult,
    load_calibration,
)


def profile(settings: Settings) -> int:
    started = time.monotonic()
    if not settings.config.chunking.policy.calibrated or settings.config.profiling is None:
        print(f"prefill-agent: nothing to measure for policy {settings.config.chunking.policy}", flush=True)
        return 0
    document = reusable(settings)
    if document is not None:
        result = ProfileResult(
            outcome="Reused",
            calibration=document if settings.leads else None,
            seconds=round(time.monotonic() - started, 3),
        )
    else:
        from prefill_runtime.agent.measure import measure

        _keep(settings, None)
        measured = measure(settings)
        if measured is None:
            return 0  # asked to end: nothing was found out
        document, refusal = measured
        result = ProfileResult(
            outcome="Refused" if refusal else "Measured",
            calibration=document if settings.leads else None,
            refusal=refusal,
            seconds=round(time.monotonic() - started, 3),
        )
    if document is not None:
        _keep(settings, document)
    leave_message(settings.places, result)
    print(f"prefill-agent: profile of rank {settings.rank}: {describe(result)}", flush=True)
    return 0


def _keep(settings: Settings, document: CalibrationDocument | None) -> None:
    """For the engine step. A folder that cannot be written must not start this step over and over."""
    path = settings.places.calibration
    try:
        if document is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, document.to_json())
    except OSError as error:
        print(f"prefill-agent: {path} cannot be written, serving starts with Fixed chunks: {error}", flush=True)


def reusable(settings: Settings) -> CalibrationDocument | None:
    profiling = settings.config.profiling
    if not settings.calibration or profiling is None or profiling.reuse == "Never":
        return None
    try:
        document = load_calibration(
            settings.calibration, settings.config.calibration_key, settings.config.engine.stages
        )
    except CalibrationError as error:
        print(f"prefill-agent: embedded calibration not usable, measuring: {error}", flush=True)
        return None
    if document.r2 < GOOD_R2 and profiling.reuse != "Always":
        print(f"prefill-agent: embedded calibration has R^2 {document.r2:.3f} < {GOOD_R2}, measuring", flush=True)
        return None
    return document


def describe(result: ProfileResult) -> str:
    text = f"{result.outcome} in {result.seconds:.1f} s"
    if result.refusal is not None:
        return f"{text}: {result.refusal.reason.value}: {result.refusal.message}"
    if result.calibration is not None:
        return f"{text}: R^2 {result.calibration.r2:.4f} from {result.calibration.sample_count} samples"
    return text
