"""The operator's requests to the API server: plain JSON objects over the client's connection pool.

Writes are server-side applies with one field manager. They carry the uid of the object they are meant for,
so they cannot hit a namesake; those that create do not force, so they cannot take an object over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlencode

import aiohttp
from prefill_operator.api.types import API_VERSION, KIND, PLURAL
from prefill_operator.desired.names import MANAGER
from prefill_operator.desired.pipeline import Manifest
from prefill_operator.reconcile.errors import NotFoundError, UnavailableError, error_of

REQUEST_SECONDS = 30.0


@dataclass(frozen=True)
class Resource:
    kind: str
    api_version: str
    plural: str

    @property
    def root(self) -> str:
        return f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        parts = [self.root]
        if namespace is not None:
            parts += ["namespaces", quote(namespace)]
        parts.append(self.plural)
        parts += [quote(part) for part in (name, subresource) if part is not None]
        return "/".join(parts)


PIPELINES = Resource(KIND, API_VERSION, PLURAL)
STATEFUL_SETS = Resource("StatefulSet", "apps/v1", "statefulsets")
SERVICES = Resource("Service", "v1", "services")
BUDGETS = Resource("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets")
CONFIG_MAPS = Resource("ConfigMap", "v1", "configmaps")
PODS = Resource("Pod", "v1", "pods")
EVENTS = Resource("Event", "v1", "events")
CHILDREN = {resource.kind: resource for resource in (STATEFUL_SETS, SERVICES, BUDGETS, CONFIG_MAPS)}


class Transport(Protocol):
    """What is used of ``kubernetes.aio.client.ApiClient``."""

    @property
    def configuration(self) -> Any: ...

    async def update_params_for_auth(
        self, headers: dict[str, str], queries: Any, settings: list[str], path: str, method: str, body: Any
    ) -> None: ...

    async def call_api(
        self, method: str, url: str, header_params: dict[str, str], body: Any, _request_timeout: float
    ) -> Any: ...


class Cluster:
    def __init__(self, transport: Transport, on_write: Callable[[str, str], None] = lambda kind, verb: None) -> None:
        self._transport = transport
        self._on_write = on_write

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        try:
            return await self._request("GET", "get", resource, resource.path(namespace, name))
        except NotFoundError:
            return None

    async def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = "", cached: bool = False
    ) -> list[Manifest]:
        """``cached``: what the API server has at hand, possibly seconds old."""
        query = {"labelSelector": labels, "fieldSelector": fields, "resourceVersion": "0" if cached else ""}
        text = urlencode({name: value for name, value in query.items() if value})
        answer = await self._request("GET", "list", resource, f"{resource.path(namespace)}?{text}")
        items: list[Manifest] = answer.get("items") or []
        return items

    async def schema(self, resource: Resource) -> Manifest:
        """The schema by which the API server keeps fields of ``resource`` and drops others; every account may ask."""
        path = f"/openapi/v3{resource.root}"
        answer = await self._request("GET", "get", resource, path)
        kinds = answer["components"]["schemas"].values()
        for schema in kinds:
            if any(kind["kind"] == resource.kind for kind in schema.get("x-kubernetes-group-version-kind", [])):
                found: Manifest = schema
                return found
        raise NotFoundError(f"the API server publishes no schema of {resource.kind}")

    async def apply(self, resource: Resource, manifest: Manifest, uid: str | None) -> Manifest:
        """``uid``: the object to change; None: there must be none of this name."""
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        body = manifest
        if uid is not None:
            body = manifest | {"metadata": manifest["metadata"] | {"uid": uid}}
        query = urlencode({"fieldManager": MANAGER, "force": "true" if uid is not None else "false"})
        path = f"{resource.path(namespace, name)}?{query}"
        return await self._write("PATCH", "patch", resource, path, body, "application/apply-patch+yaml")

    async def apply_status(self, resource: Resource, manifest: Manifest) -> Manifest:
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        query = urlencode({"fieldManager": MANAGER, "force": "true"})
        path = f"{resource.path(namespace, name, 'status')}?{query}"
        return await self._write("PATCH", "patch", resource, path, manifest, "application/apply-patch+yaml")

    async def create(self, resource: Resource, manifest: Manifest) -> Manifest:
        path = resource.path(manifest["metadata"]["namespace"])
        return await self._write("POST", "create", resource, path, manifest, "application/json")

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._write("DELETE", "delete", resource, resource.path(namespace, name), body, "application/json")
        except NotFoundError:
            return

    async def _write(
        self, method: str, verb: str, resource: Resource, path: str, body: Manifest, content_type: str
    ) -> Manifest:
        answer = await self._request(method, verb, resource, path, body, content_type)
        self._on_write(resource.kind, verb)
        return answer

    async def _request(
        self,
        method: str,
        verb: str,
        resource: Resource,
        path: str,
        body: Manifest | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": MANAGER}
        what = f"{resource.plural}{'/status' if '/status?' in path else ''}"
        try:
            await self._transport.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
            url = f"{self._transport.configuration.host}{path}"
            answer = await self._transport.call_api(
                method, url, header_params=headers, body=body, _request_timeout=REQUEST_SECONDS
            )
            text = (await answer.read()).decode()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"{verb} {what}: {error or type(error).__name__}") from error
        if answer.status >= 400:
            raise error_of(answer.status, text, verb, what, answer.headers.get("Retry-After"))
        try:
            result: Manifest = json.loads(text)
        except ValueError as error:
            raise UnavailableError(f"{verb} {what}: the answer is not JSON: {text[:200]!r}") from error
        return result
