"""What people see: tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from prefill_runtime.cli.paper import PaperTable
from prefill_runtime.cli.replay import NAMES, Replayed, seconds_text
from prefill_runtime.cli.run import Outcome, Setup
from prefill_runtime.cli.trace import Row
from prefill_runtime.scheduler.planner import Plan
from prefill_runtime.scheduler.simulate import Request
from prefill_runtime.scheduler.timeline import STATES
from rich.console import Console
from rich.table import Table

__all__ = ["Row", "papers", "plan_json", "planned", "replayed", "simulated"]


def simulated(console: Console, setup: Setup, requests: Sequence[Request], outcome: Outcome) -> None:
    line = outcome.timeline
    name = type(setup.layout).__name__
    console.print(
        f"[bold]{setup.policy} on {name}, {setup.layout.ranks} ranks[/]: makespan {line.makespan:.4g} s, "
        f"bubble {line.bubble_ratio:.1%}; no order of these chunks beats {outcome.bound:.4g} s"
    )
    table = Table("prompt", "cached", "arrival", "TTFT", "chunks")
    for request, ttft, cut in zip(requests, line.ttft, line.chunks, strict=True):
        table.add_row(
            f"{request.tokens:,}", f"{request.history:,}", f"{request.arrival:g} s", f"{ttft:.4g} s", _sizes(cut)
        )
    console.print(table)
    states = [s for s in STATES if any(r[s] > 0 for r in line.rank_state_seconds())]
    table = Table("rank", *[s.replace("_", " ") for s in states], title="seconds of every rank", title_justify="left")
    for rank, seconds in enumerate(line.rank_state_seconds()):
        table.add_row(str(rank), *[f"{seconds[s]:.4g} ({seconds[s] / line.makespan:.1%})" for s in states])
    console.print(table)


def _sizes(cut: Sequence[int]) -> str:
    if len(cut) > 24:
        return f"{len(cut)} chunks: {', '.join(map(str, cut[:10]))} .. {', '.join(map(str, cut[-6:]))}"
    return f"{len(cut)}: {', '.join(map(str, cut))}"


def plan_json(plan: Plan) -> dict[str, Any]:
    return asdict(plan) | {"gap": plan.gap, "explanation": plan.explanation}


def planned(console: Console, plan: Plan) -> None:
    console.print(f"[bold]{', '.join(map(str, plan.chunks))}[/]")
    console.print(plan.explanation)


def replayed(console: Console, results: Sequence[Replayed], title: str) -> None:
    """One row a policy: median and p90 TTFT of every prompt class, then bubble and number of chunks."""
    present = [name for name in NAMES if any(name in r.by_class() for r in results)]
    table = Table("policy", *present, "all: mean", "bubble", "chunks", title=title, title_justify="left")
    for result in results:
        classes = result.by_class()
        cells = [
            f"{seconds_text(np.median(classes[n]))} / {seconds_text(np.quantile(classes[n], 0.9))}"
            if n in classes
            else ""
            for n in present
        ]
        mean = seconds_text(float(np.mean(result.ttft)))
        table.add_row(result.label, *cells, mean, f"{result.bubble_ratio:.1%}", f"{result.chunks:,}")
    counts = [f"n = {len(results[0].by_class().get(n, []))}" for n in present]
    table.add_row("TTFT in s: median / p90", *counts, f"n = {len(results[0].ttft)}", "", "")
    console.print(table)


def papers(console: Console, tables: Sequence[PaperTable]) -> None:
    for made in tables:
        table = Table(*made.columns, title=made.title, title_justify="left", show_lines=False)
        for row in made.rows:
            table.add_row(*row)
        console.print(table)
        console.print(f"cost model: {made.cost}")
        console.print(f"reproduced: {made.reproduced}")
        console.print(f"not explained: {made.unexplained}\n")
