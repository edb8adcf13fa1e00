"""Init step ``runtime``: put this package beside a stock engine image's own, as a folder for PYTHONPATH.

The metadata folder goes along, because vLLM finds the plugin through its entry point.
"""

from __future__ import annotations

import compileall
import shutil
import tomllib
from importlib import metadata
from pathlib import Path

import prefill_runtime

DISTRIBUTION = "prefill-operator"
PACKAGE = "prefill_runtime"


def install(destination: Path) -> list[Path]:
    """Copy package and metadata; each folder appears at once or not at all."""
    destination.mkdir(parents=True, exist_ok=True)
    source = Path(prefill_runtime.__file__).resolve().parent
    package = destination / f".{PACKAGE}.new"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__", ".*"), copy_function=shutil.copyfile)
    compileall.compile_dir(package, quiet=2, stripdir=str(package), prependdir=PACKAGE)

    version, files = _metadata(source)
    info = destination / f".{PACKAGE}.info.new"
    shutil.rmtree(info, ignore_errors=True)
    info.mkdir()
    for name, text in files.items():
        (info / name).write_text(text)
    installed = [
        (package, destination / PACKAGE),
        (info, destination / f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info"),
    ]
    for new, final in installed:
        _open_to_all(new)
        old = new.with_suffix(".old")
        if final.exists():
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    return [final for _, final in installed]


def _metadata(source: Path) -> tuple[str, dict[str, str]]:
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return _metadata_of_tree(source.parent / "pyproject.toml")
    files = {name: distribution.read_text(name) for name in ("METADATA", "entry_points.txt")}
    return distribution.version, {name: text for name, text in files.items() if text}


def _metadata_of_tree(pyproject: Path) -> tuple[str, dict[str, str]]:
    """The same two files for a source tree that nobody has installed."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    described = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    return project["version"], {"METADATA": described, "entry_points.txt": "\n".join(lines)}


def _open_to_all(folder: Path) -> None:
    """The engine container may run as another user, whatever the umask was here."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
