"""Whose first token it was: pairs the API server's times with the scheduler's prompts.

A TTFT is what the API server measured (``served``), and only the scheduler says of which prompt (``request``); both
name the same arrival time. The two come over different connections, so either may be first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from prefill_runtime.telemetry.events import Request, Served

_KEPT = 4096
_TICK = 1e-5
"""Arrival times come out of a subtraction of Unix times, which is good to a microsecond; a request takes longer."""


class FirstTokens:
    """Both methods return (prompt tokens, TTFT) of the pairs that the event completes."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[int, int] = OrderedDict()
        """Prompt tokens by arrival. They stay until they are old: parallel samples of a prompt share an arrival."""
        self._served: OrderedDict[int, list[float]] = OrderedDict()

    def request(self, event: Request) -> list[tuple[int, float]]:
        tick = round(event.arrival / _TICK)
        self._prompts[tick] = event.prompt_tokens
        _keep_newest(self._prompts)
        early = [ttft for near in _around(tick) for ttft in self._served.pop(near, ())]
        return [(event.prompt_tokens, ttft) for ttft in early]

    def served(self, event: Served) -> list[tuple[int, float]]:
        tick = round(event.arrival / _TICK)
        for near in _around(tick):
            if near in self._prompts:
                return [(self._prompts[near], event.ttft)]
        self._served.setdefault(tick, []).append(event.ttft)
        _keep_newest(self._served)
        return []


def _around(tick: int) -> tuple[int, int, int]:
    return tick, tick - 1, tick + 1


def _keep_newest(entries: OrderedDict[int, Any]) -> None:
    while len(entries) > _KEPT:
        entries.popitem(last=False)
