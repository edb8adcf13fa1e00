"""Every name and label of a child object, in one place.

A StatefulSet's name ends up, with a revision hash of 11 characters, in a label of its pods; labels hold
63 characters, so 51 are left. Longer names are truncated and told apart by a hash.
"""

from __future__ import annotations

import hashlib
import re

STEM_LENGTH = 48  # 51 less "-99", the highest replica
LABEL_LENGTH = 63
_HASH_LENGTH = 8
# Service names are the strictest: RFC 1035 labels.
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

MANAGER = "prefill-operator"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_PIPELINE = "prefill.dev/pipeline"
LABEL_UID = "prefill.dev/pipeline-uid"
LABEL_REPLICA = "prefill.dev/replica"
LABEL_KEY = "prefill.dev/calibration-key"
LABEL_POD_INDEX = "apps.kubernetes.io/pod-index"


def fit(text: str, limit: int) -> str:
    """``text`` if it is a DNS label of at most ``limit`` characters, else a recognisable one that is."""
    if len(text) <= limit and _DNS_LABEL.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]
    stem = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not stem[:1].isalpha():
        stem = f"p{stem}"
    return f"{stem[: limit - _HASH_LENGTH - 1].rstrip('-')}-{digest}"


def pipeline_name(pipeline: str) -> str:
    """The client Service and the PodDisruptionBudget."""
    return fit(pipeline, STEM_LENGTH)


def replica_name(pipeline: str, replica: int) -> str:
    """The StatefulSet and the headless Service of a replica."""
    return f"{fit(pipeline, STEM_LENGTH)}-{replica}"


def leader_address(pipeline: str, replica: int, namespace: str) -> str:
    """The DNS name of rank 0; the cluster's domain is left to the pod's search list."""
    name = replica_name(pipeline, replica)
    return f"{name}-0.{name}.{namespace}.svc"


def calibration_name(key: str) -> str:
    return f"prefill-calibration-{key}"


def pipeline_label(pipeline: str) -> str:
    """The pipeline's own name wherever a label can hold it."""
    return pipeline if len(pipeline) <= LABEL_LENGTH else fit(pipeline, LABEL_LENGTH)


def pipeline_labels(pipeline: str, uid: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "prefill-pipeline",
        "app.kubernetes.io/instance": pipeline_label(pipeline),
        LABEL_MANAGED_BY: MANAGER,
        LABEL_PIPELINE: pipeline_label(pipeline),
        LABEL_UID: uid,
    }


def replica_labels(pipeline: str, uid: str, replica: int) -> dict[str, str]:
    return pipeline_labels(pipeline, uid) | {LABEL_REPLICA: str(replica)}


def rank_selector(uid: str, replica: int) -> dict[str, str]:
    """Labels that tell the pods of one replica; a StatefulSet's selector is immutable, so they are few."""
    return {LABEL_UID: uid, LABEL_REPLICA: str(replica)}


def leader_selector(uid: str) -> dict[str, str]:
    """Rank 0 of every replica."""
    return {LABEL_UID: uid, LABEL_POD_INDEX: "0"}
