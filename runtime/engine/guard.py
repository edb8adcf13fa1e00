"""Telemetry inside the engine: what fails there is logged and forgotten, never raised into a request."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")

logger = logging.getLogger(__name__)
_reported: set[str] = set()


def harmless(method: Callable[P, None]) -> Callable[P, None]:
    """For methods without a result; the first failure of each is logged with its trace."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            if method.__qualname__ not in _reported:
                _reported.add(method.__qualname__)
                logger.exception("telemetry: %s failed; further failures of it are not logged", method.__qualname__)

    return guarded
