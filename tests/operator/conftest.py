"""One real API server with controller-manager for the whole suite, and the CRD in it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from localcluster.apiserver import ApiServer
from tests.operator.operating import lab, operator

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


@pytest.fixture(scope="session")
def crd(api_server: ApiServer) -> ApiServer:
    """The API server, with the PrefillPipeline resource established."""
    for command in (
        ["kubectl", "apply", "--server-side", "-f", str(ROOT / "operator" / "crds")],
        ["kubectl", "wait", "--for=condition=Established", "--timeout=60s", "crd/prefillpipelines.prefill.dev"],
    ):
        done = subprocess.run(command, env=api_server.environment, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
    return api_server


__all__ = ["api_server", "crd", "lab", "operator"]
