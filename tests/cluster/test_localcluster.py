"""The local cluster itself, for real: everything pods need works, and nothing is left whatever ends it."""

import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localcluster import host
from localcluster.settings import REPOSITORY, Settings, find

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a node needs root"),
    pytest.mark.timeout(600),
]

NAME, OTHER = "lctest", "lctest-two"
KERNEL = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")
POD = """
apiVersion: v1
kind: Pod
metadata: {name: web, labels: {app: web}}
spec:
  hostname: web
  subdomain: peers
  terminationGracePeriodSeconds: 1
  containers:
  - name: web
    image: localhost/pause:1
    imagePullPolicy: Never
    command: [sh, -c, "echo started; mkdir /site; echo from the pod > /site/index.html; httpd -f -p 8080 -h /site"]
    resources: {requests: {cpu: 50m}}
    readinessProbe: {tcpSocket: {port: 8080}, periodSeconds: 1, timeoutSeconds: 5}
    volumeMounts: [{name: machine, mountPath: /machine, readOnly: true}]
  volumes: [{name: machine, hostPath: {path: FOLDER, type: Directory}}]
---
apiVersion: v1
kind: Service
metadata: {name: site}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: peers}
spec: {clusterIP: None, publishNotReadyAddresses: true, selector: {app: web}}
"""


def eventually(check: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.1)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "localcluster", *arguments]


