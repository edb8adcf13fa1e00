"""Why a group that is not broken is not Ready either, in the order a pod comes to life. Pure."""

from __future__ import annotations

from prefill_operator.reconcile.group import Failure, Group, Rank

PULL_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
# Normal waiting.
QUIET_REASONS = {"PodInitializing", "ContainerCreating", "CrashLoopBackOff"}


def diagnose(group: Group) -> Failure:
    """The first thing in the way, or ``Profiling`` or ``Starting`` when nothing is."""
    if missing := _missing(group):
        return missing
    for find in (_unscheduled, _unmounted, _unpulled, _crashing):
        for rank in group.ranks:
            if failure := find(rank, group):
                return failure
    ready = sum(rank.ready for rank in group.ranks)
    if any(rank.profiling for rank in group.ranks):
        return Failure("Profiling", "chunks are being measured, which comes before the first start")
    return Failure("Starting", f"{ready} of {group.size} ranks are ready")


def _missing(group: Group) -> Failure | None:
    if group.stateful_set is None or len(group.ranks) >= group.size:
        return None
    warned = group.warnings.get(group.stateful_set["metadata"]["uid"])
    if warned is None:
        return Failure("Starting", f"{len(group.ranks)} of {group.size} pods exist")
    refused = "exceeded quota" in warned.message or "is forbidden: m" in warned.message
    return Failure("QuotaDenied" if refused else "PodsRefused", warned.message)


def _unscheduled(rank: Rank, group: Group) -> Failure | None:
    for condition in rank.status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Failure("Scheduling", f"rank {rank.index} waits for a node: {condition.get('message', '')}")
    return None


def _unmounted(rank: Rank, group: Group) -> Failure | None:
    warned = group.warnings.get(rank.uid)
    if warned is None:
        return None
    if warned.reason in ("FailedMount", "FailedAttachVolume"):
        model = '"prefill-model"' in warned.message
        return Failure("ModelNotFound" if model else "VolumeNotMounted", f"rank {rank.index}: {warned.message}")
    if warned.reason in ("FailedCreatePodSandBox", "FailedScheduling"):
        return Failure("SandboxNotStarted", f"rank {rank.index}: {warned.message}")
    return None


def _unpulled(rank: Rank, group: Group) -> Failure | None:
    for status in (*rank.status.get("initContainerStatuses", []), *rank.status.get("containerStatuses", [])):
        waiting = status.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in PULL_REASONS:
            return Failure(
                "ImagePullFailed", f"rank {rank.index}, image {status.get('image', '')}: {message or reason}"
            )
        if reason and reason not in QUIET_REASONS:
            return Failure("ContainerNotStarted", f"rank {rank.index}, {status['name']}: {reason}: {message}")
    return None


def _crashing(rank: Rank, group: Group) -> Failure | None:
    return rank.init_failure
