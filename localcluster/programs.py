"""The Kubernetes programs, built from Go modules pinned by bins/*/go.mod and go.sum, kept in the cache.

Each module has a folder named after its version and the checksum of everything that decides its content, so a program
that is there is right, and a change of pins builds anew beside it. A program appears by rename, so never by half.
"""

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from localcluster.console import OWN_CLUSTER, ClusterError, progress
from localcluster.locks import exclusive
from localcluster.settings import KUBERNETES, cache_root

SOURCES = Path(__file__).resolve().parent / "bins"
GO_FLAGS = "-buildvcs=false -trimpath -modcacherw"
HELM = "3.19.2"


@dataclass(frozen=True)
class Module:
    folder: str
    version: str
    packages: dict[str, str]
    """Program to Go package."""
    variables: tuple[str, ...] = ()
    """Go variables that hold the version; the modules themselves do not know theirs."""

    @property
    def sources(self) -> Path:
        return SOURCES / self.folder

    def checksum(self) -> str:
        digest = hashlib.sha256(repr((self.version, self.variables, GO_FLAGS)).encode())
        for file in sorted(self.sources.iterdir()):
            digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
        return digest.hexdigest()[:12]

    def target(self) -> Path:
        return cache_root() / "bin" / f"{self.folder}-{self.version}-{self.checksum()}"

    def missing(self) -> list[str]:
        target = self.target()
        return [program for program in self.packages if not (target / program).exists()]

    def go_version(self) -> tuple[int, int]:
        found = re.search(r"^go (\d+)\.(\d+)", (self.sources / "go.mod").read_text(), re.MULTILINE)
        assert found, f"{self.sources}/go.mod has no go line"
        return int(found[1]), int(found[2])


_VERSION = "k8s.io/component-base/version"
MODULES = (
    Module("etcd", "3.6.5", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Module(
        "kube",
        KUBERNETES,
        {
            name: f"k8s.io/kubernetes/cmd/{name}"
            for name in (
                *("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
                *("kubelet", "kube-proxy", "kubectl"),
            )
        },
        (
            f"{_VERSION}.gitVersion=v{KUBERNETES}",
            f"{_VERSION}.gitMajor={KUBERNETES.split('.')[0]}",
            f"{_VERSION}.gitMinor={KUBERNETES.split('.')[1]}",
        ),
    ),
    Module("coredns", "1.13.1", {"coredns": "."}),
    Module(
        "helm",
        HELM,
        {"helm": "helm.sh/helm/v3/cmd/helm"},
        (f"helm.sh/helm/v3/internal/version.version=v{HELM}",),
    ),
)


def path(program: str) -> Path:
    for module in MODULES:
        if program in module.packages:
            return module.target() / program
    raise KeyError(program)


def search_path() -> str:
    """PATH for child processes: our programs first."""
    return os.pathsep.join([*(str(module.target()) for module in MODULES), os.environ.get("PATH", os.defpath)])


def missing(wanted: Collection[str] | None = None) -> list[str]:
    return [p for module in MODULES for p in module.missing() if wanted is None or p in wanted]


def go_problem() -> str:
    """Why the programs cannot be built here, or nothing."""
    least = max(module.go_version() for module in MODULES)
    go = shutil.which("go")
    if not go:
        return f"Go is not installed (no `go` on PATH); version {least[0]}.{least[1]} or newer is needed"
    text = subprocess.run([go, "version"], capture_output=True, text=True, timeout=30, env=_go_environment()).stdout
    return go_version_problem(text, least)


def go_version_problem(text: str, least: tuple[int, int]) -> str:
    found = re.search(r"go(\d+)\.(\d+)", text)
    if not found:
        return f"`go version` printed {text.strip()!r}, which names no version"
    if (int(found[1]), int(found[2])) < least:
        return f"Go {found[1]}.{found[2]} is installed, {least[0]}.{least[1]} or newer is needed"
    return ""


def build(wanted: Collection[str] | None = None) -> None:
    """Builds what is missing; Go's own caches (6 GB) go away once nothing is."""
    if not missing(wanted):
        return
    with exclusive(cache_root() / "bin" / "lock", "the program build"):
        for leftover in (cache_root() / "bin").glob("*/.building-*"):
            leftover.unlink()
        todo = missing(wanted)
        if todo and (problem := go_problem()):
            raise ClusterError(f"{problem}. Install Go and put `go` on PATH, {OWN_CLUSTER}")
        for number, program in enumerate(todo, 1):
            with progress.step(f"building {program} ({number} of {len(todo)})"):
                _build(next(module for module in MODULES if program in module.packages), program)
        if not missing():
            shutil.rmtree(cache_root() / "go", ignore_errors=True)


def _build(module: Module, program: str) -> None:
    target = module.target()
    target.mkdir(parents=True, exist_ok=True)
    temporary = target / f".building-{program}"
    flags = " ".join(["-s", "-w", *(f"-X {variable}" for variable in module.variables)])
    log = cache_root() / "bin" / f"{program}.log"
    command = ["go", "build", "-ldflags", flags, "-o", str(temporary), module.packages[program]]
    with log.open("w") as out:
        # Tied to this process: an interrupted build leaves no compiler at work behind.
        done = subprocess.run(
            ["setpriv", "--pdeathsig", "KILL", *command],
            cwd=module.sources,
            env=_go_environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise ClusterError(f"building {program} failed (go build ended with {done.returncode}); see {log}:\n{end}")
    temporary.rename(target / program)
    log.unlink()


def _go_environment() -> dict[str, str]:
    """Own Go caches unless the user has set theirs; always the same flags, else Go's cache is of no use."""
    own = cache_root() / "go"
    environment = {"GOMODCACHE": str(own / "mod"), "GOCACHE": str(own / "build")} | dict(os.environ)
    return environment | {"GOFLAGS": GO_FLAGS, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off"}
