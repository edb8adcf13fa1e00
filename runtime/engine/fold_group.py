"""The pipeline group as a rank of a folded pipeline sees it: as the virtual stage that is at work.

vLLM asks the group who is first and last, and while it loads also which of how many stages this is. With the answers of
stage s of 2P every model of vLLM places its layers, embedding, norm and head as it would on a rank of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from vllm.distributed.parallel_state import GroupCoordinator


class FoldedGroup:
    """Mixin of a pipeline group, which ``fold`` put before its class."""

    device_group: Any
    group_ranks: list[list[int]]
    rank: int
    rank_in_group: int
    world_size: int
    fold_stage: int
    fold_stages: int

    @property
    def is_first_rank(self) -> bool:
        return self.fold_stage == 0

    @property
    def is_last_rank(self) -> bool:
        return self.fold_stage == self.fold_stages - 1

    @property
    def at_tail(self) -> bool:
        return 2 * self.fold_stage >= self.fold_stages

    def channel_group(self, name: str) -> Any:
        """A process group of its own for the ranks of this pipeline. All ranks of the engine call this together."""
        backend, mine = dist.get_backend(self.device_group), None
        for ranks in self.group_ranks:
            made = dist.new_group(ranks, backend=backend, group_desc=name)
            mine = made if self.rank in ranks else mine
        return mine

    @contextmanager
    def answering_for(self, stage: int, *, loading: bool = False) -> Iterator[None]:
        """``loading``: rank and size, too, are those of the virtual stage."""
        before = self.fold_stage, self.rank_in_group, self.world_size
        self.fold_stage = stage
        if loading:
            self.rank_in_group, self.world_size = stage, self.fold_stages
        try:
            yield
        finally:
            self.fold_stage, self.rank_in_group, self.world_size = before


def fold(group: GroupCoordinator) -> Any:
    """The instance itself, which vLLM keeps in a module and hands out everywhere. Answers for the head stage until
    told otherwise.
    """
    group.__class__ = type("FoldedGroup", (FoldedGroup, type(group)), {})
    group.fold_stage, group.fold_stages = group.rank_in_group, 2 * group.world_size
    return group
