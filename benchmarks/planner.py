"""How long planning takes and how good it is: JSON to a file and a table to the terminal.

    python benchmarks/planner.py [--out planner.json]

Times are CPU seconds of this process (medians), so that a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from prefill_runtime.scheduler.chunkers import Bounds, Fixed
from prefill_runtime.scheduler.cost import PipelineCost, StageModel
from prefill_runtime.scheduler.layout import FoldBack, Layout, Linear
from prefill_runtime.scheduler.planner import Planned, Planner
from prefill_runtime.scheduler.simulate import Request, simulate

K = 1024
COST = PipelineCost(StageModel(0.7, 2.42 / (32 * K), 3.64 / (32 * K) ** 2))
LIMITS = {"path_ms": 10.0, "plan_p2_ms": 300.0, "plan_p8_ms": 1000.0, "tasks_per_second": 20_000}


def timed(work: Callable[[], object], repeats: int) -> float:
    """Median CPU milliseconds."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        taken.append((time.process_time() - start) * 1e3)
    return statistics.median(taken)


def quality() -> list[dict[str, object]]:
    """Predicted TTFT of plans beside tuned Fixed and the bound."""
    rows: list[dict[str, object]] = []
    for prompt in (128 * K, 512 * K):
        for ranks in (2, 4, 8):
            plans = {
                type(x).__name__: Planner(x, COST, Bounds(64 * K)).plan(prompt)
                for x in (Linear(ranks), FoldBack(ranks))
            }
            base = plans["Linear"].fixed[1]
            rows.append(
                {
                    "prompt": prompt,
                    "ranks": ranks,
                    "fixed_linear_s": base,
                    "fixed_foldback_s": plans["FoldBack"].fixed[1],
                    "planned_linear_s": plans["Linear"].seconds,
                    "planned_foldback_s": plans["FoldBack"].seconds,
                    "bound_foldback_s": plans["FoldBack"].bound,
                    "ratio": plans["FoldBack"].seconds / base,
                    "gap": plans["FoldBack"].gap,
                }
            )
    return rows


def speed() -> list[dict[str, object]]:
    """Seed on the scheduling path, cached answer, cold plan; at 128 chunks and at the sizes that plans choose."""
    rows: list[dict[str, object]] = []
    for layout in (Linear(2), FoldBack(2), Linear(8), FoldBack(8)):
        for name, bounds in (("128 chunks", Bounds(4 * K)), ("free", Bounds(64 * K))):
            planner = Planner(layout, COST, bounds)
            chunker = Planned(bounds, planner)
            chunker.next_chunk(0, 512 * K)
            rows.append(
                {
                    "layout": type(layout).__name__,
                    "ranks": layout.ranks,
                    "case": name,
                    "chunks": len(planner.plan(512 * K).chunks),
                    "seed_ms": timed(lambda p=planner: p.seed(512 * K), 9),  # type: ignore[misc]
                    "cached_ms": timed(lambda c=chunker: c.next_chunk(0, 512 * K), 9),  # type: ignore[misc]
                    "plan_ms": timed(lambda p=planner: p.plan(512 * K), 3),  # type: ignore[misc]
                }
            )
    return rows


def simulator() -> dict[str, object]:
    layout: Layout = FoldBack(8)
    requests = [Request(512 * K)] * 20
    tasks = 20 * 64 * layout.stages
    taken = timed(lambda: simulate(layout, COST, requests, Fixed(Bounds(8 * K))), 3)
    return {"tasks": tasks, "tasks_per_second": tasks / taken * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    result = {"limits": LIMITS, "quality": quality(), "speed": speed(), "simulator": simulator()}
    for name in ("quality", "speed"):
        rows = result[name]
        assert isinstance(rows, list)
        print(" ".join(f"{key:>18}" for key in rows[0]))
        for row in rows:
            print(" ".join(f"{v:>18.4g}" if isinstance(v, float) else f"{v!s:>18}" for v in row.values()))
        print()
    print(f"simulator: {result['simulator']['tasks_per_second']:,.0f} chunk-stage tasks per second")  # type: ignore[index, call-overload]
    out = parser.parse_args().out
    if out:
        out.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
