"""As much of a Kubernetes client as starting a cluster takes: JSON over one verified TLS connection."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localcluster.console import ClusterError


class Api:
    def __init__(self, server: str, pki: Path) -> None:
        where = urlsplit(server)
        assert where.hostname
        self.address = (where.hostname, where.port or 443)
        self.tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self.tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")

    def request(self, method: str, path: str, body: object = None, kind: str = "application/json") -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection(*self.address, context=self.tls, timeout=5)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": kind} if text else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def call(self, method: str, path: str, body: object = None, kind: str = "application/json") -> Any:
        status, text = self.request(method, path, body, kind)
        if status >= 300:
            raise ClusterError(f"the API server answered {status} to {method} {path}: {text.decode(errors='replace')}")
        return json.loads(text)

    def exists(self, path: str) -> bool:
        try:
            return self.request("GET", path)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def ready(self) -> bool:
        """/readyz waits for the default RBAC roles too: earlier clients are forbidden and back off for seconds."""
        return self.exists("/readyz")
