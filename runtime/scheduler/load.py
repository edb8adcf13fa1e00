"""How busy the pipeline has been: whether more prompts will come while one runs."""

from __future__ import annotations

import math

_SECONDS = 30.0
_PROMPTS = 16


class Load:
    """The share of recent time with prefill work in the pipeline, but no more than the share of recent prompts that
    found it so: a client who waits for each answer keeps the pipeline busy, and yet nobody queues behind him. With
    prompts that come at random both are the same.
    """

    def __init__(self, now: float) -> None:
        self._at, self.busy = now, False
        self._time = self._met = 0.0

    def changed(self, now: float, busy: bool) -> None:
        self._time += self._step(now) * (self.busy - self._time)
        self._at, self.busy = now, busy

    def arrived(self) -> None:
        """A prompt came in."""
        self._met += (self.busy - self._met) / _PROMPTS

    def share(self, now: float) -> float:
        return min(self._time + self._step(now) * (self.busy - self._time), self._met)

    def _step(self, now: float) -> float:
        return -math.expm1(-max(now - self._at, 0.0) / _SECONDS)
