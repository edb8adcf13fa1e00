"""Search for the cut of one prompt with the least predicted finish time.

The makespan under a static order is the longest path through the tasks, so in the variables y_k = cost of everything
up to cut k it is convex and piecewise linear, and its optima (found offline by linear programming) have a plain shape:

Linear    equal time, because the finish is sum t + (P - 1) max t (TeraPipe's objective) for equal stages.
FoldBack  a tent: time per chunk grows steadily from a small first chunk, which shortens the fill, and falls
          symmetrically to a small last one, which shortens the drain. For P = 2 it may double from chunk to chunk;
          for P >= 4 it grows by a constant, from about P / 2 of these steps.

So: propose such shapes for every sensible number of chunks, map them to tokens through the cost model, score all of
them exactly with the recurrence, then improve the best by moving cuts, judged by the same recurrence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from prefill_runtime.scheduler.chunkers import Bounds
from prefill_runtime.scheduler.cost import PipelineCost
from prefill_runtime.scheduler.layout import FoldBack, Layout
from prefill_runtime.scheduler.order import LAGS, usual_lag
from prefill_runtime.scheduler.recurrence import finish_seconds

Vector = NDArray[np.float64]
_MOVED = 48  # cuts that one round tries to move
TASKS = 40_000  # chunk-stage steps of the recurrence that one search may take: bounds its time on any machine


@dataclass(frozen=True)
class Problem:
    """One prompt on one pipeline. Cuts are counted in quanta from the end of the cached prefix.

    weight: prompts that wait: each starts a period later for this one (0: an idle pipeline).
    orders: lags of the static orders that the ranks may run in; (OLDEST,) if they decide while they run.
    """

    layout: Layout
    cost: PipelineCost
    bounds: Bounds
    tokens: int
    history: int
    weight: float = 0.0
    orders: tuple[int, ...] = LAGS

    @property
    def rest(self) -> int:
        return self.tokens - self.history

    @property
    def units(self) -> int:
        """The last cut; only the last chunk may be a fraction of a quantum."""
        return -(-self.rest // self.bounds.quantum)

    @property
    def most(self) -> int:
        return self.bounds.highest // self.bounds.quantum

    @property
    def least(self) -> int:
        return self.bounds.lowest // self.bounds.quantum

    @property
    def lags(self) -> tuple[int, ...]:
        if not isinstance(self.layout, FoldBack) or self.layout.ranks == 1:
            return (0,)
        return self.orders

    @property
    def lag(self) -> int:
        """The one to search with."""
        usual = usual_lag(self.layout.ranks)
        return usual if usual in self.lags else self.lags[0]

    def counts(self) -> list[int]:
        """Numbers of chunks worth trying: every one near the fewest possible, then ever sparser."""
        fewest = max(1, -(-self.units // self.most))
        most = max(fewest, min(1 + (self.units - 1) // self.least, 2 * fewest + 12 * self.layout.ranks + 16))
        counts, n = [], fewest
        while n <= most:
            counts.append(n)
            n += max(1, n // 8)
        return counts

    def tokens_of(self, cuts: Vector) -> tuple[Vector, Vector]:
        """Chunk and history tokens, one row per chunk."""
        ends = np.minimum(cuts * self.bounds.quantum, self.rest)
        return np.ascontiguousarray(np.diff(ends, axis=1).T), np.ascontiguousarray(ends[:, :-1].T) + self.history

    def legal(self, cuts: Vector) -> NDArray[np.bool_]:
        """Which candidates keep the bounds; a step of zero pads a shorter candidate at its end."""
        steps = np.diff(cuts, axis=1)
        inner = cuts[:, 1:] < cuts[:, -1:]
        low = np.where(inner, self.least, 0)
        return np.asarray(((steps >= low) & (steps <= self.most)).all(axis=1) & (cuts[:, -1] > cuts[:, 0]))

    def seconds(self, cuts: Vector, lag: int) -> Vector:
        """Predicted seconds of each candidate; infinite if it breaks a bound."""
        chunk, history = self.tokens_of(cuts)
        return np.where(self.legal(cuts), self._seconds(chunk, history, lag), np.inf)

    def _seconds(self, chunk: Vector, history: Vector, lag: int) -> Vector:
        finish = finish_seconds(self.layout, self.cost, chunk, history, lag)
        return finish + self.weight * self._period(chunk, history, lag, finish) if self.weight else finish

    def _period(self, chunk: Vector, history: Vector, lag: int, finish: Vector) -> Vector:
        """How much later the next prompt ends for this one: what a second copy right behind the first adds.

        Not only work: where neighbouring chunks differ in time, ranks wait for one another however full the queue is.
        """
        twice = [np.concatenate([part, part]) for part in (chunk, history)]
        both = finish_seconds(self.layout, self.cost, twice[0], twice[1], lag)
        return np.maximum(both - finish, self._rank_seconds(chunk, history))

    def _rank_seconds(self, chunk: Vector, history: Vector) -> Vector:
        work = np.where(chunk > 0, self.cost.work(self.layout.stages, chunk, history), 0.0)
        return np.asarray(work.sum(axis=0) / self.layout.ranks)

    def price(self, chunks: list[int]) -> tuple[float, int]:
        """Predicted seconds of any list of chunks, and the lag of the order that reaches them."""
        sizes = np.array(chunks, dtype=np.float64)[:, None]
        history = self.history + np.concatenate([np.zeros((1, 1)), np.cumsum(sizes, axis=0)[:-1]])
        return min((float(self._seconds(sizes, history, lag)[0]), lag) for lag in self.lags)

    def floor(self, chunks: list[int]) -> float:
        """What ``price`` cannot be below, without a simulation."""
        cuts = np.cumsum([[0, *chunks]], axis=1) / self.bounds.quantum
        return float(self.at_least(cuts)[0])

    def busy(self, chunks: list[int]) -> float:
        """Mean seconds that a rank works on these chunks."""
        sizes = np.array(chunks, dtype=np.float64)[:, None]
        history = self.history + np.concatenate([np.zeros((1, 1)), np.cumsum(sizes, axis=0)[:-1]])
        return float(self._rank_seconds(sizes, history)[0])

    def least_seconds(self, chunks: int) -> float:
        """No plan of so many chunks does better."""
        work = sum(
            share * m.least_work(float(self.rest), float(self.history), chunks)
            for share, m in self.cost.parts(self.layout.stages)
        )
        work += chunks * self.layout.stages * self.cost.pass_overhead_s
        return (1 + self.weight) * work / self.layout.ranks

    def at_least(self, cuts: Vector) -> Vector:
        """A lower bound of ``seconds`` in closed form: a rank's work and what fill and drain cannot hide."""
        chunk, history = self.tokens_of(cuts)
        stage = [np.where(chunk > 0, t, 0.0) for t in self.cost.stage_seconds(self.layout.stages, chunk, history)]
        ranks, own = self.layout.ranks, self.weight * self._rank_seconds(chunk, history)
        if isinstance(self.layout, FoldBack) and ranks > 1:
            last = (chunk > 0).sum(axis=0) - 1
            up = np.asarray(sum(stage[ranks + 1 :], np.zeros_like(chunk)))[last, np.arange(chunk.shape[1])]
            inner = (stage[ranks - 1] + stage[ranks]).sum(axis=0)
            return np.asarray(own + sum(t[0] for t in stage[: ranks - 1]) + inner + up)
        if ranks == 1:
            return np.asarray(own + stage[0].sum(axis=0))
        # Stage 0 up to some chunk, that chunk through the other stages, the rest on the last one.
        before, after = np.cumsum(stage[0], axis=0), np.cumsum(stage[-1][::-1], axis=0)[::-1]
        between = sum(stage[1:-1], np.zeros_like(chunk))
        return np.asarray(own + (before + between + after).max(axis=0))


