"""Traces through the simulator: TTFT by prompt class for one policy, or for all of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prefill_runtime.cli.run import Setup
from prefill_runtime.cli.trace import CLASSES, Row, groups, prompt_class, requests
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.simulate import Request, simulate

NAMES = [name for _, name in CLASSES] + ["gt_512k"]


@dataclass(frozen=True)
class Replayed:
    """What a trace saw under one policy. Bubble and throughput are over all clocks of the trace together."""

    label: str
    tokens: list[int]
    ttft: list[float]
    bubble_ratio: float
    chunks: int
    computed_tokens: int
    seconds: float

    def by_class(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for tokens, ttft in zip(self.tokens, self.ttft, strict=True):
            found.setdefault(prompt_class(tokens), []).append(ttft)
        return {name: found[name] for name in NAMES if name in found}

    def as_json(self) -> dict[str, object]:
        classes = {
            name: {
                "count": len(v),
                **{f"p{q}": float(np.quantile(v, q / 100)) for q in (50, 90, 99)},
                "mean": float(np.mean(v)),
            }
            for name, v in self.by_class().items()
        }
        return {
            "label": self.label,
            "requests": len(self.ttft),
            "ttft_s": classes,
            "bubble_ratio": self.bubble_ratio,
            "chunks": self.chunks,
            "computed_tokens": self.computed_tokens,
            "seconds": self.seconds,
        }


def replay(
    label: str,
    setup: Setup,
    rows: Sequence[Row],
    *,
    cached: bool,
    stretch: float = 1.0,
    progress: Callable[[int], None] = lambda done: None,
) -> Replayed:
    """Run every clock of the trace on its own pipeline; one chunker serves all, so plans are shared."""
    chunker = setup.chunker()
    tokens: list[int] = []
    ttft: list[float] = []
    busy = span = seconds = 0.0
    chunks = computed = 0
    for group in groups(rows):
        made = requests(group, cached=cached, stretch=stretch)
        timeline = simulate(setup.layout, setup.cost, made, chunker, setup.rules)
        tokens += [r.tokens for r in made]
        ttft += timeline.ttft
        busy += timeline.busy
        active = sum(end - start for start, end in timeline.periods)
        span += active * setup.layout.ranks
        seconds += timeline.makespan
        chunks += sum(map(len, timeline.chunks))
        computed += sum(r.tokens - r.history for r in made)
        progress(len(group))
    return Replayed(label, tokens, ttft, 1 - busy / span, chunks, computed, seconds)


def stretch_to(setup: Setup, rows: Sequence[Row], load: float, *, cached: bool) -> float:
    """The factor on arrival times at which the trace's work is ``load`` of what the ranks can do."""
    if not 0 < load < 1:
        raise ParameterError("load", load, "0 < load < 1")
    work = span = 0.0
    for group in groups(rows):
        made = requests(group, cached=cached)
        work += sum(_work(setup, request) for request in made)
        span += max(r.arrival for r in made)
    if span == 0:
        raise ParameterError("load", load, "a trace whose requests do not all arrive at once")
    return work / (load * span * setup.layout.ranks)


def _work(setup: Setup, request: Request) -> float:
    rest = request.tokens - request.history
    passes = -(-rest // setup.chunk)
    least = setup.cost.model.least_work(float(rest), float(request.history), passes)
    return least + passes * setup.layout.stages * setup.cost.pass_overhead_s


def picture(results: Sequence[Replayed], title: str, path: Path) -> None:
    """Median TTFT by prompt class, one bar a policy; whiskers reach to p90."""
    from prefill_runtime.cli.charts import figure, save

    present = [name for name in NAMES if any(name in r.by_class() for r in results)]
    chart, axes = figure(3 + 1.5 * len(present), 5)
    width = 0.85 / len(results)
    palette = [
        "#b8bfc9",
        "#8f99a8",
        "#6e7a8d",
        "#e9a15b",
        "#d97f3f",
        "#c9b04a",
        "#5590dd",
        "#3572c6",
        "#1f8a8a",
        "#8d63b8",
    ]
    for i, result in enumerate(results):
        groups_ = result.by_class()
        x = [k + (i - (len(results) - 1) / 2) * width for k, name in enumerate(present) if name in groups_]
        mid = [float(np.median(groups_[name])) for name in present if name in groups_]
        high = [
            float(np.quantile(groups_[name], 0.9)) - m
            for name, m in zip([n for n in present if n in groups_], mid, strict=True)
        ]
        axes.bar(x, mid, width * 0.92, color=palette[i % len(palette)], label=result.label)
        axes.errorbar(x, mid, [[0.0] * len(mid), high], fmt="none", ecolor="#1f2530", elinewidth=0.8, capsize=1.5)
    counts = [sum(name == prompt_class(t) for t in results[0].tokens) for name in present]
    axes.set_xticks(range(len(present)), [f"{name}\n({n} requests)" for name, n in zip(present, counts, strict=True)])
    axes.set_yscale("log")
    axes.set_ylabel("TTFT in seconds: median, whisker to p90")
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    save(chart, path)
