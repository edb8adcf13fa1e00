"""Traces through the simulator: TTFT by prompt class for one policy, or for all of them side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """A panel for all prompts and one for each prompt class, a row for each policy; each panel's best stands out."""
    from prefill_runtime.cli.charts import panels, save

    classes = [result.by_class() for result in results]
    present = [name for name in NAMES if any(name in c for c in classes)]
    chart, axes = panels(1 + len(present), 2.3, 1.2 + 0.34 * len(results))
    _panel(axes[0], [result.ttft for result in results], f"all ({len(results[0].ttft)} requests)", mean=True)
    for axis, name in zip(axes[1:], present, strict=True):
        _panel(axis, [c.get(name, []) for c in classes], f"{name} ({len(classes[0].get(name, []))})", mean=False)
    axes[0].set_yticks(range(len(results)), [result.label for result in results])
    axes[0].invert_yaxis()
    chart.suptitle(f"{title}: TTFT in seconds, less is better", x=0.0, y=1.05, ha="left", fontsize=12)
    chart.text(0.0, -0.02, "bar: median (all: mean), in numbers: / p90; green: best of the panel", fontsize=9)
    save(chart, path)


def _panel(axis: Any, values: Sequence[Sequence[float]], title: str, *, mean: bool) -> None:
    middle = [float(np.mean(v) if mean else np.median(v)) for v in values]
    axis.set_xlim(0, 1.3 * max(middle))
    least = min(middle)
    for row, (value, m) in enumerate(zip(values, middle, strict=True)):
        best = m <= least * 1.005
        axis.barh(row, m, 0.72, color="#7cc9a3" if best else "#c9d0da")
        text = f"{seconds_text(m)} / {seconds_text(float(np.quantile(value, 0.9)))}"
        axis.text(0.02 * axis.get_xlim()[1], row, text, va="center", fontsize=8, weight="bold" if best else "normal")
    axis.set_title(title, fontsize=9, loc="left")
    axis.tick_params(labelsize=8)


def seconds_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
