"""What every rank must hold, and how to split layers so that every rank can and none is slower than it need be.

Weights and KV follow the layers; the embedding sits with the first stage, norm, head and sampler with the last (on
FoldBack both are on rank 0); activations of the chunks in flight wait at each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefill_runtime.scheduler.errors import ParameterError, at_least
from prefill_runtime.scheduler.layout import FoldBack, Layout


@dataclass(frozen=True)
class ModelShape:
    """Sizes in bytes of a model's parts, per tensor-parallel rank.

    layer_bytes: weights of one layer. embedding_bytes, head_bytes: 0 for the head when it shares the embedding's
    matrix. kv_bytes: per token and layer. activation_bytes: per token, of one hand-over between stages.
    embedding_cost, head_cost: time of these parts in units of one layer's time.
    """

    layers: int
    layer_bytes: float
    kv_bytes: float
    activation_bytes: float = 0.0
    embedding_bytes: float = 0.0
    head_bytes: float = 0.0
    embedding_cost: float = 0.0
    head_cost: float = 0.0

    def __post_init__(self) -> None:
        at_least("layers", self.layers, 1)
        for name in ("layer_bytes", "kv_bytes", "activation_bytes", "embedding_bytes", "head_bytes"):
            at_least(name, getattr(self, name), 0)
        at_least("embedding_cost", self.embedding_cost, 0)
        at_least("head_cost", self.head_cost, 0)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank."""

    weights: float
    kv: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.activations


def rank_memory(
    layout: Layout, shape: ModelShape, split: Sequence[int], kv_tokens: int, max_chunk: int, inflight: int | None = None
) -> list[RankMemory]:
    """Memory of every rank for ``split`` (layers of each stage), a KV cache of ``kv_tokens`` and chunks in flight.

    A chunk in flight waits with its input and its output at every rank that it has not left.
    """
    _check_split(layout, shape, split)
    flying = layout.inflight if inflight is None else inflight
    ranks = []
    for rank in range(layout.ranks):
        stages = layout.stages_of(rank)
        layers = sum(split[s] for s in stages)
        weights = layers * shape.layer_bytes
        weights += shape.embedding_bytes * (0 in stages) + shape.head_bytes * (layout.stages - 1 in stages)
        held = (
            min(flying, layout.stages - stages[0]) if isinstance(layout, FoldBack) else min(flying, layout.ranks - rank)
        )
        activations = 2 * held * max_chunk * shape.activation_bytes
        ranks.append(RankMemory(weights, layers * kv_tokens * shape.kv_bytes, activations))
    return ranks


def check_fits(memory: Sequence[RankMemory], available: float) -> None:
    """Refuse a plan that some rank cannot hold."""
    for rank, needed in enumerate(memory):
        if needed.total > available:
            parts = f"weights {needed.weights / 2**30:.1f} + KV {needed.kv / 2**30:.1f}"
            text = f"{needed.total / 2**30:.1f} GiB ({parts} + activations {needed.activations / 2**30:.1f})"
            raise ParameterError(
                f"memory of rank {rank}", text, f"<= {available / 2**30:.1f} GiB; fewer KV tokens or more ranks"
            )


def stage_shares(layout: Layout, shape: ModelShape, split: Sequence[int]) -> tuple[float, ...]:
    """Each stage's share of the whole model's time, for ``PipelineCost``."""
    _check_split(layout, shape, split)
    cost = [float(n) for n in split]
    cost[0] += shape.embedding_cost
    cost[-1] += shape.head_cost
    return tuple(c / sum(cost) for c in cost)


def best_split(
    layout: Layout,
    shape: ModelShape,
    available: float = float("inf"),
    kv_tokens: int = 0,
    max_chunk: int = 0,
) -> tuple[int, ...]:
    """Layers of each stage: least time on the slowest rank, every rank within its memory.

    Ranks are filled by the layer that makes the least-loaded fitting rank slower by least; on FoldBack a rank's layers
    are divided so that its head and its tail pass take alike. Exact, because layers
    are alike: moving one from a rank filled later to another cannot lower the largest load.
    """
    if shape.layers < layout.stages:
        raise ParameterError("layers", shape.layers, f">= {layout.stages}, one per stage of the layout")
    extra = [0.0] * layout.ranks
    extra[layout.rank_of(0)] += shape.embedding_cost
    extra[layout.rank_of(layout.stages - 1)] += shape.head_cost
    room = _layer_room(layout, shape, available, kv_tokens, max_chunk)
    if sum(room) < shape.layers:
        raise ParameterError(
            "layers", shape.layers, f"<= {sum(room)}, what fits into {available / 2**30:.1f} GiB a rank"
        )
    counts = [layout.virtual] * layout.ranks
    for _ in range(shape.layers - layout.stages):
        fitting = [r for r in range(layout.ranks) if counts[r] < room[r]]
        counts[min(fitting, key=lambda r: (counts[r] + 1 + extra[r], -r))] += 1
    return _to_stages(layout, shape, counts)


def _layer_room(layout: Layout, shape: ModelShape, available: float, kv_tokens: int, max_chunk: int) -> list[int]:
    ones = [1] * (layout.stages - 1) + [shape.layers - layout.stages + 1]
    per_layer = shape.layer_bytes + kv_tokens * shape.kv_bytes
    room = []
    for rank, memory in enumerate(rank_memory(layout, shape, ones, kv_tokens, max_chunk)):
        layers = sum(ones[s] for s in layout.stages_of(rank))
        left = available - (memory.total - layers * per_layer)
        room.append(shape.layers if per_layer == 0 or left == float("inf") else max(0, int(left // per_layer)))
        if room[-1] < layout.virtual:
            raise ParameterError(f"layers that fit on rank {rank}", room[-1], f">= {layout.virtual}")
    return room


def _to_stages(layout: Layout, shape: ModelShape, counts: Sequence[int]) -> tuple[int, ...]:
    split = [0] * layout.stages
    for rank, count in enumerate(counts):
        stages = layout.stages_of(rank)
        if len(stages) == 1:
            split[stages[0]] = count
            continue
        more = shape.head_cost - shape.embedding_cost if rank == 0 else 0.0
        head = min(max(round((count + more) / 2 + 1e-9), 1), count - 1)
        split[stages[0]], split[stages[1]] = head, count - head
    return tuple(split)


def _check_split(layout: Layout, shape: ModelShape, split: Sequence[int]) -> None:
    if len(split) != layout.stages:
        raise ParameterError("stages in split", len(split), f"{layout.stages}")
    if min(split) < 1 or sum(split) != shape.layers:
        raise ParameterError("split", list(split), f"{layout.stages} positive numbers with sum {shape.layers}")