def run(*arguments: str, text: str | None = None, fails: bool = False) -> str:
    done = subprocess.run(command(*arguments), cwd=REPOSITORY, input=text, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + (done.stderr if fails else "")


def kubectl(*arguments: str, name: str = NAME, text: str | None = None) -> str:
    return run("kubectl", "--name", name, *arguments, text=text)


def kernel_parameters() -> dict[str, str]:
    return {name: Path("/proc/sys", name).read_text() for name in KERNEL}


def in_namespace(link: str) -> list[str]:
    """Processes in a network namespace, zombies aside: they wait for the machine's process 1 and hold nothing."""
    return [str(p.parent.parent) for p in Path("/proc").glob("[0-9]*/ns/net") if _target(p) == link]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def settings(name: str = NAME) -> Settings:
    found = find(name)
    assert found
    return found


def node(name: str = NAME) -> int:
    pid = host.node_process(settings(name))
    assert pid
    return pid


def assert_nothing_left(cluster: Settings, namespace: str) -> None:
    assert host.remains(cluster) == []
    assert cluster.link not in os.listdir("/sys/class/net")
    assert str(cluster.network) not in subprocess.run(["ip", "route"], capture_output=True, text=True).stdout
    assert str(cluster.work) not in Path("/proc/self/mountinfo").read_text()
    assert in_namespace(namespace) == []
    assert not Path(f"/run/lock/prefill-operator-{cluster.name}.lock").exists()


@pytest.fixture(scope="module")
def before() -> dict[str, str]:
    return kernel_parameters()


@pytest.fixture(scope="module")
def cluster(before: dict[str, str]) -> Iterator[Settings]:
    run("down", "--name", NAME)
    run("up", "--name", NAME)
    yield settings()
    run("down", "--name", NAME)


@pytest.fixture(scope="module")
def pod(cluster: Settings, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("machine")
    (folder / "note").write_text("from the machine")
    kubectl("apply", "-f", "-", text=POD.replace("FOLDER", str(folder)))
    kubectl("wait", "--for=condition=Ready", "pod/web", "--timeout=60s")
    return "web"


def test_logs_exec_and_host_folders(pod: str) -> None:
    assert kubectl("logs", pod) == "started\n"
    assert kubectl("exec", pod, "--", "cat", "/machine/note") == "from the machine"


def test_port_forward(pod: str, cluster: Settings) -> None:
    arguments = command("kubectl", "--name", NAME, "port-forward", f"pod/{pod}", ":8080")
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as forward:
        try:
            assert forward.stdout
            port = re.search(r"127\.0\.0\.1:(\d+) -> 8080", forward.stdout.readline())
            assert port
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/", timeout=20) as answer:
                assert answer.read() == b"from the pod\n"
        finally:
            forward.kill()


def test_services_answer_from_pods_and_from_the_machine(pod: str) -> None:
    assert kubectl("exec", pod, "--", "wget", "-qO-", "http://site") == "from the pod\n"
    address = kubectl("get", "service", "site", "-o", "jsonpath={.spec.clusterIP}")
    with urllib.request.urlopen(f"http://{address}/", timeout=20) as answer:
        assert answer.read() == b"from the pod\n"


def test_headless_names_lead_to_pods(pod: str) -> None:
    address = kubectl("get", "pod", pod, "-o", "jsonpath={.status.podIP}")
    assert address in kubectl("exec", pod, "--", "nslookup", "web.peers.default.svc.cluster.local")


def test_the_api_answers_inside_a_pod_with_a_certificate_for_its_service_address(pod: str, cluster: Settings) -> None:
    text = kubectl("exec", pod, "--", "cat", "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")
    assert text == (cluster.pki / "ca.crt").read_text()
    certificate = subprocess.run(
        ["openssl", "x509", "-in", str(cluster.pki / "apiserver.crt"), "-noout", "-text"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"IP Address:{cluster.kubernetes_service}" in certificate
    assert cluster.kubernetes_service == kubectl("get", "service", "kubernetes", "-o", "jsonpath={.spec.clusterIP}")


def test_only_known_certificates_are_trusted_on_both_sides(cluster: Settings) -> None:
    address = f"{cluster.server}/api/v1/nodes"
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(address, timeout=20)
    trusting = ssl.create_default_context(cafile=str(cluster.pki / "ca.crt"))
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(address, timeout=20, context=trusting)
    assert refusal.value.code == 403
    refusal.value.close()


def test_pretend_npus_are_scheduled_by_count(cluster: Settings) -> None:
    run("npu", "--name", NAME, "16")
    for name, count in (("npu-a", 10), ("npu-b", 10)):
        limits = {"resources": {"limits": {"huawei.com/Ascend910": count}, "requests": {"cpu": "10m"}}}
        container = {"name": "c", "image": "localhost/pause:1", "imagePullPolicy": "Never"} | limits
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [container]},
        }
        kubectl("apply", "-f", "-", text=json.dumps(body))
        if name == "npu-a":
            kubectl("wait", "--for=condition=Ready", "pod/npu-a", "--timeout=60s")
    kubectl("wait", "--for=condition=PodScheduled=false", "pod/npu-b", "--timeout=60s")
    message = kubectl("get", "pod", "npu-b", "-o", "jsonpath={.status.conditions[0].message}")
    assert "Insufficient huawei.com/Ascend910" in message


def test_kernel_parameters_of_the_machine_stay_while_a_cluster_runs(cluster: Settings, before: dict[str, str]) -> None:
    assert kernel_parameters() == before


def test_up_again_changes_nothing(cluster: Settings) -> None:
    pid = node()
    assert str(cluster.kubeconfig) in run("up", "--name", NAME)
    assert node() == pid


def test_an_ended_program_is_started_again(cluster: Settings) -> None:
    def dns() -> set[int]:
        return {p for p in host.processes(cluster) if _program(p) == "coredns"}

    (old,) = dns()
    os.kill(old, signal.SIGKILL)
    eventually(lambda: len(new := dns()) == 1 and old not in new)


def test_two_clusters_at_once(pod: str, cluster: Settings) -> None:
    run("up", "--name", OTHER)
    other, namespace = settings(OTHER), _target(Path(f"/proc/{node(OTHER)}/ns/net"))
    assert not other.network.overlaps(cluster.network)
    assert kubectl("get", "pods", "-o", "name", name=OTHER) == ""
    assert kubectl("get", "nodes", "-o", "name", name=OTHER) == f"node/{other.node}\n"
    run("down", "--name", OTHER)
    assert_nothing_left(other, namespace)
    assert kubectl("logs", pod) == "started\n"
    assert kubectl("exec", pod, "--", "wget", "-qO-", "http://site") == "from the pod\n"


def test_a_killed_node_is_found_down_and_starts_again(cluster: Settings, before: dict[str, str]) -> None:
    namespace = _target(Path(f"/proc/{node()}/ns/net"))
    os.kill(node(), signal.SIGKILL)
    eventually(lambda: in_namespace(namespace) == [])
    assert "left by an interrupted run" in run("status", "--name", NAME, fails=True)
    run("up", "--name", NAME)
    assert "ready" in run("status", "--name", NAME)
    assert kernel_parameters() == before


@pytest.mark.parametrize("moment", ["cgroup", "link", "node"])
def test_a_killed_start_does_not_disturb_the_next(moment: str) -> None:
    run("down", "--name", OTHER)
    with subprocess.Popen(command("up", "--name", OTHER), cwd=REPOSITORY, stderr=subprocess.DEVNULL) as start:
        cluster = Settings(OTHER, 0)
        reached = {
            "cgroup": lambda: bool(host.processes(cluster)),
            "link": lambda: cluster.link in os.listdir("/sys/class/net"),
            "node": lambda: (cluster.work / "kubelet").exists() and (cluster.work / "images.json").exists(),
        }[moment]
        eventually(reached)
        start.kill()
    run("up", "--name", OTHER)
    assert "ready" in run("status", "--name", OTHER)
    namespace, running = _target(Path(f"/proc/{node(OTHER)}/ns/net")), settings(OTHER)
    run("down", "--name", OTHER)
    assert_nothing_left(running, namespace)


def test_down_leaves_nothing(cluster: Settings, before: dict[str, str]) -> None:
    namespace = _target(Path(f"/proc/{node()}/ns/net"))
    run("down", "--name", NAME)
    assert_nothing_left(cluster, namespace)
    assert kernel_parameters() == before
    run("down", "--name", NAME)
