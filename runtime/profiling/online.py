"""Calibration while serving: keeps the document in force true to what passes really take.

A bounded window of each stage's recent prefill-only passes; robust fits of them; a drift figure that says how far the
document in force is off. ``add`` is cheap, ``refine`` is for a worker thread.

A better document is one of two things. Where the window determines a stage's whole curve (up to the deepest history
that the document in force is good for), it is a new fit. Where it does not, because traffic has been all alike, the
curve in force is kept and scaled to the pace of the window.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

import numpy as np
from prefill_runtime.profiling.compose import Origin, compose, rescaled, slowest
from prefill_runtime.profiling.document import CalibrationDocument, Refusal
from prefill_runtime.profiling.fitting import (
    MAX_SECONDS,
    Fit,
    Mask,
    Vector,
    fit_design,
    fit_stage_designs,
    kinds_of,
    surest,
)
from prefill_runtime.profiling.overhead import Overhead
from prefill_runtime.scheduler.cost import NO_WINDOW, Attention, Piece, StageModel
from prefill_runtime.scheduler.errors import at_least
from prefill_runtime.scheduler.layout import Layout

Batch = tuple[tuple[Piece, ...], float]
Windows = Sequence[Sequence[Batch]]

FULL = 0.9  # of the base size: what counts as a full-size batch
FIRST, ENOUGH = 5, 30  # passes of each stage: for a try without any document, for a refit of one
FRESH = 16  # new ones between refits
MAX_DOUBT = 0.1  # relative standard error at the sizes and depths that plans are made of
SURER = 0.7  # of the doubt about the document in force: what makes another worth having though it fits about as well
NOISE = 0.01  # of the window error: less is no improvement
CLEARLY = 0.8  # of the error of the document in force


class OnlineCalibration:
    """The document in force and the windows behind it.

    window: passes kept of each stage. reach: history tokens up to which ``document`` was measured.
    """

    def __init__(
        self, origin: Origin, layout: Layout, window: int, document: CalibrationDocument | None = None, reach: int = 0
    ) -> None:
        at_least("window", window, FIRST)
        self.origin, self.document, self.ignored = origin, document, 0
        self.overhead = Overhead(layout)
        self._deepest = reach if document is not None else 0
        self._doubt = 0.0
        self._windows: list[deque[Batch]] = [deque(maxlen=window) for _ in range(layout.stages)]
        self._new = [0] * layout.stages
        self._lock = threading.Lock()

    def add(self, stage: int, pieces: Sequence[Piece], seconds: float, decodes: int = 0) -> None:
        """One pass. Those with decodes, or with a time that cannot be, are counted and left out."""
        legal = 0 <= stage < len(self._windows) and all(c > 0 and h >= 0 for c, h in pieces)
        if decodes or not pieces or not legal or not 0 < seconds <= MAX_SECONDS:  # also false for NaN
            self.ignored += 1
            return
        with self._lock:
            self._windows[stage].append((tuple(pieces), seconds))
            self._new[stage] += 1

    @property
    def due(self) -> bool:
        """Whether every stage has enough news for another look."""
        if self.document is None and min(map(len, self._windows)) < ENOUGH:
            return min(self._new) > 0 and min(map(len, self._windows)) >= FIRST
        return min(self._new) >= FRESH and min(map(len, self._windows)) >= ENOUGH

    @property
    def drift(self) -> float | None:
        """Median relative error of the document in force over the windows."""
        windows = self._snapshot()
        return _error(self.document, windows) if self.document is not None and any(windows) else None

    def refine(self, now: datetime) -> CalibrationDocument | None:
        """A better document, then also in force; None when the one in force stays."""
        windows = self._snapshot()
        self._new = [0] * len(windows)
        if min(map(len, windows)) < FIRST:
            return None
        self._deepest = max([self._deepest, *(h for window in windows for pieces, _ in window for _, h in pieces)])
        made, doubt = self._fitted(windows, now)
        if made is None:
            made, doubt = self._scaled(windows, now), self._doubt
        if made is None or not (self.document is None or self._better(made, doubt, windows)):
            return None
        self.document, self._doubt = made, doubt
        return made

    def _better(self, new: CalibrationDocument, doubt: float, windows: Windows) -> bool:
        """By more than noise: a refit of the same traffic always differs a little."""
        assert self.document is not None
        ours, theirs = _error(new, windows), _error(self.document, windows)
        return (ours <= CLEARLY * theirs and ours <= theirs - NOISE) or (
            ours <= theirs and doubt <= SURER * self._doubt
        )

    def _snapshot(self) -> list[list[Batch]]:
        with self._lock:
            return [list(window) for window in self._windows]

    def _fitted(self, windows: Windows, now: datetime) -> tuple[CalibrationDocument | None, float]:
        """And the doubt about it."""
        old, full = self.document, self._full(windows)
        if old is None and not full:
            return None, math.inf
        fits = []
        for window, fit in zip(windows, surest(self._candidates(windows)), strict=True):
            if isinstance(fit, Refusal) or self._doubt_of(fit) > MAX_DOUBT:
                return None, math.inf
            fits.append(replace(fit, sample_count=len(window)))
        pace = windows[slowest(fits, self.origin.base_tokens)]
        design, seconds, deep = _table(pace, lambda pieces: stage_features(pieces, NO_WINDOW))
        document = compose(
            fits,
            fit_design(design[:, :3] * [2.0, 1.0, 1.0], seconds, deep, "abc"),
            fit_design(*_table(pace, history_features), "abc"),
            self.origin,
            now,
            source="Online",
            target_seconds=None if old is None or full else old.target_seconds,
            pass_overhead_seconds=self._overhead(),
        )
        return document, max(map(self._doubt_of, fits))

    def _candidates(self, windows: Windows) -> Iterator[list[Fit | Refusal]]:
        """By the kind of attention: that of the document in force, else what the model's configuration allows."""
        document = self.document
        known = None if document is None else StageModel.of(document.stages[0]).attention
        for kind in kinds_of(self.origin.attention) if known is None else [known]:
            tables = [_table(window, partial(stage_features, attention=kind)) for window in windows]
            yield fit_stage_designs(tables, kind)

    def _scaled(self, windows: Windows, now: datetime) -> CalibrationDocument | None:
        if self.document is None:
            return None
        ratios, errors = list[float](), list[Vector]()
        for stage, window in zip(self.document.stages, windows, strict=True):
            expected = np.array([StageModel.of(stage).batch_seconds(pieces) for pieces, _ in window])
            took = np.array([seconds for _, seconds in window])
            ratios.append(float(np.median(took / expected)))
            errors.append(np.abs(ratios[-1] * expected / took - 1))
        return rescaled(
            self.document, ratios, errors, now, full=self._full(windows), pass_overhead_seconds=self._overhead()
        )

    def _full(self, windows: Windows) -> bool:
        """Whether there are full-size batches: only they may set the target, of which short prompts say nothing."""
        return any(sum(c for c, _ in pieces) >= FULL * self.origin.base_tokens for pieces, _ in windows[0])

    def _overhead(self) -> float:
        found = self.overhead.seconds()
        if found is None:
            return self.document.pass_overhead_seconds if self.document is not None else 0.0
        return found

    def _doubt_of(self, fit: Fit) -> float:
        """The standard error at the sizes and depths that plans are made of. That of a small chunk, which tells the
        fixed part of a pass from the rest, is taken against a full one: it is about the pace of the pipeline.
        """
        base = self.origin.base_tokens
        full, small, deep = (
            fit.seconds(np.array(stage_features([place], fit.attention)))
            for place in ((base, 0), (base // 4, 0), (base, self._deepest))
        )
        return max(full[1] / full[0], small[1] / full[0], deep[1] / deep[0])


def stage_features(pieces: Sequence[Piece], attention: Attention) -> list[float]:
    """Of k2, k1, k0 and k3; a batch pays k0 once."""
    pairs = sum(float(attention.pairs(float(c), float(h))) for c, h in pieces)
    tokens, history = (sum(x) for x in zip(*pieces, strict=True))
    return [pairs, tokens, 1, history]


def history_features(pieces: Sequence[Piece]) -> list[float]:
    """[sum C (C + H), sum (C + H), N] (seeds/000)."""
    pairs, ends = (sum(x) for x in zip(*((c * (c + h), c + h) for c, h in pieces), strict=True))
    return [pairs, ends, len(pieces)]


def _table(window: Sequence[Batch], features: Callable[[Sequence[Piece]], list[float]]) -> tuple[Vector, Vector, Mask]:
    """Design, seconds and which rows have history; equal batches are one row with their median time."""
    times: dict[tuple[Piece, ...], list[float]] = {}
    for pieces, seconds in window:
        times.setdefault(pieces, []).append(seconds)
    design = np.array([features(pieces) for pieces in times], dtype=np.float64)
    return design, np.array([np.median(t) for t in times.values()]), np.array([any(h for _, h in p) for p in times])


def _error(document: CalibrationDocument, windows: Windows) -> float:
    models = [StageModel.of(stage) for stage in document.stages]
    errors = [abs(m.batch_seconds(p) / s - 1) for m, window in zip(models, windows, strict=True) for p, s in window]
    return float(np.median(errors))
