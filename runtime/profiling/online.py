"""Calibration while serving: keeps the history model true to what passes really take.

A bounded window of recent prefill-only batches; robust fits of the batch features [sum C (C + H), sum (C + H), N];
a drift figure that says how far the model in force is off. Runs beside the scheduling path: ``add`` is cheap, ``refit``
is for a worker thread.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
from prefill_runtime.profiling.document import Refusal, RefusalReason
from prefill_runtime.profiling.fitting import MAX_SECONDS, MIN_POINTS, Fit, fit_design
from prefill_runtime.scheduler.cost import HistoryModel, Piece
from prefill_runtime.scheduler.errors import at_least

FULL = 0.9  # of the base size: what counts as a full-size batch


class OnlineCalibration:
    """The model in force and the window behind it.

    base_tokens: the size whose time is the target. window: batches kept. fresh: new batches before a refit is worth it.
    """

    def __init__(self, model: HistoryModel | None, base_tokens: int, window: int = 256, fresh: int = 16) -> None:
        at_least("base_tokens", base_tokens, 1)
        at_least("window", window, MIN_POINTS)
        at_least("fresh", fresh, 1)
        self.model, self.base_tokens, self.fresh = model, base_tokens, fresh
        self.target_seconds = model.pass_seconds(float(base_tokens), 0.0) if model else None
        self.ignored = 0
        self._batches: deque[tuple[tuple[Piece, ...], float]] = deque(maxlen=window)
        self._new = 0
        self._lock = threading.Lock()

    def add(self, pieces: Sequence[Piece], seconds: float, decodes: int = 0) -> None:
        """One pass. Batches with decodes, or with a time that cannot be, are counted and left out."""
        legal = all(c > 0 and h >= 0 for c, h in pieces) and 0 < seconds <= MAX_SECONDS
        if decodes or not pieces or not legal or not math.isfinite(seconds):
            self.ignored += 1
            return
        with self._lock:
            self._batches.append((tuple(pieces), seconds))
            self._new += 1

    @property
    def due(self) -> bool:
        """Whether enough has come in since the last fit."""
        return self._new >= self.fresh and len(self._batches) >= 2 * MIN_POINTS

    @property
    def drift(self) -> float | None:
        """Median relative error of the model in force over the window."""
        with self._lock:
            batches = list(self._batches)
        if self.model is None or not batches:
            return None
        return float(np.median([abs(self.model.batch_seconds(p) / s - 1) for p, s in batches]))

    def refit(self) -> Fit | Refusal:
        """Fit the window; the model in force changes only if that succeeds.

        The target moves only when full-size batches are in the window: short prompts say nothing of it.
        """
        with self._lock:
            batches, self._new = list(self._batches), 0
        if len(batches) < 2 * MIN_POINTS:
            message = f"{len(batches)} batches in the window, need {2 * MIN_POINTS}"
            return Refusal(reason=RefusalReason.TOO_FEW_SAMPLES, message=message)
        features = [[sum(c * (c + h) for c, h in p), sum(c + h for c, h in p), len(p)] for p, _ in batches]
        design = np.array(features, dtype=np.float64)
        seconds = np.array([s for _, s in batches])
        fit = fit_design(design, seconds, np.array([any(h for _, h in p) for p, _ in batches]), "abc")
        if isinstance(fit, Fit):
            self.model = HistoryModel(**fit.coefficients)
            if any(sum(c for c, _ in p) >= FULL * self.base_tokens for p, _ in batches):
                self.target_seconds = self.model.pass_seconds(float(self.base_tokens), 0.0)
        return fit
