"""The child objects of a PrefillPipeline but for the calibration ConfigMap: pure functions to manifests."""

from __future__ import annotations

from typing import Any

from prefill_operator.desired import names
from prefill_operator.desired.life import TEMPLATE_HASH, Life
from prefill_operator.desired.pipeline import Manifest, Pipeline
from prefill_operator.desired.pod import pod_template, template_hash
from prefill_runtime.agent import config as rank


def _metadata(pipeline: Pipeline, name: str, labels: dict[str, str]) -> Manifest:
    return {
        "name": name,
        "namespace": pipeline.namespace,
        "labels": labels,
        "ownerReferences": [pipeline.owner_reference],
    }


def client_service(pipeline: Pipeline) -> Manifest:
    """One address for clients: rank 0 of every replica that is Ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(pipeline, names.pipeline_name(pipeline.name), pipeline.labels),
        "spec": {
            "type": "ClusterIP",
            "selector": names.leader_selector(pipeline.uid),
            "ports": [{"name": "http", "port": pipeline.spec.engine.port, "targetPort": "engine"}],
        },
    }


def headless_service(pipeline: Pipeline, replica: int) -> Manifest:
    """How ranks find each other, which they must before they are Ready."""
    ports = {"control": rank.CONTROL_PORT, "group": rank.GROUP_PORT, "store": rank.STORE_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(
            pipeline,
            names.replica_name(pipeline.name, replica),
            names.replica_labels(pipeline.name, pipeline.uid, replica),
        ),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.rank_selector(pipeline.uid, replica),
            "ports": [{"name": name, "port": port, "targetPort": name} for name, port in ports.items()],
        },
    }


def disruption_budget(pipeline: Pipeline) -> Manifest:
    """A drain may take one pod, and with it one replica, at a time.

    All ranks of a replica lose their readiness with the first that goes, so the others of the same replica
    leave as unhealthy pods while those of other replicas are held back until it is whole again. A plain
    number, not maxUnavailable: that one counts pods of the StatefulSets the selector does not match too.
    """
    pods = pipeline.spec.replicas * pipeline.spec.pods_per_replica
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(pipeline, names.pipeline_name(pipeline.name), pipeline.labels),
        "spec": {
            "minAvailable": max(0, pods - 1),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": {names.LABEL_UID: pipeline.uid}},
        },
    }


def stateful_set(pipeline: Pipeline, replica: int, life: Life, calibration: str, *, running: bool) -> Manifest:
    """A replica in the shape the spec asks for, living ``life`` and starting from ``calibration`` (or from none)."""
    template = pod_template(pipeline, replica)
    digest = template_hash(template)
    template["metadata"]["annotations"] |= {
        rank.ANNOTATION_INCARNATION: life.incarnation,
        rank.ANNOTATION_CALIBRATION: calibration,
    }
    return _set(
        pipeline,
        replica,
        life.annotations() | {TEMPLATE_HASH: digest},
        {
            "serviceName": names.replica_name(pipeline.name, replica),
            "replicas": pipeline.spec.pods_per_replica if running else 0,
            # Both immutable. A changed template never waits for, nor replaces, single pods of a group.
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": names.rank_selector(pipeline.uid, replica)},
            "template": template,
        },
    )


def held_set(pipeline: Pipeline, replica: int, life: Life, observed: Manifest, **spec: Any) -> Manifest:
    """A replica in the shape it has now, however the spec may have changed since, but for ``life`` and ``spec``."""
    digest = observed["metadata"].get("annotations", {}).get(TEMPLATE_HASH, "")
    return _set(pipeline, replica, life.annotations() | {TEMPLATE_HASH: digest}, observed["spec"] | spec)


def _set(pipeline: Pipeline, replica: int, annotations: dict[str, str], spec: Manifest) -> Manifest:
    metadata = _metadata(
        pipeline,
        names.replica_name(pipeline.name, replica),
        names.replica_labels(pipeline.name, pipeline.uid, replica),
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata | {"annotations": annotations},
        "spec": spec,
    }
