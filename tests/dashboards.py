"""The shipped dashboards as tests read them, and promtool to evaluate their queries."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from localcluster import prometheus
from localcluster.settings import REPOSITORY

FOLDER = REPOSITORY / "charts" / "prefill-operator" / "dashboards"
Board = dict[str, Any]


def boards() -> dict[str, Board]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}


def panels(board: Board) -> list[dict[str, Any]]:
    """Without rows."""
    found = [*board["panels"], *(inner for panel in board["panels"] for inner in panel.get("panels", []))]
    return [panel for panel in found if panel["type"] != "row"]


def queries(board: Board) -> Iterator[tuple[str, str]]:
    """(name for messages, PromQL) of every target."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield f"{panel['title']} / {target['refId']}", target["expr"]


def query(board: Board, panel: str, ref: str = "A") -> str:
    return dict(queries(board))[f"{panel} / {ref}"]


def filled(expr: str, window: str, **variables: str) -> str:
    """A query as Grafana sends it, its variables replaced by values."""
    for name, value in {"__rate_interval": window, **variables}.items():
        expr = re.sub(rf"\${name}\b|\${{{name}}}", value, expr)
    assert "$" not in expr, f"a variable has no value: {expr}"
    return expr


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = prometheus.folder() / "promtool"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)


def assert_values(
    folder: Path, at: str, series: dict[str, str], expected: dict[str, dict[str, float]], places: int = 3
) -> None:
    """What promtool makes of queries: {query: {labels: value, rounded}}.

    ``series``: promtool's notation, such as ``0+10x5``, one value a minute.
    """
    wanted = [
        {
            "expr": f"round({expr}, {10**-places})",
            "eval_time": at,
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for expr, samples in expected.items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": given, "promql_expr_test": wanted}
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"tests": [test]}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
