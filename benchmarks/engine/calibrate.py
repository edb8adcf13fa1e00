"""The calibration of a site by the product's own profile step; kept beside the results, so it is measured once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefill_runtime.profiling.document import CalibrationError, ProfileResult, load_calibration

from benchmarks.engine.engines import AgentRun
from benchmarks.engine.sites import Arm, Site


class NoCalibrationError(RuntimeError):
    pass


def start(
    site: Site, virtual: int, base: int, results: Path, folder: Path, *, seconds: int, samples: int, depths: int
) -> AgentRun | None:
    """None when there is a calibration already."""
    if kept(site, virtual, results):
        return None
    return AgentRun(
        "profile", site, Arm("Planned", base, virtual), folder, samples=samples, historyDepths=depths,
        timeoutSeconds=seconds, weights="Real", reuse="Never",
    )  # fmt: skip


def finish(run: AgentRun | None, site: Site, virtual: int, results: Path, say: Callable[[str], None]) -> str:
    """The document as text."""
    if run is not None:
        try:
            run.process.wait()
        finally:
            run.close()
        result = ProfileResult.model_validate_json(run.termination.read_text())
        document = result.calibration
        if document is None:
            reason = result.refusal.message if result.refusal else "no reason given"
            raise NoCalibrationError(f"{site.name}: no calibration: {reason}\n{run.tail()}")
        file(site, virtual, results).write_text(document.to_json())
        errors = ", ".join(f"{stage.relative_error_p50:.1%}" for stage in document.stages)
        say(f"{site.name}: calibrated in {result.seconds:.0f} s, {document.sample_count} samples, errors {errors}")
    text = kept(site, virtual, results)
    assert text is not None
    return text


def file(site: Site, virtual: int, folder: Path) -> Path:
    return folder / f"calibration-{site.key(virtual)}.json"


def kept(site: Site, virtual: int, folder: Path) -> str | None:
    try:
        text = file(site, virtual, folder).read_text()
        load_calibration(text, site.key(virtual), site.ranks * virtual)
    except (OSError, CalibrationError):
        return None
    return text
