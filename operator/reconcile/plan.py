"""The planner: from a snapshot to the writes that bring a pipeline nearer to its spec. Pure.

Services, budget and calibration follow the spec directly. A rank group moves through these states, each told
from the cluster alone, so a step can be taken again or by another process:

    absent ──start──> running ──broken, outdated or suspended: scale to 0──> stopping ──no pod left──> stopped
                         ^                                                                               │
                         └────────── new incarnation, once not-before has passed ────────────────────────┘

A running group is never edited: what its pods are made from changes only while it has none. A broken group
is stopped at once and pays with a restart and a pause; an outdated one is stopped at once if it is not
Ready, else when the rollout budget allows it, and pays nothing; a changed spec forgives all earlier failures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from prefill_operator.api.types import ReplicaPhase, Reuse
from prefill_operator.desired import names
from prefill_operator.desired.calibration import calibration_map
from prefill_operator.desired.children import (
    client_service,
    disruption_budget,
    headless_service,
    held_set,
    stateful_set,
)
from prefill_operator.desired.life import Life, moment, timestamp
from prefill_operator.desired.pipeline import Manifest, Pipeline
from prefill_operator.desired.pod import pod_template, template_hash
from prefill_operator.reconcile.drift import differs
from prefill_operator.reconcile.evidence import Evidence, gather
from prefill_operator.reconcile.group import Failure, Group, groups_of
from prefill_operator.reconcile.observe import Reference, Snapshot

# A group that served this long has recovered: its next failure starts counting anew.
STABLE = timedelta(minutes=10)
# How often to look at what announces itself only by Events.
STUCK_SECONDS = 10.0


@dataclass(frozen=True)
class Apply:
    """``uid`` is that of the object to change; None creates it."""

    manifest: Manifest
    uid: str | None
    why: str
    # What is to follow: refused by the API server, it keeps ``manifest`` from being applied.
    trial: Manifest | None = None


@dataclass(frozen=True)
class Delete:
    kind: str
    name: str
    uid: str
    why: str


Action = Apply | Delete


@dataclass(frozen=True)
class Step:
    """What becomes of one replica: its phase for the status and at most one write to its StatefulSet."""

    group: Group
    phase: ReplicaPhase
    # Why it is not Ready when the pods do not tell; None: ask the pods.
    cause: Failure | None = None
    manifest: Manifest | None = None
    why: str = ""
    retry_at: datetime | None = None
    outdated: bool = False
    # Of a group that serves and is to be replaced: what is to follow it.
    trial: Manifest | None = None

    def undone(self) -> Step:
        """The step where its write did not come about: a group that was to be replaced goes on serving."""
        return self if self.trial is None else replace(self, phase=ReplicaPhase.READY, outdated=True)


@dataclass
class Plan:
    actions: list[Action] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    evidence: Evidence = field(default_factory=Evidence)
    conflicts: list[str] = field(default_factory=list)
    # Strangers that are only what is left of a deleted pipeline of the same name.
    leaving: list[str] = field(default_factory=list)
    wake: float | None = None

    def wake_in(self, seconds: float) -> None:
        self.wake = seconds if self.wake is None else min(self.wake, seconds)


def wanted_children(pipeline: Pipeline) -> list[Reference]:
    shared = names.pipeline_name(pipeline.name)
    wanted = [("Service", shared), ("PodDisruptionBudget", shared)]
    for replica in range(pipeline.spec.replicas):
        name = names.replica_name(pipeline.name, replica)
        wanted += [("Service", name), ("StatefulSet", name)]
    return wanted


def make_plan(pipeline: Pipeline, snapshot: Snapshot, now: datetime, new_incarnation: Callable[[], str]) -> Plan:
    plan = Plan()
    _check_names(pipeline, snapshot, plan)
    groups = groups_of(pipeline.name, snapshot, range(pipeline.spec.replicas))
    hashes = {replica: template_hash(pod_template(pipeline, replica)) for replica in groups}
    # A stopped group gives no evidence, so that a calibration removed meanwhile is not used again.
    current = [g for g in groups.values() if g.size and g.template_hash == hashes[g.replica]]
    # A pause keeps the ConfigMap as it is, and the status tells of what is kept.
    offers = {} if pipeline.spec.paused else snapshot.offers
    plan.evidence = gather(pipeline, snapshot.calibration, current, offers, now)
    steps = _Groups(pipeline, plan.evidence, hashes, now, new_incarnation).steps(groups)
    plan.steps = [steps[replica] for replica in sorted(steps)]
    if pipeline.spec.paused:
        # Nothing is retried, and a time that moves with every look would be a new status each time.
        plan.steps = [replace(step, retry_at=None) for step in plan.steps]
    for step in plan.steps:
        if step.retry_at is not None:
            plan.wake_in(max(0.0, (step.retry_at - now).total_seconds()))
        if step.phase in (ReplicaPhase.PENDING, ReplicaPhase.PROFILING, ReplicaPhase.STARTING):
            plan.wake_in(STUCK_SECONDS)
    if plan.leaving:
        plan.wake_in(1.0)
    if not pipeline.spec.paused:
        plan.actions = list(_actions(pipeline, snapshot, plan, now))
    return plan


def _check_names(pipeline: Pipeline, snapshot: Snapshot, plan: Plan) -> None:
    for (kind, name), stranger in snapshot.strangers.items():
        owners = stranger["metadata"].get("ownerReferences", [])
        ours = [o for o in owners if o.get("controller") and o["kind"] == pipeline.owner_reference["kind"]]
        if ours and ours[0]["uid"] == pipeline.uid:
            snapshot.children[kind, name] = stranger  # ours, but for a label somebody removed
        elif ours and ours[0]["name"] == pipeline.name:
            plan.leaving.append(f"{kind} {name}")
        else:
            plan.conflicts.append(f"{kind} {name}")


def _actions(pipeline: Pipeline, snapshot: Snapshot, plan: Plan, now: datetime) -> Iterable[Action]:
    """In the order of need: a group finds its Services, and a new one its calibration."""
    taken = {tuple(text.split(" ")) for text in (*plan.conflicts, *plan.leaving)}
    manifests = [client_service(pipeline), disruption_budget(pipeline)]
    manifests += [headless_service(pipeline, replica) for replica in range(pipeline.spec.replicas)]
    for manifest in manifests:
        reference = (manifest["kind"], manifest["metadata"]["name"])
        if reference not in taken:
            yield from _apply(manifest, snapshot.child(*reference), "follows the spec")
    if plan.evidence.document is not None and not plan.evidence.foreign:
        document = plan.evidence.document
        manifest = calibration_map(pipeline, document, snapshot.calibration, now)
        yield from _apply(manifest, snapshot.calibration, f"calibration {document.source} of {document.created_at}")
    for step in plan.steps:
        name = names.replica_name(pipeline.name, step.group.replica)
        # Without its headless Service the ranks could not find each other.
        if step.manifest is not None and not taken & {("StatefulSet", name), ("Service", name)}:
            yield from _apply(step.manifest, step.group.stateful_set, step.why, step.trial)
    wanted = set(wanted_children(pipeline))
    for (kind, name), child in snapshot.children.items():
        if (kind, name) not in wanted and "deletionTimestamp" not in child["metadata"]:
            yield Delete(kind, name, child["metadata"]["uid"], "beyond spec.replicas")


def _apply(manifest: Manifest, observed: Manifest | None, why: str, trial: Manifest | None = None) -> Iterable[Action]:
    if observed is None:
        yield Apply(manifest, None, why)
    elif "deletionTimestamp" not in observed["metadata"] and differs(manifest, observed):
        yield Apply(manifest, observed["metadata"]["uid"], why, trial)


@dataclass(frozen=True)
class _Groups:
    """Decides the steps of all replicas together, since a rollout spends one budget."""

    pipeline: Pipeline
    evidence: Evidence
    hashes: dict[int, str]
    now: datetime
    new_incarnation: Callable[[], str]

    def steps(self, groups: dict[int, Group]) -> dict[int, Step]:
        steps = {replica: self._step(group) for replica, group in groups.items()}
        down = sum(step.phase != ReplicaPhase.READY for step in steps.values())
        for replica in sorted(groups, reverse=True):
            step = steps[replica]
            if step.phase == ReplicaPhase.READY and step.outdated and down < self.pipeline.spec.rollout.max_unavailable:
                down += 1
                stop = self._stop(step.group, ReplicaPhase.STOPPING, Failure("RolloutInProgress", "new spec"))
                # A serving group does not end for a spec that the API server refuses.
                steps[replica] = replace(stop, trial=self._start(step.group).manifest)
        return steps

    def _step(self, group: Group) -> Step:
        observed = group.stateful_set
        if observed is None:
            if self.pipeline.spec.suspend:
                return Step(group, ReplicaPhase.PENDING, Failure("Suspended", "spec.suspend is true"))
            if not group.vanished:
                leaving = Failure("Starting", f"pods of an earlier life are leaving{group.overdue(self.now)}")
                return Step(group, ReplicaPhase.STOPPING, leaving)
            return self._start(group)
        if "deletionTimestamp" in observed["metadata"]:
            return Step(group, ReplicaPhase.STOPPING, Failure("Starting", "the StatefulSet is being deleted"))
        return self._running(group) if group.size else self._stopped(group)

    def _running(self, group: Group) -> Step:
        if self.pipeline.spec.suspend:
            return self._stop(group, ReplicaPhase.STOPPING, Failure("Suspended", "spec.suspend is true"))
        outdated = self.hashes[group.replica] != group.template_hash
        if failures := group.failures():
            if outdated:
                return self._stop(group, ReplicaPhase.STOPPING, Failure("RolloutInProgress", "new spec"))
            return self._break(group, failures[0])
        if outdated and not group.ready:
            return self._stop(group, ReplicaPhase.STOPPING, Failure("RolloutInProgress", "new spec"))
        life = group.life
        if group.ready and life.formed is None:
            life = replace(life, formed=group.fingerprint, formed_at=timestamp(self.now))
        phase = ReplicaPhase.READY if group.ready else _phase(group)
        if outdated:
            return self._hold(group, life, phase, "group formed", outdated=True)
        manifest = stateful_set(self.pipeline, group.replica, life, group.calibration, running=True)
        return Step(group, phase, manifest=manifest, why="group formed or drifted")

    def _stopped(self, group: Group) -> Step:
        life, spec = group.life, self.pipeline.spec
        cause = Failure.parse(life.last_failure) if life.last_failure else None
        if cause is not None:
            # The likeliest cause may show only after the group was stopped, on a rank that ended later.
            cause = min([cause, *group.failures()], key=lambda failure: (failure.weight, failure != cause))
            life = replace(life, last_failure=str(cause))
        overdue = "" if group.vanished else group.overdue(self.now)
        if spec.suspend:
            phase = ReplicaPhase.PENDING if group.vanished else ReplicaPhase.STOPPING
            suspended = Failure("Suspended", f"spec.suspend is true{overdue}")
            return self._hold(group, Life(life.incarnation), phase, "suspended", suspended)
        changed = self.hashes[group.replica] != group.template_hash
        limit = spec.recovery.max_restarts
        if cause is not None and not changed:
            if limit and life.restarts > limit:
                spent = Failure(
                    cause.reason, f"gave up after {limit} restarts; change the spec to retry. {cause.message}"
                )
                return self._hold(group, life, ReplicaPhase.FAILED, "cause found", spent)
            due = moment(life.not_before)
            if not group.vanished:
                told = replace(cause, message=cause.message + overdue)
                return self._hold(group, life, ReplicaPhase.RESTARTING, "cause found", told)
            # A longer pause than the longest means that the clock went back or the limit down.
            if due is not None and self.now < due <= self.now + timedelta(seconds=spec.recovery.max_backoff_seconds):
                return replace(self._hold(group, life, ReplicaPhase.BACK_OFF, "cause found", cause), retry_at=due)
        if not group.vanished:
            leaving = Failure("RolloutInProgress", f"pods are leaving{overdue}")
            return self._hold(group, life, ReplicaPhase.STOPPING, "", leaving)
        return self._start(group, 0 if changed else life.restarts)

    def _start(self, group: Group, restarts: int = 0) -> Step:
        life = Life(self.new_incarnation(), restarts)
        if self.pipeline.spec.profiling.reuse == Reuse.NEVER or self.evidence.document is None:
            calibration = ""
        else:
            calibration = self.evidence.document.to_json()
        manifest = stateful_set(self.pipeline, group.replica, life, calibration, running=True)
        return Step(group, ReplicaPhase.STARTING, Failure("Starting", "pods are being made"), manifest, "new life")

    def _break(self, group: Group, failure: Failure) -> Step:
        life, recovery = group.life, self.pipeline.spec.recovery
        formed = moment(life.formed_at)
        earlier = 0 if formed is not None and self.now - formed >= STABLE else life.restarts
        pause = min(recovery.max_backoff_seconds, recovery.backoff_seconds * 2 ** min(earlier, 16))
        due = self.now + timedelta(seconds=pause)
        life = Life(life.incarnation, earlier + 1, timestamp(due), str(failure))
        manifest = held_set(self.pipeline, group.replica, life, _observed(group), replicas=0)
        return Step(group, ReplicaPhase.RESTARTING, failure, manifest, f"broken: {failure}", due)

    def _stop(self, group: Group, phase: ReplicaPhase, cause: Failure) -> Step:
        life = Life(group.life.incarnation)
        manifest = held_set(self.pipeline, group.replica, life, _observed(group), replicas=0)
        return Step(group, phase, cause, manifest, f"stopped: {cause}")

    def _hold(
        self,
        group: Group,
        life: Life,
        phase: ReplicaPhase,
        why: str,
        cause: Failure | None = None,
        *,
        outdated: bool = False,
    ) -> Step:
        manifest = held_set(self.pipeline, group.replica, life, _observed(group))
        return Step(group, phase, cause, manifest, why, outdated=outdated)


def _phase(group: Group) -> ReplicaPhase:
    if any(rank.profiling for rank in group.ranks):
        return ReplicaPhase.PROFILING
    started = any("running" in rank.container("engine").get("state", {}) for rank in group.ranks)
    return ReplicaPhase.STARTING if started else ReplicaPhase.PENDING


def _observed(group: Group) -> Manifest:
    assert group.stateful_set is not None
    return group.stateful_set
