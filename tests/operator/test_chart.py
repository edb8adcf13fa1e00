"""Chart and manifests: the same objects, accepted by a real API server, with rights that suffice and no more."""

from __future__ import annotations

import json
import os
import re
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
from prefill_operator.api.types import PrefillPipelineSpec
from prefill_operator.desired.pipeline import Pipeline
from prefill_operator.desired.pod import pod_template

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


MONITORING = "monitoring.coreos.com/v1"
MONITORED = {
    ("PodMonitor", "prefill-operator-ranks"),
    ("ServiceMonitor", "prefill-operator"),
    ("ConfigMap", "prefill-operator-prefill-pipeline"),
}


def monitored(found: Objects) -> set[tuple[str, str]]:
    return {key for key in found if key[0] in ("PodMonitor", "ServiceMonitor", "ConfigMap")}


def test_what_prometheus_and_grafana_pick_up_comes_with_its_api_or_by_force() -> None:
    assert monitored(rendered()) == set()
    known = rendered("--api-versions", MONITORING)
    assert monitored(known) == MONITORED
    dashboards_only = rendered("--set", "dashboards.enabled=always")
    assert monitored(dashboards_only) == {key for key in MONITORED if key[0] == "ConfigMap"}
    assert monitored(rendered("--set", "dashboards.enabled=always,monitors.enabled=always")) == MONITORED
    never = rendered("--api-versions", MONITORING, "--set", "dashboards.enabled=never,monitors.enabled=never")
    assert monitored(never) == set()
    no_port = rendered("--api-versions", MONITORING, "--set", "metrics.enabled=false")
    assert monitored(no_port) == {key for key in MONITORED if key[0] != "ServiceMonitor"}


def test_kustomize_brings_the_same_for_prometheus_and_grafana() -> None:
    kustomized = objects(run("kubectl", "kustomize", str(ROOT / "manifests" / "monitoring")))
    chart = rendered("--api-versions", MONITORING)
    assert kustomized.keys() == MONITORED
    for key, found in kustomized.items():
        assert found["metadata"]["namespace"] == chart[key]["metadata"]["namespace"]
        assert found.get("data") == chart[key].get("data")
        if key[0] == "PodMonitor":
            assert found["spec"] == chart[key]["spec"]
    assert (
        kustomized["ConfigMap", "prefill-operator-prefill-pipeline"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    )


def test_monitors_and_dashboards_take_their_values(tmp_path: Path) -> None:
    values = {
        "monitors": {"enabled": "always", "labels": {"release": "stack"}, "interval": "7s"},
        "dashboards": {
            "enabled": "always", "label": "dash", "labelValue": "yes", "annotations": {"grafana_folder": "Prefill"},
        },
        "watchNamespaces": ["a", "b"],
    }  # fmt: skip
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    found = rendered("--values", str(file), release="mine")
    pods = found["PodMonitor", "mine-prefill-operator-ranks"]
    service = found["ServiceMonitor", "mine-prefill-operator"]
    board = found["ConfigMap", "mine-prefill-operator-prefill-pipeline"]
    assert pods["metadata"]["labels"]["release"] == service["metadata"]["labels"]["release"] == "stack"
    assert pods["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}
    assert [end["interval"] for end in pods["spec"]["podMetricsEndpoints"] + service["spec"]["endpoints"]] == ["7s"] * 2
    assert board["metadata"]["labels"]["dash"] == "yes"
    assert "grafana_dashboard" not in board["metadata"]["labels"]
    assert board["metadata"]["annotations"] == {"grafana_folder": "Prefill"}
    shipped = Path(CHART) / "dashboards" / "prefill-pipeline.json"
    assert board["data"] == {"prefill-pipeline.json": shipped.read_text()}


def test_monitors_select_what_is_there() -> None:
    found = rendered("--api-versions", MONITORING)
    service = found["Service", "prefill-operator-metrics"]
    monitor = found["ServiceMonitor", "prefill-operator"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["namespaceSelector"] == {"matchNames": [service["metadata"]["namespace"]]}
    assert [port["name"] for port in service["spec"]["ports"]] == [monitor["endpoints"][0]["port"]]
    spec = found["PodMonitor", "prefill-operator-ranks"]["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    pipeline_spec = PrefillPipelineSpec.model_validate(PIPELINE["spec"])
    template = pod_template(Pipeline("default", "x", "uid-1", 1, pipeline_spec, "operator:1", "1"), 0)
    assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert endpoint["port"] in [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    sources = [relabeling["sourceLabels"] for relabeling in endpoint["relabelings"]]
    labels = {f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', x)}" for x in template["metadata"]["labels"]}
    assert all(source in labels for (source,) in sources)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("monitors.unknown=1", "unknown"),
        ("dashboards.unknown=1", "unknown"),
        ("monitors.enabled=yes", "enabled"),
        ("dashboards.enabled=true", "enabled"),
        ("monitors.interval=fast", "interval"),
        ("dashboards.labelValue=1", "labelValue"),
    ],
)
def test_the_schema_refuses(setting: str, said: str) -> None:
    command = ("helm", "template", "x", CHART, "--kube-version", KUBERNETES, "--set", setting)
    done = subprocess.run(
        command, env=dict(os.environ) | {"PATH": programs.search_path()}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr
    assert said in done.stderr


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
            # Namespaces of other tests that are going forbid new objects, which is not about rights.
            text = log.read_text()
            assert not re.search(r"cannot \w+ resource|operator may not", text), text
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
