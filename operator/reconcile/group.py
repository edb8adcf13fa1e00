"""A rank group as its StatefulSet and pods show it: whole, broken, or on its way. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from prefill_operator.desired import names
from prefill_operator.desired.life import TEMPLATE_HASH, Life, fingerprint, moment
from prefill_operator.desired.pipeline import Manifest
from prefill_operator.reconcile.observe import Snapshot, Warned
from prefill_runtime.agent import config as rank
from prefill_runtime.agent.config import EndReason, LastWords
from pydantic import ValidationError

MESSAGE_LENGTH = 1000
# A kubelet that is alive removes a pod soon after its grace period.
END_MARGIN = timedelta(minutes=1)
# What ranks end with because another one did: no cause.
CONSEQUENCES = {EndReason.PEER_LOST, EndReason.INCARNATION_CHANGED, EndReason.DRAINED}
# SIGKILL and SIGTERM, as exit codes of a process that had no time for last words.
KILLED = {137, 143}
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9]*")


@dataclass(frozen=True)
class Failure:
    """``reason`` is a condition's reason. A lower ``weight`` is nearer to the cause."""

    reason: str
    message: str
    weight: int = 1

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"[:MESSAGE_LENGTH]

    @staticmethod
    def parse(text: str) -> Failure:
        reason, separator, message = text.partition(": ")
        if not separator or not _REASON.fullmatch(reason):
            reason, message = "GroupRestarting", text
        return Failure(reason, message, 2 if reason == "GroupRestarting" else 1)


@dataclass(frozen=True)
class Rank:
    """One pod of the group, and what is asked about it."""

    index: int
    pod: Manifest

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])

    @property
    def leaving(self) -> bool:
        return "deletionTimestamp" in self.pod["metadata"]

    @property
    def incarnation(self) -> str:
        return str(self.pod["metadata"].get("annotations", {}).get(rank.ANNOTATION_INCARNATION, ""))

    @property
    def ready(self) -> bool:
        conditions = self.status.get("conditions", [])
        return not self.leaving and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    @property
    def status(self) -> Manifest:
        status: Manifest = self.pod.get("status", {})
        return status

    def container(self, name: str) -> Manifest:
        statuses = [*self.status.get("initContainerStatuses", []), *self.status.get("containerStatuses", [])]
        return next((status for status in statuses if status["name"] == name), {})

    @property
    def engine_failure(self) -> Failure | None:
        """Why this rank ended, if it did; a container that was restarted in place has ended too."""
        engine = self.container("engine")
        ended = _terminated(engine)
        if ended is not None:
            return _ended(ended, f"rank {self.index}")
        if engine.get("restartCount", 0):
            return Failure("EngineCrashed", f"rank {self.index} was restarted", 2)
        if self.status.get("phase") in ("Failed", "Succeeded"):
            why = self.status.get("message") or self.status.get("reason") or "no reason given"
            return Failure("PodFailed", f"pod of rank {self.index} ended: {why}")
        return None

    @property
    def init_failure(self) -> Failure | None:
        """An init step that crashed; the kubelet tries it again."""
        for name in ("runtime", "profile"):
            step = self.container(name)
            ended = _terminated(step)
            if ended is not None and ended.get("exitCode", 0) != 0:
                failure = _ended(ended, f"init step {name} of rank {self.index}")
                return failure if failure.reason == "OutOfMemory" else Failure("InitFailed", failure.message)
        return None

    @property
    def profile_message(self) -> str | None:
        ended = self.container("profile").get("state", {}).get("terminated")
        return None if ended is None else ended.get("message", "")

    @property
    def profiling(self) -> bool:
        return "running" in self.container("profile").get("state", {})


def _terminated(status: Manifest) -> Manifest | None:
    found: Manifest | None = status.get("state", {}).get("terminated") or status.get("lastState", {}).get("terminated")
    return found


def _ended(terminated: Manifest, who: str) -> Failure:
    code, message = terminated.get("exitCode", 0), (terminated.get("message") or "").strip()
    if terminated.get("reason") == "OOMKilled":
        return Failure("OutOfMemory", f"{who} exceeded its memory limit: raise engine.resources.limits.memory", 0)
    try:
        words = LastWords.model_validate_json(message)
    except ValidationError:
        tail = message[-500:] or "no last words"
        return Failure("EngineCrashed", f"{who} ended with exit code {code}: {tail}", 2 if code in KILLED else 1)
    reason = "EngineCrashed" if words.reason == EndReason.ENGINE_EXITED else words.reason.value
    if words.reason in CONSEQUENCES:
        return Failure("GroupRestarting", f"{who} ended ({words.reason}): {words.message}", 3)
    return Failure(reason, f"{who}: {words.message}")


