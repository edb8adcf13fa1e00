"""Faults that neighbouring dashboards had in the field, each as the smallest input. Named after the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefill_runtime.telemetry.metrics import LeaderMetrics, exposition
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from observability import pipeline
from tests import dashboards
from tests.dashboards import Board

BOARDS = dashboards.boards()
VALUES = {"namespace": "n", "pipeline": "p", "replica": ".*", "rank": "0"}
TARGET = 'namespace="n", pipeline="p", replica="0"'
BUILT_IN = "-- Grafana --"


def data_sources(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(where, what) of each reference to a data source, in whatever form a board may hold it."""
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from data_sources(item, f"{path}[{number}]")
    elif isinstance(node, dict):
        for key, value in node.items():
            if key == "datasource":
                yield path, value
            yield from data_sources(value, f"{path}.{key}")


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_llmkube_1430_no_data_source_of_one_grafana(board: Board) -> None:
    """With a data source {name: Mimir, uid: prom-x}, boards that name another one's uid are empty without an error."""
    found = dict(data_sources(board))
    rows = list(enumerate(board["panels"]))
    places = [
        *(f".panels[{n}]" for n, panel in rows if panel["type"] != "row"),
        *(f".panels[{n}].targets[{t}]" for n, panel in rows for t, _ in enumerate(panel.get("targets", ()))),
        *(f".annotations.list[{n}]" for n, _ in enumerate(board["annotations"]["list"])),
        *(f".templating.list[{n}]" for n, v in enumerate(board["templating"]["list"]) if v["type"] == "query"),
    ]  # fmt: skip
    assert set(places) <= found.keys()
    for place, source in found.items():
        if source != {"type": "grafana", "uid": BUILT_IN}:
            assert source == {"type": "prometheus", "uid": "${datasource}"}, place
    assert [place for place, source in found.items() if source["uid"] == BUILT_IN] == [".annotations.list[0]"]
    assert board["annotations"]["list"][0]["builtIn"] == 1
    (chooser,) = (v for v in board["templating"]["list"] if v["type"] == "datasource")
    assert (chooser["name"], chooser["query"]) == ("datasource", "prometheus")
    assert not chooser.get("current"), "a saved choice is a data source of one Grafana"
    uids = [value for place, value in keyed(board, "uid") if place]
    assert set(uids) <= {"${datasource}", BUILT_IN}


def keyed(node: Any, wanted: str, path: str = "") -> Iterator[tuple[str, Any]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if key == wanted:
            yield path, value
        yield from keyed(value, wanted, f"{path}/{key}")


def test_kserve_1457_shares_are_of_the_whole(tmp_path: Path) -> None:
    """Three states grow alike, so each has a third; where the state label stays on both sides, each has 1."""
    board = BOARDS[pipeline.UID]
    idle, causes, ratio = (
        dashboards.filled(dashboards.query(board, panel), "5m", **VALUES)
        for panel in ("Idle", "Rank $rank: time by cause", "Bubble ratio and its floor")
    )
    series = {
        f'prefill_rank_state_seconds_total{{{TARGET}, rank="{rank}", state="{state}"}}': "0+20x10"
        for state in ("compute", "bubble_fill", "idle")
        for rank in (0, 1)
    }
    dashboards.assert_values(
        tmp_path,
        "10m",
        series,
        {
            idle: {'{replica="0", rank="0"}': 0.333, '{replica="0", rank="1"}': 0.333},
            causes: {'{state="compute"}': 0.5, '{state="bubble_fill"}': 0.5},
            ratio: {'{replica="0", rank="0"}': 0.5, '{replica="0", rank="1"}': 0.5},
        },
    )


def test_vllm_15167_quantiles_reach_beyond_a_minute(tmp_path: Path) -> None:
    """100 TTFTs evenly from 90 to 400 s: with 60 s as the last finite bucket p99 would be 60 s; it is 396.9 s."""
    registry = CollectorRegistry()
    metrics = LeaderMetrics(registry)
    seconds = [90 + 310 * k / 99 for k in range(100)]
    for value in seconds:
        metrics.ttft.labels("le_128k").observe(value)
    buckets = {
        sample.labels["le"]: sample.value
        for family in text_string_to_metric_families(exposition(registry).decode())
        for sample in family.samples
        if sample.name == "prefill_ttft_seconds_bucket"
    }
    assert max(float(le) for le in buckets if le != "+Inf") >= 1800
    series = {
        f'prefill_ttft_seconds_bucket{{{TARGET}, prompt_class="le_128k", le="{le}"}}': f"0 {count:.0f}x9"
        for le, count in buckets.items()
    }
    shown = dashboards.filled(dashboards.query(BOARDS[pipeline.UID], "TTFT, p95"), "5m", **VALUES)
    p99 = shown.replace("histogram_quantile(0.95", "histogram_quantile(0.99")
    for query, true in ((shown, 384.5), (p99, 396.9)):
        near = f"abs({query} - {true}) < bool {0.25 * true}"
        dashboards.assert_values(tmp_path, "3m", series, {near: {'{prompt_class="le_128k"}': 1}})
