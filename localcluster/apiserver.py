"""A real API server without a node, for tests of operators: etcd, kube-apiserver, kube-controller-manager on loopback.

    with ApiServer() as server:
        ...  # server.kubeconfig is an administrator's

Needs no root. The programs are tied to the thread that starts them: when it ends, be it by SIGKILL, the kernel ends
them too, so start the server in the main thread. A folder left by a killed run is removed by the next start.
"""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from localcluster import pki, programs
from localcluster.components import ControlPlane
from localcluster.console import ClusterError, progress, wait_until
from localcluster.kubeapi import Api
from localcluster.settings import REPOSITORY

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
SERVICES = "10.95.0.0/16"
PREFIX = "prefill-apiserver-"
ATTEMPTS = 3


class ApiServer:
    def __init__(self) -> None:
        self.folder = Path()
        self.server = ""
        self._lock = -1
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "admin.kubeconfig"

    @property
    def environment(self) -> dict[str, str]:
        """For child processes that should talk to this server, kubectl and helm among them."""
        return dict(os.environ) | {"KUBECONFIG": str(self.kubeconfig), "PATH": programs.search_path()}

    def start(self) -> "ApiServer":
        programs.build(PROGRAMS)
        remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            authority = pki.control_plane(self.folder / "pki", ["127.0.0.1"])
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    self._start(authority)
                    return self
                except ClusterError:
                    # Between choosing a free port and listening on it another program may have taken it.
                    self._end_programs()
                    if attempt == ATTEMPTS:
                        raise
        except BaseException:
            self.stop()
            raise
        raise AssertionError("unreachable")

    def _start(self, authority: pki.Authority) -> None:
        etcd, peer, port = free_ports(3)
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)
        self.server = f"https://127.0.0.1:{port}"
        authority.kubeconfig("admin", self.server, self.kubeconfig, cluster="prefill-test")
        file = self.folder / "controller-manager.kubeconfig"
        authority.kubeconfig("controller-manager", self.server, file, cluster="local")
        plane = ControlPlane(
            folder=self.folder,
            bind="127.0.0.1",
            advertise="127.0.0.1",
            port=port,
            etcd=f"http://127.0.0.1:{etcd}",
            etcd_peer=f"http://127.0.0.1:{peer}",
            services=SERVICES,
            with_node=False,
        )
        api = Api(self.server, plane.pki)
        self._spawn("etcd", plane.etcd_command())
        wait_until("etcd", lambda: self._alive() and plane.etcd_listens(), 60, every=0.02, hint=self._see("etcd"))
        self._spawn("apiserver", plane.apiserver_command())
        wait_until("API server ready", lambda: self._alive() and api.ready(), 120, every=0.05, hint=self._see())
        self._spawn("controller-manager", plane.controller_manager_command())
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        wait_until("default service account", lambda: self._alive() and api.exists(account), 60, hint=self._see())

    def stop(self) -> None:
        self._end_programs()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self.folder.name.startswith(PREFIX):
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "ApiServer":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", str(programs.path(command[0])), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                pass_fds=[self._lock],  # the folder counts as in use until the last program is gone
                start_new_session=True,  # Ctrl-C is for the tests; they end the server when they are done with it
            )

    def _alive(self) -> bool:
        for name, process in self._running.items():
            if process.poll() is not None:
                raise ClusterError(f"{name} ended with {process.returncode}. {self._see(name)}")
        return True

    def _see(self, name: str = "apiserver") -> str:
        file = self.folder / f"{name}.log"
        end = file.read_text(errors="replace").splitlines()[-5:] if file.exists() else []
        return "End of its log:\n" + "\n".join(end)

    def _end_programs(self) -> None:
        for process in reversed(self._running.values()):
            process.kill()
        for process in self._running.values():
            process.wait()
        self._running.clear()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def remove_abandoned() -> None:
    """Folders whose lock nobody holds any more: neither a test run nor a program of it is left."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        try:
            lock = os.open(folder / "lock", os.O_RDWR)
        except OSError:  # just being made, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _background() -> Path:
    return Path(tempfile.gettempdir()) / f"prefill-apiserver.{os.getuid()}"


def background_up() -> Path:
    """Starts a server that outlives this process; returns its kubeconfig."""
    if kubeconfig := background_kubeconfig():
        return kubeconfig
    programs.build(PROGRAMS)
    log = _background().with_suffix(".log")
    with log.open("w") as out, progress.step("starting an API server"):
        process = subprocess.Popen(
            [sys.executable, "-m", "localcluster.apiserver"],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )

        def there() -> bool:
            if process.poll() is not None:
                raise ClusterError(f"the API server did not start; see {log}:\n{log.read_text()[-2000:]}")
            return background_kubeconfig() is not None

        wait_until("API server", there, 180, hint=f"See {log}")
    kubeconfig = background_kubeconfig()
    assert kubeconfig
    return kubeconfig


def background_kubeconfig() -> Path | None:
    """Of the server in the background, if one runs: its record is locked as long as it lives."""
    return None if (found := _background_record()) is None else Path(found[1])


def _background_record() -> tuple[int, str] | None:
    try:
        record = _background().open("r+")
    except OSError:
        return None
    with record:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            words = record.read().split("\n")
            return (int(words[0]), words[1]) if len(words) > 2 else None
    return None


def background_down() -> None:
    found = _background_record()
    if found:
        os.kill(found[0], signal.SIGTERM)
        wait_until("end of the API server", lambda: _background_record() is None, 30)
    _background().unlink(missing_ok=True)
    _background().with_suffix(".log").unlink(missing_ok=True)
    remove_abandoned()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with _background().open("a+") as record:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        record.truncate(0)
        with ApiServer() as server:
            record.write(f"{os.getpid()}\n{server.kubeconfig}\n")
            record.flush()
            while True:
                time.sleep(3600)


if __name__ == "__main__":
    main()
