"""From names and numbers to a simulated run: what every command of the tools shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from prefill_runtime.scheduler.bound import run_bound
from prefill_runtime.scheduler.chunkers import MIN_QUANTUM, Bounds, Chunker, Dynamic, Fixed, TokenThrottle
from prefill_runtime.scheduler.cost import PipelineCost
from prefill_runtime.scheduler.cutters import Seq1F1B, TeraPipe
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.layout import LAYOUTS, Layout
from prefill_runtime.scheduler.order import LAGS, static_order
from prefill_runtime.scheduler.planner import Auto, Planned, Planner
from prefill_runtime.scheduler.recurrence import OLDEST
from prefill_runtime.scheduler.search import TASKS
from prefill_runtime.scheduler.simulate import Request, Rules, simulate
from prefill_runtime.scheduler.timeline import Timeline

POLICIES = ("fixed", "dynamic", "seq1f1b", "terapipe", "tokenthrottle", "planned", "auto")
PLANNING = ("planned", "auto")
DEFAULT_CHUNK = 32_768  # seeds/002
DEFAULT_PLANNED_CHUNK = 65_536  # a plan tapers, so its largest chunk may be larger than a good fixed size


@dataclass(frozen=True)
class Setup:
    """One policy on one pipeline.

    chunk: Fixed's size, Dynamic's base, every policy's largest chunk unless ``budget`` allows more.
    own_order: a plan runs in the static order it was made for, as the engine does; else ranks dispatch by ``rules``.
    ratio: prompt lengths within it share a plan; 1 plans each length for itself. tasks: what one search may simulate.
    """

    layout: Layout
    cost: PipelineCost
    policy: str
    chunk: int
    min_chunk: int = MIN_QUANTUM
    smooth: float = 1.0
    quantum: int = MIN_QUANTUM
    budget: int | None = None
    rules: Rules = field(default_factory=Rules)
    own_order: bool = True
    ratio: float = 1.0
    tasks: int = TASKS

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ParameterError("policy", self.policy, " | ".join(POLICIES))
        if self.quantum < 1:
            raise ParameterError("quantum", self.quantum, ">= 1")
        if self.chunk < self.quantum:
            raise ParameterError("chunk", self.chunk, f">= {self.quantum}, the alignment")
        if self.budget is not None and self.chunk > self.budget:
            raise ParameterError("chunk", self.chunk, f"<= budget = {self.budget}")
        if not 1 <= self.min_chunk <= self.chunk:
            raise ParameterError("min-chunk", self.min_chunk, f"1 to chunk = {self.chunk}")
        if not 0 < self.smooth <= 1:
            raise ParameterError("smooth", self.smooth, "0 < smooth <= 1")
        self.cost.parts(self.layout.stages)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.budget or self.chunk, self.min_chunk, quantum=self.quantum)

    def planner(self, *, static: bool) -> Planner:
        orders = LAGS if static else (OLDEST,)
        return Planner(self.layout, self.cost, self.bounds, orders=orders, tasks=self.tasks)

    def chunker(self, *, static: bool = False) -> Chunker:
        model = self.cost.model
        if self.policy == "fixed":
            return Fixed(self.bounds, self.chunk)
        if self.policy == "dynamic":
            return Dynamic(self.bounds, model, self.chunk, self.smooth)
        if self.policy == "seq1f1b":
            return Seq1F1B(self.bounds, model)
        if self.policy == "terapipe":
            return TeraPipe(self.bounds, self.cost, self.layout.ranks)
        if self.policy == "tokenthrottle":
            return TokenThrottle(self.bounds)
        kind = Auto if self.policy == "auto" else Planned
        return kind(self.bounds, self.planner(static=static), ratio=self.ratio)


@dataclass(frozen=True)
class Outcome:
    """A run and what no order of its chunks could beat."""

    timeline: Timeline
    bound: float

    def as_json(self) -> dict[str, object]:
        return {
            "ttft_s": self.timeline.ttft,
            "makespan_s": self.timeline.makespan,
            "bubble_ratio": self.timeline.bubble_ratio,
            "rank_state_seconds": self.timeline.rank_state_seconds(),
            "chunks": self.timeline.chunks,
            "bound_s": self.bound,
        }


def run(setup: Setup, requests: Sequence[Request], chunker: Chunker | None = None) -> Outcome:
    """Simulate; a single planned prompt runs in its plan's own order, if nothing asks for another."""
    static = setup.own_order and len(requests) == 1 and setup.rules.transfer == "async" and setup.rules.inflight is None
    if static and setup.policy in PLANNING and requests:
        request = requests[0]
        plan = setup.planner(static=True).plan(request.tokens, request.history)
        fixed = replace(request, chunks=plan.chunks)
        order = static_order(setup.layout, len(plan.chunks), plan.lag)
        timeline = simulate(setup.layout, setup.cost, [fixed], rules=setup.rules, order=order)
    else:
        timeline = simulate(setup.layout, setup.cost, requests, chunker or setup.chunker(), setup.rules)
    return Outcome(timeline, run_bound(setup.layout, setup.cost, requests, timeline.chunks))


def layout_named(name: str, ranks: int) -> Layout:
    if name.lower() not in LAYOUTS:
        raise ParameterError("layout", name, " | ".join(LAYOUTS))
    return LAYOUTS[name.lower()](ranks)


def default_chunk(policy: str) -> int:
    return DEFAULT_PLANNED_CHUNK if policy in PLANNING else DEFAULT_CHUNK
