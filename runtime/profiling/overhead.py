"""What the engine takes for a chunk that no pass contains: handing over, taking the next batch, preparing it.

A busy period's passes are known one by one, so the recurrence of a pipeline (``scheduler/recurrence.py``) tells when
the period would have ended without any overhead. The overhead is what each pass must take on top for the period to end
when it did. Since both sides of the comparison have the same passes, noise in the passes cancels out.

Only a prompt that has the pipeline to itself tells. Of several prompts at a time some passes are long and some short,
which hides what the engine needs between them; and plans are for passes that are equally long, where nothing hides it.
A disturbance only ever adds time, so the least of several periods counts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from prefill_runtime.scheduler.layout import Layout
from prefill_runtime.scheduler.recurrence import finish_of_passes

Span = tuple[int, float, float]  # batch, start, end

SHORTEST, LONGEST = 4, 512  # batches of a period worth looking at
_KEPT = 16
_STEPS = 40


@dataclass
class _Period:
    passes: list[list[Span]]
    prompts: set[str] = field(default_factory=set)


class Overhead:
    """Fed with every pass of a pipeline, on one clock."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._stages = layout, layout.stages
        self._open: dict[int, _Period] = {}
        self._done: deque[list[list[Span]]] = deque(maxlen=_KEPT)
        self._newest = [0] * self._stages
        self._lock = threading.Lock()

    def add(self, stage: int, period: int, batch: int, prompts: Iterable[str], start: float, end: float) -> None:
        """``prompts``: whose chunks the batch has. Passes of a stage come in order; period 0 is none."""
        if period <= 0:
            return
        with self._lock:
            if period not in self._open:
                self._open[period] = _Period([[] for _ in range(self._stages)])
            known, spans = self._open[period].prompts, self._open[period].passes[stage]
            if len(known) < 2:
                known.update(prompts)
            if len(spans) <= LONGEST:
                spans.append((batch, start, end))
            self._newest[stage] = period
            for over in [p for p in self._open if p < min(self._newest) or len(self._open) > _KEPT]:
                self._close(self._open.pop(over))

    def _close(self, period: _Period) -> None:
        passes = period.passes
        first = [batch for batch, _, _ in passes[0]]
        whole = first == list(range(first[0], first[0] + len(first))) if first else False
        if len(period.prompts) != 1 or not whole or not SHORTEST <= len(first) <= LONGEST:
            return
        if all([batch for batch, _, _ in spans] == first for spans in passes):
            self._done.append(passes)

    def seconds(self) -> float | None:
        """Per pass; None while no period has told."""
        with self._lock:
            periods = list(self._done)
        return min(of_period(self._layout, passes) for passes in periods) if periods else None


def of_period(layout: Layout, passes: Sequence[Sequence[Span]]) -> float:
    """``passes``: of each stage, the same batches in order."""
    took = passes[-1][-1][2] - passes[0][0][1]
    seconds = [[end - start for _, start, end in spans] for spans in passes]
    low, high = 0.0, max(0.0, took)
    if finish(layout, seconds, low) >= took:
        return low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if finish(layout, seconds, middle) < took else (low, middle)
    return low


def finish(layout: Layout, seconds: Sequence[Sequence[float]], overhead: float) -> float:
    """From the first pass's start to the last one's end; ``seconds`` by stage and batch."""
    stage = [np.array(passes)[:, None] + overhead for passes in seconds]
    return float(finish_of_passes(layout, stage, np.zeros_like(stage[0]))[0]) - overhead
