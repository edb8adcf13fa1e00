"""kubectl and helm on one cluster, for the demo and the tests: `Kube(kubeconfig)`."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from localcluster import programs
from localcluster.console import ClusterError, progress


class Kube:
    def __init__(self, kubeconfig: Path, namespace: str = "default") -> None:
        self.kubeconfig, self.namespace = kubeconfig, namespace
        self._environment = dict(os.environ) | {"KUBECONFIG": str(kubeconfig), "PATH": programs.search_path()}

    def run(self, program: str, *arguments: str, stdin: str | None = None, timeout: float = 300) -> str:
        """The program's output. Raises ClusterError with what it said on failure."""
        done = subprocess.run(
            [program, *arguments],
            input=stdin,
            stdin=None if stdin is not None else subprocess.DEVNULL,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise ClusterError(f"{program} {' '.join(arguments[:6])}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 300) -> str:
        return self.run("kubectl", "-n", self.namespace, *arguments, stdin=stdin, timeout=timeout)

    def get(self, *arguments: str) -> dict[str, Any]:
        return dict(json.loads(self("get", *arguments, "-o", "json")))

    def items(self, *arguments: str) -> list[dict[str, Any]]:
        return list(self.get(*arguments)["items"])

    def exists(self, *arguments: str) -> bool:
        return bool(self("get", *arguments, "--ignore-not-found", "-o", "name").strip())

    def apply(self, document: dict[str, Any]) -> None:
        self("apply", "-f", "-", stdin=json.dumps(document))

    def from_pod(self, pod: str, port: int, path: str) -> str:
        """GET from a pod through the API server, which needs no route to it."""
        name = quote(f"http:{pod}:{port}", safe=":")
        return self("get", "--raw", f"/api/v1/namespaces/{self.namespace}/pods/{name}/proxy{path}")

    @contextmanager
    def forwarded(self, target: str, port: int) -> Iterator[str]:
        """http://127.0.0.1:PORT of a pod or Service while the block runs."""
        command = ["kubectl", "-n", self.namespace, "port-forward", target, f":{port}", "--address", "127.0.0.1"]
        with subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                if not line.startswith("Forwarding from"):
                    raise ClusterError(f"kubectl port-forward {target}: {line.strip() or 'ended'}")
                yield f"http://{line.split()[2]}"
            finally:
                process.kill()

    def wait(self, what: str, ready: Callable[[], bool], timeout: float, detail: Callable[[], str]) -> float:
        """Seconds until `ready()`; each change of `detail()` is shown, and the last is part of the error."""
        began, shown = time.monotonic(), ""
        while not ready():
            if (news := detail()) and news != shown:
                shown = news
                progress.say(f"  {what}: {news}")
            if time.monotonic() - began > timeout:
                raise ClusterError(f"{what} did not happen within {timeout:.0f} s; last seen: {shown}")
            time.sleep(0.5)
        return time.monotonic() - began


def condition(resource: dict[str, Any], name: str) -> dict[str, Any]:
    """A condition of a resource's status; one with status Unknown while there is none yet."""
    for entry in resource.get("status", {}).get("conditions", []):
        if entry["type"] == name:
            return dict(entry)
    return {"type": name, "status": "Unknown", "reason": "", "message": ""}