def shapes(layout: Layout, chunks: int) -> Vector:
    """Relative times of the chunks of promising plans, one row each."""
    rise, fall = np.arange(chunks), np.arange(chunks)[::-1]
    if not isinstance(layout, FoldBack) or layout.ranks == 1 or chunks < 3:
        found = [np.ones(chunks)]
    elif layout.ranks == 2:
        # In logarithms, with a ceiling that no budget lets a chunk reach: long prompts have long plateaus.
        slopes = [(np.log(up), np.log(down)) for up in (1.25, 1.5, 2.0) for down in (1.5, 2.0)]
        logs = [np.minimum(rise * up, fall * down + (chunks - 1) * (up - down)) for up, down in slopes]
        logs += [np.minimum(rise * up, fall * down) for up, down in slopes]
        found = [np.exp(np.clip(log, -12.0, 12.0)) for log in logs]
        found += [np.minimum(rise, fall) + start for start in (0.5, 1.0, 2.0)]
    else:
        found = [np.minimum(rise, fall) + layout.ranks * start for start in (0.25, 0.5, 1.0)]
        found += [np.minimum(rise * up, fall * down) + layout.ranks / 2 for up, down in ((2, 1), (1, 2))]
        found.append(np.minimum(np.minimum(rise, fall), chunks / 4) + layout.ranks / 2)
    return np.array(found, dtype=np.float64)


def proposals(problem: Problem, chunks: int, rounds: int = 8) -> Vector:
    """The shapes as cuts, nearly legal: each cut is where the work done so far is the shape's share of all work.

    A chunk never exceeds the budget, so times are cut off there and the others stretched, until both hold.
    """
    model, rest, start = problem.cost.model, float(problem.rest), float(problem.history)
    fixed = model.pass_seconds(0.0, start)
    total = model.pass_seconds(rest, start) - fixed
    shape = shapes(problem.layout, chunks)
    largest, scale = np.full_like(shape, np.inf), (total + chunks * fixed) / shape.sum(axis=1, keepdims=True)
    for _ in range(rounds):
        times = np.minimum(shape * scale, largest)
        work = np.cumsum(np.maximum(times - fixed, 1e-3 * times), axis=1)
        reached = work[:, -1:].copy()
        scale = scale * total / reached
        work *= total / reached
        ends = np.minimum(model.chunk_for(work + fixed - model.pass_seconds(0.0, 0.0), np.full_like(work, start)), rest)
        begin = np.concatenate([np.zeros((len(ends), 1)), ends[:, :-1]], axis=1)
        largest = model.pass_seconds(np.full_like(begin, float(problem.bounds.highest)), begin + start)
        if np.all(ends - begin <= problem.bounds.highest * 1.01):
            break
    cuts = np.concatenate([np.zeros((len(ends), 1)), np.round(ends / problem.bounds.quantum)], axis=1)
    cuts[:, -1] = problem.units
    return cuts


