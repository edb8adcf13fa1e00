"""An operator whose role lacks a verb says so where the user looks, and goes on once it is granted."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from kubernetes.aio import client, config
from prefill_operator.reconcile.cluster import Cluster
from prefill_operator.reconcile.errors import ForbiddenError
from prefill_operator.reconcile.metrics import Metrics
from prefill_operator.reconcile.offers import Offers
from prefill_operator.reconcile.reconciler import Reconciler, Release

from localcluster.apiserver import ApiServer
from tests.operator.lab import Lab, Object, condition, pipeline
from tests.operator.operating import SUBJECT, service_account

# A group of its own: no test changes the shipped role, which others rely on.
NAMESPACED = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "limited"}


@pytest.fixture
def rules() -> list[Object]:
    role = Path(__file__).resolve().parents[2] / "manifests/rbac/rbac.yaml"
    found = next(item for item in yaml.safe_load_all(role.read_text()) if item["kind"] == "ClusterRole")
    rules: list[Object] = found["rules"]
    return rules


@pytest.fixture
def limited(crd: ApiServer, tmp_path: Path) -> Iterator[Path]:
    """The operator's account without the shipped ClusterRoleBinding."""
    file = service_account(crd, tmp_path)
    kubectl = ["kubectl", "delete", "clusterrolebinding", "prefill-operator"]
    subprocess.run(kubectl, env=crd.environment, check=True, capture_output=True, timeout=60)
    yield file
    service_account(crd, tmp_path)


def grant(crd: ApiServer, lab: Lab, rules: list[Object]) -> None:
    metadata = {"name": "limited", "namespace": lab.namespace}
    subject = {"kind": "ServiceAccount", "name": SUBJECT.rsplit(":", 1)[1], "namespace": SUBJECT.split(":")[2]}
    items = [
        {"kind": "Role", "rules": rules},
        {"kind": "RoleBinding", "roleRef": NAMESPACED, "subjects": [subject]},
    ]
    for item in items:
        text = json.dumps(item | {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": metadata})
        command = ["kubectl", "apply", "-f", "-"]
        subprocess.run(command, env=crd.environment, input=text, text=True, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(("resource", "verb"), [("statefulsets", "create"), ("pods", "list")])
async def test_a_missing_verb_is_named(
    crd: ApiServer, lab: Lab, limited: Path, rules: list[Object], resource: str, verb: str
) -> None:
    less = [
        rule | {"verbs": [v for v in rule["verbs"] if v != verb]} if resource in rule["resources"] else rule
        for rule in rules
    ]
    grant(crd, lab, less)
    lab.create(pipeline("a"))
    settings = client.Configuration()
    await config.load_kube_config(str(limited), client_configuration=settings)
    async with client.ApiClient(settings) as api:
        reconciler = Reconciler(Cluster(api), Release("operator:1", "0.1.0"), Metrics(), Offers(60.0, lambda key: None))
        with pytest.raises(ForbiddenError):
            await reconciler.reconcile((lab.namespace, "a"))
        found = condition(lab.get("PrefillPipeline", "a") or {})
        assert found["reason"] == "Forbidden"
        assert found["message"].startswith(f"the operator may not {verb} {resource}: grant it")
        grant(crd, lab, rules)
        await reconciler.reconcile((lab.namespace, "a"))
    lab.group("a-0")
