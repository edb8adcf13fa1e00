"""DP, PCP and TP as scenarios of the same cost model, so that seeds/002's second table can be discussed.

A model, not a measurement: each way of using P rank groups is priced with the same layer costs and stated overheads.

TP   all groups share every chunk: work / P plus one collective per chunk and layer
DP   every group serves its own requests with the whole model: work / 1, P requests at a time
PCP  the sequence is split over the groups (zig-zag, so causal work is even): work / P plus an exchange of all KV
PP   the simulator itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefill_runtime.scheduler.chunkers import Chunker
from prefill_runtime.scheduler.cost import PipelineCost
from prefill_runtime.scheduler.errors import at_least
from prefill_runtime.scheduler.simulate import Request


@dataclass(frozen=True)
class Interconnect:
    """What sharing costs, in seconds; whole model.

    collective_per_pass: fixed part of all collectives of one chunk. collective_per_token: the growing part (TP).
    exchange_per_token: per token of chunk and history: KV that PCP ranks show one another.
    """

    collective_per_pass: float = 0.0
    collective_per_token: float = 0.0
    exchange_per_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("collective_per_pass", "collective_per_token", "exchange_per_token"):
            at_least(name, getattr(self, name), 0)


@dataclass(frozen=True)
class Served:
    """What a scenario did with a list of requests."""

    name: str
    ttft: list[float]
    seconds: float
    tokens: int
    ranks: int

    @property
    def tokens_per_rank_second(self) -> float:
        return self.tokens / self.seconds / self.ranks


def tensor_parallel(
    cost: PipelineCost, ranks: int, requests: Sequence[Request], chunker: Chunker, net: Interconnect
) -> Served:
    """One server of P groups; every chunk on all of them."""

    def seconds(chunk: int, history: int) -> float:
        work = cost.model.pass_seconds(float(chunk), float(history)) / ranks + cost.pass_overhead_s
        return work + net.collective_per_pass + net.collective_per_token * chunk

    return _serve("TP", ranks, 1, requests, chunker, seconds)


def data_parallel(cost: PipelineCost, ranks: int, requests: Sequence[Request], chunker: Chunker) -> Served:
    """P servers, each with the whole model."""

    def seconds(chunk: int, history: int) -> float:
        return cost.model.pass_seconds(float(chunk), float(history)) + cost.pass_overhead_s

    return _serve("DP", ranks, ranks, requests, chunker, seconds)


def context_parallel(
    cost: PipelineCost, ranks: int, requests: Sequence[Request], chunker: Chunker, net: Interconnect
) -> Served:
    """One server; each chunk's tokens are dealt over the groups, which then need each other's KV."""

    def seconds(chunk: int, history: int) -> float:
        fixed = cost.model.pass_seconds(0.0, float(history))
        work = (cost.model.pass_seconds(float(chunk), float(history)) - fixed) / ranks
        return fixed + work + cost.pass_overhead_s + net.exchange_per_token * (chunk + history) * (ranks - 1) / ranks

    return _serve("PCP", ranks, 1, requests, chunker, seconds)


def _serve(
    name: str,
    ranks: int,
    servers: int,
    requests: Sequence[Request],
    chunker: Chunker,
    seconds: Callable[[int, int], float],
) -> Served:
    free = [min(r.arrival for r in requests)] * servers
    ttft = [0.0] * len(requests)
    for i in sorted(range(len(requests)), key=lambda i: requests[i].arrival):
        request = requests[i]
        server = min(range(servers), key=free.__getitem__)
        clock, history = max(free[server], request.arrival), request.history
        for chunk in chunker.cut(request.tokens, request.history):
            clock += seconds(chunk, history)
            history += chunk
        free[server] = clock
        ttft[i] = clock - request.arrival
    start = min(r.arrival for r in requests)
    tokens = sum(r.tokens for r in requests)
    return Served(name, ttft, max(free) - start, tokens, ranks)
