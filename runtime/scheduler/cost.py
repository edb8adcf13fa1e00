"""Cost models: how long a pass over one chunk takes.

Units everywhere: tokens and seconds. A chunk of ``chunk`` tokens comes after ``history`` tokens that are
already in the KV cache. ``pass_seconds`` takes plain numbers or numpy arrays alike, so that the planner can price
hundreds of candidate plans at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from prefill_runtime.profiling.document import CalibrationDocument, StageCalibration
from prefill_runtime.scheduler.errors import ParameterError, at_least

Number = TypeVar("Number", float, NDArray[np.float64])
Piece = tuple[int, int]  # chunk and history tokens of one request in a batch


class CostModel(Protocol):
    """What the chunkers, the planner and the simulator need to know of a model on a device."""

    def pass_seconds(self, chunk: Number, history: Number) -> Number:
        """One pass over one chunk, fixed part included."""

    def batch_seconds(self, pieces: Iterable[Piece]) -> float:
        """One pass over chunks of several requests."""

    def chunk_for(self, seconds: Number, history: Number) -> Number:
        """The chunk after ``history`` whose cost, beyond the fixed part, is ``seconds``; 0 when there is none."""

    def least_work(self, tokens: float, history: float, passes: int) -> float:
        """No cut of ``tokens`` into ``passes`` chunks costs less than this in sum."""


@dataclass(frozen=True)
class QuadraticModel:
    """f(l) = a l^2 + b l + c: seconds for a prompt of l tokens in one pass (seeds/000).

    A chunk of x tokens after L tokens of history costs f(L + x) - f(L) = a x (2 L + x) + b x; the fixed part c
    (kernel launches) cancels out of the difference but is paid by every pass.

    a: seconds per token squared (attention). b: seconds per token (linear layers). c: seconds per pass.
    """

    a: float
    b: float
    c: float = 0.0

    def __post_init__(self) -> None:
        for name in ("a", "b", "c"):
            at_least(name, getattr(self, name), 0)

    @classmethod
    def from_calibration(cls, document: CalibrationDocument) -> QuadraticModel:
        """The published form of the slowest stage, which sets the pace of the whole pipeline."""
        form = document.published.quadratic
        return cls(form.a, form.b, form.c)

    def seconds(self, tokens: float) -> float:
        """f(tokens)."""
        return (self.a * tokens + self.b) * tokens + self.c

    def chunk_seconds(self, chunk: Number, history: Number, *, overhead: bool = False) -> Number:
        """f(history + chunk) - f(history), plus c when ``overhead`` asks for the whole pass.

        Written without the subtraction, which would lose digits at long histories.
        """
        return chunk * (self.a * (2 * history + chunk) + self.b) + (self.c if overhead else 0.0)

    def pass_seconds(self, chunk: Number, history: Number) -> Number:
        return self.chunk_seconds(chunk, history, overhead=True)

    def batch_seconds(self, pieces: Iterable[Piece]) -> float:
        return sum(self.chunk_seconds(float(c), float(h)) for c, h in pieces) + self.c

    def chunk_for(self, seconds: Number, history: Number) -> Number:
        """The x > 0 with f(history + x) - f(history) = seconds, that is a x^2 + (2 a L + b) x - T = 0."""
        if self.a == 0 and self.b == 0:
            raise ParameterError("a and b", 0.0, "at least one > 0, else no chunk takes the target time")
        return positive_root(self.a, 2 * self.a * history + self.b, seconds)

    def least_work(self, tokens: float, history: float, passes: int) -> float:
        return self.chunk_seconds(tokens, history) + passes * self.c


@dataclass(frozen=True)
class HistoryModel:
    """f(C, H) = a C (C + H) + b (C + H) + c: the two-variable form of online calibration (seeds/000).

    A batch has the features [sum C (C + H), sum (C + H), N]. Note that it charges b for history too.
    """

    a: float
    b: float
    c: float = 0.0

    def __post_init__(self) -> None:
        for name in ("a", "b", "c"):
            at_least(name, getattr(self, name), 0)

    def pass_seconds(self, chunk: Number, history: Number) -> Number:
        return (self.a * chunk + self.b) * (chunk + history) + self.c

    def batch_seconds(self, pieces: Iterable[Piece]) -> float:
        return sum(self.pass_seconds(float(c), float(h)) for c, h in pieces)

    def chunk_for(self, seconds: Number, history: Number) -> Number:
        """The C > 0 with f(C, H) - c = seconds; 0 when history alone takes as long."""
        return positive_root(self.a, self.a * history + self.b, seconds - self.b * history)

    def least_work(self, tokens: float, history: float, passes: int) -> float:
        pairs = tokens * (history + tokens / 2)  # what sum C (C + H) tends to for ever smaller chunks
        return self.a * pairs + self.b * (tokens + passes * history) + passes * self.c


@dataclass(frozen=True)
class Attention:
    """Whom a token attends to: in the share ``full`` of the layers all tokens before it, in the others at most the last
    ``window``; 0: no layer has a window.
    """

    window: int = 0
    full: float = 1.0

    def __post_init__(self) -> None:
        at_least("window", self.window, 0)
        if not 0 <= self.full <= 1:
            raise ParameterError("full", self.full, "0 to 1, the share of layers without a window")

    def pairs(self, chunk: Number, history: Number) -> Number:
        """Pairs of tokens that attend to one another when ``chunk`` tokens follow ``history``, mean of the layers."""
        every = chunk * (history + chunk / 2)
        if not self.window:
            return every
        near = self._near(history + chunk) - self._near(history)
        return self.full * every + (1 - self.full) * near

    def _near(self, tokens: Number) -> Number:
        """Pairs within the window of a prompt of so many tokens."""
        beyond = np.maximum(tokens - self.window, 0.0)  # as many rows of the triangle are cut to the window
        return tokens * tokens / 2 - beyond * beyond / 2  # type: ignore[no-any-return]


NO_WINDOW = Attention()
"""No layer has a window."""


@dataclass(frozen=True)
class StageModel:
    """k0 + k1 C + k2 A(C, H) + k3 H: the planner's and the simulator's model (ours).

    k0: seconds per pass. k1: seconds per token. k2: seconds per pair of tokens that attend to one another, of which
    there are A = C (H + C/2), fewer with sliding windows. k3: seconds per token of history (MLA rebuilds the prefix; 0
    elsewhere). A batch pays k0 once.
    """

    k0: float
    k1: float
    k2: float
    k3: float = 0.0
    attention: Attention = NO_WINDOW

    def __post_init__(self) -> None:
        for name in ("k0", "k1", "k2", "k3"):
            at_least(name, getattr(self, name), 0)

    @classmethod
    def of(cls, stage: StageCalibration) -> StageModel:
        """A stage as it was measured."""
        attention = NO_WINDOW if stage.attention is None else Attention(**stage.attention.model_dump())
        return cls(**stage.coefficients.model_dump(), attention=attention)

    def quadratic(self) -> QuadraticModel:
        """What a profile at H = 0 would see of this model; exact when k3 = 0 and nothing has a window."""
        return QuadraticModel(self.k2 / 2, self.k1, self.k0)

    def pass_seconds(self, chunk: Number, history: Number) -> Number:
        return self.k0 + chunk * self.k1 + self.k2 * self.attention.pairs(chunk, history) + self.k3 * history

    def batch_seconds(self, pieces: Iterable[Piece]) -> float:
        return self.k0 + sum(self.pass_seconds(float(c), float(h)) - self.k0 for c, h in pieces)

    def chunk_for(self, seconds: Number, history: Number) -> Number:
        work, window, full = seconds - self.k3 * history, self.attention.window, self.attention.full
        within = positive_root(self.k2 / 2, self.k1 + self.k2 * history, work)
        if not window:
            return within
        # Beyond the window a token of a windowed layer has ``window`` pairs, but for the first of them.
        missing = np.maximum(window - history, 0.0)
        beyond = positive_root(
            self.k2 * full / 2, self.k1 + self.k2 * (full * history + (1 - full) * window),
            work + self.k2 * (1 - full) * missing * missing / 2,
        )  # fmt: skip
        if isinstance(within, float):
            return within if history + within <= window else beyond
        return np.where(history + within <= window, within, beyond)

    def least_work(self, tokens: float, history: float, passes: int) -> float:
        return self.pass_seconds(tokens, history) + (passes - 1) * (self.k0 + self.k3 * history)


@dataclass(frozen=True)
class StagedModel:
    """Each stage has a cost of its own: the last one samples, so its fixed part is another. As a ``CostModel`` it is
    the whole pipeline, the sum of its stages.
    """

    stages: tuple[StageModel, ...]
    whole: StageModel = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        at_least("number of stages", len(self.stages), 1)
        parts, kinds = [(s.k0, s.k1, s.k2, s.k3) for s in self.stages], {s.attention for s in self.stages}
        if len(kinds) > 1:
            raise ParameterError("kinds of attention", len(kinds), "1, the same in all stages")
        k0, k1, k2, k3 = (sum(column) for column in zip(*parts, strict=True))
        whole = StageModel(k0, k1, k2, k3, kinds.pop())
        object.__setattr__(self, "whole", whole)

    def pass_seconds(self, chunk: Number, history: Number) -> Number:
        return self.whole.pass_seconds(chunk, history)

    def batch_seconds(self, pieces: Iterable[Piece]) -> float:
        return self.whole.batch_seconds(pieces)

    def chunk_for(self, seconds: Number, history: Number) -> Number:
        return self.whole.chunk_for(seconds, history)

    def least_work(self, tokens: float, history: float, passes: int) -> float:
        return self.whole.least_work(tokens, history, passes)


def positive_root(a: float, slope: Number, seconds: Number) -> Number:
    """The x >= 0 with a x^2 + slope x = seconds, for a, slope >= 0; 0 when seconds <= 0 or nothing grows.

    The textbook root subtracts nearly equal numbers when a is tiny; its conjugate
    x = 2 T / (B + sqrt(B^2 + 4 a T)) does not, and gives T / B at a = 0.
    """
    if isinstance(seconds, float) and isinstance(slope, float):  # the scheduling path: numpy is slow on one number
        bottom = slope + math.hypot(slope, 2 * math.sqrt(a * seconds)) if seconds > 0 else 0.0
        return 2 * seconds / bottom if bottom > 0 else 0.0
    target = np.maximum(seconds, 0.0)
    bottom = slope + np.hypot(slope, 2 * math.sqrt(a) * np.sqrt(target))
    root: Number = 2 * target / np.where(bottom > 0, bottom, math.inf)
    return root


@dataclass(frozen=True)
class TransferModel:
    """latency + tokens * seconds_per_token for one hop of a chunk's activations (bytes / bandwidth, per token)."""

    latency_s: float = 0.0
    seconds_per_token: float = 0.0

    def __post_init__(self) -> None:
        at_least("transfer.latency_s", self.latency_s, 0)
        at_least("transfer.seconds_per_token", self.seconds_per_token, 0)

    def seconds(self, tokens: Number) -> Number:
        return self.latency_s + tokens * self.seconds_per_token