@dataclass(frozen=True)
class Group:
    """One replica. ``stateful_set`` is None when there is none."""

    replica: int
    stateful_set: Manifest | None
    ranks: tuple[Rank, ...]
    warnings: dict[str, Warned]

    @property
    def life(self) -> Life:
        assert self.stateful_set is not None
        return Life.of(self.stateful_set)

    @property
    def template_hash(self) -> str:
        assert self.stateful_set is not None
        return str(self.stateful_set["metadata"].get("annotations", {}).get(TEMPLATE_HASH, ""))

    @property
    def calibration(self) -> str:
        """What this life of the group started from."""
        assert self.stateful_set is not None
        annotations = self.stateful_set["spec"]["template"]["metadata"].get("annotations", {})
        return str(annotations.get(rank.ANNOTATION_CALIBRATION, ""))

    @property
    def size(self) -> int:
        """Pods asked for."""
        return int(self.stateful_set["spec"].get("replicas", 1)) if self.stateful_set else 0

    @property
    def settled(self) -> bool:
        """The StatefulSet's controller has seen its present spec."""
        if self.stateful_set is None:
            return True
        seen = self.stateful_set.get("status", {}).get("observedGeneration", 0)
        return bool(seen >= self.stateful_set["metadata"].get("generation", 0))

    @property
    def vanished(self) -> bool:
        """Down to nothing: no pod left and none to come."""
        if self.stateful_set is None:
            return not self.ranks
        count = self.stateful_set.get("status", {}).get("replicas", 0)
        return self.size == 0 and self.settled and count == 0 and not self.ranks

    def overdue(self, now: datetime) -> str:
        """What keeps the group from vanishing when its pods take longer to end than they may; else empty."""
        texts = []
        for pod in (member.pod for member in self.ranks):
            due = pod["metadata"].get("deletionTimestamp")
            ending = moment(due)
            if ending is not None and now - ending > END_MARGIN:
                node = pod["spec"].get("nodeName", "none")
                texts.append(f"; pod {pod['metadata']['name']} on node {node} should have ended at {due}")
        return "".join(texts) + (": if the node is lost, kubectl delete pod --force" if texts else "")

    @property
    def fingerprint(self) -> str:
        return fingerprint(rank.uid for rank in self.ranks if not rank.leaving)

    @property
    def ready(self) -> bool:
        """Every pod of this life serves."""
        if self.stateful_set is None or not self.settled or self.size == 0:
            return False
        indices = {rank.index for rank in self.ranks if rank.ready and rank.incarnation == self.life.incarnation}
        return indices == set(range(self.size)) and len(self.ranks) == self.size

    def failures(self) -> list[Failure]:
        """Why the group is broken, the likeliest cause first; empty while it is not."""
        found = [failure for rank in self.ranks if (failure := rank.engine_failure)]
        if self.size and self.life.formed is not None:
            leaving = sorted(rank.index for rank in self.ranks if rank.leaving)
            if leaving:
                found.append(Failure("GroupRestarting", f"the pod of rank {leaving[0]} was deleted", 2))
            elif self.settled and self.fingerprint != self.life.formed:
                found.append(Failure("GroupRestarting", f"a pod was lost: {len(self.ranks)} of {self.size} remain", 2))
        if self.size:
            strays = [rank.index for rank in self.ranks if rank.incarnation != self.life.incarnation]
            if strays:
                found.append(Failure("GroupRestarting", f"rank {strays[0]} belongs to another life of the group", 4))
        return sorted(found, key=lambda failure: failure.weight)


def groups_of(pipeline: str, snapshot: Snapshot, replicas: Iterable[int]) -> dict[int, Group]:
    """Pods belong to a group by their owner, since a StatefulSet of the same name may have been there before."""
    found = {}
    for replica in replicas:
        stateful_set = snapshot.child("StatefulSet", names.replica_name(pipeline, replica))
        label = str(replica)
        ranks = sorted(
            (
                Rank(int(pod["metadata"]["labels"].get(names.LABEL_POD_INDEX, "-1")), pod)
                for pod in snapshot.pods
                if pod["metadata"]["labels"].get(names.LABEL_REPLICA) == label and _owned(pod, stateful_set)
            ),
            key=lambda rank: rank.index,
        )
        found[replica] = Group(replica, stateful_set, tuple(ranks), snapshot.warnings)
    return found


def _owned(pod: Manifest, stateful_set: Manifest | None) -> bool:
    if stateful_set is None:
        return True
    uid = stateful_set["metadata"]["uid"]
    return any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", []))


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
