"""The finish time of one isolated request, in closed recurrence and for many cuts at once.

No event queue: the static order of each rank is known, so a chunk's times follow from its predecessor's. Rows of the
arrays are chunks, columns are candidate cuts; every step is one numpy operation over all candidates.

Linear: each rank takes the chunks in order; a chunk is issued when fewer than P are in flight.
FoldBack: rank r runs tail(k) right after head(k + P - 1 - r + lag), the innermost rank head and tail of a chunk
back to back. Receives are posted early and transfers hidden, so a transfer only delays its own chunk.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prefill_runtime.scheduler.cost import PipelineCost
from prefill_runtime.scheduler.layout import FoldBack, Layout

Vector = NDArray[np.float64]


def finish_seconds(layout: Layout, cost: PipelineCost, cuts: Vector, lag: int = 1) -> Vector:
    """TTFT of each candidate; ``cuts`` has shape (candidates, n + 1), from the cached prefix to the prompt's end.

    A chunk of zero tokens is no chunk: it takes no time. So candidates of different length go into one array.
    """
    chunk = np.ascontiguousarray(np.diff(cuts, axis=1).T)
    history = np.ascontiguousarray(cuts[:, :-1].T)
    there = chunk > 0
    stage = [np.where(there, s, 0.0) for s in cost.stage_seconds(layout.stages, chunk, history)]
    hop = np.where(there, cost.transfer.seconds(chunk), 0.0)
    if isinstance(layout, FoldBack) and layout.ranks > 1:
        return _foldback(layout.ranks, stage, hop, lag)
    if isinstance(layout, FoldBack):
        return np.asarray(np.sum(stage[0] + stage[1], axis=0))
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
            done = k - (last - r + lag)
            if 0 <= done < chunks:
                free[r] = np.maximum(up[done] + hop[done], free[r]) + stage[2 * ranks - 1 - r][done]
                up[done] = free[r]
    return up[-1]
