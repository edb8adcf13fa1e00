"""Chart and manifests: the same objects, accepted by a real API server, with rights that suffice and no more."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from localcluster import programs
from localcluster.apiserver import ApiServer
from localcluster.settings import KUBERNETES

ROOT = Path(__file__).resolve().parents[2]
CHART = str(ROOT / "charts" / "prefill-operator")
Objects = dict[tuple[str, str], dict[str, Any]]


def run(*command: str, environment: dict[str, str] | None = None, text: str | None = None) -> str:
    environment = environment or dict(os.environ) | {"PATH": programs.search_path()}
    done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> Objects:
    return {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(text) if item}


def rendered(*arguments: str, release: str = "prefill-operator") -> Objects:
    where = ("--namespace", "prefill-system", "--kube-version", KUBERNETES, "--include-crds")
    return objects(run("helm", "template", release, CHART, *where, *arguments))


@pytest.fixture(scope="module")
def kustomized() -> Objects:
    return objects(run("kubectl", "kustomize", str(ROOT / "manifests")))


def pod_spec(found: Objects, name: str = "prefill-operator") -> dict[str, Any]:
    spec: dict[str, Any] = found["Deployment", name]["spec"]["template"]["spec"]
    return spec


def test_lint() -> None:
    text = run("helm", "lint", "--strict", "--kube-version", KUBERNETES, CHART)
    assert "1 chart(s) linted, 0 chart(s) failed" in text


def test_both_ways_install_the_same(kustomized: Objects) -> None:
    chart = rendered()
    assert chart.keys() == kustomized.keys() - {("Namespace", "prefill-system")}
    for kind, parts in {
        "ClusterRole": ("rules",),
        "ClusterRoleBinding": ("roleRef", "subjects"),
        "CustomResourceDefinition": ("spec", "metadata"),
    }.items():
        name = next(name for found, name in chart if found == kind)
        for part in parts:
            assert chart[kind, name][part] == kustomized[kind, name][part]
    assert pod_spec(chart) == pod_spec(kustomized)
    for key in ("replicas", "strategy"):
        found = [both["Deployment", "prefill-operator"]["spec"][key] for both in (chart, kustomized)]
        assert found[0] == found[1]


def test_one_replica_without_overlap(kustomized: Objects) -> None:
    spec = kustomized["Deployment", "prefill-operator"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    failed = subprocess.run(
        ["helm", "template", "x", CHART, "--set", "replicaCount=2"],
        env=dict(os.environ) | {"PATH": programs.search_path()}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert failed.returncode == 1
    assert "'replicaCount' not allowed" in failed.stderr


def test_the_operator_knows_its_own_image(kustomized: Objects) -> None:
    for found in (kustomized, rendered(), rendered("--set", "image.repository=registry.example/op,image.tag=v9")):
        (container,) = pod_spec(found)["containers"]
        assert {"name": "OPERATOR_IMAGE", "value": container["image"]} in container["env"]
        assert ":" in container["image"]


def test_the_pod_is_locked_down(kustomized: Objects) -> None:
    spec = pod_spec(kustomized)
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"] == {"cpu": "100m", "memory": "160Mi"}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert (container[probe]["httpGet"]["path"], container[probe]["timeoutSeconds"]) == ("/healthz", 5)


def test_values_reach_the_objects() -> None:
    values = "watchNamespaces={a,b},metrics.enabled=false,extraLabels.team=x,resources.limits.memory=1Gi"
    chart = rendered("--set", values, release="mine")
    assert {kind for kind, _ in chart} == {
        "CustomResourceDefinition", "ServiceAccount", "ClusterRole", "RoleBinding", "Deployment",
    }  # fmt: skip
    deployment = chart["Deployment", "mine-prefill-operator"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--namespace=a", "--namespace=b"]
    assert container["resources"]["limits"]["memory"] == "1Gi"
    assert (
        deployment["metadata"]["labels"]["team"] == deployment["spec"]["template"]["metadata"]["labels"]["team"] == "x"
    )
    assert "annotations" not in deployment["spec"]["template"]["metadata"]


@contextmanager
def installed(server: ApiServer, *arguments: str) -> Iterator[None]:
    """The release, without anything that would run its pods."""
    environment = server.environment
    flags = ("--namespace", "prefill-system", "--create-namespace", "--skip-crds", *arguments)
    run("helm", "install", "prefill-operator", CHART, *flags, environment=environment)
    try:
        yield
    finally:
        run("helm", "uninstall", "prefill-operator", "--namespace", "prefill-system", environment=environment)


def test_restricted_pod_security_accepts_the_pod(crd: ApiServer) -> None:
    text = run("kubectl", "apply", "--server-side", "-k", str(ROOT / "manifests"), environment=crd.environment)
    try:
        assert "deployment.apps/prefill-operator serverside-applied" in text
        created = ("wait", "deployment/prefill-operator", "--namespace", "prefill-system", "--timeout=60s")
        run("kubectl", *created, "--for=jsonpath={.status.replicas}=1", environment=crd.environment)
    finally:
        run("kubectl", "delete", "-k", str(ROOT / "manifests" / "rbac"), environment=crd.environment)
        run("kubectl", "delete", "deployment,service", "--all", "-n", "prefill-system", environment=crd.environment)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def service_account_config(server: ApiServer, file: Path) -> Path:
    """A kubeconfig with nothing but the operator's own token."""
    token = run(
        "kubectl", "create", "token", "prefill-operator", "--namespace", "prefill-system",
        environment=server.environment,
    ).strip()  # fmt: skip
    config = yaml.safe_load(server.kubeconfig.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    file.write_text(yaml.safe_dump(config))
    return file


@contextmanager
def operator(config: Path, *arguments: str) -> Iterator[tuple[Path, int]]:
    """The operator's process with that kubeconfig; gives its log and its health port."""
    log, port = config.with_suffix(".log"), free_port()
    ports = (f"--health-port={port}", f"--metrics-port={free_port()}")
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefill_operator.main", *ports, *arguments],
            env=dict(os.environ) | {"KUBECONFIG": str(config), "OPERATOR_IMAGE": "prefill-operator:test"},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            yield log, port
        finally:
            process.terminate()
            process.wait(60)


PIPELINE: dict[str, Any] = {
    "apiVersion": "prefill.dev/v1alpha1",
    "kind": "PrefillPipeline",
    "spec": {
        "model": {"name": "m", "source": {"hostPath": {"path": "/srv/m"}}, "maxModelLen": 32768},
        "parallelism": {"pipeline": 2},
        "engine": {"image": "engine:1"},
        "accelerator": {"vendor": "CPU"},
    },
}


@pytest.mark.parametrize("watched", ["", "rights-here"], ids=["all namespaces", "one namespace"])
def test_the_rights_suffice_and_are_no_more(crd: ApiServer, tmp_path: Path, watched: str) -> None:
    namespace = watched or "rights-all"
    environment = crd.environment
    run("kubectl", "create", "namespace", namespace, environment=environment)
    arguments = ("--set", f"watchNamespaces={{{watched}}}") if watched else ()
    with installed(crd, *arguments):
        config = service_account_config(crd, tmp_path / "operator.yaml")
        scope = f"--namespace={watched}" if watched else "--all-namespaces"
        with operator(config, scope) as (log, port):
            body = PIPELINE | {"metadata": {"name": "rights", "namespace": namespace}}
            run("kubectl", "create", "-f", "-", environment=environment, text=json.dumps(body))
            wait = ("wait", "--namespace", namespace, "--timeout=60s", "pfp/rights")
            run("kubectl", *wait, "--for=jsonpath={.status.observedGeneration}=1", environment=environment)
            kinds = "statefulset,service,pdb"
            names = ("get", kinds, "--namespace", namespace, "-o", "name")
            assert run("kubectl", *names, environment=environment).split() == [
                "statefulset.apps/rights-0",
                "service/rights",
                "service/rights-0",
                "poddisruptionbudget.policy/rights",
            ], log.read_text()
            run("kubectl", "scale", "pfp/rights", "-n", namespace, "--replicas=0", environment=environment)
            gone = ("wait", "--for=delete", "statefulset/rights-0", "-n", namespace, "--timeout=60s")
            run("kubectl", *gone, environment=environment)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
                assert answer.status == 200
            text = log.read_text().lower()
            assert "forbidden" not in text, text
        may = {}
        for verb, resource in (
            ("get", "secrets"), ("list", "secrets"), ("create", "pods"), ("delete", "pods"), ("create", "pods/exec"),
            ("create", "roles.rbac.authorization.k8s.io"), ("patch", "prefillpipelines.prefill.dev"),
            ("get", "nodes"), ("patch", "statefulsets.apps"),
        ):  # fmt: skip
            who = "--as=system:serviceaccount:prefill-system:prefill-operator"
            asked = subprocess.run(
                ["kubectl", "auth", "can-i", verb, resource, "--namespace", namespace, who],
                env=environment, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            may[verb, resource] = asked.stdout.strip()
        assert {pair for pair, answer in may.items() if answer == "yes"} == {("patch", "statefulsets.apps")}
    run("kubectl", "delete", "namespace", namespace, "--wait=false", environment=environment)
