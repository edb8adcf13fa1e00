"""Fixtures for tests of the running operator: its real process, with the rights of its real role and no more."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
import yaml

from localcluster.apiserver import ApiServer
from tests.operator.lab import Lab

ROOT = Path(__file__).resolve().parents[2]
SUBJECT = "system:serviceaccount:prefill-system:prefill-operator"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Operator:
    """The operator's process."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self.health, self.metrics, self.log = free_port(), free_port(), log
        self._kubeconfig = kubeconfig
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = dict(os.environ) | {"KUBECONFIG": str(self._kubeconfig), "OPERATOR_IMAGE": "operator:1"}
        environment.pop("KUBERNETES_SERVICE_HOST", None)
        ports = ["--health-port", str(self.health), "--metrics-port", str(self.metrics)]
        command = [sys.executable, "-m", "prefill_operator.main", "--all-namespaces", "--resync-seconds", "5", *ports]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        deadline = monotonic() + 60
        while self.page(self.health, "/healthz") is None:
            assert self.process.poll() is None, self.log.read_text()
            assert monotonic() < deadline, self.log.read_text()
            sleep(0.05)

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(sign)
        return self.process.wait(30)

    @staticmethod
    def page(port: int, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, ConnectionError):
            return None


def service_account(server: ApiServer, folder: Path) -> Path:
    """A kubeconfig of the operator's own service account, after applying the shipped role."""
    role = str(ROOT / "manifests/rbac/rbac.yaml")
    for command in (
        ["kubectl", "create", "namespace", "prefill-system"],
        ["kubectl", "apply", "--server-side", "-f", role],
    ):
        done = subprocess.run(command, env=server.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or "AlreadyExists" in done.stderr, done.stderr
    token = subprocess.run(
        ["kubectl", "create", "token", "prefill-operator", "--namespace", "prefill-system", "--duration", "4h"],
        env=server.environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()
    config = yaml.safe_load(server.kubeconfig.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    file = folder / "operator.kubeconfig"
    file.write_text(json.dumps(config))
    return file


@pytest.fixture(scope="module")
def operator(crd: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    folder = tmp_path_factory.mktemp("operator")
    found = Operator(service_account(crd, folder), folder / "operator.log")
    found.start()
    yield found
    code = found.stop()
    text = found.log.read_text()
    print(text)
    assert code == 0, "SIGTERM ends the operator cleanly"
    assert "bug of the operator" not in text


@pytest.fixture
def lab(crd: ApiServer, request: pytest.FixtureRequest) -> Iterator[Lab]:
    name = request.node.name.replace("_", "-").split("[")[0].removeprefix("test-")[:40].strip("-")
    found = Lab(crd, f"{name}-{os.urandom(3).hex()}")
    yield found
    found.close()
