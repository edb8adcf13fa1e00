"""What ``Scheduler.finish_requests`` answers (differs between vLLM versions)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def names_of(finished: Iterable[Any] | None) -> list[str]:
    """Names of requests ended from outside: 0.23 tells (name, client) of each, 0.28 the requests themselves."""
    return [one[0] if isinstance(one, tuple) else one.request_id for one in finished or ()]
