"""What the tests of the operator share: a namespace on the real API server, and a stand-in for the kubelet.

There is no node, so pods stay as the StatefulSet controller made them until a test writes their status.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kubernetes import config as kubernetes_config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import NotFoundError
from prefill_runtime.profiling.document import CalibrationDocument, ProfileResult, Refusal, RefusalReason

from localcluster.apiserver import ApiServer
from tests.documents import calibration

Object = dict[str, Any]

API_VERSIONS = {
    "PrefillPipeline": "prefill.dev/v1alpha1",
    "StatefulSet": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
}
SPEC: Object = {
    "model": {"name": "toy", "source": {"hostPath": {"path": "/srv/toy"}}, "maxModelLen": 4096},
    "parallelism": {"pipeline": 2},
    "chunking": {"policy": "Dynamic", "maxTokens": 1024, "minTokens": 128},
    "engine": {
        "image": "engine:1",
        # The API server stores 0.5 as 500m.
        "resources": {"requests": {"cpu": "0.5", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
    },
    "accelerator": {"vendor": "CPU"},
    "recovery": {"backoffSeconds": 1, "maxBackoffSeconds": 2},
}


def pipeline(name: str, **spec: Any) -> Object:
    return {
        "apiVersion": API_VERSIONS["PrefillPipeline"],
        "kind": "PrefillPipeline",
        "metadata": {"name": name},
        "spec": SPEC | spec,
    }


def condition(item: Object, kind: str = "Ready") -> Object:
    conditions = item.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {"status": None, "reason": "", "message": ""})


def document(key: str, created_at: str = "2030-01-02T03:04:05Z", **more: Any) -> CalibrationDocument:
    return calibration(key=key, created_at=created_at, r2=0.998, **more)


def measured(key: str, created_at: str = "2030-01-02T03:04:05Z") -> str:
    return ProfileResult(outcome="Measured", calibration=document(key, created_at), seconds=3).to_json()


def refused(reason: RefusalReason, message: str) -> str:
    return ProfileResult(outcome="Refused", refusal=Refusal(reason=reason, message=message)).to_json()


class Lab:
    def __init__(self, server: ApiServer, namespace: str) -> None:
        api = kubernetes_config.new_client_from_config(str(server.kubeconfig))
        self._client = DynamicClient(api)
        self.namespace = namespace
        self._resource("Namespace").create({"metadata": {"name": namespace}})

    def close(self) -> None:
        self.delete_namespace()
        self._client.client.close()

    def delete_namespace(self) -> None:
        with suppress(NotFoundError):
            self._resource("Namespace").delete(name=self.namespace)

    def _resource(self, kind: str) -> Any:
        return self._client.resources.get(api_version=API_VERSIONS.get(kind, "v1"), kind=kind)

    def create(self, item: Object) -> Object:
        found: Object = self._resource(item["kind"]).create(item, namespace=self.namespace).to_dict()
        return found

    def get(self, kind: str, name: str) -> Object | None:
        try:
            found: Object = self._resource(kind).get(name=name, namespace=self.namespace).to_dict()
        except NotFoundError:
            return None
        return found

    def list(self, kind: str, labels: str = "") -> list[Object]:
        found = self._resource(kind).get(namespace=self.namespace, label_selector=labels).to_dict()["items"]
        # A list's items carry no kind, and what the namespace's controllers put there is not ours.
        return [item for item in found if item["metadata"]["name"] != "kube-root-ca.crt"]

    def names(self, kind: str) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.list(kind))

    def patch(self, kind: str, name: str, change: Object) -> Object:
        found: Object = (
            self._resource(kind)
            .patch(body=change, name=name, namespace=self.namespace, content_type="application/merge-patch+json")
            .to_dict()
        )
        return found

    def delete(self, kind: str, name: str, *, orphan: bool = False) -> None:
        body = {"gracePeriodSeconds": 0} | ({"propagationPolicy": "Orphan"} if orphan else {})
        self._resource(kind).delete(name=name, namespace=self.namespace, body=body)

    def until(self, kind: str, name: str, holds: Callable[[Object], Any], seconds: int = 30) -> Object:
        """Watches until ``holds`` does; the last state is in the failure's message."""
        deadline, last = time.monotonic() + seconds, self.get(kind, name)
        if last is not None and holds(last):
            return last
        resource = self._resource(kind)
        while (left := deadline - time.monotonic()) > 0:
            selector = f"metadata.name={name}"
            stream = self._client.watch(
                resource, namespace=self.namespace, field_selector=selector, timeout=max(1, round(left))
            )
            for event in stream:
                last = event["raw_object"]
                if event["type"] != "DELETED" and holds(last):
                    return last
        raise AssertionError(f"{kind} {name} is not as expected after {seconds} s; its state: {last}")

    def until_gone(self, kind: str, name: str, seconds: int = 120) -> None:
        """The garbage collector looks for new kinds of owners every 30 s only."""
        deadline = time.monotonic() + seconds
        while self.get(kind, name) is not None:
            assert time.monotonic() < deadline, f"{kind} {name} is still there after {seconds} s"
            time.sleep(0.05)

    def until_ready(self, name: str) -> Object:
        return self.until("PrefillPipeline", name, lambda item: condition(item)["reason"] == "AllReplicasReady")

    def until_reason(self, name: str, reason: str, kind: str = "Ready") -> Object:
        return self.until("PrefillPipeline", name, lambda item: condition(item, kind)["reason"] == reason)

    # -- the kubelet's part

    def group(self, name: str, *, incarnation_not: str = "", pods: int = 2) -> list[Object]:
        """The pods of StatefulSet ``name`` once all exist, of another life than ``incarnation_not``."""

        def made(item: Object) -> bool:
            life = item["metadata"]["annotations"]["prefill.dev/incarnation"]
            return life != incarnation_not and item["status"].get("replicas") == pods

        self.until("StatefulSet", name, made)
        return [self.until("Pod", f"{name}-{index}", lambda pod: True) for index in range(pods)]

    def set_pod(self, pod: Object, status: Object) -> None:
        resource = self._resource("Pod").subresources["status"]
        resource.patch(
            body={"status": status},
            name=pod["metadata"]["name"],
            namespace=self.namespace,
            content_type="application/merge-patch+json",
        )

    def serve(
        self, name: str, *, profile: str | None = None, address: str = "", incarnation_not: str = "", pods: int = 2
    ) -> list[Object]:
        """Every pod of the group becomes Ready; ``profile`` is what rank 0's profile step leaves, at ``address``."""
        found = self.group(name, incarnation_not=incarnation_not, pods=pods)
        for pod in found:
            first = pod["metadata"]["name"].endswith("-0")
            self.set_pod(pod, ready_status(profile if first else None, address if first else ""))
        return found


def ready_status(profile: str | None = None, address: str = "") -> Object:
    engine = {"name": "engine", "ready": True, "restartCount": 0, "image": "engine:1", "imageID": "x"}
    status: Object = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [engine | {"state": {"running": {"startedAt": "2030-01-02T03:04:05Z"}}}],
    }
    if address:
        status |= {"podIP": address, "podIPs": [{"ip": address}]}
    if profile is not None:
        step = {"name": "profile", "ready": True, "restartCount": 0, "image": "engine:1", "imageID": "x"}
        status["initContainerStatuses"] = [step | {"state": {"terminated": {"exitCode": 0, "message": profile}}}]
    return status


def crashed_status(message: str, *, code: int = 1, reason: str = "Error", restarts: int = 1) -> Object:
    """The engine container ended and the kubelet started it again."""
    status = ready_status()
    status["conditions"] = [{"type": "Ready", "status": "False"}]
    status["containerStatuses"][0] |= {
        "ready": False,
        "restartCount": restarts,
        "lastState": {"terminated": {"exitCode": code, "reason": reason, "message": message}},
    }
    return status
