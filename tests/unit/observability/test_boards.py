"""The shipped boards: generated, complete, and about metrics that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefill_runtime.telemetry.hub import Hub
from prometheus_client.parser import text_string_to_metric_families

from observability.__main__ import COMMAND, FOLDERS, texts
from tests import dashboards
from tests.dashboards import Board
from tests.unit.observability.traffic import Traffic

BOARDS = dashboards.boards()
VARIABLE = re.compile(r"\$\{?(\w+)")
SUMMED_BUCKETS = re.compile(r"sum by \(le\b[^)]*\) \(rate\(\w+_bucket\{[^}]*\}\[\$__rate_interval\]\)\)")
TARGET_LABELS = {"namespace", "pipeline", "replica"}


@pytest.fixture(params=BOARDS.values(), ids=BOARDS.keys())
def board(request: pytest.FixtureRequest) -> Board:
    return request.param


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.parent.name)
def test_what_is_shipped_is_what_is_generated(folder: Path) -> None:
    shipped = {file.name: file.read_text() for file in folder.iterdir()}
    assert shipped.keys() == texts().keys()
    for name, text in texts().items():
        assert shipped[name] == text, f"{folder / name} is stale: {COMMAND}"


def test_every_panel_explains_itself(board: Board) -> None:
    for panel in dashboards.panels(board):
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["legendFormat"], panel["title"]


def test_no_two_panels_overlap(board: Board) -> None:
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        where = panel["gridPos"]
        assert where["x"] + where["w"] <= 24, panel["title"]
        for x in range(where["x"], where["x"] + where["w"]):
            for y in range(where["y"], where["y"] + where["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_every_variable_that_is_used_exists_and_each_is_used(board: Board) -> None:
    variables = board["templating"]["list"]
    assert (variables[0]["name"], variables[0]["type"]) == ("datasource", "datasource")
    assert variables[0]["query"] == "prometheus"
    names = [variable["name"] for variable in variables]
    assert names[:4] == ["datasource", "namespace", "pipeline", "replica"]
    used = {name for text in strings(board) for name in VARIABLE.findall(text)} - {"__rate_interval"}
    assert used == set(names)
    for number, variable in enumerate(variables[1:], 1):
        # A choice narrows the later ones only.
        assert set(VARIABLE.findall(variable["query"])) <= set(names[1:number])


def test_every_metric_and_label_is_exported(board: Board) -> None:
    exported = labels_of_metrics(Traffic().hub)
    for name, expr in [*dashboards.queries(board), *other_queries(board)]:
        selectors = re.findall(r"(prefill_\w+)(?:\{([^}]*)\})?", expr)
        assert selectors, name
        for metric, matchers in selectors:
            assert metric in exported, f"{name}: nothing exports {metric}"
            used = set(re.findall(r"(\w+)[!=]~?=?\"", matchers))
            assert used <= exported[metric] | TARGET_LABELS, f"{name}: {metric} has labels {exported[metric]}"
        grouped = {label for found in re.findall(r"by \(([^)]*)\)", expr) for label in found.split(", ") if label}
        assert grouped <= TARGET_LABELS.union(*(exported[metric] for metric, _ in selectors)), name


def test_quantiles_add_up_the_buckets_of_a_rate_first(board: Board) -> None:
    found = 0
    for name, expr in dashboards.queries(board):
        for quantile in re.findall(r"histogram_quantile\(.*?, (.*)\)", expr):
            found += 1
            assert re.fullmatch(
                r"sum by \(le\b[^)]*\) \(rate\(\w+_bucket\{[^}]*\}\[\$__rate_interval\]\)\)", quantile
            ), name
    assert found >= 8


def test_promtool_accepts_every_query(board: Board, tmp_path: Path) -> None:
    values = {variable["name"]: "x" for variable in board["templating"]["list"]}
    rules = [
        {"record": f"query_{number}", "expr": dashboards.filled(expr, "1m", **values)}
        for number, (_, expr) in enumerate([*dashboards.queries(board), *annotations(board)])
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = dashboards.promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(rules)} rules found" in done.stdout


def annotations(board: Board) -> Iterator[tuple[str, str]]:
    for annotation in board["annotations"]["list"]:
        if not annotation.get("builtIn"):
            yield annotation["name"], annotation["expr"]


def other_queries(board: Board) -> Iterator[tuple[str, str]]:
    yield from annotations(board)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]


def strings(node: Any) -> Iterator[str]:
    match node:
        case str():
            yield node
        case dict():
            for value in node.values():
                yield from strings(value)
        case list():
            for value in node:
                yield from strings(value)


def labels_of_metrics(hub: Hub) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(hub.metrics_text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found
