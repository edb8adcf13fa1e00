"""Kubernetes Events: one for each real transition of a condition, never one for a state that goes on."""

from __future__ import annotations

from datetime import UTC, datetime

from prefill_operator.api.types import API_VERSION, KIND, ConditionType
from prefill_operator.desired.life import timestamp
from prefill_operator.desired.names import MANAGER
from prefill_operator.desired.pipeline import Manifest
from prefill_operator.reconcile.status import ORDINARY

NOTE_LENGTH = 1000
# Steps on the way to the news; a start passes through several of them.
NO_NEWS = {"Pending", "Starting", "Scheduling", "Profiling", "Learning", "NotNeeded", "MeasuredByEngine"}


def transitions(earlier: Manifest, status: Manifest) -> list[Manifest]:
    """Conditions whose reason is another than before."""
    before = {condition["type"]: condition["reason"] for condition in earlier.get("conditions", [])}
    return [
        condition
        for condition in status["conditions"]
        if condition["type"] in (ConditionType.READY, ConditionType.CALIBRATED)
        and condition["reason"] != before.get(condition["type"])
        and condition["reason"] not in NO_NEWS
    ]


def event(pipeline: Manifest, condition: Manifest, instance: str) -> Manifest:
    metadata = pipeline["metadata"]
    moment = timestamp(datetime.now(UTC))
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata['name'][:40].rstrip('-')}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "source": {"component": MANAGER, "host": instance},
        "type": "Normal" if condition["reason"] in ORDINARY else "Warning",
        "reason": condition["reason"],
        "message": condition["message"][:NOTE_LENGTH],
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }
