"""Lower bounds: what no order of the same chunks, and no cut of the same prompt, can beat.

A rank cannot start before a first chunk has passed the stages before its own, has all its work to do, and after its
last task the last chunk still has to pass the stages after. So makespan >= head + work + tail for every rank, with
the least head and tail any first and last chunk can have (one token). With arrivals the same holds for the requests
that come after any given moment.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefill_runtime.scheduler.chunkers import Bounds
from prefill_runtime.scheduler.cost import PipelineCost
from prefill_runtime.scheduler.layout import FoldBack, Layout
from prefill_runtime.scheduler.simulate import Request

_MOST = 4096  # chunks; beyond it the bound no longer falls


def run_bound(layout: Layout, cost: PipelineCost, requests: Sequence[Request], cuts: Sequence[Sequence[int]]) -> float:
    """No order of these chunks finishes all requests earlier; seconds from the first arrival."""
    work = [_rank_work(layout, cost, r.history, cut) for r, cut in zip(requests, cuts, strict=True)]
    ends = [_ends(layout, cost, r) for r in requests]
    start = min(r.arrival for r in requests)
    late = sorted(range(len(requests)), key=lambda i: -requests[i].arrival)
    total, head, tail = [0.0] * layout.ranks, [float("inf")] * layout.ranks, [float("inf")] * layout.ranks
    best = 0.0
    for i in late:
        for rank in range(layout.ranks):
            total[rank] += work[i][rank]
            head[rank] = min(head[rank], ends[i][rank][0])
            tail[rank] = min(tail[rank], ends[i][rank][1])
            best = max(best, requests[i].arrival - start + head[rank] + total[rank] + tail[rank])
    return best


def prompt_bound(layout: Layout, cost: PipelineCost, tokens: int, history: int, bounds: Bounds) -> float:
    """No legal cut of this prompt, in whatever order, finishes earlier.

    For every number of chunks n: work / P, plus what n chunks cannot hide. More chunks cost more passes, fewer leave
    more exposed; the least over n is the bound.
    """
    rest = tokens - history
    n = max(1, -(-rest // bounds.max_tokens))
    best = float("inf")
    while True:
        least = cost.model.least_work(float(rest), float(history), n) + n * layout.stages * cost.pass_overhead_s
        if least / layout.ranks >= best * (1 - 1e-6) or n > min(rest, _MOST):
            return best
        last = n + n // 100  # numbers of chunks taken together: the work of the fewest, the exposure of the most
        best = min(best, max(_uneven(layout, cost, tokens, history, n), _even(layout, cost, least, last)))
        n = last + 1


def _uneven(layout: Layout, cost: PipelineCost, tokens: int, history: int, n: int) -> float:
    """Head, work and tail of the worst rank, whatever the shares."""
    least = [share * m.least_work(float(tokens - history), float(history), n) for share, m in cost.parts(layout.stages)]
    values = []
    for rank, (head, tail) in enumerate(_ends(layout, cost, Request(tokens, history=history))):
        stages = layout.stages_of(rank)
        values.append(head + sum(least[s] for s in stages) + n * len(stages) * cost.pass_overhead_s + tail)
    return max(values)


def _even(layout: Layout, cost: PipelineCost, least: float, n: int) -> float:
    """With equal shares: what n chunks of any sizes cannot hide.

    Linear: the largest chunk, at least the mean, passes P - 1 more stages: (S + (P - 1) S / n) / P.
    FoldBack: let E / 2P be the time lost at the innermost rank. It has chunk k only after the outer rank has done
    heads 0..k, so (P - 1) c_k <= E1 + c_0 + .. + c_(k-1), and likewise from the end. So prefix sums grow at most by
    g = P / (P - 1) a chunk, and S <= E (g^m - 1) for n = 2 m, a little more for odd n.
    """
    ranks = layout.ranks
    if ranks == 1:
        return least
    if not cost.even(layout.stages):
        return 0.0
    if not isinstance(layout, FoldBack):
        return least * (1 + (ranks - 1) / n) / ranks
    growth, half = ranks / (ranks - 1), min(n // 2, 300)
    reach = growth**half - 1 + (growth**half / (2 * (ranks - 1)) if n % 2 else 0)
    return least / ranks + least / reach / (2 * ranks)


def _rank_work(layout: Layout, cost: PipelineCost, history: int, cut: Sequence[int]) -> list[float]:
    work = [0.0] * layout.ranks
    for chunk in cut:
        for stage, seconds in enumerate(cost.stage_seconds(layout.stages, float(chunk), float(history))):
            work[layout.rank_of(stage)] += seconds
        history += chunk
    return work


def _ends(layout: Layout, cost: PipelineCost, request: Request) -> list[tuple[float, float]]:
    """Per rank: the least time before its first and after its last task."""
    first = cost.stage_seconds(layout.stages, 1.0, float(request.history))
    last = cost.stage_seconds(layout.stages, 1.0, float(request.tokens - 1))
    ends = []
    for rank in range(layout.ranks):
        stages = layout.stages_of(rank)
        ends.append((sum(first[: stages[0]]), sum(last[stages[-1] + 1 :])))
    return ends
