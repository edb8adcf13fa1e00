"""Searches for plans in a process of its own: questions as JSON lines on stdin, chunks on stdout.

Not a thread: it would hold the interpreter's lock for milliseconds while the engine wants to compose a step, and for
longer the lower its priority. The process ends when its stdin does, so it cannot outlive the engine.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

from prefill_runtime.scheduler.chunkers import Bounds
from prefill_runtime.scheduler.costfile import dump_cost, parse_cost
from prefill_runtime.scheduler.errors import ParameterError
from prefill_runtime.scheduler.layout import LAYOUTS
from prefill_runtime.scheduler.planner import Planner

MODULE = "prefill_runtime.scheduler.search_process"


def setup_line(planner: Planner) -> str:
    """The first line of stdin."""
    layout = next(name for name, kind in LAYOUTS.items() if type(planner.layout) is kind)
    return json.dumps(
        {
            "layout": layout,
            "ranks": planner.layout.ranks,
            "orders": planner.orders,
            "cost": json.loads(dump_cost(planner.cost)),
            "bounds": asdict(planner.bounds),
            "doubt": planner.doubt,
        }
    )


def planner_of(line: str) -> Planner:
    setup = json.loads(line)
    layout = LAYOUTS[setup["layout"]](setup["ranks"])
    cost, bounds = parse_cost(json.dumps(setup["cost"])), Bounds(**setup["bounds"])
    return Planner(layout, cost, bounds, orders=tuple(setup["orders"]), doubt=setup["doubt"])


def answer(planner: Planner, line: str) -> dict[str, Any]:
    try:
        return {"chunks": list(planner.plan(*json.loads(line)).chunks)}
    except ParameterError as error:
        return {"error": str(error)}


def main() -> None:
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    planner = planner_of(sys.stdin.readline())
    for line in sys.stdin:
        print(json.dumps(answer(planner, line)), flush=True)


if __name__ == "__main__":
    main()
