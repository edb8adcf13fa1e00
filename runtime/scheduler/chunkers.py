"""How a prompt is cut: the next chunk's size from its true history and what remains of it.

Every chunker proposes a size; ``Bounds.fit`` alone turns the proposal into a legal one. So no policy can break
a bound, and all policies treat the tail alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from prefill_runtime.scheduler.cost import QuadraticModel
from prefill_runtime.scheduler.errors import ParameterError, at_least

MIN_QUANTUM = 64


def chunk_quantum(page_tokens: int = 1, tensor_parallel: int = 1) -> int:
    """What chunk sizes are multiples of: lcm(page, TP), taken as often as it needs to reach 64 tokens."""
    at_least("page_tokens", page_tokens, 1)
    at_least("tensor_parallel", tensor_parallel, 1)
    unit = math.lcm(page_tokens, tensor_parallel)
    return unit * math.ceil(MIN_QUANTUM / unit)


@dataclass(frozen=True)
class Bounds:
    """What every chunk must keep to.

    max_tokens: the engine's token budget of one step (max_num_batched_tokens).
    min_tokens: no chunk but the last is smaller.
    max_model_len: history and chunk together never pass it.
    quantum: every chunk but the last is a multiple of it (see ``chunk_quantum``).
    """

    max_tokens: int
    min_tokens: int = MIN_QUANTUM
    max_model_len: int = 1 << 30
    quantum: int = MIN_QUANTUM

    def __post_init__(self) -> None:
        at_least("quantum", self.quantum, 1)
        at_least("max_tokens", self.max_tokens, self.quantum)
        at_least("max_model_len", self.max_model_len, 1)
        if not 1 <= self.min_tokens <= self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"1 to max_tokens = {self.max_tokens}")

    @property
    def lowest(self) -> int:
        """The smallest aligned chunk: min_tokens aligned up, or the largest aligned one if that passes the budget."""
        up = -(-self.min_tokens // self.quantum) * self.quantum
        return min(up, self.highest)

    @property
    def highest(self) -> int:
        """The largest aligned chunk."""
        return self.max_tokens // self.quantum * self.quantum

    def fit(self, size: float, history: int, remaining: int) -> int:
        """The legal chunk nearest below ``size`` for a prompt with ``remaining`` tokens after ``history``.

        A tail below half of min_tokens would cost a whole pipeline round for almost no work, so it joins this chunk
        when the budget allows.
        """
        at_least("history", history, 0)
        at_least("remaining", remaining, 1)
        if history + remaining > self.max_model_len:
            raise ParameterError("history + remaining", history + remaining, f"<= max_model_len = {self.max_model_len}")
        bounded = min(max(size, self.lowest), self.highest)  # also brings an infinite size into int's range
        aligned = int(bounded) // self.quantum * self.quantum
        tail = remaining - aligned
        if tail <= 0 or (2 * tail < self.min_tokens and remaining <= self.max_tokens):
            return remaining
        return aligned


class Chunker(ABC):
    """Base of all policies that decide chunk by chunk."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds

    @abstractmethod
    def propose(self, history: int, remaining: int) -> float:
        """The size this policy wants; may be any positive number."""

    def next_chunk(self, history: int, remaining: int) -> int:
        """Tokens of the next chunk of a prompt that has ``history`` tokens computed and ``remaining`` to go."""
        return self.bounds.fit(self.propose(history, remaining), history, remaining)

    def cut(self, prompt_tokens: int, history: int = 0) -> list[int]:
        """All chunks of a prompt of ``prompt_tokens``, of which the first ``history`` are cached already."""
        at_least("history", history, 0)
        at_least("prompt_tokens", prompt_tokens, history + 1)
        chunks: list[int] = []
        while history < prompt_tokens:
            chunks.append(self.next_chunk(history, prompt_tokens - history))
            history += chunks[-1]
        return chunks


class Fixed(Chunker):
    """Equal chunks of ``tokens`` (by default the whole budget): what stock vLLM does."""

    def __init__(self, bounds: Bounds, tokens: int | None = None) -> None:
        super().__init__(bounds)
        self.tokens = bounds.max_tokens if tokens is None else tokens
        if not bounds.quantum <= self.tokens <= bounds.max_tokens:
            raise ParameterError("tokens", self.tokens, f"{bounds.quantum} to max_tokens = {bounds.max_tokens}")

    def propose(self, history: int, remaining: int) -> float:
        return self.tokens


class Dynamic(Chunker):
    """Chunks of equal time (seeds/000): target T = f(base) - f(0); the next chunk after L tokens is the positive root
    x of a x^2 + (2 a L + b) x - T = 0, smoothed to base + smoothing (x - base).
    """

    def __init__(self, bounds: Bounds, model: QuadraticModel, base: int | None = None, smoothing: float = 1.0) -> None:
        super().__init__(bounds)
        self.model = model
        self.base = bounds.max_tokens if base is None else base
        self.smoothing = smoothing
        if not 1 <= self.base <= bounds.max_tokens:
            raise ParameterError("base", self.base, f"1 to max_tokens = {bounds.max_tokens}")
        if not 0 < smoothing <= 1:
            raise ParameterError("smoothing", smoothing, "0 < smoothing <= 1")
        self.target = model.chunk_seconds(self.base, 0)
        if not 0 < self.target < math.inf:
            raise ParameterError("f(base) - f(0)", self.target, "> 0 and finite; a and b must not both be 0")

    def predict(self, history: int) -> float:
        """The unsmoothed size that takes the target time."""
        return self.model.chunk_for(self.target, history)

    def propose(self, history: int, remaining: int) -> float:
        return self.base + self.smoothing * (self.predict(history) - self.base)
