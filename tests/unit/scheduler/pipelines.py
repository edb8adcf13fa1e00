"""Hypothesis strategies for pipelines of any kind."""

from __future__ import annotations

from hypothesis import strategies as st
from prefill_runtime.scheduler.chunkers import Bounds, Chunker, Dynamic, Fixed, TokenThrottle
from prefill_runtime.scheduler.cost import (
    HistoryModel,
    PipelineCost,
    QuadraticModel,
    StagedModel,
    StageModel,
    TransferModel,
)
from prefill_runtime.scheduler.cutters import Seq1F1B, TeraPipe
from prefill_runtime.scheduler.layout import FoldBack, Layout, Linear
from prefill_runtime.scheduler.planner import Auto, Planned, Planner

small = st.floats(1e-6, 1e-2)
stage_models = st.builds(
    StageModel, st.floats(0, 1), st.floats(1e-7, 1e-3), st.floats(0, 1e-7), st.sampled_from([0.0, 1e-7])
)
models = st.one_of(
    stage_models,
    st.builds(QuadraticModel, st.floats(0, 1e-7), st.floats(1e-7, 1e-3), st.floats(0, 1)),
    st.builds(HistoryModel, st.floats(0, 1e-7), st.floats(1e-7, 1e-4), st.floats(0, 1)),
)
layouts = st.builds(lambda kind, ranks: kind(ranks), st.sampled_from([Linear, FoldBack]), st.integers(2, 8))
bounds = st.builds(
    lambda largest, smallest, quantum: Bounds(largest, max(1, min(largest, largest // smallest)), quantum=quantum),
    st.integers(512, 16_384),
    st.sampled_from([2, 4, 64]),
    st.sampled_from([64, 128]),
)


@st.composite
def costs(draw: st.DrawFn, layout: Layout, equal: bool = False) -> PipelineCost:
    shares = None
    if not equal and draw(st.booleans()):
        parts = [draw(st.floats(0.5, 1.5)) for _ in range(layout.stages)]
        shares = tuple(p / sum(parts) for p in parts)
    transfer = TransferModel(draw(st.sampled_from([0.0, 1e-3])), draw(st.sampled_from([0.0, 1e-6])))
    if shares is None and not equal and draw(st.booleans()):
        own = tuple(draw(stage_models) for _ in range(layout.stages))
        return PipelineCost(StagedModel(own), draw(st.sampled_from([0.0, 0.01])), None, transfer)
    return PipelineCost(draw(models), draw(st.sampled_from([0.0, 0.01])), shares, transfer)


def all_chunkers(layout: Layout, cost: PipelineCost, limits: Bounds) -> list[Chunker]:
    planner = Planner(layout, cost, limits)
    return [
        Fixed(limits),
        Fixed(limits, limits.highest // limits.quantum // 2 * limits.quantum or limits.quantum),
        Dynamic(limits, cost.model),
        Dynamic(limits, cost.model, smoothing=0.6, overhead=True),
        Seq1F1B(limits, cost.model),
        Seq1F1B(limits, cost.model, 6),
        TeraPipe(limits, cost, layout.ranks),
        TokenThrottle(limits),
        Planned(limits, planner),
        Auto(limits, planner, ratio=1.05),
    ]
