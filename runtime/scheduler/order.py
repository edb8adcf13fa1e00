"""What a rank of a folded pipeline runs next: known before anything runs, so nobody has to decide meanwhile.

Rank r runs tail(k) right behind head(k + P - 1 - r + lag), the innermost rank both passes of a batch back to back.
The distance never grows with the rank, so no two ranks wait for each other, whatever transfers do. A batch is
whatever the pipeline is given, of one prompt or of several: a drain is filled by the heads that come next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from prefill_runtime.scheduler.errors import ParameterError, at_least
from prefill_runtime.scheduler.layout import FoldBack, Layout

LAGS = (0, 1)
"""Vanilla and asynchronous order; the chunks in flight, P + lag, stay within FoldBack's default."""


def usual_lag(ranks: int) -> int:
    """Plans whose chunks double need a chunk of slack on two ranks; with more ranks the distance has enough of it."""
    return 1 if ranks == 2 else 0


def distance(ranks: int, rank: int, lag: int) -> int:
    """Heads that a rank runs between a batch's head and its tail, the head before the tail included."""
    return 0 if rank == ranks - 1 else ranks - 1 - rank + lag


class RankOrder:
    """The tails that are due, as heads come. Batches are numbered by the caller, in rising order."""

    def __init__(self, ranks: int, rank: int, lag: int) -> None:
        at_least("lag", lag, 0)
        if not 0 <= rank < ranks:
            raise ParameterError("rank", rank, f"0 to {ranks - 1}")
        self._distance = distance(ranks, rank, lag)
        self._open: deque[int] = deque()

    def head(self, batch: int) -> Iterator[int]:
        """The head of ``batch`` has run; what is to be run right behind it."""
        self._open.append(batch)
        while len(self._open) > self._distance:
            yield self._open.popleft()

    def flush(self, upto: int) -> Iterator[int]:
        """No more heads for now: the tails up to that of ``upto``."""
        while self._open and self._open[0] <= upto:
            yield self._open.popleft()


def static_order(layout: Layout, chunks: int, lag: int = 1, request: int = 0) -> list[list[tuple[int, int, int]]]:
    """The order of one prompt as lists of (request, chunk, stage) per rank, for the simulator."""
    if not isinstance(layout, FoldBack):
        return [[(request, k, r) for k in range(chunks)] for r in range(layout.ranks)]
    orders: list[list[tuple[int, int, int]]] = []
    for rank in range(layout.ranks):
        head, tail = layout.stages_of(rank)
        tails, order = RankOrder(layout.ranks, rank, lag), list[tuple[int, int, int]]()
        for k in range(chunks):
            order.append((request, k, head))
            order += [(request, done, tail) for done in tails.head(k)]
        order += [(request, done, tail) for done in tails.flush(chunks - 1)]
        orders.append(order)
    return orders
