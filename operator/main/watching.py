"""kopf's part: watch streams that only put keys into the queue.

No create, update or delete handlers, timers or daemons: those add finalizers or write state into the objects.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import kopf
from prefill_operator.api.types import GROUP, PLURAL, VERSION
from prefill_operator.desired import names
from prefill_operator.reconcile.queue import Key, WorkQueue

CHILDREN = (("apps", "v1", "statefulsets"), ("", "v1", "pods"), ("", "v1", "services"),
            ("policy", "v1", "poddisruptionbudgets"))  # fmt: skip
CALIBRATIONS = ("", "v1", "configmaps")


def settings() -> kopf.OperatorSettings:
    found = kopf.OperatorSettings()
    found.peering.standalone = True
    # The operator serves fixed namespaces, and needs no right to list namespaces or CRDs.
    found.scanning.disabled = True
    found.posting.enabled = False
    found.posting.loggers = False
    # A limit deadlocks: an idle worker holds its place for idle_timeout.
    found.queueing.worker_limit = None
    found.watching.server_timeout = 300
    found.watching.client_timeout = 310
    found.watching.connect_timeout = 10
    # API servers send a bookmark each minute: a stream that is silent for longer is dead.
    found.watching.inactivity_timeout = 70
    found.networking.request_timeout = 30
    found.networking.connect_timeout = 10
    # Finite: a watcher that cannot go on ends the process, and the kubelet starts a fresh one.
    found.networking.error_backoffs = (0.5, 1, 2, 3, 5, 8, 13, 21, 34)
    # None is ever set; the name says whose it would be.
    found.persistence.finalizer = "prefill.dev/unused"
    for resource in CHILDREN:
        found.watching.label_selectors[resource] = names.LABEL_UID
    found.watching.label_selectors[CALIBRATIONS] = names.LABEL_KEY
    return found


def registry(queue: WorkQueue) -> kopf.OperatorRegistry:
    found = kopf.OperatorRegistry()
    pipelines: defaultdict[str, set[str]] = defaultdict(set)

    @kopf.on.login(registry=found)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=found)
    def pipeline_seen(namespace: str | None, name: str | None, type: str | None, **_: Any) -> None:
        key = _key(namespace, name)
        (pipelines[key[0]].discard if type == "DELETED" else pipelines[key[0]].add)(key[1])
        queue.add(key)

    def child_seen(namespace: str | None, labels: Any, **_: Any) -> None:
        queue.add(_key(namespace, labels.get(names.LABEL_PIPELINE)))

    for resource in CHILDREN:
        kopf.on.event(*resource, registry=found, id="child", labels={names.LABEL_PIPELINE: kopf.PRESENT})(child_seen)

    @kopf.on.event(*CALIBRATIONS, registry=found, labels={names.LABEL_KEY: kopf.PRESENT})
    def calibration_seen(namespace: str | None, **_: Any) -> None:
        # Any pipeline of the namespace may use it; looking costs less than keeping track.
        for name in pipelines[namespace or ""]:
            queue.add(_key(namespace, name))

    return found


def _key(namespace: str | None, name: str | None) -> Key:
    return namespace or "", name or ""
