from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from prefill_operator.reconcile import errors
from prefill_operator.reconcile.cluster import STATEFUL_SETS, Cluster
from prefill_operator.reconcile.drift import differs


@pytest.mark.parametrize(
    ("status", "message", "kind", "text"),
    [
        (403, 'pods "x" is forbidden: exceeded quota: q', errors.QuotaError, "exceeded quota: q"),
        (403, 'User "u" cannot patch resource', errors.ForbiddenError, "the operator may not patch statefulsets"),
        (403, 'User "u" cannot create resource "pods" in', errors.ForbiddenError, "the operator may not create pods:"),
        (403, "unable to create new content because it is being terminated", errors.ConflictError, "terminated"),
        (404, "not found", errors.NotFoundError, "not found"),
        (409, "the object has been modified", errors.ConflictError, "modified"),
        (422, "spec.replicas: Invalid value", errors.InvalidError, "spec.replicas: Invalid value"),
        (429, "too many", errors.ThrottledError, "too many"),
        (500, "failed to create typed patch object (x): .spec.y: field not declared", errors.InvalidError, ".spec.y"),
        (500, "etcd", errors.UnavailableError, "patch statefulsets: etcd"),
    ],
)
def test_answers_become_domain_errors(status: int, message: str, kind: type[Exception], text: str) -> None:
    found = errors.error_of(status, json.dumps({"message": message}), "patch", "statefulsets", "7")
    assert type(found) is kind
    assert text in found.message
    if isinstance(found, errors.ThrottledError):
        assert found.retry_after == 7


def test_an_answer_that_is_no_json_is_quoted() -> None:
    assert "<html>" in errors.error_of(502, "<html>", "get", "pods").message


class Answer:
    def __init__(self, status: int, body: str) -> None:
        self.status, self._body, self.headers = status, body, {}

    async def read(self) -> bytes:
        return self._body.encode()


class Transport:
    """Stands for the network, which is what these tests are about."""

    def __init__(self, answer: Answer | Exception) -> None:
        self.answer, self.requests = answer, []
        self.configuration = type("Configuration", (), {"host": "https://server"})

    async def update_params_for_auth(self, *_: Any) -> None: ...

    async def call_api(self, method: str, url: str, **request: Any) -> Answer:
        self.requests.append((method, url, request["body"]))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


MANIFEST = {"metadata": {"name": "a-0", "namespace": "ns"}}


async def test_a_change_carries_the_uid_and_a_creation_does_not_force() -> None:
    transport = Transport(Answer(200, "{}"))
    writes: list[tuple[str, str]] = []
    cluster = Cluster(transport, lambda kind, verb: writes.append((kind, verb)))
    await cluster.apply(STATEFUL_SETS, MANIFEST, "u1")
    await cluster.apply(STATEFUL_SETS, MANIFEST, None)
    (_, change, body), (_, creation, other) = transport.requests
    assert (
        change == "https://server/apis/apps/v1/namespaces/ns/statefulsets/a-0?fieldManager=prefill-operator&force=true"
    )
    assert body["metadata"]["uid"] == "u1"
    assert creation.endswith("force=false")
    assert "uid" not in other["metadata"]
    assert writes == [("StatefulSet", "patch")] * 2


@pytest.mark.parametrize(
    "trouble", [aiohttp.ServerDisconnectedError(), TimeoutError(), ConnectionResetError(), Answer(200, "<html>")]
)
async def test_a_broken_connection_means_come_back_later(trouble: Any) -> None:
    with pytest.raises(errors.UnavailableError):
        await Cluster(Transport(trouble)).get(STATEFUL_SETS, "ns", "a-0")


def item(**fields: Any) -> dict[str, Any]:
    return {"metadata": {"name": "x", "labels": {}, "annotations": {}}} | fields


@pytest.mark.parametrize(
    ("desired", "observed", "expected"),
    [
        (item(spec={"a": 1}), item(spec={"a": 1, "default": True}), False),
        (item(spec={"a": 1}), item(spec={"a": 2}), True),
        (item(spec={"cpu": "0.5"}), item(spec={"cpu": "500m"}), False),
        (item(spec={"memory": "1Gi"}), item(spec={"memory": "1073741824"}), False),
        (item(spec={"memory": "1G"}), item(spec={"memory": "1Gi"}), True),
        (item(spec={"cards": "16"}), item(spec={"cards": "8"}), True),
        (
            item(spec={"env": [{"name": "A", "value": "1"}]}),
            item(spec={"env": [{"name": "B"}, {"name": "A", "value": "1"}]}),
            False,
        ),
        (
            item(mounts=[{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]),
            item(mounts=[{"name": "v", "mountPath": "/b"}, {"name": "v", "mountPath": "/a"}]),
            False,
        ),
        (item(spec={"env": [{"name": "A", "value": ""}]}), item(spec={"env": [{"name": "A"}]}), False),
        (item(spec={"list": ["a"]}), item(spec={"list": ["a", "b"]}), True),
        (item(spec={"empty": {}}), item(spec={}), False),
        (item(), item(metadata={"name": "x", "annotations": {"other.dev/x": "1"}}), False),
        (item(), item(metadata={"name": "x", "ownerReferences": [{"kind": "PrefillPipeline", "uid": "u"}]}), True),
        (item(), item(metadata={"name": "x", "ownerReferences": [{"kind": "Application", "uid": "u"}]}), False),
    ],
)
def test_drift(desired: Any, observed: Any, expected: bool) -> None:
    assert differs(desired, observed) is expected
