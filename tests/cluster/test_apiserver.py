"""The API server without a node: real answers, and nothing left when the tests that use it are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from localcluster.apiserver import ApiServer, remove_abandoned
from localcluster.settings import REPOSITORY

pytestmark = pytest.mark.timeout(300)
HOLD = "import time; from localcluster.apiserver import ApiServer\n"
HOLD += "with ApiServer() as s: print(s.folder, flush=True); time.sleep(600)"


def eventually(check: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def kubectl(server: ApiServer, *arguments: str) -> str:
    return subprocess.run(
        ["kubectl", *arguments], env=server.environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def users(folder: Path) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words:
            found.append(words.decode(errors="replace"))
    return found


def test_controllers_work_and_the_end_leaves_nothing() -> None:
    with ApiServer() as server:
        kubectl(server, "create", "deployment", "a", "--image=x", "--replicas=2")
        eventually(lambda: kubectl(server, "get", "pods", "-o", "name").count("pod/a-") == 2)
        kubectl(server, "delete", "deployment", "a")
        eventually(lambda: kubectl(server, "get", "pods", "-o", "name") == "")
        folder = server.folder
        assert len(users(folder)) == 3
    assert users(folder) == []
    assert not folder.exists()


def test_two_servers_at_once() -> None:
    with ApiServer() as one, ApiServer() as two:
        kubectl(one, "create", "namespace", "only-here")
        assert one.server != two.server
        assert "only-here" not in kubectl(two, "get", "namespaces")


def test_a_killed_user_leaves_no_process_and_the_next_start_removes_its_folder() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        folder = Path(holder.stdout.readline().strip())
        assert len(users(folder)) == 3
        remove_abandoned()
        assert folder.exists(), "a folder in use must stay"
        os.kill(holder.pid, signal.SIGKILL)

    def gone() -> bool:
        remove_abandoned()
        return not folder.exists()

    eventually(lambda: users(folder) == [])
    eventually(gone)


def test_a_server_in_the_background() -> None:
    def command(action: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "localcluster", "apiserver", action],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.strip()

    command("down")
    kubeconfig = Path(command("up"))
    assert kubeconfig.exists()
    assert command("up") == str(kubeconfig), "one that runs is used"
    command("down")
    assert users(kubeconfig.parent) == []
    assert not kubeconfig.parent.exists()
