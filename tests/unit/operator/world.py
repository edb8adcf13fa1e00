"""A small world of objects for the pure parts of the operator: a pipeline and its group in any state."""

from __future__ import annotations

from copy import deepcopy
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from prefill_operator.api.types import PrefillPipelineSpec
from prefill_operator.desired import names
from prefill_operator.desired.pipeline import Manifest, Pipeline
from prefill_operator.reconcile.observe import Snapshot
from prefill_operator.reconcile.plan import Action, Apply, Plan, make_plan
from prefill_runtime.profiling.document import CalibrationDocument, ProfileResult

from tests.documents import calibration

NOW = datetime(2030, 1, 1, tzinfo=UTC)
FIXED = {"policy": "Fixed", "maxTokens": 1024, "minTokens": 128}
SPEC: Manifest = {
    "model": {"name": "toy", "source": {"hostPath": {"path": "/srv/toy"}}, "maxModelLen": 4096},
    "parallelism": {"pipeline": 2},
    "chunking": {"policy": "Dynamic", "maxTokens": 1024, "minTokens": 128},
    "engine": {"image": "engine:1", "resources": {"requests": {"cpu": "0.5"}, "limits": {"memory": "4Gi"}}},
    "accelerator": {"vendor": "CPU"},
}


def make_pipeline(name: str = "a", **spec: Any) -> Pipeline:
    return Pipeline(
        namespace="ns",
        name=name,
        uid="uid-1",
        generation=1,
        spec=PrefillPipelineSpec.model_validate(SPEC | spec),
        operator_image="operator:1",
        runtime_version="0.1.0",
    )


def document(key: str, created_at: str = "2030-01-01T00:00:00Z", **more: Any) -> CalibrationDocument:
    return calibration(key=key, created_at=created_at, **({"r2": 0.99} | more))


class World:
    """Carries plans out on dictionaries and plays the StatefulSet controller; time stands still but for ``wait``."""

    def __init__(self, **spec: Any) -> None:
        self.spec, self.now, self.snapshot = dict(spec), NOW, Snapshot()
        self._serial = count(1)

    @property
    def pipeline(self) -> Pipeline:
        return make_pipeline(**self.spec)

    def plan(self) -> Plan:
        return make_plan(self.pipeline, deepcopy(self.snapshot), self.now, lambda: f"life-{next(self._serial)}")

    def step(self) -> Plan:
        """One reconciliation, and what the controllers make of it."""
        plan = self.plan()
        for action in plan.actions:
            self._carry_out(action)
        self._control()
        return plan

    def settle(self) -> Plan:
        for _ in range(20):
            plan = self.step()
            if not plan.actions:
                return plan
        raise AssertionError(f"never quiet: {plan.actions}")

    def wait(self, **duration: float) -> None:
        self.now += timedelta(**duration)

    def _carry_out(self, action: Action) -> None:
        if not isinstance(action, Apply):
            del self.snapshot.children[action.kind, action.name]
            return
        manifest = deepcopy(action.manifest)
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        before = self.snapshot.calibration if kind == "ConfigMap" else self.snapshot.child(kind, name)
        assert (before is None) == (action.uid is None), f"{kind} {name}"
        metadata = before["metadata"] if before else {"uid": f"object-{next(self._serial)}", "generation": 0}
        manifest["metadata"] |= {"uid": metadata["uid"], "generation": metadata["generation"] + 1}
        manifest["status"] = deepcopy(before.get("status", {})) if before else {}
        if kind == "ConfigMap":
            self.snapshot.calibration = manifest
        else:
            self.snapshot.children[kind, name] = manifest

    def _control(self) -> None:
        """The StatefulSet and pod garbage controllers."""
        owners = set()
        for (kind, name), item in self.snapshot.children.items():
            if kind != "StatefulSet":
                continue
            owners.add(item["metadata"]["uid"])
            for index in range(item["spec"]["replicas"]):
                if self.find_pod(f"{name}-{index}") is None:
                    self.snapshot.pods.append(self._pod(item, index))
            pods = [p for p in self.snapshot.pods if p["metadata"]["name"].rpartition("-")[0] == name]
            self.snapshot.pods = [
                p
                for p in self.snapshot.pods
                if p not in pods or int(p["metadata"]["name"].rpartition("-")[2]) < item["spec"]["replicas"]
            ]
            item["status"] = {
                "observedGeneration": item["metadata"]["generation"],
                "replicas": item["spec"]["replicas"],
            }
        self.snapshot.pods = [p for p in self.snapshot.pods if p["metadata"]["ownerReferences"][0]["uid"] in owners]

    def _pod(self, owner: Manifest, index: int) -> Manifest:
        template = deepcopy(owner["spec"]["template"])
        name = f"{owner['metadata']['name']}-{index}"
        template["metadata"] |= {
            "name": name,
            "uid": f"pod-{next(self._serial)}",
            "ownerReferences": [{"uid": owner["metadata"]["uid"]}],
        }
        template["metadata"]["labels"][names.LABEL_POD_INDEX] = str(index)
        return template | {"status": {}}

    def find_pod(self, name: str) -> Manifest | None:
        return next((p for p in self.snapshot.pods if p["metadata"]["name"] == name), None)

    def pod(self, name: str) -> Manifest:
        found = self.find_pod(name)
        assert found is not None, f"{name} is not among {[p['metadata']['name'] for p in self.snapshot.pods]}"
        return found

    def lose(self, name: str) -> None:
        """Somebody deletes a pod and the StatefulSet controller makes another one."""
        self.snapshot.pods.remove(self.pod(name))
        self._control()

    def scale(self, name: str, pods: int) -> None:
        """Somebody scales a StatefulSet by hand."""
        self.stateful_set(name)["spec"]["replicas"] = pods
        self._control()

    def ready(self, *pods: str, profile: str | None = None) -> None:
        for pod in self.snapshot.pods:
            if not pods or pod["metadata"]["name"] in pods:
                pod["status"] = {
                    "phase": "Running",
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [{"name": "engine", "restartCount": 0, "state": {"running": {}}}],
                }
                if profile is not None and pod["metadata"]["labels"][names.LABEL_POD_INDEX] == "0":
                    ended = {"exitCode": 0, "message": profile}
                    pod["status"]["initContainerStatuses"] = [{"name": "profile", "state": {"terminated": ended}}]

    def measure(self) -> CalibrationDocument:
        """Every pod becomes Ready, after a profile step that ended well."""
        found = document(self.pipeline.calibration_key)
        self.ready(profile=ProfileResult(outcome="Measured", calibration=found).to_json())
        return found

    def crash(self, pod: str, message: str = "", code: int = 1, reason: str = "Error") -> None:
        ended = {"exitCode": code, "reason": reason, "message": message}
        self.pod(pod)["status"] = {
            "phase": "Running",
            "containerStatuses": [{"name": "engine", "restartCount": 1, "lastState": {"terminated": ended}}],
        }

    def stateful_set(self, name: str = "a-0") -> Manifest:
        found = self.snapshot.child("StatefulSet", name)
        assert found is not None
        return found

    def note(self, annotation: str, name: str = "a-0") -> str | None:
        found: str | None = self.stateful_set(name)["metadata"]["annotations"].get(f"prefill.dev/{annotation}")
        return found
