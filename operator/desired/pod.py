"""The pod template of a replica: everything but the life of the group (see ``life.py``)."""

from __future__ import annotations

import hashlib
import json
import math

from prefill_operator.api.types import Vendor
from prefill_operator.desired import names
from prefill_operator.desired.environment import environment, mounts, volumes
from prefill_operator.desired.pipeline import Manifest, Pipeline, rank_config
from prefill_runtime.agent import config as rank

AGENT = ("python3", "-m", "prefill_runtime.agent")
# What the entry point of an Ascend image does, which a pod's command replaces: the toolkit's libraries and Python
# packages are found through the variables that these files set, and they keep our PYTHONPATH.
ASCEND_SETTINGS = ("/usr/local/Ascend/ascend-toolkit/set_env.sh", "/usr/local/Ascend/nnal/atb/set_env.sh")
ASCEND_START = 'for f in {files}; do [ ! -f "$f" ] || . "$f"; done; exec "$@"'.format(files=" ".join(ASCEND_SETTINGS))
PROBE_SECONDS = 5
PROBE = {"periodSeconds": PROBE_SECONDS, "timeoutSeconds": 5}


def pod_template(pipeline: Pipeline, replica: int) -> Manifest:
    extra = pipeline.spec.scheduling.pod_template
    labels = names.replica_labels(pipeline.name, pipeline.uid, replica) | {"app.kubernetes.io/component": "rank"}
    config = {rank.ANNOTATION_CONFIG: rank_config(pipeline, replica).to_json()}
    return {
        "metadata": {
            "labels": extra.metadata.labels | labels,
            "annotations": extra.metadata.annotations | config,
        },
        "spec": _pod_spec(pipeline, replica),
    }


def template_hash(template: Manifest) -> str:
    """16 hexadecimal digits that change with anything a running group would have to be replaced for."""
    canonical = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _pod_spec(pipeline: Pipeline, replica: int) -> Manifest:
    extra = pipeline.spec.scheduling.pod_template
    inits = [_install(pipeline)]
    if pipeline.profiles:
        inits.append(_container(pipeline, "profile", "profile"))
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": extra.termination_grace_period_seconds,
        "initContainers": inits,
        "containers": [_container(pipeline, "engine", "serve") | _serving(pipeline)],
        "volumes": volumes(pipeline),
    }
    if extra.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    optional = {
        "nodeSelector": extra.node_selector,
        "tolerations": list(extra.tolerations),
        "affinity": _affinity(pipeline, replica),
        "securityContext": extra.security_context,
        "imagePullSecrets": [{"name": secret.name} for secret in extra.image_pull_secrets],
        "serviceAccountName": extra.service_account_name,
        "priorityClassName": extra.priority_class_name,
        "schedulerName": extra.scheduler_name,
        "runtimeClassName": pipeline.spec.accelerator.runtime_class_name,
    }
    return spec | {name: value for name, value in optional.items() if value}


def _install(pipeline: Pipeline) -> Manifest:
    return {
        "name": "runtime",
        "image": pipeline.operator_image,
        "imagePullPolicy": "IfNotPresent",
        "command": [*AGENT, "install"],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "volumeMounts": [{"name": "prefill-runtime", "mountPath": str(rank.RUNTIME_DIR)}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _container(pipeline: Pipeline, name: str, command: str) -> Manifest:
    engine = pipeline.spec.engine
    return {
        "name": name,
        "image": engine.image,
        "imagePullPolicy": engine.image_pull_policy,
        "command": _agent(pipeline, command),
        "env": environment(pipeline),
        "resources": _resources(pipeline),
        "volumeMounts": mounts(pipeline),
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _agent(pipeline: Pipeline, command: str) -> list[str]:
    if pipeline.spec.accelerator.vendor == Vendor.ASCEND:
        return ["/bin/bash", "-c", ASCEND_START, "prefill-agent", *AGENT, command]
    return [*AGENT, command]


def _serving(pipeline: Pipeline) -> Manifest:
    """The engine container is alive as long as its agent is; the agent judges the engine and ends with a reason."""
    health = {"httpGet": {"path": "/healthz", "port": "control"}} | PROBE
    return {
        "ports": [
            {"name": "engine", "containerPort": pipeline.spec.engine.port},
            {"name": "control", "containerPort": rank.CONTROL_PORT},
            {"name": "group", "containerPort": rank.GROUP_PORT},
            {"name": "store", "containerPort": rank.STORE_PORT},
        ],
        "startupProbe": health | {"failureThreshold": math.ceil(pipeline.spec.startup.budget_seconds / PROBE_SECONDS)},
        "livenessProbe": health | {"failureThreshold": 6},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "control"}, "failureThreshold": 2} | PROBE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _resources(pipeline: Pipeline) -> Manifest:
    spec = pipeline.spec
    cards: dict[str, int | str] = {}
    if spec.accelerator.vendor == Vendor.ASCEND:
        cards = {spec.accelerator.resource_name: spec.cards_per_pod}
    found = {
        "requests": {name: str(value) for name, value in (spec.engine.resources.requests | cards).items()},
        "limits": {name: str(value) for name, value in (spec.engine.resources.limits | cards).items()},
    }
    return {name: value for name, value in found.items() if value}


def _affinity(pipeline: Pipeline, replica: int) -> Manifest:
    """The user's rules, and the topology key's: all pods of a replica on nodes with the same value of it."""
    scheduling = pipeline.spec.scheduling
    affinity = dict(scheduling.pod_template.affinity)
    if scheduling.topology_key is None:
        return affinity
    together = {
        "topologyKey": scheduling.topology_key,
        "labelSelector": {"matchLabels": names.rank_selector(pipeline.uid, replica)},
    }
    pods = dict(affinity.get("podAffinity", {}))
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    return affinity | {"podAffinity": pods | {required: [*pods.get(required, []), together]}}