def repair(cuts: Vector, least: int, most: int) -> Vector:
    """Move inner cuts as little as needed for every chunk to keep its bounds, if there is room."""
    n = cuts.shape[1] - 1
    for i in range(1, n):
        cuts[:, i] = np.clip(cuts[:, i], cuts[:, i - 1] + least, cuts[:, i - 1] + most)
    for i in range(n - 1, 0, -1):
        low, high = cuts[:, i + 1] - most, cuts[:, i + 1] - (least if i < n - 1 else 1)
        cuts[:, i] = np.clip(cuts[:, i], low, high)
    return cuts


@dataclass(frozen=True)
class Found:
    """A cut in quanta, its predicted seconds and the order's lag."""

    cuts: Vector
    seconds: float
    lag: int


def search(problem: Problem, extra: list[list[int]], tasks: int = TASKS) -> Found:
    """The best of ``extra`` (token cuts of known policies) and of the proposals, improved by local moves.

    Candidates whose lower bound is no better than the best so far are never simulated.
    """
    found: list[Found] = []
    least = np.inf

    def consider(group: Vector) -> None:
        nonlocal least
        promising = group[problem.at_least(group) < least]
        if len(promising):
            found.append(_best(problem, promising))
            least = min(least, found[-1].seconds)

    for chunks in extra:
        consider(np.ceil(np.cumsum([[0, *chunks]], axis=1) / problem.bounds.quantum))
    for n in problem.counts():
        if problem.least_seconds(n) >= least:
            break
        consider(repair(proposals(problem, n), problem.least, problem.most))
    found.sort(key=lambda f: f.seconds)
    return improve_best(problem, found[:3], tasks)


def improve_best(problem: Problem, starts: list[Found], tasks: int) -> Found:
    """Spend what the task budget allows on the best few, then pick the best lag."""
    best = starts[0]
    for start in starts:
        per_round = max(1, len(start.cuts) - 1) * problem.layout.stages * (3 if problem.weight else 1)
        better = improve(problem, start, tasks // len(starts) // per_round)
        best = min(best, better, key=lambda f: f.seconds)
    others = [Found(best.cuts, float(problem.seconds(best.cuts[None], lag)[0]), lag) for lag in problem.lags]
    return min([best, *others], key=lambda f: f.seconds)


def _best(problem: Problem, cuts: Vector) -> Found:
    seconds = problem.seconds(cuts, problem.lag)
    i = int(np.argmin(seconds))
    return Found(cuts[i], float(seconds[i]), problem.lag)


def improve(problem: Problem, start: Found, rounds: int) -> Found:
    """Move cuts one by one, in blocks and in smooth random patterns; halve the step when nothing helps."""
    random, best = np.random.default_rng(0), start
    step = max(1.0, problem.units / len(start.cuts) / 4)
    for _ in range(rounds if len(start.cuts) > 2 else 0):
        moved = _neighbours(best.cuts, step, problem, random)
        moved = moved[problem.at_least(moved) < best.seconds]
        found = _best(problem, moved) if len(moved) else best
        if found.seconds < best.seconds * (1 - 1e-6):
            best = found
        elif step <= 1:
            break
        else:
            step = max(1.0, step / 2)
    return best


def _neighbours(cuts: Vector, step: float, problem: Problem, random: np.random.Generator) -> Vector:
    n, inner = len(cuts), np.arange(1, len(cuts) - 1)
    if len(inner) > _MOVED:
        inner = np.sort(random.choice(inner, _MOVED, replace=False))
    single = (np.arange(n) == inner[:, None]).astype(np.float64)
    block = (np.arange(n) >= inner[:, None]).astype(np.float64)
    smooth = np.cumsum(random.normal(size=(32, n)), axis=1) / np.sqrt(n) * random.uniform(0.1, 2, (32, 1))
    moves = np.concatenate([single, block])
    large, small = max(1.0, round(step)), max(1.0, round(step / 3))
    shifts = [moves * large, moves * -large] + ([moves * small, moves * -small] if small < large else [])
    moved = cuts + np.concatenate(shifts)
    moved[:, -1] = cuts[-1]
    wild = cuts + np.round(smooth * step)
    wild[:, 0], wild[:, -1] = 0, cuts[-1]
    moved = np.concatenate([moved, repair(wild, problem.least, problem.most)])
    return moved[problem.legal(moved)]
