"""A batch for the tail pass: what the head's runner may change must not be shared with the tail's.

Each runner keeps the lists of KV blocks that a SchedulerOutput brings and makes them longer later on. Nothing else of
it is changed, so only those lists are copied: of a 512K prompt's token ids there is one copy.
"""

from __future__ import annotations

import copy
from typing import Any

Blocks = tuple[list[int], ...]


def for_tail(output: Any) -> Any:
    """A SchedulerOutput with block lists of its own."""
    made = copy.copy(output)
    made.scheduled_new_reqs = [_with_own_blocks(request) for request in output.scheduled_new_reqs]
    cached = made.scheduled_cached_reqs = copy.copy(output.scheduled_cached_reqs)
    cached.new_block_ids = [None if blocks is None else _own(blocks) for blocks in cached.new_block_ids]
    return made


def _with_own_blocks(request: Any) -> Any:
    made = copy.copy(request)
    made.block_ids = _own(request.block_ids)
    return made


def _own(blocks: Blocks) -> Blocks:
    return tuple(list(group) for group in blocks)
