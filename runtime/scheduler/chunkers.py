"""How a prompt is cut: the next chunk's size from its true history and what remains of it.

Every chunker proposes a size; ``Bounds.fit`` alone turns the proposal into a legal one. So no policy can break
a bound, and all policies treat the tail alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from prefill_runtime.scheduler.cost import CostModel
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

    def fit(self, size: float, history: int, remaining: int, keeps: Callable[[int], bool] = lambda tail: False) -> int:
        """The legal chunk nearest below ``size`` for a prompt with ``remaining`` tokens after ``history``.

        A tail below half of min_tokens would cost a whole pipeline round for almost no work, so it joins this chunk
        when the budget allows; ``keeps`` may object for a policy that knows the tail's true cost.
        """
        at_least("history", history, 0)
        at_least("remaining", remaining, 1)
        if history + remaining > self.max_model_len:
            raise ParameterError("history + remaining", history + remaining, f"<= max_model_len = {self.max_model_len}")
        if size >= remaining <= self.max_tokens:
            return remaining
        bounded = min(max(size, self.lowest), self.highest)  # also brings an infinite size into int's range
        aligned = int(bounded) // self.quantum * self.quantum
        tail = remaining - aligned
        if tail <= 0 or (2 * tail < self.min_tokens and remaining <= self.max_tokens and not keeps(tail)):
            return remaining
        return aligned


@dataclass(frozen=True)
class Queue:
    """The scheduler's surroundings when it cuts a chunk.

    waiting_tokens: prompt tokens not computed yet, this prompt's included. waiting_requests: prompts behind this one.
    kv_free: share of the KV cache that is free. load: share of recent time in which the pipeline had work.
    """

    waiting_tokens: int
    waiting_requests: int = 0
    kv_free: float = 1.0
    load: float = 0.0


class Chunker(ABC):
    """Base of all policies that decide chunk by chunk."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._request: Hashable = None

    @abstractmethod
    def propose(self, history: int, remaining: int) -> float:
        """The size this policy wants; may be any positive number."""

    def keeps_tail(self, history: int, tail: int) -> bool:
        """Whether a short tail after ``history`` is worth a round of its own."""
        return False

    def observe(self, queue: Queue) -> None:  # noqa: B027  # not abstract: most policies do not care
        """What waits behind this prompt."""

    def next_chunk(self, history: int, remaining: int, request: Hashable = None) -> int:
        """Tokens of the next chunk of a prompt that has ``history`` tokens computed and ``remaining`` to go.

        request: names the prompt, for policies that plan ahead; without it equal prompt lengths share a plan.
        """
        end = history + remaining
        self._request = request if request is not None else ("prompt of", end)
        return self.bounds.fit(
            self.propose(history, remaining), history, remaining, lambda tail: self.keeps_tail(end - tail, tail)
        )

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

    With a HistoryModel the same target is met by solving f(C, H) - c = T for C. ``overhead`` includes the fixed part
    of a pass in T: fewer, larger chunks where launching one is dear.

    A short tail stays a chunk of its own when its work exceeds the fixed part: joined to its neighbour it would hold
    up every rank for longer than the round that it saves.
    """

    def __init__(
        self,
        bounds: Bounds,
        model: CostModel,
        base: int | None = None,
        smoothing: float = 1.0,
        *,
        overhead: bool = False,
    ) -> None:
        super().__init__(bounds)
        self.model = model
        self.base = bounds.max_tokens if base is None else base
        self.smoothing = smoothing
        if not 1 <= self.base <= bounds.max_tokens:
            raise ParameterError("base", self.base, f"1 to max_tokens = {bounds.max_tokens}")
        if not 0 < smoothing <= 1:
            raise ParameterError("smoothing", smoothing, "0 < smoothing <= 1")
        fixed = model.pass_seconds(0.0, 0.0)
        growth = model.pass_seconds(float(self.base), 0.0) - fixed
        if not 0 < growth < math.inf:
            raise ParameterError("f(base) - f(0)", growth, "> 0 and finite; some cost per token must be > 0")
        self.target = growth + fixed if overhead else growth

    def predict(self, history: int) -> float:
        """The unsmoothed size that takes the target time."""
        return self.model.chunk_for(self.target, history)

    def propose(self, history: int, remaining: int) -> float:
        return self.base + self.smoothing * (self.predict(history) - self.base)

    def keeps_tail(self, history: int, tail: int) -> bool:
        fixed = self.model.pass_seconds(0.0, float(history))
        return self.model.pass_seconds(float(tail), float(history)) - fixed > fixed


class TokenThrottle(Chunker):
    """gLLM's prefill budget: #P = max(min(waiting / T, maxP (kvfree - thresh) / (1 - thresh)), minP).

    rounds: T, in how many iterations all waiting prompt tokens should be issued. maxP and minP are the bounds'.
    kv_threshold: the free share of KV cache at which prefill is throttled down to minP.
    """

    def __init__(self, bounds: Bounds, rounds: int = 8, kv_threshold: float = 0.05) -> None:
        super().__init__(bounds)
        at_least("rounds", rounds, 1)
        if not 0 <= kv_threshold < 1:
            raise ParameterError("kv_threshold", kv_threshold, "0 <= kv_threshold < 1")
        self.rounds, self.kv_threshold = rounds, kv_threshold
        self._queue: Queue | None = None

    def observe(self, queue: Queue) -> None:
        self._queue = queue

    def propose(self, history: int, remaining: int) -> float:
        queue = self._queue or Queue(remaining)
        room = self.bounds.max_tokens * (queue.kv_free - self.kv_threshold) / (1 - self.kv_threshold)
        return max(min(queue.waiting_tokens / self.rounds, room), self.bounds.min_tokens)

    @staticmethod
    def decodes_per_pass(decodes: int, depth: int) -> int:
        """gLLM spreads the running decodes evenly over the batches in flight."""
        return -(-decodes // depth)
