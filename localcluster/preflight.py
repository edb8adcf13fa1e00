"""What the machine must offer, checked before anything starts: each problem says what is missing and what to do."""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from localcluster import host, images, programs
from localcluster.console import OWN_CLUSTER, ClusterError, progress
from localcluster.envs import ENGINE_VERSION
from localcluster.settings import WORK_ROOT, cache_root, choose_slot, find

PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "iproute2": "ip",
    "nftables": "nft",
    "openssl": "openssl",
    "util-linux": "unshare",
    "busybox-static": "/bin/busybox",
    "containernetworking-plugins": "/usr/lib/cni/ptp",
    "ca-certificates": "/etc/ssl/certs/ca-certificates.crt",
}
"""Debian package to the program or file it is needed for."""

GIGABYTE = 10**9
PROGRAMS, CLUSTER = "Kubernetes programs", "running cluster"
NEEDED_MEMORY = 6 * GIGABYTE
SPACES = ["unshare", "--pid", "--fork", "--mount", "--net", "--uts", "--ipc", "--kill-child"]


@dataclass(frozen=True)
class Problem:
    missing: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.missing}\n    {self.remedy}, {OWN_CLUSTER}"


@dataclass(frozen=True)
class Space:
    """Disk use of one part in bytes, measured; `extra` is needed only while it is made."""

    what: str
    kept: int
    extra: int
    there: bool


def disk_plan() -> list[Space]:
    cache = cache_root()
    return [
        Space(PROGRAMS, int(0.6e9), int(5.7e9), not programs.missing()),
        Space("images", int(1.4e9), int(0.4e9), any(cache.glob("images/*engine*.tar"))),
        Space("vLLM environment", int(5.7e9), int(2.3e9), any(cache.glob(f"venvs/engine-{ENGINE_VERSION}-*/complete"))),
        Space("models", int(0.3e9), int(0.6e9), any(cache.glob("models/*/config.json"))),
        Space(CLUSTER, int(2.5e9), 0, False),
    ]


def disk_needed(plan: list[Space]) -> int:
    """Parts are made one after the other, so of the passing needs only the largest counts."""
    todo = [part for part in plan if not part.there]
    return sum(part.kept for part in todo) + max((part.extra for part in todo), default=0)


def disk_problem(needed: int, free: int, folder: Path) -> Problem | None:
    if free >= needed:
        return None
    return Problem(
        f"disk space: {needed / GIGABYTE:.1f} GB are needed below {folder}, {free / GIGABYTE:.1f} GB are free",
        f"free {(needed - free) / GIGABYTE:.1f} GB",
    )


def memory_problem(available: int) -> Problem | None:
    if available >= NEEDED_MEMORY:
        return None
    return Problem(
        f"memory: {NEEDED_MEMORY / GIGABYTE:.0f} GB are needed, {available / GIGABYTE:.1f} GB are available",
        "end other programs",
    )


def root_problem(user: int) -> Problem | None:
    return Problem(f"root: a node needs it, this is user {user}", "run it with sudo") if user else None


def require_root() -> None:
    _raise([root_problem(os.geteuid())])


def release_problem(text: str) -> Problem | None:
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if fields.get("VERSION_CODENAME", "").strip('"') == images.SUITE:
        return None
    name = fields.get("PRETTY_NAME", "an unknown system").strip('"')
    return Problem(f"Debian 12 ({images.SUITE}): images are made from its packages, this is {name}", "use Debian 12")


def go_problem() -> Problem | None:
    absent = programs.missing()
    if not absent or not (problem := programs.go_problem()):
        return None
    return Problem(f"Go, to build {', '.join(absent)}: {problem}", "install Go and put `go` on PATH")


def missing_packages() -> list[str]:
    def there(needed: str) -> bool:
        return Path(needed).exists() if needed.startswith("/") else shutil.which(needed) is not None

    return [package for package, needed in PACKAGES.items() if not there(needed)]


def packages_problem(absent: list[str]) -> Problem | None:
    if not absent:
        return None
    return Problem(f"Debian packages: {' '.join(absent)}", f"apt-get install {' '.join(absent)}")


