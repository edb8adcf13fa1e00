"""The shipped PodMonitor and dashboards on a serving pipeline: a real Prometheus scrapes the rank pods, and while
prompts come in no panel is empty."""

from __future__ import annotations

import itertools
import math
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import yaml

from localcluster import deploy
from localcluster.kube import Kube
from localcluster.settings import KUBERNETES
from tests import dashboards
from tests.dashboards import Board
from tests.e2e.conftest import Pipeline
from tests.prometheus import Object, Prometheus, scrape_config

BOARDS = dashboards.boards()
LENGTHS = (33, 1500, 6000)
WINDOW = "30s"
VALUES = {"namespace": "default", "pipeline": "toy", "replica": ".*"}


@pytest.fixture(scope="module")
def prometheus(kube: Kube, pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrapes what the chart's PodMonitor selects of all pods of the cluster."""
    pods = [pod for pod in kube.items("pods", "--all-namespaces") if "deletionTimestamp" not in pod["metadata"]]
    with Prometheus(tmp_path_factory.mktemp("prometheus"), [scrape_config(pod_monitor(kube), pods)]) as server:
        yield server


def pod_monitor(kube: Kube) -> Object:
    text = kube.run(
        *("helm", "template", "prefill-operator", str(deploy.CHART), "--namespace", deploy.OPERATOR_NAMESPACE),
        *("--kube-version", KUBERNETES, "--set", "monitors.enabled=always"),
    )
    (monitor,) = (item for item in yaml.safe_load_all(text) if item and item["kind"] == "PodMonitor")
    return dict(monitor)


@contextmanager
def traffic(pipeline: Pipeline) -> Iterator[None]:
    """Prompts of all lengths, one after the other and none like an earlier one, while the block runs."""
    stop = threading.Event()

    def send() -> None:
        rng = random.Random(29)
        for length in itertools.cycle(LENGTHS):
            if stop.is_set():
                return
            pipeline.first_token([rng.randrange(4, 256) for _ in range(length)])

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        try:
            yield
        finally:
            stop.set()
        sent.result()


def test_it_scrapes_the_ranks_and_nothing_else(kube: Kube, prometheus: Prometheus) -> None:
    def up() -> int:
        return len(prometheus.now('up{pipeline="toy"} == 1'))

    kube.wait("both ranks scraped", lambda: up() == 2, 30, lambda: f"{up()} are up")
    scraped = {target["labels"]["pod"] for target in prometheus.targets()}
    assert scraped >= {"toy-0-0", "toy-0-1"}
    assert scraped <= {pod["metadata"]["name"] for pod in kube.items("pods", "-l", "prefill.dev/pipeline")}
    states = 'count by (namespace, pipeline, replica, pod, rank) (prefill_rank_state_seconds_total{pipeline="toy"})'
    kube.wait("state seconds of both ranks", lambda: len(prometheus.now(states)) == 2, 30, lambda: "")
    for labels, _ in prometheus.now(states):
        expected = {"namespace": "default", "pipeline": "toy", "replica": "0"}
        assert labels == expected | {"rank": labels["rank"], "pod": f"toy-0-{labels['rank']}"}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_no_panel_is_empty_while_traffic_flows(
    kube: Kube, pipeline: Pipeline, prometheus: Prometheus, board: Board
) -> None:
    asked = {
        f"{name} (rank {rank})": dashboards.filled(expr, WINDOW, rank=rank, **VALUES)
        for name, expr in dashboards.queries(board)
        for rank in (("0", "1") if "$rank" in expr else (".*",))
    }
    began = time.time()

    def empty() -> list[str]:
        return [
            name
            for name, expr in asked.items()
            if not any(math.isfinite(v) for _, values in prometheus.since(expr, began, 1) for v in values.values())
        ]

    with traffic(pipeline):
        kube.wait("a value in every panel", lambda: empty() == [], 180, lambda: f"empty: {', '.join(empty())}")


def test_the_causes_of_a_rank_add_up_to_all_of_its_time(pipeline: Pipeline, prometheus: Prometheus) -> None:
    """Where a share keeps a label too many, each is 1."""
    expr = dashboards.query(BOARDS["prefill-pipeline"], "Rank $rank: time by cause")
    for rank in ("0", "1"):
        found = prometheus.since(dashboards.filled(expr, WINDOW, rank=rank, **VALUES), time.time() - 60, 1)
        states = {labels["state"] for labels, _ in found}
        assert {"compute", "bubble_fill", "bubble_imbalance", "bubble_drain"} <= states
        assert "idle" not in states
        sums: dict[float, float] = {}
        for _, values in found:
            for at, value in values.items():
                sums[at] = sums.get(at, 0.0) + value
        finite = [total for total in sums.values() if math.isfinite(total)]
        assert finite
        assert finite == pytest.approx([1.0] * len(finite))
        compute = [v for labels, values in found if labels["state"] == "compute" for v in values.values()]
        highest = max(filter(math.isfinite, compute))
        assert 0 < highest < 1


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_variables_offer_what_there_is(pipeline: Pipeline, prometheus: Prometheus, board: Board) -> None:
    offered = {}
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            asked = dashboards.filled(variable["query"], WINDOW, rank=".*", **VALUES)
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", asked).groups()
            offered[variable["name"]] = prometheus.label_values(label, series)
    assert "toy" in offered.pop("pipeline")
    assert offered == {"namespace": ["default"], "replica": ["0"], "rank": ["0", "1"]}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_annotations_can_be_asked(prometheus: Prometheus, board: Board) -> None:
    """There may be none: not every run has a new calibration."""
    for annotation in board["annotations"]["list"]:
        if not annotation.get("builtIn"):
            marks = prometheus.now(dashboards.filled(annotation["expr"], "1h", rank=".*", **VALUES))
            assert {labels["pipeline"] for labels, _ in marks} <= {"toy"}
