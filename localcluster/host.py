"""What a cluster has on this machine besides its work folder: processes, cgroups, one network link; and its removal.

There is no file with a process id: every process of a cluster lives in the cluster's cgroup, so the kernel itself tells
which ones there are, also after an interrupted start, and no reused number can mislead. Mounts, network namespace,
firewall rules and pods die with the node's process 1; kernel parameters are never changed (node.py hides them).
"""

import ipaddress
import json
import os
import signal
import subprocess
import time
from pathlib import Path

from localcluster.console import OWN_CLUSTER, ClusterError
from localcluster.settings import WORK_ROOT, Settings, overlapping_slots, recorded_slots

CGROUPS = Path("/sys/fs/cgroup")
STATE_FOLDERS = ("/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni")
"""Covered inside the node by folders of the cluster; outside only needed as mount points."""


def run(*command: str, check: bool = True, timeout: float = 60) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode:
        raise ClusterError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def unified() -> bool:
    return (CGROUPS / "cgroup.controllers").exists()


def hierarchies() -> list[Path]:
    """One root with cgroup v2; one folder per controller set with v1 (symbolic links are aliases)."""
    if unified():
        return [CGROUPS]
    return [folder for folder in sorted(CGROUPS.iterdir()) if folder.is_dir() and not folder.is_symlink()]


def make_cgroups(settings: Settings) -> list[Path]:
    """Creates the cluster's cgroup with a child for the node's own programs; returns the files to join that child.

    The weights make the whole cluster count as four busy processes instead of one, and within it the programs that keep
    it alive as much as all pods: pods without a CPU request have next to no weight and starve otherwise.
    """
    joins = []
    for root in hierarchies():
        top = root / settings.cgroup
        own = top / "node"
        top.mkdir(exist_ok=True)
        if unified():
            for folder in (root, top):
                _delegate(folder)
        own.mkdir(exist_ok=True)
        for folder, parent in ((top, root), (own, top)):
            for file in ("cpuset.cpus", "cpuset.mems"):
                if not unified() and (folder / file).exists():
                    (folder / file).write_text((parent / file).read_text())
        for folder, shares in ((top, 4096), (own, 2048)):
            if (folder / "cpu.shares").exists():
                (folder / "cpu.shares").write_text(str(shares))
            elif (folder / "cpu.weight").exists():
                (folder / "cpu.weight").write_text(str(shares * 100 // 1024))
        joins.append(own / "cgroup.procs")
    return joins


def _delegate(folder: Path) -> None:
    controllers = (folder / "cgroup.controllers").read_text().split()
    try:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
    except OSError as error:
        raise ClusterError(
            f"control groups: the controllers {' '.join(controllers)} cannot be enabled below {folder}: {error}; "
            f"inside a container, give it its own control group namespace, {OWN_CLUSTER}"
        ) from error


def processes(settings: Settings) -> set[int]:
    found = set()
    for root in hierarchies():
        for file in (root / settings.cgroup).glob("**/cgroup.procs"):
            try:
                found |= {int(line) for line in file.read_text().split()}
            except OSError:  # the group went away between listing and reading
                continue
    return found - {0, os.getpid()}


def node_process(settings: Settings) -> int | None:
    """Process 1 of the node: the one whose second-level namespace number is 1 (containers are one level deeper)."""
    for pid in processes(settings):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
        if len(numbers) == len(_own_levels()) + 1 and numbers[-1] == "1":
            return pid
    return None


def _own_levels() -> list[str]:
    status = Path("/proc/self/status").read_text()
    return next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))


