"""The boards' queries on a Prometheus that scrapes an agent's metrics through the PodMonitor: the quick version of the
end-to-end test, for who writes a board."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from prefill_operator.desired import names

from localcluster.settings import REPOSITORY
from tests import dashboards
from tests.dashboards import Board
from tests.prometheus import Object, Prometheus, scrape_config
from tests.unit.observability.traffic import Traffic

BOARDS = dashboards.boards()
VALUES = {"namespace": "tenant", "pipeline": "long", "replica": "3", "rank": "1"}


@pytest.fixture(scope="module")
def page() -> Iterator[int]:
    """The port of an agent that gets a prompt before each scrape."""
    traffic = Traffic()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            traffic.prompt()
            text = traffic.hub.metrics_text()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def prometheus(page: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    documents = yaml.safe_load_all((REPOSITORY / "manifests" / "monitoring" / "monitors.yaml").read_text())
    (monitor,) = (found for found in documents if found["kind"] == "PodMonitor")
    monitor["metadata"]["namespace"] = "prefill-system"
    labels = names.replica_labels("long", "uid-1", 3) | {"app.kubernetes.io/component": "rank"}
    pods = [pod("rank", labels, page), pod("stranger", labels | {"app.kubernetes.io/component": "other"}, page)]
    with Prometheus(tmp_path_factory.mktemp("prometheus"), [scrape_config(monitor, pods)]) as server:
        yield server


def pod(name: str, labels: dict[str, str], port: int) -> Object:
    return {
        "metadata": {"namespace": "tenant", "name": name, "labels": labels},
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "control", "containerPort": port}]}]},
        "status": {"podIP": "127.0.0.1"},
    }


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_every_query_has_a_value(prometheus: Prometheus, board: Board) -> None:
    asked = {name: dashboards.filled(expr, "10s", **VALUES) for name, expr in dashboards.queries(board)}
    deadline = time.monotonic() + 30
    while empty := [
        name for name, expr in asked.items() if not any(math.isfinite(value) for _, value in prometheus.now(expr))
    ]:
        assert time.monotonic() < deadline, f"no value for {', '.join(empty)}"
        time.sleep(0.2)


def test_the_stranger_is_not_scraped(prometheus: Prometheus) -> None:
    (target,) = prometheus.targets()
    expected = {"namespace": "tenant", "pipeline": "long", "replica": "3", "pod": "rank", "container": "engine"}
    assert expected.items() <= target["labels"].items()
