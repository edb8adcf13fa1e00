"""Which layers sit on which rank.

Linear: stage s on rank s. FoldBack: 2P virtual stages, stage s on rank s if s < P, else on rank 2P - 1 - s (seeds/003):
a chunk goes down through all ranks and back up, so the outer rank holds the first and the last layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from prefill_runtime.scheduler.errors import ParameterError


@dataclass(frozen=True)
class Layout(ABC):
    """``ranks`` pipeline positions, each of which hosts ``virtual`` stages."""

    ranks: int

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 256:
            raise ParameterError("ranks", self.ranks, "1 to 256")

    @property
    @abstractmethod
    def virtual(self) -> int:
        """Stages per rank."""

    @abstractmethod
    def rank_of(self, stage: int) -> int:
        """The rank that runs ``stage``."""

    @property
    @abstractmethod
    def inflight(self) -> int:
        """Chunks issued and not yet out of the last stage, by default."""

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual

    def stages_of(self, rank: int) -> list[int]:
        return [s for s in range(self.stages) if self.rank_of(s) == rank]

    @property
    def placement(self) -> list[int]:
        """The rank of every stage."""
        return [self.rank_of(s) for s in range(self.stages)]


class Linear(Layout):
    """One contiguous stage per rank: CPP, and DCPP with Dynamic chunks."""

    @property
    def virtual(self) -> int:
        return 1

    @property
    def inflight(self) -> int:
        return self.ranks  # vLLM's own rule

    def rank_of(self, stage: int) -> int:
        return stage


class FoldBack(Layout):
    """Two stages per rank, head and tail: VPP."""

    @property
    def virtual(self) -> int:
        return 2

    @property
    def inflight(self) -> int:
        return 2 * self.ranks - 1

    def rank_of(self, stage: int) -> int:
        return stage if stage < self.ranks else 2 * self.ranks - 1 - stage


def layout_of(ranks: int, virtual: int) -> Layout:
    """By the number of stages that each rank hosts."""
    kinds: dict[int, type[Layout]] = {1: Linear, 2: FoldBack}
    if virtual not in kinds:
        raise ParameterError("virtual stages", virtual, "1 or 2")
    return kinds[virtual](ranks)


LAYOUTS: dict[str, type[Layout]] = {"linear": Linear, "foldback": FoldBack}