def taken_slots(name: str) -> set[int]:
    routes = json.loads(run("ip", "-j", "-4", "route", "show", "table", "main") or "[]")
    foreign = [r["dst"] for r in routes if r.get("dev") != f"pf-{name}"]
    addresses = json.loads(run("ip", "-j", "-4", "addr") or "[]")
    for link in addresses:
        if link.get("ifname") != f"pf-{name}":
            foreign += [f"{a['local']}/{a['prefixlen']}" for a in link.get("addr_info", []) if "local" in a]
    usable = [text for text in foreign if text == "default" or _is_network(text)]
    return overlapping_slots(usable) | {slot for other, slot in recorded_slots().items() if other != name}


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def connect(settings: Settings, pid: int) -> None:
    """A virtual cable between this machine and the node, and the one route that leads to all of the cluster."""
    run("ip", "link", "add", settings.link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "addr", "add", f"{settings.host_address}/30", "dev", settings.link)
    run("ip", "link", "set", settings.link, "up")
    enter = ("nsenter", "-t", str(pid), "-n", "ip")
    run(*enter, "link", "set", "lo", "up")
    run(*enter, "addr", "add", f"{settings.node_address}/30", "dev", "eth0")
    run(*enter, "link", "set", "eth0", "up")
    run("ip", "route", "add", str(settings.network), "via", settings.node_address, "dev", settings.link)


def make_state_folders() -> None:
    """Mount points on this machine; a list of those made here lets the last cluster remove exactly them."""
    record = WORK_ROOT / "made"
    made = set(record.read_text().split()) if record.exists() else set()
    for folder in STATE_FOLDERS:
        if not Path(folder).exists():
            made.add(folder)
            record.write_text("\n".join(sorted(made)))  # before the folder: a kill in between loses nothing
            Path(folder).mkdir(parents=True)


def remove_state_folders() -> None:
    """Only when no cluster is left: removing a mount point of another one's would unmount it there."""
    if not WORK_ROOT.exists() or any(p.is_dir() for p in WORK_ROOT.iterdir()):
        return
    record = WORK_ROOT / "made"
    for folder in record.read_text().split() if record.exists() else []:
        if Path(folder).is_dir() and not any(Path(folder).iterdir()):
            Path(folder).rmdir()
    record.unlink(missing_ok=True)
    WORK_ROOT.rmdir()


def remains(settings: Settings) -> list[str]:
    """Everything of this cluster that is on the machine, in words; empty after `down`."""
    found = [f"process {pid}" for pid in sorted(processes(settings))]
    found += [str(root / settings.cgroup) for root in hierarchies() if (root / settings.cgroup).exists()]
    if Path(f"/sys/class/net/{settings.link}").exists():
        found.append(f"link {settings.link}")
    if settings.work.exists():
        found.append(str(settings.work))
    return found


def remove(settings: Settings) -> None:
    """Ends and removes all of the cluster, whatever state it is in."""
    _kill(settings)
    if Path(f"/sys/class/net/{settings.link}").exists():
        # Usually gone with the namespace; the kernel does that in the background.
        run("ip", "link", "del", settings.link, check=False)
    _remove_cgroups(settings)
    if settings.work.exists():
        run("rm", "-rf", "--one-file-system", str(settings.work), timeout=600)
    if left := remains(settings):
        raise ClusterError(f"cluster {settings.name} could not be removed completely; left: {', '.join(left)}")


def _kill(settings: Settings, patience: float = 60) -> None:
    end = time.monotonic() + patience
    if node := node_process(settings):
        os.kill(node, signal.SIGKILL)  # the kernel ends the whole namespace with it
    while left := processes(settings):
        if time.monotonic() > end:
            raise ClusterError(f"processes {sorted(left)} did not end within {patience:.0f} s of SIGKILL")
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def _remove_cgroups(settings: Settings, patience: float = 20) -> None:
    end = time.monotonic() + patience
    for root in hierarchies():
        top = root / settings.cgroup
        while top.exists():
            for folder, _, _ in os.walk(top, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:  # a dying process still counts for a moment
                    continue
            if time.monotonic() > end:
                raise ClusterError(f"cgroup {top} could not be removed within {patience:.0f} s")
            if top.exists():
                time.sleep(0.05)
