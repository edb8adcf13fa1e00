"""Start, stop and look at a whole cluster: one node as one process tree in its own namespaces."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from localcluster import configs, host, images, pki, programs
from localcluster.console import ClusterError, progress, wait_until
from localcluster.kubeapi import Api
from localcluster.locks import cluster_lock, exclusive
from localcluster.settings import REPOSITORY, WORK_ROOT, Settings, check_name, choose_slot, find

NPU = "huawei.com/Ascend910"


def up(name: str) -> Settings:
    check_name(name)
    programs.build()
    pause = images.pause()
    with exclusive(cluster_lock(name), f"start or stop of cluster {name}"):
        before = find(name)
        if before and before.ready_mark.exists() and host.node_process(before):
            progress.say(f"cluster {name} is up already")
            return before
        _clear(before or Settings(name, 0))
        settings = _prepare(name)
        try:
            _start(settings, pause)
        except BaseException:
            progress.say(f"start failed; logs: {settings.logs} (removed by the next up or down)")
            raise
        settings.ready_mark.touch()
    return settings


def down(name: str) -> None:
    with exclusive(cluster_lock(check_name(name)), f"start or stop of cluster {name}"):
        settings = find(name) or Settings(name, 0)
        if not host.remains(settings):
            progress.say(f"cluster {name} is not up")
        else:
            with progress.step(f"stopping cluster {name}"):
                host.remove(settings)
    with exclusive(cluster_lock("all"), "another cluster's start or stop"):
        host.remove_state_folders()


def _clear(settings: Settings) -> None:
    if left := host.remains(settings):
        progress.say(f"removing what an interrupted run left: {', '.join(left[:5])}{' ...' if len(left) > 5 else ''}")
        host.remove(settings)


def _prepare(name: str) -> Settings:
    with exclusive(cluster_lock("all"), "another cluster's start or stop"):
        WORK_ROOT.mkdir(parents=True, exist_ok=True)
        host.make_state_folders()
        settings = Settings(name, choose_slot(name, host.taken_slots(name)))
        settings.logs.mkdir(parents=True)
        settings.work.chmod(0o700)
        (settings.work / "slot").write_text(str(settings.slot))
    addresses = ["127.0.0.1", settings.node_address, settings.kubernetes_service]
    authority = pki.control_plane(settings.pki, addresses)
    pki.node(authority, settings.node, settings.node_address)
    authority.kubeconfig("admin", settings.server, settings.kubeconfig, cluster=f"prefill-{name}")
    for client in ("kubelet", "controller-manager", "scheduler", "proxy", "dns"):
        file = settings.work / f"{client}.kubeconfig"
        authority.kubeconfig(client, "https://127.0.0.1:6443", file, cluster="local")
    configs.write_all(settings)
    return settings


def _start(settings: Settings, pause: images.Archive) -> None:
    with progress.step(f"starting cluster {settings.name} ({settings.network})"):
        _launch(settings)
        wait_until(
            "the node's own namespaces",
            lambda: (node := host.node_process(settings)) is not None and _separated(node),
            timeout=30,
            every=0.02,
            hint=_see(settings, "node"),
        )
        node = require_node(settings)
        host.connect(settings, node)
        images.wait_for_containerd(settings, node)
        images.load_archive(settings, node, pause)
        api = Api(settings.server, settings.pki)
        wait_until("API server ready", api.ready, 120, hint=_see(settings, "apiserver"))
        wait_until("node Ready", lambda: _node_ready(api, settings), 120, hint=_see(settings, "kubelet"))
        wait_until(
            "default service account",
            lambda: api.exists("/api/v1/namespaces/default/serviceaccounts/default"),
            60,
            hint=_see(settings, "controller-manager"),
        )


def _launch(settings: Settings) -> None:
    joins = host.make_cgroups(settings)
    node = [sys.executable, "-m", "localcluster.node", settings.name, str(settings.slot)]
    spaces = ["unshare", "--pid", "--fork", "--mount", "--net", "--uts", "--ipc", "--kill-child"]
    # The shell moves itself into the cgroups first: from its first moment the node can be found and ended by them.
    script = "".join(f"echo 0 > {shlex.quote(str(file))}; " for file in joins)
    with (settings.logs / "node.log").open("w") as log:
        subprocess.run(
            ["sh", "-ec", f"{script} exec setsid --fork {shlex.join(spaces + node)}"],
            check=True,
            cwd="/",
            env=_without_proxies() | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _without_proxies() -> dict[str, str]:
    """The cluster's addresses are reached directly; a proxy of this machine would be asked for them."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def _separated(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()


def _see(settings: Settings, program: str) -> str:
    file = settings.logs / f"{program}.log"
    end = "\n".join(file.read_text(errors="replace").splitlines()[-5:]) if file.exists() else ""
    return f"See {file}:\n{end}"


def _node_ready(api: Api, settings: Settings) -> bool:
    path = f"/api/v1/nodes/{settings.node}"
    if not api.exists(path):
        return False
    conditions = api.call("GET", path).get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def require(name: str) -> Settings:
    settings = find(name)
    if settings is None or host.node_process(settings) is None:
        raise ClusterError(f"cluster {name} is not up: python3 -m localcluster up --name {name}")
    return settings


def require_node(settings: Settings) -> int:
    node = host.node_process(settings)
    if node is None:
        raise ClusterError(f"the node of cluster {settings.name} has ended. {_see(settings, 'node')}")
    return node


def status(name: str) -> int:
    settings = find(check_name(name))
    if settings is None or not (node := host.node_process(settings)):
        left = host.remains(settings or Settings(name, 0))
        print(f"cluster {name}: down" + (f"; left by an interrupted run: {', '.join(left)}" if left else ""))
        return 1
    api = Api(settings.server, settings.pki)
    ready = api.ready() and _node_ready(api, settings)
    print(f"cluster {name}: {'ready' if ready else 'not ready'}")
    print(f"  process 1   {node} ({len(host.processes(settings))} processes)")
    print(f"  network     {settings.network} (pods {settings.pods}, services {settings.services})")
    print(f"  kubeconfig  {settings.kubeconfig}")
    print(f"  logs        {settings.logs}")
    return 0 if ready else 1


def execute(name: str, command: list[str]) -> None:
    """Replaces this process by a command inside the node, like `docker exec`."""
    node = require_node(require(name))
    os.environ["PATH"] = programs.search_path()
    os.execvp("nsenter", ["nsenter", "-t", str(node), "-m", "-n", "-p", "-u", "-i", "--", *command])


def kubectl(name: str, arguments: list[str]) -> None:
    environment = _without_proxies() | {"KUBECONFIG": str(require(name).kubeconfig)}
    os.execve(programs.path("kubectl"), ["kubectl", *arguments], environment)


def pretend_npus(name: str, count: int) -> None:
    """Capacity is enough: the kubelet copies it to allocatable and admits pods by it, without a device plugin."""
    settings = require(name)
    api = Api(settings.server, settings.pki)
    path = f"/api/v1/nodes/{settings.node}"
    change = [{"op": "add", "path": "/status/capacity/" + NPU.replace("/", "~1"), "value": str(count)}]
    api.call("PATCH", f"{path}/status", change, kind="application/json-patch+json")

    def allocatable() -> bool:
        return bool(api.call("GET", path)["status"]["allocatable"].get(NPU) == str(count))

    wait_until(f"{count} {NPU} allocatable", allocatable, 60, every=0.2, hint=_see(settings, "kubelet"))
    progress.say(f"{settings.node}: {count} {NPU}")
