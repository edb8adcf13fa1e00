"""The operator dies after each of its writes in turn, and another one takes over: the end is the same.

In-process reconcilers on the real API server; no operator process serves these pipelines' namespaces, since the
sweep must be alone with its writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from kubernetes.aio import client, config
from prefill_operator.desired.calibration import RETAINED_BY, REVISION
from prefill_operator.desired.life import timestamp
from prefill_operator.reconcile.cluster import Cluster
from prefill_operator.reconcile.errors import ConflictError, ThrottledError, UnavailableError
from prefill_operator.reconcile.metrics import Metrics
from prefill_operator.reconcile.offers import Offers
from prefill_operator.reconcile.reconciler import Reconciler, Release

from localcluster.apiserver import ApiServer
from tests.leader import Leader
from tests.operator.lab import Lab, crashed_status, document, measured, pipeline, ready_status

Object = dict[str, Any]
NOISE = {
    *("uid", "clusterIP", "clusterIPs", "selector", "matchLabels", "lastTransitionTime", "observedGeneration"),
    *("prefill.dev/pipeline-uid", "prefill.dev/template-hash", "prefill.dev/formed", "prefill.dev/config"),
}
START = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass
class World:
    """What outlives a process of the operator."""

    leader: Leader
    lives: count[int]
    now: datetime = START


class Crash(BaseException):
    """The process is gone; nothing after the write happens."""


class Life:
    """One process: a reconciler whose cluster connection dies after ``writes`` writes."""

    def __init__(self, api: client.ApiClient, world: World, writes: int | None = None) -> None:
        self.written: list[str] = []
        self._left, self.world = writes, world
        self._offers = Offers(0.0, lambda key: None)
        cluster = Cluster(api, self._on_write)
        self._reconciler = Reconciler(
            cluster,
            Release("operator:1", "0.1.0"),
            Metrics(),
            self._offers,
            clock=lambda: world.now,
            new_incarnation=lambda: f"life-{next(world.lives)}",
        )

    async def end(self) -> None:
        await self._offers.close()

    def _on_write(self, kind: str, verb: str) -> None:
        self.written.append(f"{verb} {kind}")
        if self._left is not None and len(self.written) == self._left:
            raise Crash

    async def settle(self, lab: Lab, holds: Callable[[], bool]) -> None:
        """Reconciles until a look writes nothing and ``holds``: what the queue does, without waiting for events."""
        for _ in range(600):
            before = len(self.written)
            try:
                await self._reconciler.reconcile((lab.namespace, "a"))
            except (ConflictError, ThrottledError, UnavailableError):
                continue
            if len(self.written) == before and holds():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"never settled; wrote {self.written[-10:]}, pipeline {lab.get('PrefillPipeline', 'a')}")


async def bring_up(lab: Lab, life: Life) -> None:
    """From nothing to a calibrated, formed group."""

    def whole() -> bool:
        return len(lab.list("Pod")) == 2

    await life.settle(lab, whole)
    for pod in lab.list("Pod"):
        key = pod["metadata"]["annotations"]["prefill.dev/config"].split('"calibrationKey":"')[1][:16]
        first = pod["metadata"]["name"].endswith("-0")
        lab.set_pod(pod, ready_status(measured(key) if first else None, life.world.leader.address if first else ""))
    await life.settle(lab, lambda: bool(lab.list("ConfigMap")))


async def learn(lab: Lab, life: Life) -> None:
    """The group has a better calibration than it started with."""
    life.world.now = START + timedelta(minutes=30)
    ((found),) = lab.list("ConfigMap")
    key = found["data"]["key"]
    better = document(key, timestamp(START + timedelta(minutes=20)), source="Online")
    life.world.leader.offer = better.to_json()
    await life.settle(lab, lambda: lab.list("ConfigMap")[0]["data"]["source"] == "Online")


def restarts(lab: Lab) -> str:
    found = lab.get("StatefulSet", "a-0") or {"metadata": {"annotations": {}}}
    return str(found["metadata"]["annotations"].get("prefill.dev/restarts", "0"))


async def break_and_restart(lab: Lab, life: Life) -> None:
    """The second rank ends; the pause passes; another life of the group begins."""
    if restarts(lab) == "0":
        lab.set_pod(lab.get("Pod", "a-0-1") or {}, crashed_status("core dumped"))

    def reborn() -> bool:
        pods = lab.list("Pod")
        if restarts(lab) == "1" and not pods:
            life.world.now = START + timedelta(minutes=40)
        return restarts(lab) == "1" and len(pods) == 2 and not any("status" in pod and ended(pod) for pod in pods)

    await life.settle(lab, reborn)


def ended(pod: Object) -> bool:
    return any(status["restartCount"] for status in pod["status"].get("containerStatuses", []))


def end_state(lab: Lab) -> list[Object]:
    """Everything the operator made, without what differs from run to run."""
    found = []
    for kind in ("PrefillPipeline", "StatefulSet", "Service", "PodDisruptionBudget", "ConfigMap"):
        for item in lab.list(kind):
            metadata = item["metadata"]
            managers = sorted({(m["manager"], m["operation"]) for m in metadata.get("managedFields", [])})
            for name in ("uid", "resourceVersion", "creationTimestamp", "managedFields", "generation", "namespace"):
                metadata.pop(name, None)
            if kind != "PrefillPipeline":
                item.pop("status", None)
            item["managers"] = [manager for manager in managers if manager[0] == "prefill-operator"]
            found.append(_stable(item))
    return found


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _stable(item) for name, item in value.items() if name not in NOISE}
    if isinstance(value, list):
        return [_stable(item) for item in value]
    if isinstance(value, str) and value.startswith("life-"):
        return "life"
    return value


async def whole_run(lab: Lab, life: Life) -> None:
    await bring_up(lab, life)
    await learn(lab, life)
    await break_and_restart(lab, life)


class Refused:
    """An answer of an API server in trouble."""

    def __init__(self, status: int) -> None:
        self.status, self.headers = status, {"Retry-After": "1"}

    async def read(self) -> bytes:
        return b'{"message": "trouble"}'


class Unreliable(client.ApiClient):
    """Every ``every``th request goes wrong, each time in another way; what is lost is the answer to a request done."""

    def __init__(self, settings: client.Configuration, every: int) -> None:
        super().__init__(settings)
        self._every, self._requests, self.troubles = every, 0, 0

    async def call_api(self, *arguments: Any, **options: Any) -> Any:
        self._requests += 1
        if self._requests % self._every:
            return await super().call_api(*arguments, **options)
        self.troubles += 1
        status = (409, 429, 500, 0)[self.troubles % 4]
        if status:
            return Refused(status)
        await (await super().call_api(*arguments, **options)).read()
        raise TimeoutError


async def run(
    crd: ApiServer, name: str, crash_after: int | None, trouble_every: int = 0
) -> tuple[list[str], list[Object]]:
    lab = Lab(crd, name)
    settings = client.Configuration()
    await config.load_kube_config(str(crd.kubeconfig), client_configuration=settings)
    try:
        async with Unreliable(settings, trouble_every) if trouble_every else client.ApiClient(settings) as api:
            lab.create(pipeline("a"))
            with Leader() as leader:
                world = World(leader, count())
                life = Life(api, world, crash_after)
                written: list[str] = []
                try:
                    await whole_run(lab, life)
                except Crash:
                    await life.end()
                    written = [*life.written, "crash"]
                    life = Life(api, world)
                    await resume(lab, life)
                await life.end()
                return [*written, *life.written], end_state(lab)
    finally:
        lab.close()


async def resume(lab: Lab, life: Life) -> None:
    """The scenario again from wherever the crash left it."""
    if restarts(lab) == "0":
        await bring_up(lab, life)
        await learn(lab, life)
    await break_and_restart(lab, life)


async def test_a_crash_after_any_write_changes_nothing_in_the_end(crd: ApiServer) -> None:
    written, expected = await run(crd, "sweep", None)
    assert RETAINED_BY in str(expected)
    (kept,) = [item for item in expected if item["kind"] == "ConfigMap"]
    assert (kept["data"]["source"], kept["metadata"]["annotations"][REVISION]) == ("Online", "2")
    assert '"source":"Profile"' in kept["data"]["previous.json"]
    # Three Services and budget, set, status; calibration, formed, status and events; another calibration, status and
    # event; stop, start and their status.
    assert len(written) >= 15, written
    for number in range(1, len(written) + 1):
        trace, found = await run(crd, f"sweep-{number}", number)
        assert found == expected, f"crash after write {number} ({written[number - 1]}); writes: {trace}"


async def test_trouble_with_any_request_changes_nothing_in_the_end(crd: ApiServer) -> None:
    _, expected = await run(crd, "calm", None)
    # More than a quiet look takes, which else would never end well; the remainders meet every request of it.
    for every in (13, 17, 19):
        trace, found = await run(crd, f"trouble-{every}", None, every)
        assert found == expected, f"every {every}th request in trouble; writes: {trace}"
