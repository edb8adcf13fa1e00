"""Prompts that share a plan: lengths a few percent apart are cut at the same relative positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from prefill_runtime.scheduler.chunkers import Bounds
from prefill_runtime.scheduler.errors import ParameterError

RATIO = 1.05  # between neighbours: a shared plan then loses less than what measured costs are wrong by
_STRIDES = (16, 8, 4, 2, 1)


class Wanted(NamedTuple):
    """A plan's question: a whole prompt, its cached tokens, and how many prompts wait (``Planner.plan``)."""

    tokens: int
    history: int = 0
    weight: float = 0.0


@dataclass(frozen=True)
class Grid:
    """Lengths ``ratio`` apart, counted in quanta; 1 gives each length a plan of its own."""

    bounds: Bounds
    ratio: float = RATIO

    def __post_init__(self) -> None:
        if not 1 <= self.ratio < 2:
            raise ParameterError("ratio", self.ratio, "1 <= ratio < 2")

    def nearest(self, wanted: Wanted) -> Wanted:
        """The prompt whose plan serves this one."""
        if self.ratio == 1:
            return wanted
        rest = min(self._length(wanted.tokens - wanted.history), self.bounds.max_model_len)
        history = min(self._length(wanted.history) if wanted.history else 0, self.bounds.max_model_len - rest)
        return Wanted(rest + history, history, wanted.weight)

    def ahead(self) -> list[Wanted]:
        """Every length worth a plan, coarse to fine and long ones first: wherever it is cut off, what is there
        covers the whole range.
        """
        if self.ratio == 1:
            return []
        lowest, highest = self._level(2 * self.bounds.lowest), self._level(self.bounds.max_model_len)
        lengths: dict[Wanted, None] = {}
        for stride in _STRIDES:
            for level in range(highest, lowest - 1, -stride):
                lengths.setdefault(Wanted(min(self._at(level), self.bounds.max_model_len)))
        return list(lengths)

    def _length(self, tokens: int) -> int:
        return self._at(self._level(tokens))

    def _level(self, tokens: int) -> int:
        return round(math.log(tokens / self.bounds.quantum, self.ratio))

    def _at(self, level: int) -> int:
        return max(1, round(self.bounds.quantum * self.ratio**level))
