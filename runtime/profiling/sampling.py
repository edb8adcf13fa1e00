"""Which prompts to run, cut how, so that a fit of the stage costs stands on firm ground.

1. Warm-ups, which are thrown away: the first passes pay one-time costs that would spoil a fit.
2. `samples` chunk sizes evenly from the base size down to one quantum, each a prompt of its own (seeds/000).
3. One long prompt of several chunks, which reaches the history depths that short prompts never see.
4. A prompt that has the pipeline to itself, in many small chunks, which shows what the engine takes between passes.
5. All of it again and again until the quickest repeat of a point no longer gets quicker, or time is over.

The order serves a short budget: first a few sizes over the whole range, then the long prompt, then ever more sizes in
between, so whatever has been measured when time runs out covers the range. It also serves a busy pipeline: neighbours
are of similar size, so that no rank waits long for another one.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

from prefill_runtime.scheduler.errors import ParameterError, at_least

MIN_ROUNDS = 3
WARMUPS = 2
_QUICKER = 0.02
_UNSTABLE = 0.2
_COARSE = 8
_PER_DEPTH = 5
_SMALLEST = 1 / 16
_LONE = 32


@dataclass(frozen=True)
class SamplingPlan:
    """What the profiling driver runs, in this order; a prompt is the list of its chunk sizes.

    warmups: their times are dropped.
    prompts: one round; every chunk of every prompt is one sample, at the history its predecessors make.
    lone: runs alone after each round; no sample.
    """

    warmups: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]
    lone: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """All tokens that the warm-ups and one round compute."""
        return sum(sum(p) for p in (*self.warmups, *self.prompts, self.lone))

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
    coarse, *finer = _levels(sizes[::-1])
    order: list[tuple[int, ...]] = [(size,) for size in coarse]
    deep = depth_prompt(longest, history_depths, max_model_len, align)
    if len(deep) > 1:
        order.append(deep)
    order += [(size,) for level in finer for size in level]
    warmups = [(longest,)] * WARMUPS + [deep] * (len(deep) > 1)
    small = max(int(longest * _SMALLEST) // align, 1) * align
    lone = (small,) * min(_LONE, (max_model_len - 1) // small)
    return SamplingPlan(tuple(warmups), tuple(order), lone)


def depth_prompt(base: int, depths: int, max_model_len: int, align: int) -> tuple[int, ...]:
    """Chunks of one long prompt, five per depth.

    Sizes go down from a unit to a sixteenth of it and up again in equal ratios, once for every two depths: small
    chunks as well as large ones meet short and long histories, so what a chunk costs for its tokens, for its history
    and for the product of both can be told apart, and neighbours are near enough in size for a rank not to wait long
    for another one. The unit is the base size, or what lets all chunks fit below max_model_len.
    """
    if depths == 0:
        return ()
    count = _PER_DEPTH * depths
    valleys = max(depths // 2, 1)
    shares = [_SMALLEST ** (1 - abs(2 * valleys * i / (count - 1) % 2 - 1)) for i in range(count)]
    unit = min(base, (max_model_len - 1) / sum(shares))
    return tuple(size for share in shares if (size := int(unit * share) // align * align))


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


def _levels(items: list[int]) -> Iterator[list[int]]:
    """A few items from all over the list with both its ends, then those in between, twice as many in each next level;
    every second level backwards.
    """
    stride = 1 << max(len(items).bit_length() - _COARSE.bit_length(), 0)
    seen = set[int]()
    direction = 1
    while stride:
        level = sorted({*range(0, len(items), stride), len(items) - 1} - seen)
        seen.update(level)
        yield [items[i] for i in level[::direction]]
        stride, direction = stride // 2, -direction
