"""From timed chunks to a stage's coefficients, or to a typed refusal; never an exception for bad data.

1. Check every sample; take the median of the repeats of each (chunk, history).
2. Weigh residuals by time + a floor: relative error where passes are long, absolute where timer and scheduling
   noise dominates.
3. Least trimmed squares: many small subsets, each improved by refitting on the better 70% of the points, find the
   curve that most points agree on whatever the rest says; then one fit on all points near it. Points with history
   are fewer than those without and are trimmed among themselves, or they would all pass for outliers together.
4. Each fit is non-negative least squares on scaled columns, exact: with at most four coefficients all active sets
   are tried.
5. Refuse when the design is ill-conditioned, when clamping a coefficient to zero made the fit materially worse (the
   data contradict the model), when attention cost came out zero though time grows with history, when time does not
   grow at all, or when held-out points are badly predicted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from prefill_runtime.profiling.document import GOOD_R2, Refusal, RefusalReason
from prefill_runtime.scheduler.cost import NO_WINDOW, Attention

Sample = tuple[int, int, float]  # chunk tokens, history tokens, seconds
Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]

MIN_POINTS = 8
MAX_CONDITION = 1e5
MAX_SECONDS = 86_400.0
MAX_TOKENS = 1 << 30
_KEPT = 0.7  # share of points the trimmed fit keeps; so up to 30% may be outliers
_STARTS = 60
_NEAR = 4.0  # scaled median deviations within which a point counts as good
_FOLDS = 5
_CLEARLY = 0.7  # of the held-out error: what a further term has to earn
_ROUNDING = 1e-9  # relative: errors below are all the same
_LEAST_NOISE = 0.02  # few points may lie on a curve by luck
_CONTRADICTION = 1.5  # factor on the residual spread that clamping may cost


@dataclass(frozen=True)
class Fit:
    """Coefficients of a cost form and how far to trust them.

    coefficients: by name. r2: on held-out points. clamped: names that the data wanted slightly below zero.
    outliers: points left out. held_out_error: median relative error of held-out points, those with history if any.
    """

    coefficients: dict[str, float]
    r2: float
    condition: float
    sample_count: int
    outliers: int
    clamped: tuple[str, ...]
    relative_error_p50: float
    relative_error_p90: float
    held_out_error: float
    covariance: Vector = field(repr=False, compare=False)
    attention: Attention = NO_WINDOW

    def seconds(self, row: Vector) -> tuple[float, float]:
        """What the fit says of ``row`` of a design, of which the first columns are used, and its standard error."""
        row = row[: len(self.covariance)]
        said = float(row @ np.array(list(self.coefficients.values())))
        return said, math.sqrt(max(0.0, float(row @ self.covariance @ row)))


def fit_quadratic(samples: Sequence[Sample]) -> Fit | Refusal:
    """a ((H + C)^2 - H^2) + b C + c, for ``QuadraticModel``."""
    return _fit_samples(samples, lambda c, h: [c * (2 * h + c), c, np.ones_like(c)])


def fit_history(samples: Sequence[Sample]) -> Fit | Refusal:
    """a C (C + H) + b (C + H) + c, for ``HistoryModel``."""
    return _fit_samples(samples, lambda c, h: [c * (c + h), c + h, np.ones_like(c)])


def fit_stages(samples_by_stage: Sequence[Sequence[Sample]], attention: Attention = NO_WINDOW) -> list[Fit | Refusal]:
    """k2 A(C, H) + k1 C + k0 of each stage, for ``StageModel``; with k3 H where only that explains the samples.

    ``attention`` is what the model's configuration says. Whether the engine makes use of its windows the samples tell.
    """
    return surest(_fit_stages(samples_by_stage, kind) for kind in kinds_of(attention))


def kinds_of(attention: Attention) -> list[Attention]:
    """What may be found of a model that is configured so."""
    return [NO_WINDOW, attention] if attention.window else [NO_WINDOW]


def surest(fits: Iterable[list[Fit | Refusal]]) -> list[Fit | Refusal]:
    """Those that predict held-out points best."""
    return min(fits, key=_error)


def _fit_stages(samples_by_stage: Sequence[Sequence[Sample]], attention: Attention) -> list[Fit | Refusal]:
    tables = [
        _table(samples, lambda c, h: [attention.pairs(c, h), c, np.ones_like(c), h]) for samples in samples_by_stage
    ]
    fits = iter(fit_stage_designs([table for table in tables if not isinstance(table, Refusal)], attention))
    return [
        table if isinstance(table, Refusal) else _counted(next(fits), samples)
        for table, samples in zip(tables, samples_by_stage, strict=True)
    ]


Table = tuple[Vector, Vector, Mask]
"""Design, seconds, and which rows have history."""


def _fit_samples(samples: Sequence[Sample], columns: Callable[[Vector, Vector], list[Vector]]) -> Fit | Refusal:
    table = _table(samples, columns)
    return table if isinstance(table, Refusal) else _counted(fit_design(*table, "abc"), samples)


def _table(samples: Sequence[Sample], columns: Callable[[Vector, Vector], list[Vector]]) -> Table | Refusal:
    bad = _bad_sample(samples)
    if bad:
        return Refusal(reason=RefusalReason.BAD_SAMPLE, message=bad)
    chunk, history, seconds = _medians(samples)
    if len(chunk) < MIN_POINTS:
        message = f"{len(chunk)} distinct (chunk, history) points, need {MIN_POINTS}; profile more sizes or depths"
        return Refusal(reason=RefusalReason.TOO_FEW_SAMPLES, message=message)
    return np.stack(columns(chunk, history), axis=1), seconds, history > 0


def _counted(fit: Fit | Refusal, samples: Sequence[Sample]) -> Fit | Refusal:
    return fit if isinstance(fit, Refusal) else replace(fit, sample_count=len(samples))


def fit_stage_designs(tables: Sequence[Table], attention: Attention) -> list[Fit | Refusal]:
    """Columns of each stage's design: those of k2, whose pairs are ``attention``'s, k1, k0 and k3.

    A term that the device does not have would take its coefficient from noise, and deep history multiplies it; so k3
    has to earn its place on held-out points. Stages have layers of one kind: they all have the term or none has it.
    """
    plain = [fit_design(design[:, :3], seconds, deep, ("k2", "k1", "k0")) for design, seconds, deep in tables]
    rebuilt = list(plain)
    for stage, (design, seconds, deep) in enumerate(tables):
        found = fit_design(design, seconds, deep, ("k2", "k1", "k0", "k3")) if np.any(deep) else plain[stage]
        if isinstance(found, Fit) and found.coefficients.get("k3"):
            rebuilt[stage] = found
    better = rebuilt if _error(rebuilt) < _CLEARLY * _error(plain) else plain
    return [fit if isinstance(fit, Refusal) else replace(fit, attention=attention) for fit in better]


def _error(fits: Sequence[Fit | Refusal]) -> float:
    """Of held-out points, the geometric mean over the stages: a noisy one does not outweigh the others."""
    errors = [math.inf if isinstance(fit, Refusal) else fit.held_out_error for fit in fits]
    return math.exp(sum(math.log(error + _ROUNDING) for error in errors) / max(len(errors), 1))


def fit_design(design: Vector, seconds: Vector, deep: Mask, names: Sequence[str]) -> Fit | Refusal:
    """Fit seconds = design @ coefficients. Column 0 is the attention term, column 2 the fixed part of a pass.

    deep: rows with history.
    """
    if len(design) < design.shape[1] + 2:
        message = f"{len(design)} kinds of samples, need {design.shape[1] + 2} for {', '.join(names)}"
        return Refusal(reason=RefusalReason.TOO_FEW_SAMPLES, message=message)
    coefficients, good = _robust(design, seconds, deep)
    condition = max(_condition(design), _condition(design[good]))
    if condition > MAX_CONDITION:
        distinct = len(np.unique(design[good], axis=0))
        message = (
            f"condition number {condition:.3g}, allowed <= {MAX_CONDITION:.0e}: {distinct} kinds of samples do not "
            f"determine {', '.join(names)}; vary chunk sizes and histories"
        )
        return Refusal(reason=RefusalReason.ILL_CONDITIONED, message=message)
    refusal = (
        _contradicted(design, seconds, coefficients, good, names)
        or _growth_missed(design, seconds, coefficients, deep)
        or _not_growing(design, coefficients)
    )
    if refusal:
        return refusal
    expected = _held_out(design, seconds, good)
    r2 = _r2(expected, seconds, good)
    if r2 < GOOD_R2:
        message = f"R^2 on held-out points is {r2:.3f}, need {GOOD_R2}; times are too noisy or of another shape"
        return Refusal(reason=RefusalReason.POOR_FIT, message=message)
    error = np.abs(design @ coefficients - seconds) / seconds
    missed, asked = np.abs(expected - seconds) / seconds, deep if np.any(deep) else ~deep
    free = _scaled_solve(design[good], seconds[good], _scale(seconds[good]))
    return Fit(
        coefficients={name: float(x) for name, x in zip(names, coefficients, strict=True)},
        r2=r2,
        condition=condition,
        sample_count=len(seconds),
        outliers=int(np.sum(~good)),
        clamped=tuple(n for n, x, f in zip(names, coefficients, free, strict=True) if x == 0 and f < 0),
        relative_error_p50=float(np.quantile(error, 0.5)),
        relative_error_p90=float(np.quantile(error, 0.9)),
        held_out_error=float(np.median(missed[asked])),
        covariance=_covariance(design[good], seconds[good], coefficients),
    )


def _bad_sample(samples: Sequence[Sample]) -> str:
    for i, (chunk, history, seconds) in enumerate(samples):
        if not 1 <= chunk <= MAX_TOKENS:
            return f"sample {i}: chunk is {chunk}, allowed: 1 to {MAX_TOKENS} tokens"
        if not 0 <= history <= MAX_TOKENS:
            return f"sample {i}: history is {history}, allowed: 0 to {MAX_TOKENS} tokens"
        if not 0 < seconds <= MAX_SECONDS:  # also false for NaN
            return f"sample {i}: seconds is {seconds}, allowed: > 0 to {MAX_SECONDS:.0f}"
    return ""


def _medians(samples: Sequence[Sample]) -> tuple[Vector, Vector, Vector]:
    repeats: dict[tuple[int, int], list[float]] = {}
    for chunk, history, seconds in samples:
        repeats.setdefault((chunk, history), []).append(seconds)
    rows = [(c, h, float(np.median(s))) for (c, h), s in sorted(repeats.items())]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _condition(design: Vector) -> float:
    """Of the scaled columns; infinite when they are linearly dependent."""
    norm = np.linalg.norm(design, axis=0)
    if not np.all(norm > 0) or len(design) < design.shape[1]:
        return math.inf
    singular = np.linalg.svd(design / norm, compute_uv=False)
    return float(singular[0] / singular[-1]) if singular[-1] > 0 else math.inf


def _scale(seconds: Vector) -> Vector:
    """What a residual is measured in."""
    return seconds + 0.1 * float(np.median(seconds))


def _scaled_solve(design: Vector, seconds: Vector, scale: Vector) -> Vector:
    """Ordinary weighted least squares."""
    weighted = design / scale[:, None]
    norm = np.linalg.norm(weighted, axis=0)
    norm[norm == 0] = 1.0  # a subset of points may lack a term altogether
    return np.asarray(np.linalg.lstsq(weighted / norm, seconds / scale, rcond=None)[0] / norm)


def nonnegative_solve(design: Vector, seconds: Vector, scale: Vector) -> Vector:
    """Weighted least squares with coefficients >= 0: the best of all active sets."""
    columns = design.shape[1]
    free = _scaled_solve(design, seconds, scale)
    if np.all(free >= 0):
        return free
    best, least = np.zeros(columns), float(np.sum((seconds / scale) ** 2))
    for count in range(1, columns):
        for active in itertools.combinations(range(columns), count):
            part = _scaled_solve(design[:, active], seconds, scale)
            loss = float(np.sum(((design[:, active] @ part - seconds) / scale) ** 2))
            if np.all(part >= 0) and loss < least:
                best, least = np.zeros(columns), loss
                best[list(active)] = part
    return best


def _robust(design: Vector, seconds: Vector, deep: Mask) -> tuple[Vector, Mask]:
    """Coefficients and which points they stand on."""
    groups = [g for g in (np.flatnonzero(~deep), np.flatnonzero(deep)) if len(g)]
    scale, random = _scale(seconds), np.random.default_rng(0)
    best, least = np.zeros(design.shape[1]), math.inf
    for start in range(_STARTS):
        rows = np.arange(len(seconds)) if start == 0 else random.choice(len(seconds), design.shape[1] + 1, False)
        for _ in range(4):
            coefficients = nonnegative_solve(design[rows], seconds[rows], scale[rows])
            residual = np.abs(design @ coefficients - seconds) / scale
            kept = [g[np.argsort(residual[g], kind="stable")][: math.ceil(_KEPT * len(g))] for g in groups]
            rows = np.concatenate(kept)
        loss = float(np.sum(residual[rows] ** 2))
        if loss < least:
            best, least = coefficients, loss
    good = np.ones(len(seconds), dtype=np.bool_)
    for _ in range(3):  # from the trimmed fit to one on every good point, weighed by what the curve expects
        expected = design @ best
        scale = _scale(np.maximum(expected, 1e-12))
        residual = np.abs(expected - seconds) / scale
        for group in groups:
            good[group] = _near(residual[group])
        best = nonnegative_solve(design[good], seconds[good], scale[good])
    return best, good


def _near(residual: Vector) -> Mask:
    """Points within a few spreads of the curve; the spread is a median, so outliers do not widen it."""
    spread = 1.4826 * float(np.median(residual))
    return np.asarray(residual <= max(_NEAR * spread, 1e-6))


def _contradicted(design: Vector, seconds: Vector, fit: Vector, good: Mask, names: Sequence[str]) -> Refusal | None:
    """A coefficient that was clamped to zero and should not have been: the data have another shape than the model."""
    if np.all(fit > 0):
        return None
    x, y, scale = design[good], seconds[good], _scale(seconds[good])
    free = _scaled_solve(x, y, scale)
    clamped, unclamped = (float(np.sqrt(np.mean(((x @ k - y) / scale) ** 2))) for k in (fit, free))
    if clamped <= _CONTRADICTION * unclamped + 1e-3 or np.all(free >= 0):
        return None
    worst = names[int(np.argmin(free * np.linalg.norm(x / scale[:, None], axis=0)))]
    reason = RefusalReason.NOT_GROWING if free[0] < 0 else RefusalReason.POOR_FIT
    wanted = ", ".join(f"{n} = {value:.3g}" for n, value in zip(names, free, strict=True))
    message = (
        f"the data want {wanted}; with none below zero the error is {clamped:.3f} instead of {unclamped:.3f}, "
        f"so time does not follow the model ({worst} < 0)"
    )
    return Refusal(reason=reason, message=message)


def _growth_missed(design: Vector, seconds: Vector, fit: Vector, deep: Mask) -> Refusal | None:
    """Attention cost fitted as zero while the residuals grow with history: two effects of different shape."""
    if fit[0] > 0 or not np.any(deep) or np.all(deep):
        return None
    residual = (seconds - design @ fit) / _scale(seconds)
    more = float(np.median(residual[deep])) - float(np.median(residual[~deep]))
    if more <= 0.05:
        return None
    message = (
        f"attention cost fits as zero, yet chunks with history take {more:.0%} longer than the fit says; "
        "time grows with history but not with the square of the size"
    )
    return Refusal(reason=RefusalReason.NOT_GROWING, message=message)


def _not_growing(design: Vector, fit: Vector) -> Refusal | None:
    fixed = float(fit[2])
    growth = float(np.max(design @ fit)) - fixed
    if growth > 0.05 * fixed and growth > 0:
        return None
    message = f"the largest chunk takes only {growth:.3g} s more than an empty pass of {fixed:.3g} s"
    return Refusal(reason=RefusalReason.NOT_GROWING, message=message)


def _held_out(design: Vector, seconds: Vector, good: Mask) -> Vector:
    """What fits that have not seen a point say of it: each good point is left out of one of five."""
    expected, fold = np.zeros_like(seconds), np.cumsum(good) % _FOLDS
    for out in range(_FOLDS):
        seen = good & (fold != out)
        fit = nonnegative_solve(design[seen], seconds[seen], _scale(seconds[seen]))
        expected[fold == out] = design[fold == out] @ fit
    return expected


def _covariance(design: Vector, seconds: Vector, fit: Vector) -> Vector:
    scale, (points, columns) = _scale(seconds), design.shape
    variance = float(np.sum(((design @ fit - seconds) / scale) ** 2)) / max(1, points - columns)
    weighted = design / scale[:, None]
    norm = np.linalg.norm(weighted, axis=0)
    inverse = np.linalg.inv((weighted / norm).T @ (weighted / norm)) / np.outer(norm, norm)
    return np.asarray(max(variance, _LEAST_NOISE**2) * inverse)


def _r2(expected: Vector, seconds: Vector, good: Mask) -> float:
    """On the good points; too few of them count as no fit at all."""
    if np.sum(good) < _KEPT * len(seconds):
        return 0.0
    y = seconds[good]
    spread = float(np.sum((y - np.mean(y)) ** 2))
    return 1 - float(np.sum((expected[good] - y) ** 2)) / spread if spread > 0 else 0.0
