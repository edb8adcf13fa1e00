"""Which prompts to run, cut how, so that a fit of the stage costs stands on firm ground.

1. Warm-ups, which are thrown away: the first passes pay one-time costs that would spoil a fit.
2. `samples` chunk sizes evenly from the base size down to one quantum, each a prompt of its own (seeds/000).
3. One long prompt of several chunks, which reaches the history depths that short prompts never see.
4. All of it again and again until the quickest repeat of a point no longer gets quicker, or time is over.

The order serves a short budget. Sizes come in bit-reversed order and the long prompt right after the first eight of
them, so whatever has been measured when time runs out covers the whole range.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

from prefill_runtime.scheduler.errors import ParameterError, at_least

MIN_ROUNDS = 3
WARMUPS = 2
_QUICKER = 0.02
_UNSTABLE = 0.2
_BEFORE_DEPTH = 8
_DEPTH_CYCLE = (4, 2, 1)  # quarters of the unit: one cycle of chunks per depth


@dataclass(frozen=True)
class SamplingPlan:
    """What the profiling driver runs, in this order; a prompt is the list of its chunk sizes.

    warmups: their times are dropped.
    prompts: one round; every chunk of every prompt is one sample, at the history its predecessors make.
    """

    warmups: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """All tokens that the warm-ups and one round compute."""
        return sum(sum(p) for p in self.warmups + self.prompts)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))


def plan(base_tokens: int, samples: int, history_depths: int, max_model_len: int, align: int) -> SamplingPlan:
    """The sampling plan for one engine.

    align is lcm(page, TP). One token of max_model_len is left for the answer.
    """
    at_least("align", align, 1)
    at_least("samples", samples, 1)
    at_least("history_depths", history_depths, 0)
    at_least("max_model_len", max_model_len, align + 1)
    at_least("base_tokens", base_tokens, align)
    longest = min(base_tokens, max_model_len - 1) // align * align
    steps = max(samples - 1, 1)
    sizes = sorted({(longest - (longest - align) * i // steps) // align * align for i in range(samples)})
    order: list[tuple[int, ...]] = [(size,) for size in _bit_reversed(sizes[::-1])]
    deep = depth_prompt(longest, history_depths, max_model_len, align)
    if len(deep) > 1:
        order.insert(min(_BEFORE_DEPTH, len(order)), deep)
    warmups = [(longest,)] * WARMUPS + [deep] * (len(deep) > 1)
    return SamplingPlan(tuple(warmups), tuple(order))


def depth_prompt(base: int, depths: int, max_model_len: int, align: int) -> tuple[int, ...]:
    """Chunks of one long prompt: per depth one whole, one half and one quarter unit.

    The unit is the base size, or what lets all depths fit below max_model_len. Sizes vary along the prompt because a
    constant size would leave attention and linear cost hard to tell apart.
    """
    if depths == 0:
        return ()
    room = max_model_len - 1
    unit = min(base, room * _DEPTH_CYCLE[0] // (depths * sum(_DEPTH_CYCLE)))
    cycle = [unit * quarters // _DEPTH_CYCLE[0] // align * align for quarters in _DEPTH_CYCLE]
    return tuple(size for _ in range(depths) for size in cycle if size)


def points(chunks: tuple[int, ...], seconds: list[float]) -> list[tuple[int, int, float]]:
    """The (chunk, history, seconds) samples of one prompt, for the fits."""
    if len(chunks) != len(seconds):
        raise ParameterError("seconds", len(seconds), f"{len(chunks)} values, one per chunk")
    return [(chunk, sum(chunks[:i]), took) for i, (chunk, took) in enumerate(zip(chunks, seconds, strict=True))]


Point = TypeVar("Point", bound=Hashable)


def settled(before: Mapping[Point, float], after: Mapping[Point, float]) -> bool:
    """Whether another round is not worth it: the last one made few of the quickest repeats materially quicker.

    Of undisturbed repeats the n-th is the quickest with probability 1 / n, so this comes true after five rounds or so.
    """
    quicker = sum(seconds < (1 - _QUICKER) * before.get(point, float("inf")) for point, seconds in after.items())
    return quicker <= _UNSTABLE * len(after)


def _bit_reversed(items: list[int]) -> list[int]:
    """Largest and smallest first, then ever finer in between (van der Corput order)."""
    if len(items) < 3:
        return items
    bits = (len(items) - 1).bit_length()
    reversed_bits = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits)]
    middle = [items[i] for i in reversed_bits if 0 < i < len(items) - 1]
    return [items[0], items[-1], *middle]
