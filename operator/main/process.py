"""Wires the parts of the operator together and runs them until one ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import kopf
from aiohttp import web
from prefill_operator.api.crd import unknown_fields
from prefill_operator.main import watching
from prefill_operator.main.settings import Settings
from prefill_operator.reconcile.cluster import PIPELINES, Cluster
from prefill_operator.reconcile.errors import ClusterError, NotFoundError, ThrottledError
from prefill_operator.reconcile.metrics import Metrics
from prefill_operator.reconcile.offers import Offers
from prefill_operator.reconcile.queue import Key, WorkQueue
from prefill_operator.reconcile.reconciler import Reconciler, Release
from prefill_runtime import __version__
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

log = logging.getLogger(__name__)

CRD_RETRY_SECONDS = 2.0
# Leaders are asked for their calibration once in each resync, which may come a moment early.
ASK_FACTOR = 0.9


class Resync:
    """Adds every pipeline to the queue now and then; its age is the operator's health."""

    def __init__(self, cluster: Cluster, queue: WorkQueue, settings: Settings) -> None:
        self._cluster, self._queue, self._settings = cluster, queue, settings
        self._completed = asyncio.get_running_loop().time()

    @property
    def age(self) -> float:
        return asyncio.get_running_loop().time() - self._completed

    @property
    def healthy(self) -> bool:
        return self.age < self._settings.resync_seconds * self._settings.stale_factor

    def nothing_to_do(self) -> None:
        self._completed = asyncio.get_running_loop().time()

    async def run(self) -> None:
        while True:
            try:
                keys = await self._keys()
            except ClusterError as error:
                log.warning("resync: %s", error)
            else:
                for key in keys:
                    self._queue.add(key)
                await self._queue.attempted(keys)
                self._completed = asyncio.get_running_loop().time()
            await asyncio.sleep(self._settings.resync_seconds)

    async def _keys(self) -> set[Key]:
        keys: set[Key] = set()
        for namespace in self._settings.namespaces or (None,):
            for item in await self._cluster.list(PIPELINES, namespace, cached=True):
                keys.add((item["metadata"]["namespace"], item["metadata"]["name"]))
        return keys


async def run(settings: Settings) -> None:
    """Ends with the first of its parts, cleanly on SIGTERM."""
    metrics = Metrics()
    async with AsyncExitStack() as stack:
        cluster = Cluster(await stack.enter_async_context(await _client()), metrics.wrote)
        offers = Offers(settings.resync_seconds * ASK_FACTOR, lambda key: queue.add(key))
        stack.push_async_callback(offers.close)
        reconciler = Reconciler(cluster, Release(settings.operator_image, __version__), metrics, offers)
        queue = WorkQueue(reconciler.reconcile, _report, settings.workers)
        resync = Resync(cluster, queue, settings)
        metrics.watch(lambda: len(queue), lambda: resync.age)
        for port, path, handler in (
            (settings.health_port, "/healthz", _health(resync)),
            (settings.metrics_port, "/metrics", _metrics(metrics)),
        ):
            stack.push_async_callback((await _serve(port, path, handler)).cleanup)
        await _crd_served(cluster, settings, resync)
        await report_outdated_crd(cluster)
        parts = [
            asyncio.create_task(part, name=name) for name, part in (("queue", queue.run()), ("resync", resync.run()))
        ]
        # kopf ends every task that was made after it started, so ours start first.
        await asyncio.sleep(0)
        parts.append(asyncio.create_task(_watch(queue, settings), name="watch"))
        done, pending = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()


async def _client() -> Any:
    """Loaded here because the client takes 50 MB that nothing else needs."""
    from kubernetes.aio import client, config

    load: Any = config  # its functions carry no types
    configuration = client.Configuration()
    try:
        load.load_incluster_config(client_configuration=configuration)
    except load.ConfigException:
        await load.load_kube_config(client_configuration=configuration)
    return client.ApiClient(configuration)


async def _watch(queue: WorkQueue, settings: Settings) -> None:
    await kopf.operator(
        registry=watching.registry(queue),
        settings=watching.settings(),
        namespaces=settings.namespaces,
        clusterwide=not settings.namespaces,
        standalone=True,
    )


async def _crd_served(cluster: Cluster, settings: Settings, resync: Resync) -> None:
    """Installing the operator before its CRD is not an error, and none that a restart would mend."""
    while True:
        try:
            await cluster.list(PIPELINES, settings.namespaces[0] if settings.namespaces else None, cached=True)
            return
        except NotFoundError:
            log.warning("the cluster does not serve prefillpipelines.prefill.dev: install the CRD; waiting for it")
            resync.nothing_to_do()
        except ClusterError as error:
            log.warning("waiting for the API server: %s", error)
        await asyncio.sleep(CRD_RETRY_SECONDS)


async def report_outdated_crd(cluster: Cluster) -> None:
    """Helm never changes a CRD, so an upgrade of the operator alone leaves one that drops the fields it lacks."""
    try:
        unknown = unknown_fields(await cluster.schema(PIPELINES))
    except ClusterError as error:
        log.warning("whether the CRD is of this release is not known: %s", error)
        return
    if unknown:
        log.warning(
            "the CRD in the cluster is older than this operator: the API server drops %d fields, among them %s; "
            "apply the CRD of this release",
            len(unknown),
            ", ".join(unknown[:5]),
        )


def _report(key: Key, error: Exception) -> float | None:
    if isinstance(error, ClusterError):
        log.warning("%s/%s: %s: %s", *key, error.reason, error)
    else:
        log.error("%s/%s: this is a bug of the operator", *key, exc_info=error)
    return error.retry_after if isinstance(error, ThrottledError) else None


Handler = Callable[[web.Request], Awaitable[web.Response]]


def _health(resync: Resync) -> Handler:
    async def health(_: web.Request) -> web.Response:
        text = f"last complete resync {resync.age:.0f} s ago\n"
        return web.Response(text=text, status=200 if resync.healthy else 503)

    return health


def _metrics(metrics: Metrics) -> Handler:
    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return scrape


async def _serve(port: int, path: str, handler: Handler) -> web.AppRunner:
    app = web.Application()
    app.router.add_get(path, handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
