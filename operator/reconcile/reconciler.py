"""One reconciliation: observe, plan, apply, status. Decides on nothing from an earlier one."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from time import monotonic

from prefill_operator.api.types import API_VERSION, KIND, PrefillPipelineSpec
from prefill_operator.api.validation import problems
from prefill_operator.desired.pipeline import Manifest, Pipeline
from prefill_operator.reconcile.apply import carry_out
from prefill_operator.reconcile.cluster import EVENTS, PIPELINES, Cluster
from prefill_operator.reconcile.errors import ClusterError, ForbiddenError, InvalidError, NotFoundError, QuotaError
from prefill_operator.reconcile.events import event, transitions
from prefill_operator.reconcile.group import Failure, groups_of, now
from prefill_operator.reconcile.metrics import Metrics
from prefill_operator.reconcile.observe import Snapshot, observe
from prefill_operator.reconcile.offers import Offers, leaders
from prefill_operator.reconcile.plan import make_plan, wanted_children
from prefill_operator.reconcile.queue import Key
from prefill_operator.reconcile.status import status_of, to_manifest, trouble_status
from pydantic import ValidationError

log = logging.getLogger(__name__)

# Somebody has to act on these, so they are told in the status; other errors only mean to try again.
TOLD = (ForbiddenError, QuotaError, InvalidError)


@dataclass(frozen=True)
class Release:
    """What this operator puts into pods."""

    operator_image: str
    runtime_version: str


class Reconciler:
    def __init__(
        self,
        cluster: Cluster,
        release: Release,
        metrics: Metrics,
        offers: Offers,
        *,
        clock: Callable[[], datetime] = now,
        new_incarnation: Callable[[], str] = lambda: secrets.token_hex(5),
    ) -> None:
        self._cluster, self._release, self._metrics, self._offers = cluster, release, metrics, offers
        self._clock, self._new_incarnation = clock, new_incarnation

    async def reconcile(self, key: Key) -> float | None:
        """Returns after how many seconds to look again even if nothing happens. Raises ClusterError."""
        started, result = monotonic(), "ok"
        try:
            return await self._reconcile(key)
        except Exception as error:
            result = error.reason if isinstance(error, ClusterError) else "Bug"
            raise
        finally:
            self._metrics.reconciled(monotonic() - started, result)

    async def _reconcile(self, key: Key) -> float | None:
        raw = await self._cluster.get(PIPELINES, *key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            # Owner references do all the cleaning up.
            self._metrics.saw(key, None)
            self._offers.forget(key)
            return None
        pipeline, wrong = self._read(raw)
        if pipeline is None:
            await self._tell(key, raw, Failure("InvalidSpec", "; ".join(wrong)))
            return None
        try:
            snapshot = await self._look(pipeline)
        except TOLD as error:
            await self._tell(key, raw, Failure(error.reason, error.message))
            raise
        groups = groups_of(pipeline.name, snapshot, range(pipeline.spec.replicas))
        snapshot.offers = self._offers.latest(key, leaders(groups.values()) if pipeline.learns else [])
        return await self._bring_nearer(key, raw, pipeline, snapshot)

    def _read(self, raw: Manifest) -> tuple[Pipeline | None, list[str]]:
        """The pipeline, or what is wrong with its spec."""
        metadata = raw["metadata"]
        try:
            spec = PrefillPipelineSpec.model_validate(raw.get("spec", {}))
        except ValidationError as error:
            details = error.errors(include_url=False)
            return None, [f"spec.{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in details]
        if found := problems(spec, metadata["name"]):
            return None, found
        pipeline = Pipeline(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            generation=metadata["generation"],
            spec=spec,
            operator_image=self._release.operator_image,
            runtime_version=self._release.runtime_version,
        )
        return pipeline, []

    async def _look(self, pipeline: Pipeline) -> Snapshot:
        calibration = pipeline.calibration_name if pipeline.needs_calibration else None
        return await observe(self._cluster, pipeline.namespace, pipeline.uid, wanted_children(pipeline), calibration)

    async def _bring_nearer(self, key: Key, raw: Manifest, pipeline: Pipeline, snapshot: Snapshot) -> float | None:
        plan = make_plan(pipeline, snapshot, self._clock(), self._new_incarnation)
        earlier = raw.get("status", {})
        self._log_ignored(key, earlier, plan.evidence.ignored)
        try:
            await carry_out(self._cluster, pipeline.namespace, plan.actions)
        except TOLD as error:
            trouble = Failure(error.reason, error.message)
            plan.steps = [step.undone() for step in plan.steps]
            status = status_of(pipeline, plan, earlier, self._clock(), trouble)
            await self._write_status(key, raw, to_manifest(status))
            raise
        await self._write_status(key, raw, to_manifest(status_of(pipeline, plan, earlier, self._clock())))
        return plan.wake

    def _log_ignored(self, key: Key, earlier: Manifest, ignored: tuple[str, ...]) -> None:
        told = " ".join(condition["message"] for condition in earlier.get("conditions", []))
        for text in ignored:
            if text not in told:
                log.warning("%s/%s: %s", *key, text)

    async def _tell(self, key: Key, raw: Manifest, trouble: Failure) -> None:
        earlier, generation = raw.get("status", {}), raw["metadata"]["generation"]
        await self._write_status(key, raw, trouble_status(trouble, generation, earlier, self._clock()))

    async def _write_status(self, key: Key, raw: Manifest, status: Manifest) -> None:
        """The only writer of the status; writes nothing when nothing changed."""
        earlier, metadata = raw.get("status", {}), raw["metadata"]
        true = frozenset(c["type"] for c in status["conditions"] if c["status"] == "True")
        self._metrics.saw(key, true)
        if status == earlier:
            return
        identity = {name: metadata[name] for name in ("name", "namespace", "uid")}
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": identity, "status": status}
        try:
            await self._cluster.apply_status(PIPELINES, manifest)
        except NotFoundError:
            return
        for condition in transitions(earlier, status):
            log.info("%s/%s: %s: %s", *key, condition["reason"], condition["message"])
            try:
                await self._cluster.create(EVENTS, event(raw, condition, socket.gethostname()))
            except ClusterError as error:
                log.warning("%s/%s: no Event for %s: %s", *key, condition["reason"], error)
