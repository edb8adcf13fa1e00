"""Policies that cut a whole prompt at once, and how such a plan is followed chunk by chunk."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray
from prefill_runtime.scheduler.chunkers import Bounds, Chunker, Fixed
from prefill_runtime.scheduler.cost import CostModel, PipelineCost
from prefill_runtime.scheduler.errors import ParameterError, at_least

Vector = NDArray[np.float64]
_REMEMBERED = 256  # plans of prompts in flight; older ones are made again when asked for


class Cutter(Chunker):
    """A policy with a plan per prompt. The plan is a list of cut positions, so a chunk that came out smaller than
    planned (another request took part of the budget) does not upset what follows: the next one goes to the next cut.
    """

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self._plans: OrderedDict[Hashable, list[int]] = OrderedDict()

    def adopt(self, other: Chunker) -> None:
        """Prompts that ``other`` has begun to cut keep its cuts."""
        if isinstance(other, Cutter):
            self._plans = OrderedDict(other._plans)

    @abstractmethod
    def plan_chunks(self, tokens: int, history: int) -> list[int]:
        """Legal chunks that sum to tokens - history."""

    def propose(self, history: int, remaining: int) -> float:
        end = history + remaining
        ends = self._plans.get(self._request)
        if ends is None or not ends[0] < history < end or ends[-1] != end:
            ends = [history]
            for chunk in self.plan_chunks(end, history):
                ends.append(ends[-1] + chunk)
            self._plans[self._request] = ends
            if len(self._plans) > _REMEMBERED:
                self._plans.popitem(last=False)
        return next(cut for cut in ends if cut > history) - history

    def keeps_tail(self, history: int, tail: int) -> bool:
        return history in self._plans.get(self._request, ())  # a planned cut stays


class Seq1F1B(Cutter):
    """k segments of equal work (FLOPs), cut from the end backwards (Seq1F1B)."""

    def __init__(self, bounds: Bounds, model: CostModel, segments: int | None = None) -> None:
        super().__init__(bounds)
        self.model, self.segments = model, segments
        if segments is not None:
            at_least("segments", segments, 1)

    def plan_chunks(self, tokens: int, history: int) -> list[int]:
        rest, start = tokens - history, float(history)
        fewest = -(-rest // self.bounds.highest)
        count = self.segments or max(fewest, 2)
        for segments in range(count, count + 4 * fewest + 8):
            chunks = self._segments(rest, start, segments)
            if max(chunks) <= self.bounds.max_tokens:
                return chunks  # else: the first segment is the longest; more of them until it fits the budget
        return Fixed(self.bounds).cut(tokens, history)

    def _segments(self, rest: int, start: float, count: int) -> list[int]:
        fixed, unit = self.model.pass_seconds(0.0, start), self.bounds.quantum
        work = (self.model.pass_seconds(float(rest), start) - fixed) * np.arange(1, count) / count
        cuts = self.model.chunk_for(work + fixed - self.model.pass_seconds(0.0, 0.0), np.full(count - 1, start))
        ends, after = [rest], rest
        for cut in np.atleast_1d(cuts)[::-1]:
            aligned = int(cut) // unit * unit
            if self.bounds.lowest <= aligned <= after - self.bounds.lowest:
                ends.append(aligned)
                after = aligned
        return [int(x) for x in np.diff([0, *ends[::-1]])]


class TeraPipe(Cutter):
    """Minimise sum t_i + (P - 1) max t_i over slices of multiples of ``unit`` (TeraPipe), exactly.

    For a bound m on the largest slice time a dynamic programme gives the least sum S(m), a falling step function of
    m. Bisection on the sorted slice times skips every m between two with the same S, and every m whose best
    conceivable value S(high) + (P - 1) m(low) is no better than the best found.
    """

    def __init__(self, bounds: Bounds, cost: PipelineCost, ranks: int, unit: int | None = None) -> None:
        super().__init__(bounds)
        at_least("ranks", ranks, 1)
        self.cost, self.ranks, self.unit = cost, ranks, unit
        if unit is not None and (unit < bounds.quantum or unit % bounds.quantum or unit > bounds.highest):
            allowed = f"a multiple of {bounds.quantum} up to {bounds.highest}"
            raise ParameterError("unit", unit, allowed)

    def plan_chunks(self, tokens: int, history: int) -> list[int]:
        rest = tokens - history
        unit = self.unit or self._unit(rest)
        ends = np.minimum(np.arange(-(-rest // unit) + 1) * unit, rest)
        times = self._times(ends, history)
        values = np.unique(times[np.isfinite(times)])
        best, cut = float("inf"), [0, len(ends) - 1]
        pending = [(0, len(values) - 1)]
        sums: dict[int, tuple[float, list[int]]] = {}

        def least(i: int) -> tuple[float, list[int]]:
            if i not in sums:
                sums[i] = _shortest(times, float(values[i]))
            return sums[i]

        while pending:
            low, high = pending.pop()
            for i in (low, high):
                total, nodes = least(i)
                if total + (self.ranks - 1) * values[i] < best:
                    best, cut = total + (self.ranks - 1) * float(values[i]), nodes
            worth = least(high)[0] + (self.ranks - 1) * values[min(low + 1, high)] < best
            if high - low > 1 and worth and least(low)[0] > least(high)[0]:
                middle = (low + high) // 2
                pending += [(low, middle), (middle, high)]
        return [int(x) for x in np.diff(ends[cut])]

    def _unit(self, rest: int) -> int:
        """At most 128 slices: the programme is quadratic in them."""
        quantum = self.bounds.quantum
        return min(max(1, -(-rest // (128 * quantum))) * quantum, self.bounds.highest)

    def _times(self, ends: NDArray[np.int64], history: int) -> Vector:
        """Stage seconds of every slice [i, j), infinite where a bound forbids it."""
        chunk = (ends[None, :] - ends[:, None]).astype(np.float64)
        before = np.broadcast_to(ends[:, None] + history, chunk.shape).astype(np.float64)
        seconds = self.cost.model.pass_seconds(chunk, before) / self.ranks + self.cost.pass_overhead_s
        last = np.arange(len(ends)) == len(ends) - 1
        legal = (chunk > 0) & (chunk <= self.bounds.max_tokens) & ((chunk >= self.bounds.lowest) | last[None, :])
        return np.where(legal, seconds, np.inf)


def _shortest(times: Vector, largest: float) -> tuple[float, list[int]]:
    """Least sum of slice times up to ``largest`` from 0 to the end, and the nodes on the way."""
    nodes = len(times)
    allowed = np.where(times <= largest, times, np.inf)
    total, before = np.full(nodes, np.inf), np.zeros(nodes, dtype=np.int64)
    total[0] = 0.0
    for j in range(1, nodes):
        options = total[:j] + allowed[:j, j]
        before[j] = int(np.argmin(options))
        total[j] = options[before[j]]
    path, node = [nodes - 1], nodes - 1
    while node and np.isfinite(total[node]):
        node = int(before[node])
        path.append(node)
    return float(total[-1]), path[::-1]
