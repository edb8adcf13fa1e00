"""What is known about a pipeline's calibration: ConfigMap, what groups started from, what they measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from prefill_operator.desired import names
from prefill_operator.desired.calibration import DOCUMENT, PREVIOUS, read
from prefill_operator.desired.life import moment
from prefill_operator.desired.pipeline import Manifest, Pipeline
from prefill_operator.reconcile.group import Group
from prefill_operator.reconcile.refine import newest, refine
from prefill_runtime.profiling.document import CalibrationDocument, CalibrationError, ProfileResult
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
    # What serving groups offer and is not to be kept, and why.
    ignored: tuple[str, ...] = ()


class _Gathering:
    """Documents that belong to the pipeline, what turned out to be none, and refusals by replica."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.documents: list[CalibrationDocument] = []
        self.invalid: list[str] = []
        self.refused: dict[int, str] = {}
        self.calibrated: set[int] = set()

    def consider(self, text: str, source: str) -> bool:
        try:
            self.documents.append(read(text, self._pipeline))
        except CalibrationError as error:
            self.invalid.append(f"{source}: {error}")
            return False
        return True

    def stored(self, observed: Manifest) -> None:
        name, data = observed["metadata"]["name"], observed.get("data") or {}
        if not self.consider(data.get(DOCUMENT, ""), f"ConfigMap {name}") and PREVIOUS in data:
            self.consider(data[PREVIOUS], f"ConfigMap {name}, {PREVIOUS}")

    def group(self, group: Group) -> None:
        message = next((r.profile_message for r in group.ranks if r.index == 0 and not r.leaving), None)
        result, problem = _result(message)
        if problem:
            self.invalid.append(f"profile step of replica {group.replica}: {problem}")
        elif result and result.refusal:
            stage = "" if result.refusal.stage is None else f" in stage {result.refusal.stage}"
            refusal = f"replica {group.replica}: {result.refusal.reason}{stage}: {result.refusal.message}"
            self.refused[group.replica] = refusal
        elif result and result.calibration:
            if self.consider(result.calibration.to_json(), f"profile step of replica {group.replica}"):
                self.calibrated.add(group.replica)
        elif group.calibration and self.consider(group.calibration, f"start of replica {group.replica}"):
            self.calibrated.add(group.replica)


def gather(
    pipeline: Pipeline,
    observed: Manifest | None,
    groups: Iterable[Group],
    offers: Mapping[int, str],
    now: datetime,
) -> Evidence:
    """``groups``: those that run with the present spec; others measured for another key. ``offers``: their texts."""
    if not pipeline.needs_calibration:
        return Evidence()
    found = _Gathering(pipeline)
    foreign = observed is not None and observed["metadata"].get("labels", {}).get(names.LABEL_KEY) != (
        pipeline.calibration_key
    )
    if observed is not None and not foreign:
        found.stored(observed)
    current = list(groups)
    for group in current:
        found.group(group)
    document = newest(found.documents, now)
    offered = {group.replica: offers[group.replica] for group in current if group.replica in offers}
    refinement = refine(pipeline, document, observed, offered, now)
    document = refinement.document or document
    learnt = {group.replica for group in current if document is not None and _learnt_since(group, document)}
    return Evidence(
        document,
        foreign,
        tuple(found.invalid),
        tuple(text for replica, text in found.refused.items() if replica not in learnt),
        frozenset(found.calibrated | learnt),
        refinement.ignored,
    )


def _learnt_since(group: Group, document: CalibrationDocument) -> bool:
    """Groups of one spec see the same costs and learn on their own: what one knows now, so do the others soon."""
    formed = moment(group.life.formed_at)
    created = moment(document.created_at)
    return document.source == "Online" and formed is not None and created is not None and created >= formed


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
