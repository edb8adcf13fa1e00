"""The floor of the bubble ratio: what the pipeline had to lose for the traffic it got, whoever cut the chunks.

Let W_r(n) be the seconds that rank r works when a busy period's prompts go through in n passes, and W their sum over
the P ranks. If the period takes T seconds, the mean of the ranks' bubble ratios is 1 - W / (P T). T is at least

- head + W_r + tail for each rank r: a first pass must get to it, and a last one must leave the pipeline after it;
- with one stage per rank, f W + (1 - f) W / n, because the longest pass, at least the mean, has all ranks to go
  through, one after the other, while rank 0 does what comes before it and the last rank what comes after, each at least
  a share f of the work. (Folded back, rank 0 does both and has twice the share.)

The floor is the least ratio over all n up to what the smallest allowed chunk makes of these prompts (or up to the
passes that there were, if they were more). A stretch out of the middle of a period has no head and no tail; what is
left is that uneven stages wait for the slowest. Transfers, the engine's own time and prompts that come too late to fill
in are not in the floor: the gap to the measured ratio is what chunk sizes, order, engine and arrivals cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from prefill_runtime.scheduler.cost import NO_WINDOW, Attention, StageModel
from prefill_runtime.scheduler.layout import Layout, layout_of
from prefill_runtime.telemetry.account import WINDOW_SECONDS
from prefill_runtime.telemetry.events import Chunk, Idle, Issue

_COUNTS = 256
"""Numbers of passes that are looked at; the ratio changes slowly with them."""


@dataclass(slots=True)
class Work:
    """The prefill work of some batches, in the terms of a ``StageModel``."""

    passes: int = 0
    prompts: int = 0
    """That ended."""
    tokens: int = 0
    pairs: float = 0.0
    history: int = 0

    def add(self, chunks: Sequence[Chunk], attention: Attention) -> None:
        self.passes += 1
        for chunk in chunks:
            if chunk.prefill:
                self.tokens += chunk.tokens
                self.pairs += float(attention.pairs(float(chunk.tokens), float(chunk.history)))
                self.history += chunk.history
                self.prompts += chunk.history + chunk.tokens >= chunk.prompt_tokens

    def __add__(self, other: Work) -> Work:
        return Work(
            self.passes + other.passes,
            self.prompts + other.prompts,
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.history + other.history,
        )


def bubble_floor(
    layout: Layout, stages: Sequence[StageModel], work: Work, least_chunk: int, *, whole: bool = True
) -> float:
    """See the head of this file. ``whole``: the work is a busy period's, from its first batch to its last."""
    hosted = [layout.stages_of(rank) for rank in range(layout.ranks)]
    most = max(1, work.passes, (work.tokens + work.prompts * (least_chunk - 1)) // least_chunk)
    passes = np.unique(np.geomspace(1, most, _COUNTS).round())
    base = [s.k1 * work.tokens + s.k2 * work.pairs + s.k3 * work.history for s in stages]
    by_stage = [b + s.k0 * passes for b, s in zip(base, stages, strict=True)]
    seconds = np.array([sum(by_stage[s] for s in own) for own in hosted])
    total, least = seconds.sum(axis=0), seconds.max(axis=0)
    if not least.all():
        return 0.0
    if whole:
        ends = [s.k0 + s.k1 for s in stages]
        for rank, own in enumerate(hosted):
            least = np.maximum(least, sum(ends[: own[0]]) + seconds[rank] + sum(ends[own[-1] + 1 :]))
        if layout.virtual == 1:
            share = _least_share(stages, least_chunk)
            least = np.maximum(least, share * total + (1 - share) * total / passes)
    return float(np.min(1 - total / (layout.ranks * least)))


def _least_share(stages: Sequence[StageModel], least_chunk: int) -> float:
    """Of any chunk's work the first and the last stage have at least this part each."""
    terms = [(s.k0 + s.k1 * least_chunk, s.k1, s.k2, s.k3) for s in stages]
    parts = zip(*terms, strict=True)
    return min((min(part[0], part[-1]) / sum(part) for part in parts if sum(part) > 0), default=0.0)


class FloorMeter:
    """Follows the scheduler's batches; ``value`` is the floor of what the ranks' bubble ratios are of."""

    def __init__(self, ranks: int, least_chunk: int) -> None:
        self._ranks, self._least_chunk = ranks, least_chunk
        self.stages: Sequence[StageModel] = ()
        """Of the calibration in force."""
        self.value: float | None = None
        self._period = 0
        self._recent, self._earlier = Work(), Work()
        self._since = 0.0
        self._whole = True

    def issue(self, event: Issue) -> None:
        if not event.stamp.period:
            return
        if event.stamp.period != self._period:
            self._period, self._whole, self._since = event.stamp.period, True, event.at
            self._recent, self._earlier = Work(), Work()
        self._recent.add(event.stamp.chunks, self.stages[0].attention if self.stages else NO_WINDOW)
        if event.at - self._since >= WINDOW_SECONDS:
            self._whole, self._since = False, event.at
            self._measure(self._recent)
            self._recent, self._earlier = Work(), self._recent

    def idle(self, event: Idle) -> None:
        if event.period == self._period:
            self._measure(self._earlier + self._recent)

    def _measure(self, work: Work) -> None:
        stages = self.stages
        if len(stages) not in (self._ranks, 2 * self._ranks):
            self.value = None
            return
        layout = layout_of(self._ranks, len(stages) // self._ranks)
        self.value = bubble_floor(layout, stages, work, self._least_chunk, whole=self._whole)
