"""Process 1 of the node, in its own pid, mount, net, uts and ipc namespaces: mounts, then keeps the programs running.

Started by cluster.py; everything here ends with this process.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from localcluster import programs
from localcluster.components import ControlPlane
from localcluster.host import STATE_FOLDERS
from localcluster.kubeapi import Api
from localcluster.settings import Settings

KERNEL_PARAMETERS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What the kubelet wants to find, or else sets for the whole machine. It finds files with these values instead."""


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=30)


def set_up_mounts(settings: Settings) -> None:
    mount("-t", "proc", "proc", "/proc")
    # A new sysfs shows this network namespace; the cgroups below it must be carried over.
    mount("-t", "tmpfs", "tmpfs", "/mnt")
    Path("/mnt/cgroup").mkdir()
    mount("--rbind", "/sys/fs/cgroup", "/mnt/cgroup")
    mount("-t", "sysfs", "sysfs", "/sys")
    mount("--rbind", "/mnt/cgroup", "/sys/fs/cgroup")
    subprocess.run(["umount", "-l", "/mnt"], check=True, timeout=30)
    mount("-t", "tmpfs", "tmpfs", "/run")
    mount("-t", "tmpfs", "tmpfs", "/dev/shm")
    for folder in (*STATE_FOLDERS, "/var/log"):
        own = settings.work / Path(folder).name
        own.mkdir(exist_ok=True)
        mount("--bind", str(own), folder)
    mount("--make-rshared", "/var/lib/kubelet")
    for name, value in KERNEL_PARAMETERS.items():
        if Path("/proc/sys", name).exists():
            stand_in = Path("/run/kernel", name)
            stand_in.parent.mkdir(parents=True, exist_ok=True)
            stand_in.write_text(value + "\n")
            mount("--bind", str(stand_in), f"/proc/sys/{name}")
    for folder in ("/run/containerd", "/run/netns", "/run/lock"):
        Path(folder).mkdir(exist_ok=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def wait_for_network(settings: Settings, patience: float = 30) -> None:
    """The cable is plugged in from outside; if that never happens, the start was interrupted and the node ends."""
    end = time.monotonic() + patience
    probe = ["ip", "-4", "-o", "addr", "show", "dev", "eth0", "up"]
    while settings.node_address not in subprocess.run(probe, capture_output=True, text=True, timeout=30).stdout:
        if time.monotonic() > end:
            raise SystemExit(f"no network link within {patience:.0f} s: the start was interrupted")
        time.sleep(0.02)


def control_plane(settings: Settings) -> ControlPlane:
    return ControlPlane(
        folder=settings.work,
        bind="0.0.0.0",
        advertise=settings.node_address,
        port=6443,
        etcd="http://127.0.0.1:2379",
        etcd_peer="http://127.0.0.1:2380",
        services=settings.services,
        with_node=True,
    )


def first_programs(settings: Settings) -> dict[str, list[str]]:
    return {
        "etcd": control_plane(settings).etcd_command(),
        "containerd": ["containerd", "-c", f"{settings.work}/containerd.toml"],
    }


def later_programs(settings: Settings) -> dict[str, list[str]]:
    """Clients of the API server; started before it is ready, they would be refused and back off for seconds."""
    work = settings.work
    return {
        "controller-manager": control_plane(settings).controller_manager_command(),
        "scheduler": ["kube-scheduler", f"--kubeconfig={work}/scheduler.kubeconfig", "--leader-elect=false"],
        "kubelet": [
            "kubelet",
            f"--config={work}/kubelet.yaml",
            f"--kubeconfig={work}/kubelet.kubeconfig",
            f"--hostname-override={settings.node}",
            f"--node-ip={settings.node_address}",
        ],
        "proxy": ["kube-proxy", f"--config={work}/kube-proxy.yaml"],
        "dns": ["coredns", "-conf", f"{work}/Corefile"],
    }


class Keeper:
    """Starts programs, starts them again a second after they ended, and reaps every orphan of the node."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.running: dict[int, tuple[str, list[str]]] = {}
        self.due: list[tuple[float, str, list[str]]] = []

    def start(self, name: str, command: list[str]) -> None:
        log = os.open(self.logs / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        pid = os.posix_spawnp(
            command[0],
            command,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)],
            setsigmask=(),
        )
        os.close(log)
        self.running[pid] = (name, command)

    def turn(self, seconds: float) -> None:
        """Sleeps until a child ends or the time is over, then tidies up."""
        signal.sigtimedwait({signal.SIGCHLD}, seconds)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self.running:
                name, command = self.running.pop(pid)
                print(f"{name} ended with {os.waitstatus_to_exitcode(status)}, starting it again", flush=True)
                self.due.append((time.monotonic() + 1, name, command))
        now = time.monotonic()
        for entry in [e for e in self.due if e[0] <= now]:
            self.due.remove(entry)
            self.start(entry[1], entry[2])


def main() -> None:
    settings = Settings(sys.argv[1], int(sys.argv[2]))
    assert os.getpid() == 1, "only as process 1 of a node: use `python3 -m localcluster up`"
    name = settings.node.encode()
    ctypes.CDLL(None).sethostname(name, len(name))
    set_up_mounts(settings)
    wait_for_network(settings)
    os.environ["PATH"] = programs.search_path()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    keeper = Keeper(settings.logs)
    for program, command in first_programs(settings).items():
        keeper.start(program, command)
    plane = control_plane(settings)
    while not plane.etcd_listens():
        keeper.turn(0.02)
    keeper.start("apiserver", plane.apiserver_command())
    api = Api("https://127.0.0.1:6443", settings.pki)
    while not api.ready():
        keeper.turn(0.1)
    for program, command in later_programs(settings).items():
        keeper.start(program, command)
    while True:
        keeper.turn(3600 if not keeper.due else 0.2)


if __name__ == "__main__":
    main()
