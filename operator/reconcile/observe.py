"""One look at the cluster: everything a reconciliation of one pipeline decides on, read live."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prefill_operator.desired import names
from prefill_operator.desired.pipeline import Manifest
from prefill_operator.reconcile.cluster import (
    BUDGETS,
    CHILDREN,
    CONFIG_MAPS,
    EVENTS,
    PODS,
    SERVICES,
    STATEFUL_SETS,
    Cluster,
)

Reference = tuple[str, str]  # kind, name

# Events are read only of objects that make no progress by themselves, so a few are enough to know why.
MAX_EVENT_SUBJECTS = 4


@dataclass
class Snapshot:
    """``children`` carry the pipeline's uid label; ``strangers`` have a name that it wants, but not the label."""

    children: dict[Reference, Manifest] = field(default_factory=dict)
    strangers: dict[Reference, Manifest] = field(default_factory=dict)
    pods: list[Manifest] = field(default_factory=list)
    calibration: Manifest | None = None
    # Present warning of an object, by uid.
    warnings: dict[str, Warned] = field(default_factory=dict)
    # Calibrations that leaders offer, by replica.
    offers: dict[int, str] = field(default_factory=dict)

    def child(self, kind: str, name: str) -> Manifest | None:
        return self.children.get((kind, name))


@dataclass(frozen=True)
class Warned:
    reason: str
    message: str


async def observe(
    cluster: Cluster, namespace: str, uid: str, wanted: Iterable[Reference], calibration: str | None
) -> Snapshot:
    """``wanted``: children the spec asks for; ``calibration``: name of the ConfigMap that may hold its measurement."""
    labels = f"{names.LABEL_UID}={uid}"
    snapshot = Snapshot()
    for resource in (STATEFUL_SETS, SERVICES, BUDGETS):
        for item in await cluster.list(resource, namespace, labels=labels):
            snapshot.children[resource.kind, item["metadata"]["name"]] = item
    snapshot.pods = await cluster.list(PODS, namespace, labels=labels)
    for kind, name in wanted:
        if (kind, name) not in snapshot.children:
            found = await cluster.get(CHILDREN[kind], namespace, name)
            if found is not None:
                snapshot.strangers[kind, name] = found
    if calibration is not None:
        snapshot.calibration = await cluster.get(CONFIG_MAPS, namespace, calibration)
    for stuck in list(_stuck(snapshot))[:MAX_EVENT_SUBJECTS]:
        warned = await _latest_warning(cluster, namespace, stuck)
        if warned is not None:
            snapshot.warnings[stuck] = warned
    return snapshot


def _stuck(snapshot: Snapshot) -> Iterable[str]:
    """Objects whose trouble is told by nothing but their Events: pods never made, and volumes never mounted."""
    for (kind, _), item in snapshot.children.items():
        if kind == STATEFUL_SETS.kind and item.get("status", {}).get("replicas", 0) < item["spec"].get("replicas", 1):
            yield item["metadata"]["uid"]
    for pod in snapshot.pods:
        if pod["spec"].get("nodeName") and not _began(pod):
            yield pod["metadata"]["uid"]


def _began(pod: Manifest) -> bool:
    statuses = pod.get("status", {}).get("initContainerStatuses", [])
    return any("waiting" not in status.get("state", {"waiting": {}}) for status in statuses)


async def _latest_warning(cluster: Cluster, namespace: str, uid: str) -> Warned | None:
    """The object's latest Event if that is a warning; an earlier one is over."""
    events = await cluster.list(EVENTS, namespace, fields=f"involvedObject.uid={uid}", cached=True)

    def order(event: Manifest) -> tuple[str, bool]:
        when = event.get("lastTimestamp") or event.get("eventTime") or ""
        return when[: len("2030-01-01T00:00:00")], event.get("type") == "Warning"

    last = max(events, key=order, default=None)
    if last is None or last.get("type") != "Warning":
        return None
    return Warned(last.get("reason", ""), last.get("message", ""))