@dataclass(frozen=True)
class PipelineCost:
    """A whole pipeline's cost: the model's terms are for all layers, and stage s takes ``shares[s]`` of them, or its
    own part of a ``StagedModel``.

    pass_overhead_s: added to every stage pass whatever its share. shares: one per stage, sum 1; None means equal.
    """

    model: CostModel
    pass_overhead_s: float = 0.0
    shares: tuple[float, ...] | None = None
    transfer: TransferModel = TransferModel()

    def __post_init__(self) -> None:
        at_least("pass_overhead_s", self.pass_overhead_s, 0)
        if self.shares is not None:
            if isinstance(self.model, StagedModel):
                raise ParameterError("shares", list(self.shares), "none, for the model tells each stage's cost")
            for i, share in enumerate(self.shares):
                at_least(f"shares[{i}]", share, 0)
            if abs(sum(self.shares) - 1) > 0.01:
                raise ParameterError("sum of shares", f"{sum(self.shares):g}", "1 (within 1%)")

    def parts(self, stages: int) -> tuple[tuple[float, CostModel], ...]:
        """(share, model) of each of ``stages`` stages; ParameterError when the cost is for another number of them."""
        if isinstance(self.model, StagedModel):
            found: tuple[tuple[float, CostModel], ...] = tuple((1.0, model) for model in self.model.stages)
            name = "number of stage models"
        elif self.shares is None:
            return ((1 / stages, self.model),) * stages
        else:
            found, name = tuple((share, self.model) for share in self.shares), "number of shares"
        if len(found) != stages:
            raise ParameterError(name, len(found), f"{stages}, one per stage of the layout")
        return found

    def even(self, stages: int) -> bool:
        """Whether all stages cost the same."""
        (share, model), *others = self.parts(stages)
        return all(abs(s - share) < 1e-9 and m == model for s, m in others)

    def stage_seconds(self, stages: int, chunk: Number, history: Number) -> list[Number]:
        """Seconds of a pass on each of ``stages`` stages."""
        if isinstance(self.model, StagedModel):
            return [m.pass_seconds(chunk, history) + self.pass_overhead_s for _, m in self.parts(stages)]
        whole = self.model.pass_seconds(chunk, history)
        return [share * whole + self.pass_overhead_s for share, _ in self.parts(stages)]

    def batch_seconds(self, stages: int, pieces: Sequence[Piece]) -> list[float]:
        """Seconds of a pass over chunks of several requests, on each stage."""
        return [share * m.batch_seconds(pieces) + self.pass_overhead_s for share, m in self.parts(stages)]

    def work(self, stages: int, chunk: Number, history: Number) -> Number:
        """Rank-seconds of one chunk over all stages."""
        return sum(self.stage_seconds(stages, chunk, history))  # type: ignore[return-value]
