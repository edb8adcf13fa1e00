"""What a step holds beside its first prompt's chunk: the time budget.

A chunk that ends its prompt may be short, and a pass of its own for each short prompt would be mostly fixed cost. So
the prompts behind it may join the step up to a time at which the fixed part is a tenth, but never longer than a full
chunk takes: everybody in the step waits for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prefill_runtime.scheduler.chunkers import Bounds
from prefill_runtime.scheduler.cost import PipelineCost

_FIXED_PARTS = 10


@dataclass(frozen=True)
class Rest:
    """What a prompt still has to be computed."""

    history: int
    remaining: int


@dataclass(frozen=True)
class StepBudget:
    """Prices steps by the whole pipeline's work, which is what they take on a mean stage times the stages. Without a
    cost time has no limit, and tokens alone count.
    """

    bounds: Bounds
    stages: int
    cost: PipelineCost | None = None

    @property
    def fixed(self) -> float:
        """Seconds of a pass without tokens."""
        if self.cost is None:
            return 0.0
        return self.cost.model.batch_seconds([]) + self.stages * self.cost.pass_overhead_s

    def seconds(self, chunk: int, rest: Rest) -> float:
        """What a chunk of ``rest`` adds to a step."""
        if self.cost is None:
            return 0.0
        return self.cost.model.batch_seconds([(chunk, rest.history)]) - self.cost.model.batch_seconds([])

    def allowed(self, first: Rest) -> float:
        """Seconds of a step whose first prompt ends in it."""
        if self.cost is None:
            return math.inf
        full = self.fixed + self.seconds(self.bounds.highest, Rest(0, self.bounds.highest))
        return max(self.fixed + self.seconds(first.remaining, first), min(_FIXED_PARTS * self.fixed, full))

    def shares(self, first: Rest, others: Iterable[Rest], tokens: int) -> list[int]:
        """Tokens of ``others``, in order, in a step that ends ``first``; ``tokens`` is the room that it leaves.

        The first prompt that does not fit whole gets what fits, if that is a legal chunk, and ends the search: nobody
        overtakes it. So no more of ``others`` is looked at than the step holds.
        """
        shares: list[int] = []
        left = self.allowed(first) - self.fixed - self.seconds(first.remaining, first)
        if tokens < 1 or left <= 0:
            return shares
        for rest in others:
            added = self.seconds(rest.remaining, rest)
            if rest.remaining <= tokens and added <= left:
                shares.append(rest.remaining)
                tokens, left = tokens - rest.remaining, left - added
                if tokens < 1 or left <= 0:
                    break
                continue
            fits = math.inf if self.cost is None else self.cost.model.chunk_for(left, float(rest.history))
            part = int(min(fits, tokens, rest.remaining - 1)) // self.bounds.quantum * self.bounds.quantum
            if part >= self.bounds.lowest:
                shares.append(part)
            break
        return shares
