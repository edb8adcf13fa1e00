"""Whether a calibration that a serving group offers is to be kept. Pure; ``offers.py`` fetches them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from prefill_operator.desired.calibration import WRITTEN_AT, read
from prefill_operator.desired.life import moment, timestamp
from prefill_operator.desired.pipeline import Manifest, Pipeline
from prefill_runtime.profiling.document import GOOD_R2, CalibrationDocument, CalibrationError

# Clocks of nodes may differ by this much.
CLOCK_SKEW = timedelta(minutes=5)
# A fit that moves all the time is not worth a write, and a watch event for every pipeline, each time.
PAUSE = timedelta(minutes=10)

Rank = tuple[bool, str, str]


@dataclass(frozen=True)
class Refinement:
    """``document`` replaces the kept one; None: that one stays."""

    document: CalibrationDocument | None = None
    # Offers that should not be, and why.
    ignored: tuple[str, ...] = ()


def rank(document: CalibrationDocument, now: datetime) -> Rank:
    """Sorts by age, alike in every reconciliation; one from the future, by a clock that was wrong, is the oldest."""
    return (document.created_at <= timestamp(now + CLOCK_SKEW), document.created_at, document.to_json())


def newest(documents: Iterable[CalibrationDocument], now: datetime) -> CalibrationDocument | None:
    return max(documents, key=lambda document: rank(document, now), default=None)


def refine(
    pipeline: Pipeline,
    kept: CalibrationDocument | None,
    observed: Manifest | None,
    offers: Mapping[int, str],
    now: datetime,
) -> Refinement:
    """``kept``: what is used so far; ``observed``: the ConfigMap; ``offers``: text by replica."""
    good: list[CalibrationDocument] = []
    ignored: list[str] = []
    for replica, text in sorted(offers.items()):
        try:
            document = read(text, pipeline)
            if document.source == "Online":
                _check(document, now)
                good.append(document)
        except CalibrationError as error:
            ignored.append(f"what replica {replica} offers is ignored: {error}")
    best = newest(good, now)
    if best is not None and kept is not None and (rank(best, now) <= rank(kept, now) or not _due(observed, now)):
        best = None
    return Refinement(best, tuple(ignored))


def _check(document: CalibrationDocument, now: datetime) -> None:
    if document.r2 < GOOD_R2:
        raise CalibrationError(f"R^2 is {document.r2:.3f}, at least {GOOD_R2} is needed")
    if document.created_at > timestamp(now + CLOCK_SKEW):
        raise CalibrationError(f"it is of {document.created_at}, which is yet to come: set the clocks of the nodes")


def _due(observed: Manifest | None, now: datetime) -> bool:
    written = moment(observed["metadata"].get("annotations", {}).get(WRITTEN_AT)) if observed else None
    # A time to come was written by a clock that was wrong.
    return written is None or not now - PAUSE < written <= now
