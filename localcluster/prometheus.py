"""Prometheus and promtool for the tests: the programs of Debian's package without installing it, which would also
start a server on this machine."""

import shutil
import subprocess
from pathlib import Path

from localcluster.console import ClusterError, progress
from localcluster.locks import exclusive
from localcluster.settings import cache_root

PROGRAMS = ("prometheus", "promtool")


def folder() -> Path:
    """Where both programs are, fetched if they are missing."""
    target = cache_root() / "bin" / "prometheus"
    if not _complete(target):
        with exclusive(cache_root() / "bin" / "prometheus.lock", "the download of Prometheus"):
            if not _complete(target):
                with progress.step("fetching Prometheus from Debian"):
                    _fetch(target)
    return target


def _complete(target: Path) -> bool:
    return all((target / program).exists() for program in PROGRAMS)


def _fetch(target: Path) -> None:
    scratch = target.with_name("prometheus.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    if _run(scratch, "apt-get", "-qq", "download", "prometheus").returncode:
        _run(scratch, "apt-get", "-qq", "update")  # usually the package lists are old or absent
        done = _run(scratch, "apt-get", "-qq", "download", "prometheus")
        if done.returncode:
            raise ClusterError(
                f"apt-get could not download Debian's package prometheus, which tests need: {done.stderr.strip()}\n"
                "    repair the package sources of this machine and run again"
            )
    (package,) = scratch.glob("*.deb")
    done = _run(scratch, "dpkg-deb", "-x", str(package), "root")
    if done.returncode:
        raise ClusterError(f"{package.name} could not be unpacked: {done.stderr.strip()}")
    shutil.rmtree(target, ignore_errors=True)
    (scratch / "root" / "usr" / "bin").rename(target)
    shutil.rmtree(scratch)


def _run(scratch: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=600)
