"""What can go wrong between the operator and the API server: the one place that reads client exceptions."""

from __future__ import annotations

import json
import re
from contextlib import suppress


class ClusterError(Exception):
    """A request failed. ``reason`` goes into a condition as it is, ``message`` says what to do."""

    reason = "ApiError"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotFoundError(ClusterError):
    """The object is gone, or its kind is not served."""

    reason = "NotFound"


class ConflictError(ClusterError):
    """Somebody else changed, made or removed the object since it was read: look again."""

    reason = "Conflict"


class ForbiddenError(ClusterError):
    """The operator's role lacks a verb."""

    reason = "Forbidden"


class QuotaError(ClusterError):
    """A ResourceQuota or LimitRange of the namespace refuses the object."""

    reason = "QuotaDenied"


class InvalidError(ClusterError):
    """The API server or an admission webhook refuses the object: its message is about the user's own fields."""

    reason = "ChildRefused"


class ThrottledError(ClusterError):
    """Too many requests: come back later."""

    reason = "Throttled"

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(ClusterError):
    """No answer, or none that means anything: come back later."""

    reason = "ApiUnavailable"


def error_of(status: int, body: str, verb: str, resource: str, retry_after: str | None = None) -> ClusterError:
    """The domain error of an HTTP answer of 400 or more."""
    text = body
    with suppress(ValueError, AttributeError):
        text = json.loads(body).get("message") or body
    text = text.strip()[:1000] or f"HTTP status {status} without a message"
    if status == 403:
        if "exceeded quota" in text or "is forbidden: maximum" in text or "is forbidden: minimum" in text:
            return QuotaError(text)
        if "being terminated" in text:
            return ConflictError(text)
        # An apply that creates is refused for "create" though the request is a patch.
        denied = re.search(r'cannot (\w+) resource "([^"]+)"', text)
        verb, resource = denied.groups() if denied else (verb, resource)
        return ForbiddenError(f"the operator may not {verb} {resource}: grant it in the operator's role ({text})")
    if status == 429:
        return ThrottledError(text, float(retry_after) if retry_after and retry_after.isdecimal() else None)
    # The API server answers 500 to an apply with a field its schema does not know.
    if status in (400, 413, 422) or "failed to create typed patch object" in text:
        return InvalidError(text)
    kinds: dict[int, type[ClusterError]] = {404: NotFoundError, 409: ConflictError}
    return kinds.get(status, UnavailableError)(f"{verb} {resource}: {text}")
