"""Container images without a registry: mmdebstrap -> buildah -> archive -> containerd.

buildah decides by content whether anything must be built; archives are named after the image id, so each image is
written and imported once. The base image is keyed by its recipe. Everything is below the cache folder `images`.
"""

import configparser
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localcluster.console import ClusterError, progress, wait_until
from localcluster.locks import exclusive
from localcluster.settings import REPOSITORY, Settings, cache_root

RECIPES = REPOSITORY / "images"
SUITE = "bookworm"
PAUSE_TAG = "localhost/pause:1"
BASE_TAG = "localhost/prefill-base"
ENGINE_TAG = "localhost/prefill-engine-cpu"
BUSYBOX = Path("/bin/busybox")
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
MMDEBSTRAP = (
    *("mmdebstrap", "--quiet", "--variant=minbase", '--aptopt=Acquire::Languages "none"'),
    *("--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*"),
    *("--dpkgopt=path-exclude=/usr/share/locale/*",),
    # This machine's package sources are for this machine: no address of them stays in an image.
    '--customize-hook=rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/*',
)


@dataclass(frozen=True)
class Archive:
    tag: str
    image: str
    file: Path


def root() -> Path:
    return cache_root() / "images"


def contained(script: str, *arguments: str, temporary: Path, timeout: float = 3600) -> subprocess.CompletedProcess[str]:
    """Runs a script in mount and process namespaces of its own: killed at any point, it leaves no mount, no process."""
    spaces = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    return subprocess.run(
        ["setpriv", "--pdeathsig", "KILL", *spaces, "sh", "-ec", script, "sh", *arguments],
        env=dict(os.environ) | {"TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def buildah(*arguments: str) -> str:
    storage, run, temporary = (root() / name for name in ("storage", "run", "tmp"))
    for folder in (storage, run, temporary):
        folder.mkdir(parents=True, exist_ok=True)
    # Its notes on what is mounted must not outlive the mounts.
    script = f'mount -t tmpfs tmpfs {shlex.quote(str(run))}; exec buildah "$@"'
    options = ("--root", str(storage), "--runroot", str(run), "--storage-driver", "overlay")
    done = contained(script, *options, *arguments, temporary=temporary)
    if done.returncode:
        raise ClusterError(f"buildah {arguments[0]} failed:\n{_end(done)}")
    return done.stdout


def _end(done: subprocess.CompletedProcess[str]) -> str:
    return "\n".join((done.stdout + done.stderr).strip().splitlines()[-30:])


def image_id(tag: str) -> str:
    """Empty when there is no such image."""
    try:
        return buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", tag).strip()
    except ClusterError:
        return ""


def build(tag: str, context: Path, dockerfile: Path, arguments: dict[str, str]) -> Archive:
    """Builds an ordinary Dockerfile on the local base image (build argument BASE)."""
    with exclusive(root() / "lock", "an image build"):
        base = _base()
        with progress.step(f"image {tag}"):
            _bud(tag, context, dockerfile, {"BASE": base} | arguments)
            return _archive(tag)


def engine(version: str, environment: Path) -> Archive:
    """The thin CPU engine image: libraries only; vLLM itself is a read-only folder of this machine (a copy in the image
    would take 7 GB and many minutes)."""
    recipe = RECIPES / "engine-cpu-thin"
    return build(f"{ENGINE_TAG}:{version}", recipe, recipe / "Dockerfile", {"VENV": str(environment)})


def pause() -> Archive:
    """Holds a pod's namespaces; busybox also serves small test pods."""
    recipe = RECIPES / "pause" / "Dockerfile"
    key = hashlib.sha256(recipe.read_bytes() + BUSYBOX.read_bytes()).hexdigest()[:12]
    record = root() / f"pause-{key}"
    image = record.read_text() if record.exists() else ""
    if image and _file(PAUSE_TAG, image).exists():
        return Archive(PAUSE_TAG, image, _file(PAUSE_TAG, image))
    with exclusive(root() / "lock", "an image build"), progress.step(f"image {PAUSE_TAG}"), scratch() as folder:
        shutil.copy(BUSYBOX, folder)
        _bud(PAUSE_TAG, folder, recipe, {})
        archive = _archive(PAUSE_TAG)
    record.write_text(archive.image)
    return archive


def base_key() -> str:
    digest = hashlib.sha256(repr((MMDEBSTRAP, SUITE)).encode())
    for file in sorted((RECIPES / "base").iterdir()):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _base() -> str:
    tag = f"{BASE_TAG}:{base_key()}"
    if image_id(tag):
        return tag
    recipe = RECIPES / "base"
    packages = ",".join((recipe / "packages").read_text().split())
    with progress.step(f"base image {tag}"), scratch() as folder:
        command = [*MMDEBSTRAP, f"--include={packages}", SUITE, f"{folder}/root.tar", *_package_sources()]
        done = contained('exec "$@"', *command, temporary=folder)
        if done.returncode:
            raise ClusterError(f"mmdebstrap could not make the base image (network, package sources?):\n{_end(done)}")
        _bud(tag, folder, recipe / "Dockerfile", {})
    return tag


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder below the cache; the lock is held, so what an interrupted run left there can go."""
    folder = root() / "scratch"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(root() / "tmp", ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _package_sources() -> list[str]:
    found = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    usable = [str(f) for f in found if f.suffix in (".list", ".sources") and f.is_file() and SUITE in f.read_text()]
    if not usable:
        raise ClusterError(f"no package source of this machine names Debian {SUITE}")
    return usable


def _bud(tag: str, context: Path, dockerfile: Path, arguments: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = [x for name, value in arguments.items() for x in ("--build-arg", f"{name}={value}")]
        for outside, inside in machine_settings(Path(folder)).items():
            options += ["--volume", f"{outside}:{inside}:ro"]
        buildah(
            *("bud", "--isolation", "chroot", "--layers", "--quiet", "--pull-never"),
            *(*options, "--file", str(dockerfile), "--tag", tag, str(context)),
        )


def machine_settings(folder: Path) -> dict[str, str]:
    """What RUN steps need to reach package indexes from this machine: mounted for them only, never part of an image.

    Of the mounts only empty mount points stay, so none is named after a path of this machine.
    """
    mounts = {str(f): str(f) for f in (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d")) if f.exists()}
    bundle = os.environ.get("SSL_CERT_FILE", CA_BUNDLE)
    if Path(bundle).exists():
        mounts[bundle] = CA_BUNDLE
    pip = pip_settings(Path("/etc/pip.conf"), dict(os.environ))
    for name, value in pip["global"].items() if pip.has_section("global") else ():
        for word in value.split():
            if word.startswith("/") and Path(word).exists():
                inside = CA_BUNDLE if name == "cert" else mounts.setdefault(word, f"/mnt/pip-{len(mounts)}")
                pip["global"][name] = pip["global"][name].replace(word, inside)
                mounts[word] = inside
    with (folder / "pip.conf").open("w") as file:
        pip.write(file)
    mounts[str(folder / "pip.conf")] = "/etc/pip.conf"
    return mounts


def pip_settings(file: Path, environment: dict[str, str]) -> configparser.RawConfigParser:
    """pip's configuration file of this machine, with the PIP_ variables on top as pip itself ranks them."""
    settings = configparser.RawConfigParser()
    settings.read(file)
    for name, value in environment.items():
        if name.startswith("PIP_") and name != "PIP_CONFIG_FILE":
            if not settings.has_section("global"):
                settings.add_section("global")
            settings["global"][name[4:].lower().replace("_", "-")] = value
    return settings


def _file(tag: str, image: str) -> Path:
    return root() / f"{re.sub(r'[^a-zA-Z0-9.-]', '_', tag)}-{image[:12]}.tar"


def _archive(tag: str) -> Archive:
    image = image_id(tag)
    if not image:
        raise ClusterError(
            f"no image {tag}: build it with python3 -m localcluster image build {tag} CONTEXT -f DOCKERFILE"
        )
    file = _file(tag, image)
    if not file.exists():
        for old in root().glob(file.name.replace(image[:12], "*")):
            old.unlink()
        temporary = file.with_suffix(".part")
        temporary.unlink(missing_ok=True)
        buildah("push", "--quiet", tag, f"docker-archive:{temporary}:{tag}")
        temporary.rename(file)
    return Archive(tag, image, file)


def archive(tag: str) -> Archive:
    with exclusive(root() / "lock", "an image build"):
        return _archive(tag)


def _containerd(node: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    enter = ("nsenter", "-t", str(node), "-m", "-n", "-p", "-u", "-i", "--")
    return subprocess.run([*enter, "ctr", "-n", "k8s.io", *arguments], capture_output=True, text=True, timeout=900)


def wait_for_containerd(settings: Settings, node: int) -> None:
    wait_until(
        "containerd ready",
        lambda: _containerd(node, "version").returncode == 0,
        timeout=60,
        every=0.2,
        hint=f"See {settings.logs}/containerd.log",
    )


def load_archive(settings: Settings, node: int, archive: Archive) -> None:
    """Imports an image once; the note of what is there lives and goes with the cluster."""
    note = settings.work / "images.json"
    there = json.loads(note.read_text()) if note.exists() else {}
    if there.get(archive.tag) == archive.image:
        return
    done = _containerd(node, "images", "import", str(archive.file))
    if done.returncode:
        raise ClusterError(f"containerd could not import {archive.tag} from {archive.file}: {done.stderr.strip()}")
    note.write_text(json.dumps(there | {archive.tag: archive.image}))
