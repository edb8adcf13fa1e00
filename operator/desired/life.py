"""One life of a rank group, kept as annotations of its StatefulSet: the operator process itself remembers nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256

from prefill_operator.desired.pipeline import Manifest
from prefill_runtime.agent.config import ANNOTATION_INCARNATION

TEMPLATE_HASH = "prefill.dev/template-hash"
RESTARTS = "prefill.dev/restarts"
NOT_BEFORE = "prefill.dev/not-before"
LAST_FAILURE = "prefill.dev/last-failure"
FORMED = "prefill.dev/formed"
FORMED_AT = "prefill.dev/formed-at"


def timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment(text: str | None) -> datetime | None:
    """The reverse of ``timestamp``; None for what is no time, since annotations can be edited by anyone."""
    try:
        return datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


def fingerprint(uids: Iterable[str]) -> str:
    """Tells one set of pods from any other."""
    return sha256(",".join(sorted(uids)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Life:
    incarnation: str
    restarts: int = 0
    # Earliest next start of a broken group.
    not_before: str | None = None
    # "Reason: message" of what broke it.
    last_failure: str | None = None
    # Fingerprint of the pods that were once all Ready together: any other set of pods means that one was lost.
    formed: str | None = None
    formed_at: str | None = None

    @staticmethod
    def of(stateful_set: Manifest) -> Life:
        found = stateful_set["metadata"].get("annotations", {})
        restarts = found.get(RESTARTS, "0")
        return Life(
            incarnation=found.get(ANNOTATION_INCARNATION, ""),
            restarts=int(restarts) if restarts.isdecimal() else 0,
            not_before=found.get(NOT_BEFORE) or None,
            last_failure=found.get(LAST_FAILURE) or None,
            formed=found.get(FORMED) or None,
            formed_at=found.get(FORMED_AT) or None,
        )

    def annotations(self) -> dict[str, str]:
        """All of them, empty where there is nothing to say: an apply would leave one that it does not name, and
        that somebody else has set, as it is."""
        return {
            ANNOTATION_INCARNATION: self.incarnation,
            RESTARTS: str(self.restarts),
            NOT_BEFORE: self.not_before or "",
            LAST_FAILURE: self.last_failure or "",
            FORMED: self.formed or "",
            FORMED_AT: self.formed_at or "",
        }
