"""Medians and intervals of paired ratios."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """low and high: 95% confidence interval, None with fewer than three pairs."""

    median: float
    low: float | None
    high: float | None
    pairs: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.median:.3f}"
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def paired_ratio(ours: dict[int, float], theirs: dict[int, float]) -> Ratio | None:
    """Ratios within rounds, so that what slows a whole round down cancels out; bootstrap over the rounds."""
    ratios = [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]
    if not ratios:
        return None
    if len(ratios) < 3:
        return Ratio(statistics.median(ratios), None, None, len(ratios))
    low, high = bootstrap(ratios)
    return Ratio(statistics.median(ratios), low, high, len(ratios))


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the median; the same for the same values."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
