"""The finish time of one isolated request, in closed recurrence and for many cuts at once.

No event queue: the static order of each rank is known, so a chunk's times follow from its predecessor's. Rows of the
arrays are chunks, columns are candidate cuts; every step is one numpy operation over all candidates.

Linear: each rank takes the chunks in order; a chunk is issued when fewer than P are in flight.
FoldBack: each rank keeps its static order (``order.py``). Receives are posted early and transfers hidden, so a transfer
only delays its own chunk.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from prefill_runtime.scheduler.cost import PipelineCost
from prefill_runtime.scheduler.layout import FoldBack, Layout
from prefill_runtime.scheduler.order import distance

Vector = NDArray[np.float64]


OLDEST = -1  # in place of a lag: dispatch by the simulator's rule, oldest chunk first; known here for P = 2


def finish_seconds(layout: Layout, cost: PipelineCost, chunk: Vector, history: Vector, lag: int = 1) -> Vector:
    """TTFT of each candidate; row k of ``chunk`` and ``history`` is every candidate's k-th chunk.

    A chunk of zero tokens is no chunk: it takes no time. So candidates of different length go into one array.
    """
    there = chunk > 0
    stage = [np.where(there, s, 0.0) for s in cost.stage_seconds(layout.stages, chunk, history)]
    return finish_of_passes(layout, stage, np.where(there, cost.transfer.seconds(chunk), 0.0), lag)


def finish_of_passes(layout: Layout, stage: list[Vector], hop: Vector, lag: int = 1) -> Vector:
    """The same from the seconds that each chunk takes on each stage, and between two of them."""
    if layout.ranks == 1:
        return np.asarray(np.sum(sum(stage), axis=0))
    if isinstance(layout, FoldBack):
        if lag == OLDEST and layout.ranks == 2:
            return _oldest_of_two(stage, hop, layout.inflight)
        return _foldback(layout.ranks, stage, hop, max(lag, 0))
    return _linear(layout, stage, hop)


def _linear(layout: Layout, stage: list[Vector], hop: Vector) -> Vector:
    chunks, candidates = hop.shape
    free = [np.zeros(candidates) for _ in stage]
    out: list[Vector] = []
    for k in range(chunks):
        ready = out[k - layout.inflight] if k >= layout.inflight else np.zeros(candidates)
        for s, seconds in enumerate(stage):
            if s:
                ready = ready + hop[k]
            ready = np.maximum(ready, free[s]) + seconds[k]
            free[s] = ready
        out.append(ready)
    return out[-1]


def _foldback(ranks: int, stage: list[Vector], hop: Vector, lag: int) -> Vector:
    """At step k every rank runs head k, then the tail that its order puts behind it; then the drain."""
    chunks = len(hop)
    free = [np.zeros(hop.shape[1]) for _ in range(ranks)]
    up: list[Vector] = [free[0]] * chunks  # when chunk k has left the rank that ran it last
    last = ranks - 1
    for k in range(chunks + last + lag):
        if k < chunks:
            ready = free[0]
            for r in range(last):
                free[r] = np.maximum(ready, free[r]) + stage[r][k]
                ready = free[r] + hop[k]
            free[last] = np.maximum(ready, free[last]) + (stage[last][k] + stage[ranks][k])
            up[k] = free[last]
        for r in range(last - 1, -1, -1):
            done = k - distance(ranks, r, lag)
            if 0 <= done < chunks:
                free[r] = np.maximum(up[done] + hop[done], free[r]) + stage[2 * ranks - 1 - r][done]
                up[done] = free[r]
    return up[-1]


def _oldest_of_two(stage: list[Vector], hop: Vector, inflight: int) -> Vector:
    """FoldBack on two ranks when rank 0 decides while it runs: the oldest tail if one is ready, else the next head."""
    chunks, candidates = hop.shape
    column = np.arange(candidates)
    heads, tails = np.zeros(candidates, dtype=np.int64), np.zeros(candidates, dtype=np.int64)
    clock, inner = np.zeros(candidates), np.zeros(candidates)
    back = np.full((chunks + 1, candidates), np.inf)  # when each chunk is back at rank 0
    for _ in range(2 * chunks):
        tail_ready = back[tails, column]
        feed = (heads < chunks) & (heads - tails < inflight) & (tail_ready > clock * (1 + 1e-9) + 1e-12)
        k = np.where(feed, heads, np.minimum(tails, chunks - 1))
        start = np.where(feed, clock, np.maximum(clock, tail_ready))
        clock = start + np.where(feed, stage[0][k, column], stage[3][k, column])
        fold = np.maximum(clock + hop[k, column], inner) + stage[1][k, column] + stage[2][k, column]
        inner = np.where(feed, fold, inner)
        back[k, column] = np.where(feed, inner + hop[k, column], back[k, column])
        heads, tails = heads + feed, tails + ~feed
    return clock