def kernel_problem(what: str, command: list[str]) -> Problem | None:
    """Tries the feature for real, in namespaces that vanish with the command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Problem(f"{what}: {error}", "repair that")
    if done.returncode == 0:
        return None
    reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return Problem(
        f"{what}: `{' '.join(command)}` says: {reason[0]}",
        "use a kernel (or a container) that allows it",
    )


def kernel_problems() -> list[Problem]:
    layers = (
        "mount -t tmpfs t /mnt && cd /mnt && mkdir a b c d && mount -t overlay o -o lowerdir=a,upperdir=b,workdir=c d"
    )
    tries = {
        "process, mount, network, host name and IPC namespaces": [*SPACES, "true"],
        "overlay file system": [*SPACES, "sh", "-c", layers],
        "virtual network links": [*SPACES, "ip", "link", "add", "va", "type", "veth", "peer", "name", "vb"],
        "nftables": [*SPACES, "nft", "add", "table", "ip", "t"],
    }
    problems = [kernel_problem(what, command) for what, command in tries.items()]
    if not any(os.access(folder, os.W_OK) and (folder / "cgroup.procs").exists() for folder in host.hierarchies()):
        problems.append(Problem(f"control groups: no writable hierarchy in {host.CGROUPS}", "mount one"))
    return [problem for problem in problems if problem]


def address_problem(name: str) -> Problem | None:
    try:
        choose_slot(name, host.taken_slots(name))
    except ClusterError as error:
        return Problem(f"network addresses: {error}", "make one free")
    return None


def install_packages(absent: list[str]) -> None:
    environment = dict(os.environ) | {"DEBIAN_FRONTEND": "noninteractive"}

    def apt(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)

    with progress.step(f"installing Debian packages: {' '.join(absent)}"):
        done = apt("install", "-y", "--no-install-recommends", *absent)
        if done.returncode:  # usually because the package lists are old or absent
            apt("update")
            done = apt("install", "-y", "--no-install-recommends", *absent)
        if done.returncode:
            raise ClusterError(f"apt-get could not install {' '.join(absent)}: {done.stderr.strip()}, {OWN_CLUSTER}")


def check(name: str, whole_demo: bool) -> None:
    """Installs missing packages, then reports all problems at once. `whole_demo`: count the engine's disk space too."""
    _raise([root_problem(os.geteuid()), release_problem(Path("/etc/os-release").read_text())])
    if absent := missing_packages():
        install_packages(absent)
    plan = [part for part in disk_plan() if whole_demo or part.what in (PROGRAMS, CLUSTER)]
    checks: list[Callable[[], Problem | None]] = [
        lambda: packages_problem(missing_packages()),
        go_problem,
        *(partial(disk_problem, needed, _free(folder), folder) for folder, needed in disk_by_folder(plan).items()),
        lambda: address_problem(name),
    ]
    running = find(name)
    if not running or not host.node_process(running):  # else the memory is in use by what it is for
        checks.append(lambda: memory_problem(_available_memory()))
    _raise([test() for test in checks] + [*kernel_problems()])
    if whole_demo:
        passing = disk_needed(plan) - sum(part.kept for part in plan if not part.there)
        parts = ", ".join(f"{p.what} {p.kept / GIGABYTE:.1f}" + (" (there)" if p.there else "") for p in plan)
        progress.say(
            f"disk: {disk_needed(plan) / GIGABYTE:.1f} GB still needed, {passing / GIGABYTE:.1f} GB of it only for a "
            f"while; {_free(cache_root()) / GIGABYTE:.0f} GB are free (GB: {parts})"
        )


def disk_by_folder(plan: list[Space]) -> dict[Path, int]:
    """The cache and the running cluster may be on different disks; on one disk their needs add up."""
    if _device(WORK_ROOT) == _device(cache_root()):
        return {cache_root(): disk_needed(plan)}
    return {
        cache_root(): disk_needed([part for part in plan if part.what != CLUSTER]),
        WORK_ROOT: disk_needed([part for part in plan if part.what == CLUSTER]),
    }


def _raise(found: list[Problem | None]) -> None:
    if problems := [problem for problem in found if problem]:
        raise ClusterError("this machine lacks:\n" + "\n".join(f"  - {problem}" for problem in problems))


def _free(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _device(folder: Path) -> int:
    return _existing(folder).stat().st_dev


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ClusterError("/proc/meminfo has no MemAvailable")
