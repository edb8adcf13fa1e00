"""Cost models: how long one pipeline stage works on a chunk.

Units everywhere: tokens and seconds. A chunk of ``chunk`` tokens comes after ``history`` tokens that are
already in the KV cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefill_runtime.profiling.document import CalibrationDocument
from prefill_runtime.scheduler.errors import ParameterError, at_least


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
        """The model of the slowest stage at the base size: it sets the pace of the whole pipeline."""
        models = [cls(s.coefficients.a, s.coefficients.b, s.coefficients.c) for s in document.stages]
        return max(models, key=lambda m: m.chunk_seconds(document.base_tokens, 0))

    def seconds(self, tokens: float) -> float:
        """f(tokens)."""
        return (self.a * tokens + self.b) * tokens + self.c

    def chunk_seconds(self, chunk: float, history: float, *, overhead: bool = False) -> float:
        """f(history + chunk) - f(history), plus c when ``overhead`` asks for the whole pass.

        Written without the subtraction, which would lose digits at long histories.
        """
        grown = chunk * (self.a * (2 * history + chunk) + self.b)
        return grown + self.c if overhead else grown

    def chunk_for(self, seconds: float, history: float) -> float:
        """The x > 0 with f(history + x) - f(history) = seconds, that is a x^2 + (2 a L + b) x - T = 0.

        The textbook root subtracts nearly equal numbers when a is tiny; its conjugate
        x = 2 T / (B + sqrt(B^2 + 4 a T)), B = 2 a L + b, does not, and gives T / b at a = 0.
        """
        at_least("seconds", seconds, 0, above=True)
        slope = 2 * self.a * history + self.b
        bottom = slope + math.hypot(slope, 2 * math.sqrt(self.a) * math.sqrt(seconds))
        if bottom == 0:
            raise ParameterError("a and b", 0.0, "at least one > 0, else no chunk takes the target time")
        return 2 * seconds / bottom
