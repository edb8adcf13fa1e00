"""What is known about a pipeline's calibration: ConfigMap, what groups started from, what they measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prefill_operator.desired import names
from prefill_operator.desired.calibration import DOCUMENT, newest
from prefill_operator.desired.pipeline import Manifest, Pipeline
from prefill_operator.reconcile.group import Group
from prefill_runtime.profiling.document import CalibrationDocument, CalibrationError, ProfileResult, load_calibration
from pydantic import ValidationError


@dataclass(frozen=True)
class Evidence:
    """``document`` is the calibration to keep and to start from."""

    document: CalibrationDocument | None = None
    # The ConfigMap of the wanted name is not ours.
    foreign: bool = False
    # Texts that should have been a calibration, and why they are none.
    invalid: tuple[str, ...] = ()
    # Why running groups serve without a calibration.
    refused: tuple[str, ...] = ()
    # Replicas whose present life serves with a calibration.
    calibrated: frozenset[int] = frozenset()


def gather(pipeline: Pipeline, observed: Manifest | None, groups: Iterable[Group]) -> Evidence:
    """``groups``: those that run with the present spec; others measured for another key."""
    if not pipeline.needs_calibration:
        return Evidence()
    key = pipeline.calibration_key
    documents: list[CalibrationDocument] = []
    invalid: list[str] = []
    refused: list[str] = []
    calibrated: set[int] = set()

    def consider(text: str, source: str) -> bool:
        try:
            documents.append(load_calibration(text, key))
        except CalibrationError as error:
            invalid.append(f"{source}: {error}")
            return False
        return True

    foreign = observed is not None and observed["metadata"].get("labels", {}).get(names.LABEL_KEY) != key
    if observed is not None and not foreign:
        consider(observed.get("data", {}).get(DOCUMENT, ""), f"ConfigMap {observed['metadata']['name']}")
    for group in groups:
        message = next((r.profile_message for r in group.ranks if r.index == 0 and not r.leaving), None)
        result, problem = _result(message)
        if problem:
            invalid.append(f"profile step of replica {group.replica}: {problem}")
        elif result and result.refusal:
            stage = "" if result.refusal.stage is None else f" in stage {result.refusal.stage}"
            refused.append(f"replica {group.replica}: {result.refusal.reason}{stage}: {result.refusal.message}")
        elif result and result.calibration:
            text = result.calibration.to_json()
            if consider(text, f"profile step of replica {group.replica}"):
                calibrated.add(group.replica)
        elif group.calibration and consider(group.calibration, f"start of replica {group.replica}"):
            calibrated.add(group.replica)
    return Evidence(newest(documents), foreign, tuple(invalid), tuple(refused), frozenset(calibrated))


def _result(message: str | None) -> tuple[ProfileResult | None, str | None]:
    """The profile step's result, or what is wrong with its message; neither while it has not ended."""
    if message is None:
        return None, None
    try:
        result = ProfileResult.model_validate_json(message)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        return None, f"{where}: {first['msg']}"
    if result.outcome == "Measured" and result.calibration is None:
        return None, "calibration: missing from a result that says Measured"
    return result, None
