"""The planner: for one prompt and one pipeline the best cut, why it is the best, and how far it is from the bound.

``seed`` answers at once from closed forms: for the scheduling path, which must never wait. ``plan`` searches and is
meant to run beside it (``search_process``); the scheduler asks ``Planned`` for chunks and gets the seed until the plan
is there. Both are compared with Fixed chunks before they are used.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from prefill_runtime.scheduler.bound import prompt_bound
from prefill_runtime.scheduler.chunkers import Bounds, Dynamic, Fixed, Queue
from prefill_runtime.scheduler.cost import PipelineCost
from prefill_runtime.scheduler.cutters import Cutter
from prefill_runtime.scheduler.errors import ParameterError, at_least
from prefill_runtime.scheduler.grid import Grid, Wanted
from prefill_runtime.scheduler.layout import Layout
from prefill_runtime.scheduler.order import LAGS
from prefill_runtime.scheduler.search import TASKS, Problem, proposals, repair, search

Key = TypeVar("Key", int, str)
_SWEEP = (1.0, 0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)  # of the budget: 64K, 48K, 32K, 24K .. 4K
_SEEDED = 5  # numbers of chunks that a seed considers
_MAX_SWEPT = 256  # a Fixed size that makes more chunks than this is no candidate
_QUICK = 1024  # chunk-stage steps: what may be priced on the scheduling path, about a millisecond


@dataclass(frozen=True)
class Plan:
    """A cut and what the model says of it.

    policy: whose cut it is. seconds: predicted TTFT. rank_seconds: busy time of a rank. bound: no cut can beat this
    TTFT. fixed: the best Fixed size of the sweep and its predicted TTFT. lag: the order for FoldBack. weight: what
    the plan minimises is seconds + weight * what it delays the next prompt by, 0 for an idle pipeline.
    """

    chunks: tuple[int, ...]
    policy: str
    seconds: float
    rank_seconds: float
    bound: float
    fixed: tuple[int, float]
    lag: int
    weight: float

    @property
    def gap(self) -> float:
        """Above the bound, as a share of it."""
        return self.seconds / self.bound - 1

    @property
    def explanation(self) -> str:
        size, seconds = self.fixed
        gain = 1 - self.seconds / seconds
        text = (
            f"{self.policy}: {len(self.chunks)} chunks from {min(self.chunks)} to {max(self.chunks)} tokens; "
            f"finishes in {self.seconds:.4g} s, {gain:.1%} less than the best fixed size ({size} tokens, "
            f"{seconds:.4g} s); no cut can beat {self.bound:.4g} s, so at most {self.gap / (1 + self.gap):.1%} is left"
        )
        if self.weight:
            text += f"; each second by which it delays the next prompt was priced at {self.weight:g} s"
        return text


class Planner:
    """Plans for one pipeline. Immutable but for its cache, so it may be used from a worker thread.

    doubt: what ``cost`` is off by, relative; unequal chunks have to gain more than that over a Fixed size.
    """

    def __init__(
        self,
        layout: Layout,
        cost: PipelineCost,
        bounds: Bounds,
        *,
        orders: tuple[int, ...] = LAGS,
        tasks: int = TASKS,
        doubt: float = 0.0,
    ) -> None:
        cost.parts(layout.stages)  # complain now, not in the middle of a request
        self.layout, self.cost, self.bounds, self.orders, self.tasks = layout, cost, bounds, orders, tasks
        self.doubt = doubt
        if not cost.model.pass_seconds(float(bounds.max_tokens), 0.0) > cost.model.pass_seconds(0.0, 0.0):
            raise ParameterError("cost of a token", 0.0, "> 0, else there is nothing to plan")

    def problem(self, tokens: int, history: int = 0, weight: float = 0.0) -> Problem:
        at_least("history", history, 0)
        at_least("prompt_tokens", tokens, history + 1)
        if tokens > self.bounds.max_model_len:
            raise ParameterError("prompt_tokens", tokens, f"<= max_model_len = {self.bounds.max_model_len}")
        return Problem(self.layout, self.cost, self.bounds, tokens, history, weight, self.orders)

    def seed(self, tokens: int, history: int = 0, weight: float = 0.0) -> list[int]:
        """A good cut in about a millisecond: the shape and count with the least closed-form finish time, or Fixed."""
        problem = self.problem(tokens, history)
        counts = problem.counts()
        best, least = np.zeros((1, 2)), np.inf
        for n in counts[:: max(1, -(-len(counts) // _SEEDED))]:
            cuts = proposals(problem, n, rounds=3)
            options = problem.at_least(cuts)
            i = int(np.argmin(options))
            if options[i] < least:
                best, least = cuts[i : i + 1], float(options[i])
        shaped = _sizes(problem, repair(best, problem.least, problem.most)[0])
        return self._or_fixed(shaped, tokens, history, weight)

    def scaled(self, chunks: Sequence[int], wanted: Wanted) -> list[int]:
        """The cut of a prompt of nearly this length: equal chunks again, else positions scaled and aligned, or Fixed.

        Equal chunks keep their size, not their number: one more token would make two chunks of one quantum into one of
        two, twice as long as all others.
        """
        problem = self.problem(wanted.tokens, wanted.history)
        if sum(chunks) == problem.rest:
            return list(chunks)
        if len({*chunks[:-1]}) == 1 and chunks[-1] <= chunks[0]:
            return self._or_fixed(Fixed(self.bounds, chunks[0]).cut(wanted.tokens, wanted.history), *wanted)
        ends = np.cumsum([0, *chunks]) * (problem.rest / sum(chunks))
        cuts = np.round(ends / self.bounds.quantum)[None, :]
        cuts[:, -1] = problem.units
        cuts = repair(cuts, problem.least, problem.most)
        own = _sizes(problem, cuts[0]) if problem.legal(cuts)[0] else self._walk([int(e) for e in ends[1:]], wanted)
        return self._or_fixed(own, *wanted)

    def _walk(self, ends: list[int], wanted: Wanted) -> list[int]:
        """From cut to cut in legal steps, where as many chunks as before cannot hold the prompt."""
        chunks: list[int] = []
        position, end = wanted.history, wanted.tokens
        while position < end:
            to = next((e for e in ends if wanted.history + e > position), end)
            chunks.append(self.bounds.fit(wanted.history + to - position, position, end - position))
            position += chunks[-1]
        return chunks

    def _or_fixed(self, own: list[int], tokens: int, history: int, weight: float) -> list[int]:
        """``own`` unless a Fixed size is predicted to be as good. Sizes too small to be priced here are left out."""
        problem, steps = self.problem(tokens, history, weight), self.layout.stages * (3 if weight else 1)
        fixed = {
            c.tokens: c.cut(tokens, history)
            for c in self._sweep(tokens - history)
            if (tokens - history) / c.tokens * steps <= _QUICK
        }
        if len(own) * steps > _QUICK or not fixed:
            return own
        return fixed.get(self._equal(problem, fixed, problem.price(own)[0]), own)

    def _equal(self, problem: Problem, fixed: dict[int, list[int]], seconds: float) -> int:
        """The best Fixed size if it is as good as ``seconds`` within the doubt, else 0."""
        price = _promising(problem, fixed)
        size = min(price, key=lambda size: price[size])
        return size if price[size] <= (1 + self.doubt) * seconds else 0

    def plan(self, tokens: int, history: int = 0, weight: float = 0.0) -> Plan:
        """The best of a sweep of Fixed sizes, Dynamic, and a search.

        weight: how many prompts wait, each of which starts later by what this one keeps the pipeline busy.
        """
        at_least("weight", weight, 0)
        problem = self.problem(tokens, history, weight)
        fixed = {c.tokens: c.cut(tokens, history) for c in self._sweep(tokens - history)}
        named = {f"Fixed {size}": chunks for size, chunks in fixed.items()}
        dynamic = Dynamic(self.bounds, self.cost.model).cut(tokens, history)
        if len(dynamic) <= _MAX_SWEPT:
            named["Dynamic"] = dynamic
        value = _promising(problem, named)
        found = search(problem, [named[key] for key in sorted(value, key=lambda key: value[key])], self.tasks)
        value["Planned"], named["Planned"] = found.seconds, _sizes(problem, found.cuts)
        name = min(value, key=lambda key: value[key])
        if equal := self._equal(problem, fixed, value[name]):
            name = f"Fixed {equal}"
        chunks = named[name]
        alone = self.problem(tokens, history)
        seconds, lag = alone.price(chunks)
        swept = _promising(alone, fixed)
        size = min(swept, key=lambda s: swept[s])
        return Plan(
            chunks=tuple(chunks),
            policy=name,
            seconds=seconds,
            rank_seconds=alone.busy(chunks),
            bound=prompt_bound(self.layout, self.cost, tokens, history, self.bounds),
            fixed=(size, swept[size]),
            lag=lag,
            weight=weight,
        )

    def predict(self, chunks: list[int], history: int = 0) -> tuple[float, int]:
        """Finish seconds of any cut, in the model's own static order, and the lag of that order."""
        return self.problem(history + sum(chunks), history).price(chunks)

    def _sweep(self, rest: int) -> list[Fixed]:
        sizes = {max(self.bounds.quantum, int(self.bounds.max_tokens * part)) for part in _SWEEP}
        aligned = {size // self.bounds.quantum * self.bounds.quantum for size in sizes} | {self.bounds.lowest}
        fits = [size for size in aligned if rest / size <= _MAX_SWEPT and size >= self.bounds.lowest]
        return [Fixed(self.bounds, size) for size in sorted(fits or [self.bounds.highest])]


def _promising(problem: Problem, cuts: dict[Key, list[int]]) -> dict[Key, float]:
    """The predicted seconds of all cuts but those whose lower bound already rules them out."""
    found: dict[Key, float] = {}
    bounds = {key: problem.floor(chunks) for key, chunks in cuts.items()}
    for key in sorted(cuts, key=lambda key: bounds[key]):
        if not found or bounds[key] < min(found.values()):
            found[key] = problem.price(cuts[key])[0]
    return found


def _sizes(problem: Problem, cuts: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[int]:
    chunk, _ = problem.tokens_of(cuts[None, :])
    return [int(c) for c in chunk[:, 0] if c > 0]


class Planned(Cutter):
    """Our policy: plans per prompt length and prefix hit, shared by the prompts that ``grid`` takes together.

    A known plan answers at once; else the seed does, and the search is handed to ``later``, which calls ``learn`` or
    ``forget`` when it is done, from whatever thread. Without ``later`` it searches at once, which suits simulations.
    """

    def __init__(
        self,
        bounds: Bounds,
        planner: Planner,
        later: Callable[[Wanted], None] | None = None,
        ratio: float = 1.0,
        remembered: int = 1024,
    ) -> None:
        super().__init__(bounds)
        self.planner, self.later, self.grid, self.remembered = planner, later, Grid(bounds, ratio), remembered
        self._known: OrderedDict[Wanted, Sequence[int]] = OrderedDict()
        self._asked: set[Wanted] = set()
        self._weight = 0.0

    def plan_chunks(self, tokens: int, history: int) -> list[int]:
        if tokens - history <= self.bounds.lowest:
            return [tokens - history]  # nothing to cut
        wanted = Wanted(tokens, history, self._weight)
        shared = self.grid.nearest(wanted)
        plan = self._known.get(shared)
        if plan is None and self.later is None:
            plan = self.planner.plan(*shared).chunks
            self.learn(shared, plan)
        elif plan is None and self.later is not None and shared not in self._asked:
            self._asked.add(shared)
            self.later(shared)
        with contextlib.suppress(KeyError):
            self._known.move_to_end(shared)
        return self.planner.seed(*wanted) if plan is None else self.planner.scaled(plan, wanted)

    def learn(self, wanted: Wanted, chunks: Sequence[int]) -> None:
        """The plan that was asked for, or one made ahead."""
        self._known[wanted] = chunks
        self._asked.discard(wanted)
        if len(self._known) > self.remembered:
            self._known.popitem(last=False)

    def forget(self, wanted: Wanted) -> None:
        """There will be no answer: the next prompt like this one asks again."""
        self._asked.discard(wanted)


class Auto(Planned):
    """Planned for the queue at hand. While nobody else is there a prompt's own finish is all that counts. Prompts of
    its size that wait behind it (and those that will come while it runs, about load / (1 - load) of them) each start
    a period later; much shorter ones are done soon after it is, so its own finish counts once more for each of them.
    """

    LEVELS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0)  # few, so that plans are found again
    _queue = Queue(0)

    def observe(self, queue: Queue) -> None:
        self._queue = queue

    def plan_chunks(self, tokens: int, history: int) -> list[int]:
        queue, rest = self._queue, tokens - history
        load = min(queue.load, 0.95)
        alike = min(float(queue.waiting_requests), max(0, queue.waiting_tokens - rest) / rest)
        wanted = (alike + load / (1 - load)) / (1 + queue.waiting_requests - alike)
        self._weight = min(self.LEVELS, key=lambda level: abs(level - wanted))
        return super().plan_chunks(tokens, history)
