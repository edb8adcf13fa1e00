"""The status of a pipeline: one pure function of the plan, so that status always tells what was decided on."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from prefill_operator.api.types import (
    CalibrationStatus,
    Condition,
    ConditionType,
    PrefillPipelineStatus,
    ReplicaPhase,
    ReplicaStatus,
)
from prefill_operator.desired import names
from prefill_operator.desired.life import timestamp
from prefill_operator.desired.pipeline import Manifest, Pipeline
from prefill_operator.reconcile.diagnosis import diagnose
from prefill_operator.reconcile.group import Failure
from prefill_operator.reconcile.plan import Plan, Step
from prefill_runtime.agent.config import Policy
from prefill_runtime.profiling.document import CalibrationDocument

MESSAGE_LENGTH = 2000
AT_REST = {ReplicaPhase.READY, ReplicaPhase.FAILED}
# Reasons that are part of a normal life; any other is worth a Warning event.
ORDINARY = {
    "AllReplicasReady", "Learning", "Learnt", "Measured", "MeasuredByEngine", "NotNeeded", "Pending", "Profiling",
    "RolloutInProgress", "ScaledToZero", "Scheduling", "Starting", "Suspended",
}  # fmt: skip


class Conditions:
    """Builds the list; ``lastTransitionTime`` moves only with ``status``."""

    def __init__(self, earlier: Iterable[Manifest], generation: int, now: datetime) -> None:
        self._earlier = {condition["type"]: condition for condition in earlier}
        self._generation, self._now = generation, now
        self.found: list[Condition] = []

    def set(self, kind: ConditionType, status: bool | None, reason: str, message: str) -> None:
        text = {True: "True", False: "False", None: "Unknown"}[status]
        earlier = self._earlier.get(kind.value)
        since = earlier["lastTransitionTime"] if earlier and earlier["status"] == text else timestamp(self._now)
        self.found.append(
            Condition.model_validate(
                {
                    "type": kind.value,
                    "status": text,
                    "reason": reason,
                    "message": message[:MESSAGE_LENGTH],
                    "lastTransitionTime": since,
                    "observedGeneration": self._generation,
                }
            )
        )


def status_of(
    pipeline: Pipeline, plan: Plan, earlier: Manifest, now: datetime, error: Failure | None = None
) -> PrefillPipelineStatus:
    """``error``: a write of this very plan that the API server refused."""
    spec = pipeline.spec
    conditions = Conditions(earlier.get("conditions", []), pipeline.generation, now)
    ready = [step for step in plan.steps if step.phase == ReplicaPhase.READY]
    verdict = error or _verdict(pipeline, plan)
    conditions.set(ConditionType.READY, verdict.reason == "AllReplicasReady", verdict.reason, verdict.message)
    conditions.set(ConditionType.CALIBRATED, *_calibrated(pipeline, plan))
    resting = all(step.phase in AT_REST and not step.outdated for step in plan.steps) or _suspended(plan)
    conditions.set(
        ConditionType.PROGRESSING,
        not resting,
        "AtRest" if resting else verdict.reason,
        "every replica is where it should be" if resting else verdict.message,
    )
    degraded = 0 < len(ready) < spec.replicas
    conditions.set(
        ConditionType.DEGRADED,
        degraded,
        "SomeReplicasDown" if degraded else "NotDegraded",
        f"{len(ready)} of {spec.replicas} replicas serve",
    )
    paused = "spec.paused is true: nothing is changed until it is false" if spec.paused else "spec.paused is false"
    conditions.set(ConditionType.PAUSED, spec.paused, "PausedBySpec" if spec.paused else "NotPaused", paused)
    return PrefillPipelineStatus(
        observed_generation=pipeline.generation,
        conditions=tuple(conditions.found),
        replicas=sum(step.group.stateful_set is not None for step in plan.steps),
        ready_replicas=len(ready),
        selector=",".join(f"{key}={value}" for key, value in names.leader_selector(pipeline.uid).items()),
        policy=_policy(pipeline, plan),
        calibration=_calibration(plan),
        replica_statuses=tuple(_replica(step) for step in plan.steps),
    )


def trouble_status(trouble: Failure, generation: int, earlier: Manifest, now: datetime) -> Manifest:
    """For what keeps the operator from acting at all: what is running goes on, and so does the rest of the status."""
    conditions = Conditions(earlier.get("conditions", []), generation, now)
    conditions.set(ConditionType.READY, False, trouble.reason, trouble.message)
    ready = conditions.found[0].model_dump(mode="json", by_alias=True)
    others = [condition for condition in earlier.get("conditions", []) if condition["type"] != ConditionType.READY]
    return earlier | {"observedGeneration": generation, "conditions": [ready, *others]}


def to_manifest(status: PrefillPipelineStatus) -> Manifest:
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def _cause(step: Step) -> Failure:
    return step.cause or diagnose(step.group)


def _suspended(plan: Plan) -> bool:
    return bool(plan.steps) and all(
        step.phase == ReplicaPhase.PENDING and step.cause is not None and step.cause.reason == "Suspended"
        for step in plan.steps
    )


def _verdict(pipeline: Pipeline, plan: Plan) -> Failure:
    """Reason and message of Ready: of all replicas the one in the worst state speaks first."""
    if plan.conflicts:
        objects = ", ".join(plan.conflicts)
        return Failure("NameConflict", f"{objects} exists and is not this pipeline's: remove it or rename the pipeline")
    if plan.leaving:
        return Failure("Starting", f"{', '.join(plan.leaving)} of a deleted pipeline of this name is still leaving")
    if not plan.steps:
        return Failure("ScaledToZero", "spec.replicas is 0")
    waiting = [step for step in plan.steps if step.phase != ReplicaPhase.READY]
    if not waiting:
        if any(step.outdated for step in plan.steps):
            return Failure("RolloutInProgress", "replicas of an earlier spec are still to be replaced")
        return Failure("AllReplicasReady", f"{len(plan.steps)} of {len(plan.steps)} replicas serve")
    told = sorted(waiting, key=lambda step: _cause(step).reason in ORDINARY)
    texts = [f"replica {step.group.replica}: {_cause(step).message}" for step in told]
    return Failure(_cause(told[0]).reason, "; ".join(texts))


def _calibrated(pipeline: Pipeline, plan: Plan) -> tuple[bool | None, str, str]:
    status, reason, message = _calibrated_apart_from_offers(pipeline, plan)
    return status, reason, "; ".join((message, *plan.evidence.ignored))


def _calibrated_apart_from_offers(pipeline: Pipeline, plan: Plan) -> tuple[bool | None, str, str]:
    policy, evidence = pipeline.policy, plan.evidence
    if policy == Policy.ENGINE_NATIVE:
        return None, "MeasuredByEngine", "the engine measures by itself at every start and keeps nothing"
    if not pipeline.needs_calibration:
        alone = policy is not pipeline.spec.chunking.policy
        return None, "NotNeeded", f"chunking.policy {policy}{' of a single stage' * alone} needs no calibration"
    name = pipeline.calibration_name
    fixed = "chunks are Fixed until enough of them were timed while serving" if pipeline.learns else "chunks are Fixed"
    if evidence.foreign:
        return False, "NameConflict", f"ConfigMap {name} exists and is not a calibration with this key: remove it"
    if evidence.refused:
        return False, "ProfilingRefused", f"{fixed}. {'; '.join(evidence.refused)}"
    if evidence.document is not None:
        return True, *_kept(evidence.document, name)
    if evidence.invalid:
        return False, "CalibrationInvalid", f"{fixed}. {'; '.join(evidence.invalid)}"
    if any(step.phase == ReplicaPhase.PROFILING for step in plan.steps):
        return False, "Profiling", "chunks are being measured"
    if pipeline.profiles:
        return False, "Pending", "nothing was measured yet with this key"
    if pipeline.learns:
        return False, "Learning", f"profiling.enabled is false: {fixed}"
    return (
        False,
        "NotMeasured",
        (
            f"{fixed}: profiling and profiling.onlineCalibration are disabled and there is no ConfigMap {name}: "
            "enable one of them, or set chunking.policy to Fixed"
        ),
    )


def _kept(document: CalibrationDocument, name: str) -> tuple[str, str]:
    fit = f"R^2 {document.r2:.4f}, {document.sample_count} samples"
    kept = f"{document.created_at}, kept in ConfigMap {name}"
    if document.source == "Online":
        return "Learnt", f"source Online: {fit}, learnt while serving {kept}"
    return "Measured", f"source Profile: {fit}, measured {kept}"


def _policy(pipeline: Pipeline, plan: Plan) -> Policy:
    """What the running groups follow."""
    running = {step.group.replica for step in plan.steps if step.phase == ReplicaPhase.READY}
    if pipeline.needs_calibration and running and not running & plan.evidence.calibrated:
        return Policy.FIXED
    return pipeline.policy


def _calibration(plan: Plan) -> CalibrationStatus | None:
    document = plan.evidence.document
    if document is None or plan.evidence.foreign or plan.evidence.refused:
        return None
    return CalibrationStatus(
        key=document.key,
        config_map=names.calibration_name(document.key),
        source=document.source,
        r2=f"{document.r2:.4f}",
        samples=document.sample_count,
        time=document.created_at,
    )


def _replica(step: Step) -> ReplicaStatus:
    group = step.group
    return ReplicaStatus(
        index=group.replica,
        phase=step.phase,
        incarnation=group.life.incarnation or None if group.stateful_set else None,
        restarts=group.life.restarts if group.stateful_set else 0,
        next_retry_time=timestamp(step.retry_at) if step.retry_at else None,
        message=None if step.phase == ReplicaPhase.READY else str(_cause(step)),
    )
