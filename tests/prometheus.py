"""A real Prometheus for tests, and a PodMonitor turned into its configuration as the Prometheus Operator does it.

Debian's build has no Kubernetes discovery, so a test hands over the pods with the labels that discovery would give
them; selecting and relabelling is Prometheus's own work.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from localcluster import prometheus

META = "__meta_kubernetes"
Object = dict[str, Any]


class Prometheus:
    """A server on loopback with everything it writes in ``folder``; a context manager."""

    def __init__(self, folder: Path, scrape_configs: list[Object]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._folder = folder
        (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": scrape_configs}))

    def __enter__(self) -> Prometheus:
        command = [
            "setpriv", "--pdeathsig", "KILL", str(prometheus.folder() / "prometheus"),
            f"--config.file={self._folder / 'prometheus.yml'}", f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]  # fmt: skip
        without_proxies = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, env=without_proxies, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"Prometheus is not ready:\n{(self._folder / 'prometheus.log').read_text()[-3000:]}")

    def _get(self, path: str, **parameters: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path} {parameters}: {error.read().decode()}") from error

    def now(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each series at this moment."""
        return [(found["metric"], float(found["value"][1])) for found in self._get("query", query=expr)["result"]]

    def since(self, expr: str, start: float, step: float) -> list[tuple[dict[str, str], dict[float, float]]]:
        """(labels, value by time) of each series between a Unix time and now, which is what a panel gets."""
        data = self._get("query_range", query=expr, start=str(start), end=str(time.time()), step=str(step))
        return [
            (found["metric"], {float(at): float(value) for at, value in found["values"]}) for found in data["result"]
        ]

    def label_values(self, label: str, series: str) -> list[str]:
        return list(self._get(f"label/{label}/values", **{"match[]": series}))

    def targets(self) -> list[Object]:
        return list(self._get("targets", state="active")["activeTargets"])


def scrape_config(monitor: Object, pods: Iterable[Object], interval: str = "1s") -> Object:
    """The job of a PodMonitor with one endpoint."""
    spec = monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    where = spec["namespaceSelector"]
    namespaces = ".*" if where.get("any") else "|".join(where["matchNames"])
    name = f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
    return {
        "job_name": f"podMonitor/{name}/0",
        "scrape_interval": interval,
        "scrape_timeout": interval,
        "metrics_path": endpoint["path"],
        "static_configs": discovered(pods),
        "relabel_configs": [
            _keep("namespace", namespaces),
            *(_keep(f"pod_label_{_as_label(key)}", value) for key, value in spec["selector"]["matchLabels"].items()),
            _keep("pod_container_port_name", endpoint["port"]),
            {"source_labels": [f"{META}_namespace"], "target_label": "namespace"},
            {"source_labels": [f"{META}_pod_container_name"], "target_label": "container"},
            {"source_labels": [f"{META}_pod_name"], "target_label": "pod"},
            {"target_label": "job", "replacement": name},
            {"target_label": "endpoint", "replacement": endpoint["port"]},
            *({_snake(key): value for key, value in step.items()} for step in endpoint.get("relabelings", ())),
        ],
    }


def discovered(pods: Iterable[Object]) -> list[Object]:
    """What discovery of role pod finds: a target for each port that a container declares."""
    found = []
    for pod in pods:
        about, address = pod["metadata"], pod["status"].get("podIP")
        labels = {f"{META}_namespace": about["namespace"], f"{META}_pod_name": about["name"]}
        labels |= {f"{META}_pod_label_{_as_label(key)}": value for key, value in about.get("labels", {}).items()}
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()) if address else ():
                more = {
                    f"{META}_pod_container_name": container["name"],
                    f"{META}_pod_container_port_name": port.get("name", ""),
                }
                found.append({"targets": [f"{address}:{port['containerPort']}"], "labels": labels | more})
    return found


def _keep(meta: str, pattern: str) -> Mapping[str, Any]:
    return {"action": "keep", "source_labels": [f"{META}_{meta}"], "regex": pattern}


def _as_label(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", name)
